#include "cuda/faults.h"

#include <cstring>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "cuda/recording.h"
#include "cuda/resources.h"

namespace potluck {

using cuda::check;

namespace cuda {

unsigned long long* FaultList::give(const char* op, FaultReporter report) {
    if (!is_full()) {
        given_.push_back({op, std::move(report)});
        return slots_ + given_.size() - 1;
    }
    given_.back() = {op, [op](std::int64_t position) {
                         throw Error(op,
                                     fmt::format("an op met a bad element (an id or label out of range, a "
                                                 "divisor of 0) at position {}.",
                                                 position));
                     }};
    return slots_ + fault_slots - 1;
}

void FaultList::tell(int index, std::int64_t position) const {
    const Given given = given_[static_cast<std::size_t>(index)];
    const OpScope scope(given.op);
    given.report(position);
    throw Error(
        given.op,
        fmt::format("the element at position {} was bad when the op ran. It has been overwritten before "
                    "anything was read from the device, so its value is not known.",
                    position));
}

}  // namespace cuda

/// The slots of one thread's ops on the device that have not been checked yet.
class CudaBackend::ThreadFaults {
public:
    explicit ThreadFaults(CudaBackend& backend)
        : backend_(backend),
          block_(backend.resources().take_fault_block(backend.stream())),
          own_(block_->slots) {}
    ~ThreadFaults() {
        block_->is_clean = own_.is_empty();
        own_.clear();
        backend_.resources().give_fault_block(std::move(block_));
    }
    ThreadFaults(const ThreadFaults&) = delete;
    ThreadFaults& operator=(const ThreadFaults&) = delete;

    unsigned long long* give(const char* op, cuda::FaultReporter report) {
        if (own_.is_full()) backend_.synchronize();
        return own_.give(op, std::move(report));
    }
    void add(const std::shared_ptr<RecordedFaults>& faults) {
        for (const auto& other : replayed_)
            if (other == faults) return;
        if (static_cast<int>(replayed_.size()) + 1 == cuda::FaultRanges::most) backend_.synchronize();
        replayed_.push_back(faults);
    }
    cuda::FaultRanges ranges() const {
        cuda::FaultRanges ranges;
        for (const auto& faults : replayed_) ranges.ranges[ranges.count++] = faults->list.range();
        if (!own_.is_empty()) ranges.ranges[ranges.count++] = own_.range();
        return ranges;
    }

    /// Starts to copy the slots to the host; false when no slot is in use.
    bool start(cudaStream_t stream) {
        const cuda::FaultRanges all = ranges();
        auto* to = static_cast<unsigned long long*>(block_->host.data());
        for (int i = 0; i < all.count; ++i, to += cuda::fault_slots)
            check(cudaMemcpyAsync(to, all.ranges[i].slots, bytes_of(all.ranges[i]), cudaMemcpyDeviceToHost,
                                  stream),
                  "cudaMemcpyAsync");
        return all.count > 0;
    }

    /// After the copies have completed: throws the Error of the first bad element and resets all slots.
    void finish(cudaStream_t stream) {
        const cuda::FaultRanges all = ranges();
        const auto replayed = std::exchange(replayed_, {});
        const cuda::FaultList own = std::exchange(own_, cuda::FaultList(block_->slots));
        const auto* said = static_cast<const unsigned long long*>(block_->host.data());
        for (int i = 0; i < all.count; ++i, said += cuda::fault_slots) {
            for (int slot = 0; slot < all.ranges[i].count; ++slot) {
                if (said[slot] == cuda::no_fault) continue;
                const auto position = static_cast<std::int64_t>(said[slot]);
                for (int range = 0; range < all.count; ++range)
                    check(cudaMemsetAsync(const_cast<unsigned long long*>(all.ranges[range].slots), 0xff,
                                          bytes_of(all.ranges[range]), stream),
                          "cudaMemsetAsync");
                const auto is_recorded = static_cast<std::size_t>(i) < replayed.size();
                (is_recorded ? replayed[static_cast<std::size_t>(i)]->list : own).tell(slot, position);
            }
        }
    }

private:
    static std::size_t bytes_of(const cuda::FaultRange& range) {
        return static_cast<std::size_t>(range.count) * sizeof(unsigned long long);
    }

    CudaBackend& backend_;
    std::unique_ptr<Resources::FaultBlock> block_;
    cuda::FaultList own_;
    std::vector<std::shared_ptr<RecordedFaults>> replayed_;
};

CudaBackend::ThreadFaults& CudaBackend::thread_faults() {
    static thread_local std::unordered_map<CudaBackend*, std::unique_ptr<ThreadFaults>> of_devices;
    std::unique_ptr<ThreadFaults>& faults = of_devices[this];
    if (faults == nullptr) faults = std::make_unique<ThreadFaults>(*this);
    return *faults;
}

unsigned long long* CudaBackend::fault_slot(cuda::FaultReporter report) {
    if (is_capturing()) return recorded_faults_->list.give(OpScope::current(), std::move(report));
    return thread_faults().give(OpScope::current(), std::move(report));
}

cuda::FaultRanges CudaBackend::fault_ranges() {
    if (!is_capturing()) return thread_faults().ranges();
    cuda::FaultRanges ranges;
    if (!recorded_faults_->list.is_empty()) ranges.ranges[ranges.count++] = recorded_faults_->list.range();
    return ranges;
}

bool CudaBackend::start_fault_check() { return thread_faults().start(stream()); }
void CudaBackend::finish_fault_check() { thread_faults().finish(stream()); }
void CudaBackend::expect_faults(const std::shared_ptr<RecordedFaults>& faults) {
    if (!faults->list.is_empty()) thread_faults().add(faults);
}

std::unique_ptr<CudaBackend::Resources::FaultBlock> CudaBackend::Resources::take_fault_block(
    cudaStream_t queue) {
    const std::lock_guard lock(fault_mutex);
    std::unique_ptr<FaultBlock> block;
    if (free_fault_blocks.empty()) {
        block = std::make_unique<FaultBlock>();
        void* memory = nullptr;
        check(cudaMallocAsync(&memory, fault_block_bytes, queue), "cudaMallocAsync");
        block->slots = static_cast<unsigned long long*>(memory);
    } else {
        block = std::move(free_fault_blocks.back());
        free_fault_blocks.pop_back();
    }
    if (!block->is_clean)
        check(cudaMemsetAsync(block->slots, 0xff, fault_block_bytes, queue), "cudaMemsetAsync");
    block->is_clean = true;
    return block;
}

void CudaBackend::Resources::give_fault_block(std::unique_ptr<FaultBlock> block) {
    const std::lock_guard lock(fault_mutex);
    free_fault_blocks.push_back(std::move(block));
}

}  // namespace potluck
