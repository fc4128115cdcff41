#pragma once

// Internal: the JSON header of a safetensors file.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace potluck {

/// One tensor as the header describes it: bytes [begin, end) of the data that follows the header.
struct HeaderEntry {
    std::string name;
    DType dtype = DType::f32;
    Shape shape;
    std::int64_t begin = 0;
    std::int64_t end = 0;
};

struct Header {
    std::vector<HeaderEntry> entries;  // in the order of the file
    std::map<std::string, std::string> metadata;
};

/// Parses the header text and checks it against the number of data bytes that follow it. Throws Error that names
/// `path`, the tensor and the numbers. Memory usage is at most a small multiple of the text's size, whatever the text
/// says.
Header parse_safetensors_header(const std::string& path, std::string_view text, std::int64_t data_bytes);

/// "F32" for f32.
std::string_view safetensors_name(DType dtype);

}  // namespace potluck
