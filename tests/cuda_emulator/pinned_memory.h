#pragma once

// Internal: pinned memory of the host, and the copies that may still run on it.
//
// A copy to the host has run when the call returns, but on a card it would not have: until the host waits for it, what
// stands in the target is garbage here, and the source of a copy to the device must stay as it was. (What kernels do with
// pinned memory is not followed.)

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace potluck::emulator {

class PinnedMemory {
public:
    struct Block {
        std::uint64_t bytes = 0;
        const char* op = "";  // who asked
    };

    void add(std::uintptr_t address, Block block) { blocks_[address] = block; }
    /// Forgets the block that begins here. False when there is none.
    bool remove(std::uintptr_t address);
    /// The block that has this address; nullptr for none.
    const Block* find(std::uintptr_t address) const;
    const std::map<std::uintptr_t, Block>& blocks() const { return blocks_; }

    /// The running operation copies to, or from, these bytes. A copy to the host gives the values in `late`: they come
    /// when the host waits.
    void read(const void* from, std::size_t bytes);
    void write(void* to, const void* late, std::size_t bytes);
    /// What the host waited for has ended (see State::host_clock).
    void host_waited();
    /// The newest copy on the block at this address that the host did not wait for; 0 for none.
    std::uint32_t copy_in_flight(std::uintptr_t address) const;

private:
    struct Copy {
        std::uintptr_t begin;
        std::size_t bytes;
        std::uint16_t slot;
        std::uint32_t serial;
        bool to_host;
        std::vector<std::byte> values;  // to come, or as they were when the copy began
        bool has_arrived = false;
    };

    /// For the running operation: the copies that touched these bytes before must have ended.
    void follow(std::uintptr_t begin, std::size_t bytes, bool write);
    static void arrive(Copy& copy);

    std::map<std::uintptr_t, Block> blocks_;
    std::vector<Copy> in_flight_;  // oldest first
};

}  // namespace potluck::emulator
