#include "core/memory_trace.h"

namespace potluck {
namespace {

thread_local MemoryTrace* innermost = nullptr;

}  // namespace

MemoryTrace::MemoryTrace(Device device) noexcept : device_(device), outer_(innermost) { innermost = this; }

MemoryTrace::~MemoryTrace() { innermost = outer_; }

void MemoryTrace::count(Device device, std::int64_t bytes) noexcept {
    for (MemoryTrace* trace = innermost; trace != nullptr; trace = trace->outer_) {
        if (!(trace->device_ == device)) continue;
        trace->held_ += bytes;
        if (bytes <= 0) continue;
        try {
            trace->after_allocations_.push_back(trace->held_);
        } catch (...) {  // no memory for the list: the highest value must not be lost
            if (!trace->after_allocations_.empty() && trace->held_ > trace->after_allocations_.back())
                trace->after_allocations_.back() = trace->held_;
        }
    }
}

}  // namespace potluck
