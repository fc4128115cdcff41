#pragma once

// Internal: pinned host memory, and the copies that may still access it.
//
// A copy to the host has been executed when the call returns, but on a GPU it might not have been: until the host waits
// for it, the target contains garbage here, and the source of a copy to the device must not change. (Accesses of
// kernels to pinned memory are not tracked.)

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace potluck::emulator {

class PinnedMemory {
public:
    struct Block {
        std::uint64_t bytes = 0;
        const char* op = "";  // the op that allocated it
    };

    void add(std::uintptr_t address, Block block) { blocks_[address] = block; }
    /// Removes the block that begins here. False when there is none.
    bool remove(std::uintptr_t address);
    /// The block that contains this address; nullptr for none.
    const Block* find(std::uintptr_t address) const;
    const std::map<std::uintptr_t, Block>& blocks() const { return blocks_; }

    /// The running operation copies to, or from, these bytes. A copy to the host passes its values in `late`: they are
    /// stored when the host waits.
    void read(const void* from, std::size_t bytes);
    void write(void* to, const void* late, std::size_t bytes);
    /// Completes the copies for which the host has waited (see State::host_clock).
    void host_waited();
    /// The newest copy on the block at this address for which the host has not waited; 0 for none.
    std::uint32_t copy_in_flight(std::uintptr_t address) const;

private:
    struct Copy {
        std::uintptr_t begin;
        std::size_t bytes;
        std::uint16_t slot;
        std::uint32_t serial;
        bool to_host;
        std::vector<std::byte> values;  // to be stored, or the source's content when the copy began
        bool has_arrived = false;
    };

    /// For the running operation: faults unless the earlier copies on these bytes have ended.
    void follow(std::uintptr_t begin, std::size_t bytes, bool write);
    static void arrive(Copy& copy);

    std::map<std::uintptr_t, Block> blocks_;
    std::vector<Copy> in_flight_;  // oldest first
};

}  // namespace potluck::emulator
