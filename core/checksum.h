#pragma once

// Internal: checksums of files.

#include <cstdint>
#include <memory>
#include <string>

namespace potluck {

/// XXH3 with 64 bits (https://xxhash.com) of bytes that come piece by piece: it finds damage and mix-ups, it is no
/// protection against forgery.
class Checksum {
public:
    Checksum();
    ~Checksum();
    Checksum(const Checksum&) = delete;
    Checksum& operator=(const Checksum&) = delete;

    void add(const void* data, std::int64_t bytes);
    /// Of everything so far, as 16 hexadecimal digits.
    std::string text() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

/// The checksum of a whole file. Throws Error(op, ...) when it cannot be read.
std::string checksum_of_file(const std::string& op, const std::string& path);

}  // namespace potluck
