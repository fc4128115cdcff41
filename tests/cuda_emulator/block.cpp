#include "tests/cuda_emulator/block.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <exception>
#include <new>

#include "tests/cuda_emulator/arena.h"
#include "tests/cuda_emulator/state.h"
#include "tests/cuda_emulator/static_shared.h"

// The built-in variables, which kernels see as const (kernel_language.h).
constinit thread_local uint3 threadIdx{};
constinit thread_local uint3 blockIdx{};
constinit thread_local uint3 blockDim{};
constinit thread_local uint3 gridDim{};

namespace potluck::emulator {

using boost::context::detail::transfer_t;

constinit thread_local ActiveKernel active{};

Worker& this_worker() {
    static thread_local Worker worker;
    return worker;
}

void run_fiber(transfer_t transfer) {
    Worker& worker = *active.worker;
    Fiber* self = worker.running_;
    arrived(transfer, *self);
    for (;;) {
        Fiber* next = nullptr;
        cudaError_t status = cudaSuccess;
        try {
            worker.run_threads();
            // From here on this fiber no longer runs a thread.
            next = worker.ended_ == worker.count_ ? &worker.main_ : &worker.next_fiber();
        } catch (const StoppedOperation& stopped) {
            status = stopped.status;
        }
        if (status != cudaSuccess) worker.abandon(status);
        worker.fibers_.put_idle(*self);
        worker.running_ = next;
        switch_fiber(*self, *next);
        worker.running_ = self;
    }
}

Worker::Worker() : fibers_(run_fiber), main_(OfThisThread{}) {
    void* memory = mmap(nullptr, most_shared_bytes + 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    shared_memory = memory;
}

Worker::~Worker() { munmap(shared_memory, most_shared_bytes + 4096); }

void Worker::run(GridRun& grid, const std::function<void()>& between_blocks) {
    grid_ = &grid;
    count_ = grid.block.x * grid.block.y * grid.block.z;
    if (grid.block.x != indexed_block_.x || grid.block.y != indexed_block_.y ||
        grid.block.z != indexed_block_.z) {
        indexed_block_ = grid.block;
        thread_indices_.clear();
        for (unsigned z = 0; z < grid.block.z; ++z)
            for (unsigned y = 0; y < grid.block.y; ++y)
                for (unsigned x = 0; x < grid.block.x; ++x) thread_indices_.push_back({x, y, z});
    }
    blockDim = grid.block;
    gridDim = grid.grid;
    const StaticShared fixed = static_shared_of(grid.kernel);
    dynamic_shared.watch(reinterpret_cast<std::uintptr_t>(shared_memory), grid.shared_bytes);
    static_shared.watch(fixed.begin, fixed.bytes);
    // The hooks need the whole dynamic shared memory that a block could have, to detect accesses beyond the end.
    active = {.arena_span = arena.span,
              .dynamic_begin = dynamic_shared.begin(),
              .dynamic_bytes = most_shared_bytes,
              .static_begin = static_shared.begin(),
              .static_bytes = fixed.bytes,
              .arguments_begin = reinterpret_cast<std::uintptr_t>(grid.body->closure.get()),
              .arguments_bytes = grid.body->bytes,
              .device = grid.device,
              .muted = true,
              .worker = this};
    abandoned_ = false;
    known_pages_.fill(0);
    while (!grid.stopped.load(std::memory_order_relaxed)) {
        const std::uint64_t index = grid.next_block.fetch_add(1, std::memory_order_relaxed);
        if (index >= grid.blocks) break;
        start_block(index);
        if (abandoned_) {
            fibers_.abandon_all();
            break;
        }
        if (between_blocks) between_blocks();
    }
    active = {};
    grid_ = nullptr;
}

void Worker::start_block(std::uint64_t index) {
    block_index = index;
    blockIdx.x = static_cast<unsigned>(index % grid_->grid.x);
    blockIdx.y = static_cast<unsigned>(index / grid_->grid.x % grid_->grid.y);
    blockIdx.z = static_cast<unsigned>(index / grid_->grid.x / grid_->grid.y);
    next_thread_ = ended_ = at_barrier_ = ready_begin_ = ready_count_ = 0;
    for (unsigned first = 0; first < count_; first += lanes) {
        Warp& warp = warps[first / lanes];
        warp.absent = count_ - first >= lanes ? 0u : ~0u << (count_ - first);
        warp.pending_count = 0;
    }
    if (!async_copies.empty()) async_copies.clear();
    constexpr std::uint32_t most_time = (1u << 24) - 2;
    if (++block_time >= most_time || ++block_serial >= (1u << 28) - 2) {
        // The counters would overflow their bit fields: start again.
        dynamic_shared.forget();
        static_shared.forget();
        block_time = block_serial = 1;
    }
    Fiber& first = fibers_.take();
    running_ = &first;
    switch_fiber(main_, first);
}

void Worker::run_threads() {
    while (next_thread_ < count_ && ready_count_ == 0) {
        const unsigned number = next_thread_++;
        threads_[number].waits = Thread::Waits::no;
        go_on_with(number);
        std::string error;
        try {
            active.muted = false;
            grid_->body->run(grid_->body->closure.get());
        } catch (const StoppedOperation&) {
            throw;
        } catch (const std::exception& thrown) {
            active.muted = true;
            error = thrown.what();
        } catch (...) {
            active.muted = true;
            error = "an unknown exception";
        }
        active.muted = true;
        if (!error.empty())
            stop(FaultKind::exception, fmt::format("{} threw: {}", describe_running(), error));
        warps[number / lanes].absent |= 1u << number % lanes;
        ++ended_;
    }
}

void Worker::go_on_with(unsigned number) {
    thread = number;
    threadIdx = thread_indices_[number];
    update_access();
}

void Worker::update_access() {
    access.operation = running.serial & 0x3fffffu;
    access.block = block_index & 0xfffu;
    access.time = block_time & 0x3ffu;
    access.thread = thread & 0x3ffu;
}

Fiber& Worker::next_fiber() {
    if (ready_count_ > 0) {
        const unsigned number = ready_[ready_begin_];
        ready_begin_ = (ready_begin_ + 1) % most_threads;
        --ready_count_;
        threads_[number].waits = Thread::Waits::no;
        return *threads_[number].fiber;
    }
    if (next_thread_ < count_) return fibers_.take();
    report_deadlock();
}

void Worker::wait() {
    const unsigned number = thread;
    Fiber* self = running_;
    threads_[number].fiber = self;
    Fiber& next = next_fiber();
    running_ = &next;
    switch_fiber(*self, next);
    running_ = self;
    go_on_with(number);
}

int Worker::wait_at_barrier(Barrier kind, bool predicate) {
    if (at_barrier_ == 0) {
        barrier_kind_ = kind;
        barrier_sum_ = 0;
    } else if (kind != barrier_kind_) {
        stop(FaultKind::barrier, fmt::format("threads of one block wait at different barriers: this one at "
                                             "another kind than {} others in {}",
                                             at_barrier_, describe_running()));
    }
    barrier_sum_ += predicate ? 1 : 0;
    if (at_barrier_ + 1 == count_) {
        // The last thread to arrive releases the others.
        for (unsigned i = 0; i < at_barrier_; ++i) make_ready(barrier_threads_[i]);
        at_barrier_ = 0;
        barrier_result_ = barrier_sum_;
        ++block_time;
        update_access();
        return barrier_result_;
    }
    barrier_threads_[at_barrier_++] = thread;
    threads_[thread].waits = Thread::Waits::at_barrier;
    wait();
    return barrier_result_;
}

void Worker::meet(Meeting kind, unsigned mask, void* payload, void (*complete)(PendingMeeting&)) {
    Warp& warp = warps[thread / lanes];
    const unsigned lane = thread % lanes;
    const unsigned bit = 1u << lane;
    const auto refuse = [&](const std::string& reason) {
        stop(FaultKind::warp,
             fmt::format("{} with mask {:#010x} in {}: {}", name_of(kind), mask, describe_running(), reason));
    };
    if ((mask & bit) == 0) refuse(fmt::format("lane {} calls it, and the mask does not name it", lane));
    if (const unsigned absent = mask & warp.absent; absent != 0)
        refuse(fmt::format(
            "the mask names absent lanes ({:#010x}): they have returned, or the block has no such "
            "threads",
            absent));
    if (mask == bit) {
        PendingMeeting alone{.kind = kind, .mask = mask, .arrived = mask};
        alone.payload[lane] = payload;
        complete(alone);
        return;
    }
    PendingMeeting* meeting = nullptr;
    for (int i = 0; i < warp.pending_count; ++i) {
        PendingMeeting& other = warp.pending[static_cast<std::size_t>(i)];
        if ((other.mask & mask) == 0) continue;
        if (other.mask != mask || other.kind != kind)
            refuse(fmt::format("other lanes of the mask wait at {} with mask {:#010x}", name_of(other.kind),
                               other.mask));
        meeting = &other;
    }
    if (meeting == nullptr) {
        meeting = &warp.pending[static_cast<std::size_t>(warp.pending_count++)];
        meeting->kind = kind;
        meeting->mask = mask;
        meeting->arrived = 0;
    }
    meeting->payload[lane] = payload;
    meeting->arrived |= bit;
    if (meeting->arrived != mask) {
        threads_[thread].waits = Thread::Waits::in_warp;
        threads_[thread].meeting = kind;
        threads_[thread].mask = mask;
        wait();
        return;
    }
    complete(*meeting);
    const unsigned first = thread / lanes * lanes;
    for (unsigned others = mask & ~bit; others != 0; others &= others - 1)
        make_ready(first + static_cast<unsigned>(std::countr_zero(others)));
    *meeting = warp.pending[static_cast<std::size_t>(--warp.pending_count)];
}

bool Worker::is_open_to_kernels(std::uintptr_t address) {
    constexpr std::uintptr_t page = 4096;
    std::uintptr_t& known = known_pages_[address / page % known_pages_.size()];
    if (known == address / page) return true;
    if (state().pinned.find(address) != nullptr) return true;
    if (!is_in_a_program(address)) return false;
    known = address / page;
    return true;
}

void Worker::report_deadlock() {
    std::vector<std::string> waits;
    unsigned in_warp = 0;
    unsigned first_mask = 0;
    Meeting first_meeting{};
    unsigned first_thread = 0;
    for (unsigned number = 0; number < count_; ++number) {
        if (threads_[number].waits != Thread::Waits::in_warp ||
            (warps[number / lanes].absent >> number % lanes & 1u) != 0)
            continue;
        if (in_warp++ == 0) {
            first_mask = threads_[number].mask;
            first_meeting = threads_[number].meeting;
            first_thread = number;
        }
    }
    if (at_barrier_ > 0)
        waits.push_back(fmt::format("{} of {} threads wait at __syncthreads", at_barrier_, count_));
    if (ended_ > 0) waits.push_back(fmt::format("{} have returned", ended_));
    if (in_warp > 0)
        waits.push_back(
            fmt::format("{} wait at a function of their warp, the first ({}) at {} with mask {:#010x}",
                        in_warp, describe_thread(first_thread), name_of(first_meeting), first_mask));
    std::string text;
    for (const std::string& part : waits) text += (text.empty() ? "" : ", ") + part;
    if (at_barrier_ > 0)
        stop(FaultKind::barrier,
             fmt::format("barrier not reached by all in {}: {}", describe_running(), text));
    const unsigned absent = first_mask & warps[first_thread / lanes].absent;
    stop(FaultKind::warp,
         fmt::format("lanes wait for others that never come in {}: {}{}", describe_running(), text,
                     absent == 0
                         ? ""
                         : fmt::format("; of these lanes {:#010x} are absent: they have returned", absent)));
}

void Worker::abandon(cudaError_t status) {
    int none = cudaSuccess;
    grid_->status.compare_exchange_strong(none, status);
    grid_->stopped = true;
    abandoned_ = true;
    Fiber* self = running_;
    running_ = &main_;
    switch_fiber(*self, main_);
    std::terminate();  // not reached: no fiber switches back
}

std::string Worker::describe_thread(unsigned number) const {
    const uint3 index = thread_indices_[number];
    return fmt::format("thread ({}, {}, {})", index.x, index.y, index.z);
}
std::string Worker::describe_place() const {
    return fmt::format("block ({}, {}, {}), {}", blockIdx.x, blockIdx.y, blockIdx.z, describe_thread(thread));
}

bool is_kernel_thread() { return active.worker != nullptr; }
void abandon_kernel(cudaError_t status) {
    // The compiler assumes that announced accesses never throw, so with them nothing may be thrown from here.
    if (!active.worker->announces_accesses()) throw StoppedOperation{status};
    active.worker->abandon(status);
}
std::string describe_thread() { return active.worker->describe_place(); }

int barrier(Barrier kind, bool predicate) {
    const Muted muted;
    return active.worker->wait_at_barrier(kind, predicate);
}

void trap() {
    const Muted muted;
    stop(FaultKind::exception, fmt::format("__trap in {}", describe_running()));
}

}  // namespace potluck::emulator
