// Recorded work as CUDA graphs.

#include <array>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "core/random_scope.h"
#include "cuda/recording.h"
#include "cuda/resources.h"

namespace potluck {

using cuda::check;

CudaBackend::Recording::Recording(cudaStream_t pool_stream) : pool_stream_(pool_stream) {
    constexpr std::size_t advance_bytes = 2 * sizeof(std::uint64_t);
    constexpr std::size_t fault_bytes = cuda::fault_slots * sizeof(unsigned long long);
    words_ = static_cast<std::uint64_t*>(allocate(advance_bytes + fault_bytes));
    if (words_ == nullptr) throw Error("capture", "the device has no memory left.");
    check(cudaMemsetAsync(random_advance(), 0, advance_bytes, pool_stream_), "cudaMemsetAsync");
    check(cudaMemsetAsync(fault_slots(), 0xff, fault_bytes, pool_stream_), "cudaMemsetAsync");
}

CudaBackend::Recording::~Recording() {
    if (!host_copies_.empty()) cudaStreamSynchronize(pool_stream_);  // the last replay may still read them
    for (const auto& [data, bytes] : blocks_) cudaFreeAsync(data, pool_stream_);
}

void* CudaBackend::Recording::allocate(std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (std::vector<void*>& blocks = reusable_[bytes]; !blocks.empty()) {
        void* data = blocks.back();
        blocks.pop_back();
        return data;
    }
    void* data = nullptr;
    const cudaError_t status = cudaMallocAsync(&data, static_cast<std::size_t>(bytes), pool_stream_);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return nullptr;
    }
    check(status, "cudaMallocAsync");
    blocks_[data] = bytes;
    return data;
}

void CudaBackend::Recording::reuse(void* data) {
    const std::lock_guard lock(mutex_);
    reusable_[blocks_.at(data)].push_back(data);
}

void CudaBackend::Recording::keep(void* data) {
    const std::lock_guard lock(mutex_);
    blocks_.insert({data, 0});
}

void* CudaBackend::Recording::host_copy(const void* from, std::size_t bytes) {
    void* copy = host_copies_.emplace_back(bytes).data();
    std::memcpy(copy, from, bytes);
    return copy;
}

class CudaBackend::Graph final : public CapturedWork {
public:
    Graph(CudaBackend& backend, std::shared_ptr<Recording> recording, std::shared_ptr<RecordedFaults> faults,
          std::function<void()> work, cudaGraph_t graph, RandomKey start, RandomKey end)
        : backend_(backend),
          recording_(std::move(recording)),
          faults_(std::move(faults)),
          work_(std::move(work)),
          start_(start),
          numbers_(end.offset - start.offset) {
        check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    }
    ~Graph() override { cudaGraphExecDestroy(graph_); }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    void replay() override {
        const OpScope scope("replay");
        const cudaStream_t stream = backend_.stream();
        if (backend_.is_capturing()) throw Error("replay", "other work is being recorded. Replay after it.");
        Generator& generator = default_generator(Device::cuda(backend_.index()));
        const RandomKey now = generator.state();
        const RandomContext& context = RandomContext::current();
        const bool is_of_update = recording_->update >= 0;
        if (is_of_update && !context.is_in_update)
            throw Error("replay",
                        "the work was recorded in a RandomUpdateScope. Open one around the replay, too.");
        if (numbers_ > 0 || is_of_update) {
            if (now.seed != start_.seed)
                throw Error("replay",
                            fmt::format("the work was recorded with the random seed {}, and the generator "
                                        "now has {}. Record it again.",
                                        start_.seed, now.seed));
            const std::array<std::uint64_t, 2> advance{
                now.offset - start_.offset,
                is_of_update ? static_cast<std::uint64_t>(context.update - recording_->update) : 0};
            backend_.copy_from_host(recording_->random_advance(), advance.data(), sizeof(advance));
        }
        check(cudaGraphLaunch(graph_, stream), "cudaGraphLaunch");
        generator.set_state({now.seed, now.offset + numbers_});
        backend_.expect_faults(faults_);
    }

private:
    CudaBackend& backend_;
    std::shared_ptr<Recording> recording_;
    std::shared_ptr<RecordedFaults> faults_;
    std::function<void()> work_;  // keeps the tensors that it captures alive
    cudaGraphExec_t graph_ = nullptr;
    RandomKey start_;        // of the generator when recording began
    std::uint64_t numbers_;  // number of blocks that the work takes
};

std::unique_ptr<CapturedWork> CudaBackend::capture(std::function<void()> work) {
    if (is_capturing()) throw Error("capture", "work is being recorded already. Captures do not nest.");
    stream();
    Resources& own = resources();
    Generator& generator = default_generator(Device::cuda(index_));
    const std::lock_guard lock(capture_mutex_);
    const RandomKey start = generator.state();
    auto recording = std::make_shared<Recording>(own.stream.get());
    if (RandomContext::current().is_in_update) recording->update = RandomContext::current().update;

    const cudaStream_t queue = own.capture_stream.get();
    check(cudaStreamBeginCapture(queue, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    recording_ = recording;
    const auto faults = recorded_faults_ = std::make_shared<RecordedFaults>(recording);
    recording_thread_ = std::this_thread::get_id();
    note_recording(true);
    cudaGraph_t graph = nullptr;
    const auto end = [&] {
        recording_->ended = true;
        recording_thread_ = std::thread::id();
        note_recording(false);
        recording_.reset();
        recorded_faults_.reset();
        return cudaStreamEndCapture(queue, &graph);
    };
    try {
        work();
        const RandomKey now = generator.state();
        if (now.seed != start.seed || now.offset < start.offset)
            throw Error(
                "capture",
                "the work seeds the device's random numbers, which a replay could not do. Seed them before.");
    } catch (...) {
        end();
        if (graph != nullptr) cudaGraphDestroy(graph);
        cudaGetLastError();
        generator.set_state(start);
        throw;
    }
    const RandomKey taken = generator.state();
    generator.set_state(start);  // nothing has been drawn yet
    check(end(), "cudaStreamEndCapture");
    auto result = std::make_unique<Graph>(*this, recording, faults, std::move(work), graph, start, taken);
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return result;
}

const std::uint64_t* CudaBackend::random_advance(const RandomKey& key) {
    if (!is_capturing()) return nullptr;
    if (key.update != 0 && recording_->update < 0)
        throw Error(
            OpScope::current(),
            "a RandomUpdateScope was opened in recorded work, whose masks a replay would repeat. Open it "
            "around capture() and around each replay.");
    return recording_->random_advance();
}

void* CudaBackend::allocate_recorded(std::int64_t bytes) {
    void* data = recording_->allocate(bytes);
    if (data != nullptr) {
        const std::lock_guard lock(recorded_mutex_);
        recorded_blocks_[data] = recording_;
    }
    return data;
}

bool CudaBackend::release_recorded(void* data) noexcept try {
    const std::lock_guard lock(recorded_mutex_);
    if (const auto found = recorded_blocks_.find(data); found != recorded_blocks_.end()) {
        if (!found->second->ended) found->second->reuse(data);
        recorded_blocks_.erase(found);
        return true;
    }
    if (!is_capturing()) return false;
    recording_->keep(data);
    return true;
} catch (...) {  // no memory for the lists: leaking the block is better than using it twice
    return true;
}

}  // namespace potluck
