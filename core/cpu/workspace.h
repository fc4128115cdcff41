#pragma once

#include <cstdint>
#include <memory>

namespace potluck::cpu {

/// Memory of the calling thread for `count` elements, with undefined content, valid until the next call with the same
/// types. It is kept for the thread's next kernel: fresh pages from the system would cost a tenth of a matrix product.
/// `Owner` tells apart what is in use at the same time.
template <class Owner, class T>
T* workspace(std::int64_t count) {
    thread_local std::unique_ptr<T[]> memory;
    thread_local std::int64_t size = 0;
    if (count > size) {
        memory.reset();
        size = 0;
        memory = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(count));
        size = count;
    }
    return memory.get();
}

}  // namespace potluck::cpu
