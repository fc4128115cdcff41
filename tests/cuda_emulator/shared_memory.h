#pragma once

// Internal: the state that the checks keep of a block's shared memory, dynamic or static. They detect three errors:
// reads of bytes that no thread of this block has written, accesses beyond the end, and accesses of two threads to the
// same bytes, one of them writing, without a barrier between.

#include <cstddef>
#include <cstdint>

namespace potluck::emulator {

/// One access: the thread and the time, which is counted in barriers of the block and, within a warp, of the warp.
struct SharedAccess {
    std::uint64_t block_time : 24;
    std::uint64_t warp_time : 24;
    std::uint64_t thread : 10;
    std::uint64_t crowd : 2;  // of reads: 0 one thread, 1 several of this thread's warp, 2 several
    std::uint64_t bytes : 4;  // which of the four
};

/// The state of four bytes.
struct SharedWord {
    SharedAccess write;
    SharedAccess read;
    std::uint32_t written_block : 28;  // the block that wrote the bytes below
    std::uint32_t written_bytes : 4;
};

class SharedRegion {
public:
    SharedRegion() = default;
    SharedRegion(const SharedRegion&) = delete;
    SharedRegion& operator=(const SharedRegion&) = delete;
    ~SharedRegion();

    /// Watches another address range, at most as large as ranges set before without forgetting.
    void watch(std::uintptr_t begin, std::size_t bytes);
    void forget();
    bool contains(std::uintptr_t address) const { return address - begin_ < bytes_; }
    std::uintptr_t begin() const { return begin_; }
    std::size_t bytes() const { return bytes_; }
    SharedWord* words() const { return words_; }

private:
    std::uintptr_t begin_ = 0;  // a multiple of 4
    std::size_t bytes_ = 0;
    SharedWord* words_ = nullptr;
    std::size_t capacity_ = 0;  // bytes of words_
};

/// Checks an access of the running thread.
void check_shared(SharedRegion& region, std::uintptr_t address, std::size_t bytes, bool write);
/// The same without the check for races.
void check_shared_atomic(SharedRegion& region, std::uintptr_t address, std::size_t bytes);
/// Marks the bytes as never written.
void forget_shared(SharedRegion& region, std::uintptr_t address, std::size_t bytes);

}  // namespace potluck::emulator
