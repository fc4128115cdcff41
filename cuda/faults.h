#pragma once

// Internal: bad elements that only kernels see (an id outside the vocabulary, a divisor of 0). A kernel reports the
// position of the first one into a slot of device memory; the host waits for nothing, and tells it when it next waits
// anyway. Kernel files include this.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace potluck::cuda {

/// What stands in a slot where nothing was reported: kernels put positions there by atomicMin.
inline constexpr unsigned long long no_fault = ~0ULL;
/// Ops that may report before the host has to look.
inline constexpr int fault_slots = 256;

/// Throws the Error of the bad element at a position.
using FaultTeller = std::function<void(std::int64_t position)>;

/// Slots that have been given to ops.
struct FaultRange {
    const unsigned long long* slots;
    int count;
};
struct FaultRanges {
    static constexpr int most = 8;
    int count = 0;
    FaultRange ranges[most] = {};
};

/// A stretch of slots on the device, and what the host needs to tell what they say.
class FaultList {
public:
    explicit FaultList(unsigned long long* slots) : slots_(slots) {}

    bool is_full() const { return static_cast<int>(given_.size()) == fault_slots; }
    bool is_empty() const { return given_.empty(); }
    FaultRange range() const { return {slots_, static_cast<int>(given_.size())}; }
    /// The slot of an op that starts now. When there is none left, the last one is shared, and says less.
    unsigned long long* give(const char* op, FaultTeller tell);
    void clear() { given_.clear(); }
    /// Throws the Error of what slot `index` says.
    void tell(int index, std::int64_t position) const;

private:
    struct Given {
        const char* op;
        FaultTeller tell;
    };
    unsigned long long* slots_;
    std::vector<Given> given_;
};

}  // namespace potluck::cuda
