#pragma once

// Internal: how one host thread runs thread blocks, one after the other. Each thread of a block runs on a fiber until
// it must wait; then another one continues. A fiber whose thread has ended runs the next thread, so that a kernel
// without barriers needs a single fiber.

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/cuda_emulator/fibers.h"
#include "tests/cuda_emulator/kernel_body.h"
#include "tests/cuda_emulator/kernel_collectives.h"
#include "tests/cuda_emulator/kernel_races.h"
#include "tests/cuda_emulator/shared_memory.h"

namespace potluck::emulator {

inline constexpr unsigned most_threads = 1024;
inline constexpr unsigned lanes = 32;
inline constexpr std::size_t most_shared_bytes = std::size_t{227} << 10;

/// The collective operations of the lanes of a warp.
enum class Meeting : std::uint8_t {
    shuffle_index,
    shuffle_up,
    shuffle_down,
    shuffle_xor,
    ballot,
    fold,
    match,
    synchronize,
    multiply,
    load_matrix
};

/// A collective operation for which some lanes have not arrived yet.
struct PendingMeeting {
    Meeting kind;
    unsigned mask = 0;
    unsigned arrived = 0;
    std::array<void*, lanes> payload{};  // of each lane, on its stack
};

struct Warp {
    unsigned absent = 0;  // lanes that have returned or never existed
    std::uint32_t time = 0;
    int pending_count = 0;
    std::array<PendingMeeting, lanes / 2> pending;
};

/// An asynchronous copy that has not completed.
struct AsyncCopy {
    std::uintptr_t shared;
    std::uintptr_t global;
    int source_bytes;
    int group;  // number of commits by this thread before the copy
};
struct AsyncCopies {
    std::vector<AsyncCopy> copies;
    int committed = 0;
};

/// One launch, shared by the host threads that execute its blocks.
struct GridRun {
    const KernelBody* body;
    const void* kernel;
    dim3 grid;
    dim3 block;
    std::size_t shared_bytes;
    int device;
    std::uint64_t blocks;
    std::atomic<std::uint64_t> next_block{0};
    std::atomic<bool> stopped{false};
    std::atomic<bool> has_fences{false};
    std::atomic<int> status{cudaSuccess};
};

class Worker {
public:
    Worker();
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    /// Runs blocks of the grid until none is left. Calls `between_blocks` after each.
    void run(GridRun& grid, const std::function<void()>& between_blocks);

    // ---- called by the threads of the block ----
    int wait_at_barrier(Barrier kind, bool predicate);
    /// Waits for all lanes of `mask`. The last one calls `complete`, which has access to the payloads of all.
    void meet(Meeting kind, unsigned mask, void* payload, void (*complete)(PendingMeeting&));
    [[noreturn]] void abandon(cudaError_t status);
    std::string describe_thread(unsigned thread) const;
    std::string describe_place() const;

    // ---- read by the checks ----
    unsigned thread = 0;  // the running thread
    std::uint64_t block_index = 0;
    KernelAccess access{};  // the current access of this thread, without its bytes
    bool announces_accesses() const { return grid_->body->is_checked; }
    bool has_fences() const { return grid_->has_fences.load(std::memory_order_relaxed); }
    void note_fence() { grid_->has_fences = true; }
    /// Whether kernels may access this address, which is neither device nor shared memory nor their stack.
    bool is_open_to_kernels(std::uintptr_t address);
    std::uint32_t block_time = 1;
    std::uint32_t block_serial = 1;
    SharedRegion dynamic_shared;
    SharedRegion static_shared;
    std::array<Warp, most_threads / lanes> warps;
    void* shared_memory = nullptr;
    std::unordered_map<unsigned, AsyncCopies> async_copies;

private:
    friend void run_fiber(boost::context::detail::transfer_t transfer);
    struct Thread {
        Fiber* fiber = nullptr;
        enum class Waits : std::uint8_t { no, at_barrier, in_warp } waits = Waits::no;
        Meeting meeting{};
        unsigned mask = 0;
    };

    void start_block(std::uint64_t index);
    void run_threads();
    void wait();
    void end_thread();
    Fiber& next_fiber();
    void make_ready(unsigned number) { ready_[(ready_begin_ + ready_count_++) % most_threads] = number; }
    void go_on_with(unsigned number);
    void update_access();
    [[noreturn]] void report_deadlock();

    GridRun* grid_ = nullptr;
    std::array<std::uintptr_t, 64> known_pages_;  // pages of the host that this kernel may access
    FiberPool fibers_;
    Fiber main_;
    Fiber* running_ = nullptr;
    unsigned count_ = 0;        // threads per block
    unsigned next_thread_ = 0;  // the first thread that has not started
    unsigned ended_ = 0;
    bool abandoned_ = false;
    std::array<Thread, most_threads> threads_;
    std::array<unsigned, most_threads> ready_;
    unsigned ready_begin_ = 0;
    unsigned ready_count_ = 0;
    std::vector<uint3> thread_indices_;
    dim3 indexed_block_{0, 0, 0};

    Barrier barrier_kind_{};
    unsigned at_barrier_ = 0;
    int barrier_sum_ = 0;
    int barrier_result_ = 0;
    std::array<unsigned, most_threads> barrier_threads_;
};

/// The worker of this host thread.
Worker& this_worker();
/// The data that the hooks need about the kernel that this host thread runs; all 0 outside kernels.
struct ActiveKernel {
    std::uintptr_t arena_span;
    std::uintptr_t dynamic_begin, dynamic_bytes;
    std::uintptr_t static_begin, static_bytes;
    std::uintptr_t arguments_begin, arguments_bytes;
    int device;
    // Set while the emulator itself works for a kernel: it may call functions of the standard library that were
    // compiled for a kernel file and announce their accesses.
    bool muted;
    Worker* worker;
};
extern constinit thread_local ActiveKernel active __attribute__((tls_model("initial-exec")));

/// Sets ActiveKernel::muted while the object exists.
class Muted {
public:
    Muted() { active.muted = true; }
    ~Muted() { active.muted = false; }
    Muted(const Muted&) = delete;
    Muted& operator=(const Muted&) = delete;
};

/// The CUDA name of a collective operation.
const char* name_of(Meeting meeting);

/// Runs the grid on this host thread and, if it takes long, on others too.
cudaError_t run_grid(GridRun& grid);

}  // namespace potluck::emulator
