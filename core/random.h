#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "core/device.h"

namespace potluck {

class Tensor;

/// The start of a sequence of random numbers: number i of it is a pure function of (seed, offset, update, i), so that
/// it does not matter which thread computes it, or in which order.
struct RandomKey {
    std::uint64_t seed = 0;
    std::uint64_t offset = 0;  // in blocks of four 32-bit numbers
    std::uint64_t update = 0;  // 0, or 1 + the number of a training update: each has its own sequence
};

/// Philox 4x32-10: four 32-bit random numbers of block `key.offset + block`.
/// Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
std::array<std::uint32_t, 4> philox(RandomKey key, std::uint64_t block);

/// A seed and the current position in its sequence. Copyable; saving and restoring both numbers repeats the sequence.
class Generator {
public:
    explicit Generator(std::uint64_t seed = 0) : key_{seed, 0} {}

    /// Reserves the numbers for `count` elements and returns their key. (One block serves four elements.)
    RandomKey take(std::int64_t count);

    RandomKey state() const { return key_; }
    void set_state(RandomKey state) { key_ = state; }

private:
    RandomKey key_;
};

/// The generator that factories, dropout and initialisation use when none is passed. The device owns it.
Generator& default_generator(Device device = Device::cpu());
/// Seeds the default generators of all devices; CPU devices that are added later start with that seed, too.
void manual_seed(std::uint64_t seed);

/// The states of default generators, by the names of their devices.
using GeneratorStates = std::map<std::string, RandomKey>;
/// Those of the CPU and of the devices that these tensors are on.
GeneratorStates generator_states(std::span<const Tensor> tensors);
/// Sets the default generators to these states; devices that are not here are passed over. Throws Error for a name that
/// is none of a device, and then nothing was changed.
void set_generator_states(const GeneratorStates& states);

}  // namespace potluck
