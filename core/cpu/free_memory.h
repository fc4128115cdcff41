#pragma once

// Internal: what the host has left.

#include <cstdint>

namespace potluck {

/// Bytes that the system can still give; the largest number when it does not say.
std::int64_t free_memory_of_host();

}  // namespace potluck
