#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace potluck {

/// Named tensors and the text metadata of one file.
struct TensorFile {
    std::map<std::string, Tensor> tensors;
    std::map<std::string, std::string> metadata;
};

/// Reads a safetensors file (https://github.com/huggingface/safetensors, "Format"). The file is mapped into memory: a
/// page is copied only when it is changed (private mapping), and the mapping lives as long as the tensors. The header
/// is checked before anything is allocated: length, UTF-8 and JSON, known dtypes, shapes whose byte count fits 63 bits
/// and equals the given range, ranges without holes or overlap that cover the file, unique names, no unknown fields,
/// 256 axes at most. A tensor that is not aligned for its dtype is copied.
/// Throws Error that names the file, the tensor and both numbers.
TensorFile load_safetensors(const std::string& path);

/// The facts about a file that was written.
struct WrittenFile {
    std::int64_t bytes = 0;
    std::string xxh3;  // checksum of the whole file (XXH3 with 64 bits), 16 hexadecimal digits
};

/// Writes tensors (any strides, any device) through a temporary file in the same folder, fsync and rename: a reader of
/// `path` finds either the old file or the complete new one. On failure (disk full) the temporary file is removed and
/// Error is thrown. The data begins at a multiple of 64 bytes and is sorted by element size (largest first) and then by
/// name, so that every tensor is aligned for its dtype without padding, which the format forbids.
WrittenFile save_safetensors(const std::string& path, const TensorFile& file);

/// The same guarantee for any text or bytes: a reader finds the old content or the new one, never a part.
void write_file_atomically(const std::string& path, std::string_view content);

}  // namespace potluck
