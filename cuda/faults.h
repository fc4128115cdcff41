#pragma once

// Internal: bad elements that only kernels can detect (an id outside the vocabulary, a divisor of 0). A kernel writes
// the position of the first one into a slot of device memory. The host does not wait for it: the Error is thrown when
// the host next waits anyway. Kernel files include this header.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace potluck::cuda {

/// The value of a slot without a report: kernels write positions by atomicMin.
inline constexpr unsigned long long no_fault = ~0ULL;
/// Number of ops that may report before the host must check.
inline constexpr int fault_slots = 256;

/// Throws the Error for the bad element at `position`.
using FaultReporter = std::function<void(std::int64_t position)>;

/// Slots that have been assigned to ops.
struct FaultRange {
    const unsigned long long* slots;
    int count;
};
struct FaultRanges {
    static constexpr int most = 8;
    int count = 0;
    FaultRange ranges[most] = {};
};

/// A range of slots on the device, and the information that the host needs to interpret them.
class FaultList {
public:
    explicit FaultList(unsigned long long* slots) : slots_(slots) {}

    bool is_full() const { return static_cast<int>(given_.size()) == fault_slots; }
    bool is_empty() const { return given_.empty(); }
    FaultRange range() const { return {slots_, static_cast<int>(given_.size())}; }
    /// Assigns a slot to an op that starts now. If none is left, ops share the last one, whose report is less specific.
    unsigned long long* give(const char* op, FaultReporter report);
    void clear() { given_.clear(); }
    /// Throws the Error that slot `index` reports.
    void tell(int index, std::int64_t position) const;

private:
    struct Given {
        const char* op;
        FaultReporter report;
    };
    unsigned long long* slots_;
    std::vector<Given> given_;
};

}  // namespace potluck::cuda
