#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace potluck {

/// The exception that every function of Potluck throws on bad input. `what()` reads
/// `[op] what is wrong, with the values. What to do.`
class Error : public std::runtime_error {
public:
    Error(std::string_view op, std::string_view message);

    /// The op or function that refused the input, for instance "matmul".
    const std::string& op() const noexcept { return op_; }

private:
    std::string op_;
};

/// A device could not provide the requested memory. The message says which ops hold how much.
class OutOfMemory : public Error {
public:
    OutOfMemory(std::string_view op, std::string_view message, std::int64_t requested_bytes);

    std::int64_t requested_bytes() const noexcept { return requested_bytes_; }

private:
    std::int64_t requested_bytes_;
};

}  // namespace potluck
