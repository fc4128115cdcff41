#include "core/random.h"

#include <atomic>

#include "core/device_registry.h"
#include "core/error.h"
#include "core/format.h"
#include "core/philox.h"

namespace potluck {

std::array<std::uint32_t, 4> philox(RandomKey key, std::uint64_t block) {
    return philox_block(key, block, 0);
}

RandomKey Generator::take(std::int64_t count) {
    if (count < 0)
        throw Error("random", fmt::format("{} random numbers cannot be taken. Give 0 or more.", count));
    const auto blocks = static_cast<std::uint64_t>(count / 4 + (count % 4 != 0));
    // Atomic, as threads may share a default generator.
    return {key_.seed, std::atomic_ref(key_.offset).fetch_add(blocks)};
}

Generator& default_generator(Device device) { return device_entry(device).generator; }

void manual_seed(std::uint64_t seed) {
    for (const Device device : registered_devices()) default_generator(device) = Generator(seed);
}

}  // namespace potluck
