// Launches: what a GPU would refuse, and how the blocks of a grid are distributed over host threads.

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/state.h"
#include "tests/cuda_emulator/static_shared.h"

namespace potluck::emulator {

namespace {

int host_threads() {
    static const int count = [] {
        const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
        return static_cast<int>(setting("POTLUCK_EMULATOR_THREADS", 1, 256, cores));
    }();
    return count;
}

/// Host threads that help with long-running grids. They exist until the process ends.
class Helpers {
public:
    static Helpers& get() {
        static auto* helpers = new Helpers;
        return *helpers;
    }

    /// Lets the helpers execute blocks of the grid.
    void call(GridRun& grid) {
        const std::lock_guard lock(mutex_);
        for (; started_ < host_threads() - 1; ++started_) std::thread([this] { help(); }).detach();
        grid_ = &grid;
        ++generation_;
        wake_.notify_all();
    }
    /// Returns when no helper works on the grid any more.
    void dismiss() {
        std::unique_lock lock(mutex_);
        grid_ = nullptr;
        done_.wait(lock, [this] { return busy_ == 0; });
    }

private:
    void help() {
        std::uint64_t seen = 0;
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return grid_ != nullptr && generation_ != seen; });
            seen = generation_;
            GridRun& grid = *grid_;
            ++busy_;
            lock.unlock();
            this_worker().run(grid, {});
            lock.lock();
            if (--busy_ == 0) done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    GridRun* grid_ = nullptr;
    std::uint64_t generation_ = 0;
    int started_ = 0;
    int busy_ = 0;
};

/// The reason why no GPU could launch this, or "".
std::string refusal(const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes) {
    const auto threads = static_cast<std::uint64_t>(block.x) * block.y * block.z;
    if (threads == 0 || threads > most_threads || block.x > 1024 || block.y > 1024 || block.z > 64)
        return fmt::format(
            "a block of ({}, {}, {}) threads: at most 1024 in all, 1024 along x and y, 64 along z", block.x,
            block.y, block.z);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535)
        return fmt::format(
            "a grid of ({}, {}, {}) blocks: from 1 to 2147483647 along x, to 65535 along y and z", grid.x,
            grid.y, grid.z);
    const std::size_t own = static_shared_bytes(kernel);
    std::size_t limit = (std::size_t{48} << 10) - own;
    const auto& limits = state().shared_limits;
    if (const auto raised = limits.find(kernel); raised != limits.end())
        limit = std::max(limit, static_cast<std::size_t>(raised->second));
    if (shared_bytes > limit)
        return fmt::format(
            "{} bytes of dynamic shared memory: beside its {} static bytes the kernel may have {} "
            "(cudaFuncSetAttribute raises it, to at most {})",
            shared_bytes, own, limit, state().card.most_shared_bytes - own);
    return {};
}

void stop_tracking_writes() {
    arena.tracks_writes = false;
    for (const auto& device : state().devices)
        for (const auto& [offset, allocation] : device->memory.live())
            device->memory.set_present(allocation, true);
}

}  // namespace

void* dynamic_shared_memory() { return active.worker->shared_memory; }

cudaError_t run_grid(GridRun& grid) {
    using Time = std::chrono::steady_clock;
    bool called = false;
    std::function<void()> call_when_long;
    if (host_threads() > 1 && grid.blocks > 1) {
        // Waking other threads takes longer than a small grid.
        call_when_long = [&, start = Time::now(), left = 0u]() mutable {
            if (called || (++left & 3u) != 0 || Time::now() - start < std::chrono::microseconds(50)) return;
            called = true;
            Helpers::get().call(grid);
        };
    }
    this_worker().run(grid, call_when_long);
    if (called) Helpers::get().dismiss();
    return static_cast<cudaError_t>(grid.status.load());
}

cudaError_t launch(const void* kernel, const char* op, dim3 grid, dim3 block, std::size_t shared_bytes,
                   cudaStream_t stream, KernelBody body) {
    const std::lock_guard lock(state().mutex);
    CUstream_st* queue = find_stream(stream);
    if (queue == nullptr || queue->device != current_device()) {
        report(FaultKind::launch,
               fmt::format("launch of a kernel of op {}: the stream is none of the current device, cuda:{}",
                           op, current_device()));
        return cudaErrorInvalidResourceHandle;
    }
    if (const std::string reason = refusal(kernel, grid, block, shared_bytes); !reason.empty()) {
        report(FaultKind::launch, fmt::format("launch of a kernel of op {}: {}", op, reason));
        return cudaErrorInvalidConfiguration;
    }
    if (!body.is_checked && arena.tracks_writes) stop_tracking_writes();
    const int device = queue->device;
    return start_operation(*queue, op, kernel, [=, body = std::move(body)] {
        GridRun run{.body = &body,
                    .kernel = kernel,
                    .grid = grid,
                    .block = block,
                    .shared_bytes = shared_bytes,
                    .device = device,
                    .blocks = static_cast<std::uint64_t>(grid.x) * grid.y * grid.z};
        if (const cudaError_t status = run_grid(run); status != cudaSuccess) {
            state().devices[static_cast<std::size_t>(device)]->sticky = status;
            throw StoppedOperation{status};
        }
    });
}

}  // namespace potluck::emulator
