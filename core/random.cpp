#include "core/random.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "core/device_registry.h"
#include "core/error.h"
#include "core/format.h"
#include "core/philox.h"
#include "core/tensor.h"

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

GeneratorStates generator_states(std::span<const Tensor> tensors) {
    GeneratorStates states;
    const auto add = [&](Device device) { states[name_of(device)] = default_generator(device).state(); };
    add(Device::cpu());
    for (const Tensor& tensor : tensors) add(tensor.device());
    return states;
}

void set_generator_states(const GeneratorStates& states) {
    const std::vector<Device> here = registered_devices();
    std::vector<std::pair<Device, RandomKey>> found;
    for (const auto& [name, state] : states) {
        const Device device = parse_device(name);
        if (std::find(here.begin(), here.end(), device) != here.end()) found.emplace_back(device, state);
    }
    for (const auto& [device, state] : found) default_generator(device).set_state(state);
}

}  // namespace potluck
