#pragma once

#include <cstddef>
#include <vector>

#include "core/async_copy.h"
#include "core/tensor.h"

namespace potluck {

/// Tensors of a device, kept in the memory of another until they are needed again; in the device's own when both are the same.
class OffloadStore {
public:
    OffloadStore(Device device, Device memory) : device_(device), memory_(memory) {}

    /// Keeps `x` at `place`; it must not be changed afterwards.
    void put(std::size_t place, const Tensor& x);
    /// Starts to bring back what lies at a place, if there is such a place.
    void prefetch(std::size_t place);
    /// What lies at a place, on the device; it stays in the store.
    Tensor get(std::size_t place);
    /// The same, and the place is empty afterwards.
    Tensor take(std::size_t place);

private:
    struct Entry {
        Tensor kept;       // in the memory
        Tensor here = {};  // back on the device, or on its way
        CopyHandle coming = {};
    };

    void start_back(Entry& entry) const;

    Device device_, memory_;
    std::vector<Entry> entries_;
};

/// `x` in the memory of another device, beside what computes: pinned where that is the host of a GPU. `going` is its copy.
Tensor copied_to(Device memory, const Tensor& x, CopyHandle& going);

}  // namespace potluck
