#include "core/error.h"

#include <fmt/format.h>

namespace potluck {

Error::Error(std::string_view op, std::string_view message)
    : std::runtime_error(fmt::format("[{}] {}", op, message)), op_(op) {}

OutOfMemory::OutOfMemory(std::string_view op, std::string_view message, std::int64_t requested_bytes)
    : Error(op, message), requested_bytes_(requested_bytes) {}

}  // namespace potluck
