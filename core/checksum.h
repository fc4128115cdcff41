#pragma once

// Internal: checksums of files.

#include <cstdint>
#include <memory>
#include <string>

namespace potluck {

/// 64-bit XXH3 (https://xxhash.com) of bytes that arrive piece by piece: it detects damage and mix-ups but gives no
/// protection against forgery.
class Checksum {
public:
    Checksum();
    ~Checksum();
    Checksum(const Checksum&) = delete;
    Checksum& operator=(const Checksum&) = delete;

    void add(const void* data, std::int64_t bytes);
    /// The checksum of everything so far, as 16 hexadecimal digits.
    std::string text() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

/// The checksum of a whole file. Throws Error(op, ...) when it cannot be read.
std::string checksum_of_file(const std::string& op, const std::string& path);

}  // namespace potluck
