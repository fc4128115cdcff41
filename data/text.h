#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "data/dataset.h"

namespace potluck::data {

struct TextFile {
    std::string path;
    std::string content;  // the bytes of the file, unchanged
};

/// Reads a text file, or every text file of a folder and its subfolders, in the order of their paths.
///
/// In folders these are skipped: names that begin with a dot (.git), folders named build, node_modules or __pycache__
/// or that contain a build.ninja or CMakeCache.txt, symbolic links, everything that is not a regular file, empty files,
/// and binary files (a zero byte among the first 8000 bytes).
///
/// Throws Error that names the path when it does not exist, when a file or folder cannot be read, when the file itself
/// is empty or binary, and when the folder contains no text (listing what was skipped).
std::vector<TextFile> read_text(const std::string& path);
/// The texts of several files and folders, in the given order.
std::vector<TextFile> read_text(const std::vector<std::string>& paths);

/// A text for training and another one for validation.
struct TextSplit {
    std::string train, validation;
};

/// Gives the last `validation_fraction` of every file to validation and the rest to training, so that both contain
/// every kind of file and no byte is in both: windows over one never reach into the other. The cut of a file is moved
/// forward to the start of the next line if there is one, else back to the start of a UTF-8 character.
/// Throws Error for a fraction outside [0, 1).
TextSplit split_text(const std::vector<TextFile>& files, double validation_fraction);

/// Windows over a text of tokens: item i is (tokens[s .. s+window-1], tokens[s+1 .. s+window]) with s = i * stride,
/// both i64 of shape (window): at every position the target is the next token.
class TokenWindows final : public Dataset {
public:
    /// `tokens` has one axis and an integer dtype (u8 holds bytes in an eighth of the memory of i64).
    /// With n tokens there are (n - window - 1) / stride + 1 windows. Throws Error that gives both numbers when n is
    /// below window + 1, for a window or stride below 1, and for another shape or dtype.
    TokenWindows(Tensor tokens, std::int64_t window, std::int64_t stride = 1);

    std::int64_t size() const override;
    Example get(std::int64_t index, RandomKey key) const override;
    std::int64_t window() const { return window_; }

private:
    Tensor tokens_;
    std::int64_t window_, stride_;
};

}  // namespace potluck::data
