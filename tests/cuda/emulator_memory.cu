// The emulator's checks of device memory. Every test plants a fault in a small kernel or in a call.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

#include "core/op_scope.h"
#include "cuda/launch.h"
#include "tests/cuda/emulator_support.h"
#include "tests/cuda_emulator/memory.h"

using namespace potluck;
using potluck::test::Buffer;
using potluck::test::expect_fault;
using potluck::test::FaultKind;

namespace {

__global__ void copy_floats(const float* from, float* to, int count) {
    for (auto i = static_cast<int>(cuda::global_thread()); i < count;
         i += static_cast<int>(cuda::global_threads()))
        to[i] = from[i];
}
__global__ void copy_packs(const float4* from, float4* to, int count) {
    for (auto i = static_cast<int>(cuda::global_thread()); i < count;
         i += static_cast<int>(cuda::global_threads()))
        to[i] = from[i];
}
struct Point {
    double x, y, z;
};
__global__ void copy_structs(const Point* from, Point* to) { to[threadIdx.x] = from[threadIdx.x]; }
__global__ void store_bytes(unsigned char* to) { to[threadIdx.x] = static_cast<unsigned char>(threadIdx.x); }
__global__ void add_atomically(float* sum) { atomicAdd(sum, 1.0f); }
__global__ void throw_error() { throw std::runtime_error("thrown on purpose"); }
// Its static shared memory is in a function that it calls.
__device__ double sum_of_lanes(double value) {
    __shared__ double scratch[32];
    scratch[threadIdx.x] = value;
    __syncthreads();
    double sum = 0;
    for (double each : scratch) sum += each;
    return sum;
}
__global__ void sum_through_shared(double* y) {
    const double sum = sum_of_lanes(threadIdx.x);
    if (threadIdx.x == 0) *y = sum;
}

__global__ void count_blocks(unsigned* blocks) {
    if (threadIdx.x == 0) atomicAdd(blocks, 1u);
}

__global__ void write_same_place(int* to) {
    if (threadIdx.x == 0) to[0] = 1;
}
__global__ void shift_in_place(float* x, int count, bool with_barrier) {
    const auto i = static_cast<int>(threadIdx.x);
    const float next = x[(i + 1) % count];
    if (with_barrier) __syncthreads();
    x[i] = next;
}
__global__ void hand_over(int* data, unsigned* finished, int* to) {
    data[blockIdx.x] = static_cast<int>(blockIdx.x);
    __threadfence();
    if (atomicAdd(finished, 1u) + 1 < gridDim.x) return;
    int sum = 0;  // the last block
    for (unsigned i = 0; i < gridDim.x; ++i) sum += data[i];
    *to = sum;
}
__global__ void read_value(const int* from, int* to) { *to = *from; }
__device__ const int table[4] = {1, 2, 3, 4};
struct Values {
    int of[40];
};
__global__ void read_table(Values values, int* to) {
    to[threadIdx.x] = table[threadIdx.x] + values.of[threadIdx.x];
}

/// The message of `cuda::launch` when the emulator stops the kernel.
template <class Function>
std::string error_of(Function function) {
    try {
        function();
    } catch (const Error& error) {
        return error.what();
    }
    return {};
}

}  // namespace

TEST_CASE("cuda emulator: a kernel that stays inside its memory leaves no fault, and the right values") {
    const cuda::Stream stream;
    const std::vector<float> values(1000, 1.5f);
    const Buffer<float> x(values, stream.get());
    const Buffer<float> y(values.size(), stream.get());
    cuda::launch(copy_floats, 3, 64, 0, stream.get(), x.data(), y.data(), 1000);
    CHECK(y.to_host() == values);
    cuda::launch(copy_packs, 3, 64, 0, stream.get(), reinterpret_cast<const float4*>(x.data()),
                 reinterpret_cast<float4*>(y.data()), 250);
    CHECK(y.to_host() == values);
    test::expect_no_fault();
}

TEST_CASE("cuda emulator: a load or a store one element behind the end is out of bounds") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const OpScope scope("planted");
    const Buffer<float> x(std::vector<float>(100), stream.get());
    const Buffer<float> y(101, stream.get());
    const std::string error =
        error_of([&] { cuda::launch(copy_floats, 1, 32, 0, stream.get(), x.data(), y.data(), 101); });
    CHECK(error.find("out of bounds") != std::string::npos);
    expect_fault(FaultKind::out_of_bounds,
                 {"op planted", "reads 4 bytes at 0 bytes behind the end of allocation",
                  "400 bytes, made by planted", "thread (4, 0, 0)"});

    const Buffer<float> longer(std::vector<float>(104), stream.get());
    const Buffer<float> shorter(102, stream.get());
    CHECK_THROWS_AS(
        cuda::launch(copy_packs, 1, 32, 0, stream.get(), reinterpret_cast<const float4*>(longer.data()),
                     reinterpret_cast<float4*>(shorter.data()), 26),
        Error);
    // The last pack begins inside and ends outside.
    expect_fault(FaultKind::out_of_bounds,
                 {"writes 16 bytes at byte 400 of allocation", "of which byte 8 is 0 bytes behind the end"});

    CHECK_THROWS_AS(cuda::launch(copy_floats, 1, 1, 0, stream.get(), x.data() - 1, y.data(), 1), Error);
    expect_fault(FaultKind::out_of_bounds, {"reads 4 bytes at 4 bytes before the begin of allocation"});
}

TEST_CASE("cuda emulator: structs and atomics are seen as well") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const Buffer<Point> points(std::vector<Point>(4), stream.get());
    const Buffer<Point> fewer(3, stream.get());
    CHECK_THROWS_AS(cuda::launch(copy_structs, 1, 4, 0, stream.get(), points.data(), fewer.data()), Error);
    expect_fault(FaultKind::out_of_bounds, {"writes", "behind the end of allocation"});
    const Buffer<float> sum(1, stream.get());
    CHECK_THROWS_AS(cuda::launch(add_atomically, 1, 1, 0, stream.get(), sum.data()), Error);
    expect_fault(FaultKind::never_written, {});
    CHECK_THROWS_AS(cuda::launch(add_atomically, 1, 1, 0, stream.get(), sum.data() + 1), Error);
    expect_fault(FaultKind::out_of_bounds, {});
}

TEST_CASE(
    "cuda emulator: bytes at the end of an allocation that is no multiple of four are watched one by one") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const Buffer<unsigned char> bytes(13, stream.get());
    cuda::launch(store_bytes, 1, 13, 0, stream.get(), bytes.data());
    CHECK_THROWS_AS(cuda::launch(store_bytes, 1, 14, 0, stream.get(), bytes.data()), Error);
    expect_fault(FaultKind::out_of_bounds, {"writes 1 bytes", "thread (13, 0, 0)"});
}

TEST_CASE("cuda emulator: memory that was freed may not be used, by a kernel, a copy or a library") {
    const cuda::Stream stream;
    Buffer<float> x(std::vector<float>(100), stream.get());
    const Buffer<float> y(100, stream.get());
    float* const late = x.data();
    {
        const OpScope scope("freeing");
        x.free();
    }
    if (emulator::accesses_are_checked) {
        CHECK_THROWS_AS(cuda::launch(copy_floats, 1, 32, 0, stream.get(), late + 5, y.data(), 10), Error);
        expect_fault(FaultKind::use_after_free, {"byte 20 of allocation", "which was freed by freeing"});
    }
    CHECK(cudaMemsetAsync(late, 0, 4, stream.get()) == cudaErrorIllegalAddress);
    expect_fault(FaultKind::use_after_free, {"cudaMemsetAsync", "writes 4 bytes"});
    CHECK(emulator::library_call(stream.get(), "a library", [=] { emulator::check_read(late, 400, "A"); }) ==
          cudaErrorIllegalAddress);
    expect_fault(FaultKind::use_after_free, {"a library", "(A)", "reads 400 bytes"});
    CHECK(cudaFreeAsync(late, stream.get()) == cudaErrorInvalidValue);
    expect_fault(FaultKind::use_after_free, {"cudaFreeAsync", "which was freed by freeing"});
}

TEST_CASE("cuda emulator: a read of memory that nobody wrote is a fault, and a copy of it stays unwritten") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const Buffer<float> x(8, stream.get());
    const Buffer<float> y(8, stream.get());
    std::vector<float> host(8);
    REQUIRE(cudaMemsetAsync(x.data(), 0, 16, stream.get()) == cudaSuccess);
    CHECK_THROWS_AS(cuda::launch(copy_floats, 1, 1, 0, stream.get(), x.data(), y.data(), 8), Error);
    expect_fault(FaultKind::never_written, {"reads 4 bytes at byte 16 of allocation"});
    CHECK(cudaMemcpyAsync(y.data(), x.data(), 32, cudaMemcpyDeviceToDevice, stream.get()) == cudaSuccess);
    CHECK(cudaMemcpyAsync(host.data(), y.data(), 16, cudaMemcpyDeviceToHost, stream.get()) == cudaSuccess);
    CHECK(cudaMemcpyAsync(host.data(), y.data(), 32, cudaMemcpyDeviceToHost, stream.get()) ==
          cudaErrorLaunchFailure);
    expect_fault(FaultKind::never_written, {"cudaMemcpyAsync", "of which byte 16 is"});
}

TEST_CASE("cuda emulator: a wide access to an address that is no multiple of its size is a fault") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const Buffer<float> x(std::vector<float>(16), stream.get());
    const Buffer<float> y(16, stream.get());
    CHECK_THROWS_AS(
        cuda::launch(copy_packs, 1, 1, 0, stream.get(), reinterpret_cast<const float4*>(x.data() + 1),
                     reinterpret_cast<float4*>(y.data()), 1),
        Error);
    expect_fault(FaultKind::misaligned, {"reads 16 bytes at once at byte 4 of allocation"});
}

TEST_CASE(
    "cuda emulator: threads of one kernel that touch the same device memory race unless something orders "
    "them") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const Buffer<int> y(std::vector<int>(64), stream.get());
    cuda::launch(write_same_place, 1, 64, 0, stream.get(), y.data());
    CHECK_THROWS_AS(cuda::launch(write_same_place, 2, 64, 0, stream.get(), y.data()), Error);
    expect_fault(
        FaultKind::kernel_race,
        {"writes byte 0 of allocation", "which a thread of another block writes, and nothing orders blocks"});
    const Buffer<float> x(std::vector<float>(64), stream.get());
    cuda::launch(shift_in_place, 1, 64, 0, stream.get(), x.data(), 64, true);
    CHECK_THROWS_AS(cuda::launch(shift_in_place, 1, 64, 0, stream.get(), x.data(), 64, false), Error);
    expect_fault(FaultKind::kernel_race, {"of the same block", "with no barrier between"});
    const Buffer<unsigned> finished(std::vector<unsigned>(1), stream.get());
    const Buffer<int> sum(1, stream.get());
    cuda::launch(hand_over, 20, 1, 0, stream.get(), y.data(), finished.data(), sum.data());
    CHECK(sum.to_host() == std::vector<int>{190});
}

TEST_CASE(
    "cuda emulator: a kernel reads its arguments, constants and pinned memory, and no other memory of the "
    "host") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const Buffer<int> y(4, stream.get());
    Values values{};
    values.of[3] = 10;
    cuda::launch(read_table, 1, 4, 0, stream.get(), values, y.data());
    CHECK(y.to_host() == std::vector<int>{1, 2, 3, 14});
    const cuda::PinnedMemory pinned(64);
    static_cast<int*>(pinned.data())[0] = 5;
    cuda::launch(read_value, 1, 1, 0, stream.get(), static_cast<const int*>(pinned.data()), y.data());
    CHECK(y.to_host() == std::vector<int>{5, 2, 3, 14});
    const std::vector<int> pageable(4);
    CHECK_THROWS_AS(cuda::launch(read_value, 1, 1, 0, stream.get(), pageable.data(), y.data()), Error);
    expect_fault(FaultKind::host_pointer, {"reads 4 bytes", "memory of the host and not pinned"});
    const int on_stack = 1;
    CHECK_THROWS_AS(cuda::launch(read_value, 1, 1, 0, stream.get(), &on_stack, y.data()), Error);
    expect_fault(FaultKind::host_pointer, {});
}

TEST_CASE(
    "cuda emulator: a fault is told by every later call until it is taken, then the device works again") {
    const cuda::Stream stream;
    const Buffer<float> x(std::vector<float>(4), stream.get());
    CHECK_THROWS_AS(cuda::launch(throw_error, 1, 1, 0, stream.get()), Error);
    CHECK(cudaStreamSynchronize(stream.get()) == cudaErrorLaunchFailure);
    CHECK(cudaMemsetAsync(x.data(), 0, 4, stream.get()) == cudaErrorLaunchFailure);
    void* memory = nullptr;
    CHECK(cudaMallocAsync(&memory, 4, stream.get()) == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    expect_fault(FaultKind::exception, {"thrown on purpose"});
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaMemsetAsync(x.data(), 0, 16, stream.get()) == cudaSuccess);
    CHECK(x.to_host() == std::vector<float>(4));
}

TEST_CASE("cuda emulator: a grid that was stopped does not run on, and the next one runs whole") {
    const cuda::Stream stream;
    const Buffer<unsigned> blocks(std::vector<unsigned>(1), stream.get());
    cuda::launch(count_blocks, dim3(7, 5, 3), 40, 0, stream.get(), blocks.data());
    CHECK(blocks.to_host() == std::vector<unsigned>{105});
}

TEST_CASE("cuda emulator: what no card could start is refused") {
    const cuda::Stream stream;
    const Buffer<unsigned> blocks(std::vector<unsigned>(1), stream.get());
    const auto refused = [&](dim3 grid, dim3 block, std::size_t shared_bytes, const std::string& part) {
        CHECK_THROWS_AS(cuda::launch(count_blocks, grid, block, shared_bytes, stream.get(), blocks.data()),
                        Error);
        expect_fault(FaultKind::launch, {part});
    };
    refused(1, 1025, 0, "a block of (1025, 1, 1) threads");
    refused(1, dim3(1, 1, 65), 0, "a block of (1, 1, 65) threads");
    refused(dim3(1, 65536, 1), 1, 0, "a grid of (1, 65536, 1) blocks");
    // cuda::launch raises the limit of 48 KiB; without it the limit applies.
    CHECK(emulator::launch(reinterpret_cast<const void*>(copy_packs), "planted", 1, 1, (48 << 10) + 1,
                           stream.get(), [] {}) == cudaErrorInvalidConfiguration);
    expect_fault(FaultKind::launch, {"49153 bytes of dynamic shared memory"});
    CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(count_blocks),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               (227 << 10) + 1) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(blocks.to_host() == std::vector<unsigned>{0});
}

TEST_CASE("cuda emulator: static shared memory counts, that of called functions too") {
    const cuda::Stream stream;
    const Buffer<double> y(std::size_t{1}, stream.get());
    const auto* kernel = reinterpret_cast<const void*>(sum_through_shared);
    cudaFuncAttributes attributes{};
    REQUIRE(cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess);
    CHECK(attributes.sharedSizeBytes == 256);
    REQUIRE(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(count_blocks)) == cudaSuccess);
    CHECK(attributes.sharedSizeBytes == 0);
    // 48 KiB of dynamic memory alone would fit without raising the limit.
    CHECK(emulator::launch(kernel, "planted", 1, 32, 48 << 10, stream.get(), [] {}) ==
          cudaErrorInvalidConfiguration);
    expect_fault(FaultKind::launch, {"49152 bytes of dynamic shared memory", "256 static bytes"});
    cuda::launch(sum_through_shared, 1, 32, 48 << 10, stream.get(), y.data());
    CHECK(y.to_host() == std::vector<double>{496.0});
    // A GPU with less shared memory refuses what others allow.
    for (const auto& [capability, kibibytes] : {std::pair{80, 163}, {86, 99}, {89, 99}, {90, 227}}) {
        emulator::set_card(capability);
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (kibibytes << 10) - 256) == cudaSuccess);
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   (kibibytes << 10) - 255) == cudaErrorInvalidValue);
        cudaGetLastError();
    }
    emulator::set_card(86);
    CHECK_THROWS_WITH_AS(cuda::launch(count_blocks, 1, 32, 100 << 10, stream.get(), nullptr),
                         doctest::Contains("cuda:0 has 101376"), Error);
    emulator::set_card(80);
    CHECK_THROWS_AS(emulator::set_card(75), Error);
}

TEST_CASE("cuda emulator: a copy in the wrong direction, and a host pointer to a library, are faults") {
    const cuda::Stream stream;
    const Buffer<float> x(std::vector<float>(4), stream.get());
    std::vector<float> host(4);
    CHECK(cudaMemcpyAsync(x.data(), host.data(), 16, cudaMemcpyDeviceToHost, stream.get()) ==
          cudaErrorInvalidValue);
    expect_fault(FaultKind::host_pointer, {"the direction says device to host", "host and device memory"});
    CHECK(cudaMemcpyAsync(host.data(), x.data(), 16, cudaMemcpyDeviceToDevice, stream.get()) ==
          cudaErrorInvalidValue);
    expect_fault(FaultKind::host_pointer, {});
    CHECK(cudaMemsetAsync(host.data(), 0, 16, stream.get()) == cudaErrorInvalidValue);
    expect_fault(FaultKind::host_pointer, {"none of device memory"});
    cudaPointerAttributes attributes;
    REQUIRE(cudaPointerGetAttributes(&attributes, x.data() + 1) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeDevice);
    REQUIRE(cudaPointerGetAttributes(&attributes, host.data()) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeUnregistered);
}

TEST_CASE("cuda emulator: host code that uses device memory without a copy ends with a report") {
    const cuda::Stream stream;
    const Buffer<float> x(std::vector<float>(4), stream.get());
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);  // the test framework's handler would report a failed test
        dup2(ends[1], STDERR_FILENO);
        cudaMemsetAsync(x.data(), 0, 16, stream.get());
        volatile float* data = x.data();
        data[2] = 1.0f;
        _exit(0);
    }
    close(ends[1]);
    std::string text;
    char part[512];
    for (ssize_t count = 0; (count = read(ends[0], part, sizeof(part))) > 0;)
        text.append(part, static_cast<std::size_t>(count));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGSEGV);
    INFO(text);
    CHECK(text.find("host code used a pointer to device memory without a copy: byte 8 of allocation") !=
          std::string::npos);
}

TEST_CASE("cuda emulator: memory ends where the device says, and a pool keeps and gives back") {
    const int devices_before = emulator::devices();
    emulator::configure(devices_before + 1, std::int64_t{64} << 20);
    {
        const cuda::CurrentDevice current(devices_before);  // no other test uses this device
        const cuda::Stream stream;
        std::size_t free = 0;
        std::size_t total = 0;
        REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
        CHECK(total == (std::size_t{64} << 20));
        CHECK(free == total);
        cudaMemPool_t pool = nullptr;
        REQUIRE(cudaDeviceGetDefaultMemPool(&pool, devices_before) == cudaSuccess);
        const auto attribute = [&](cudaMemPoolAttr name) {
            std::uint64_t value = 0;
            CHECK(cudaMemPoolGetAttribute(pool, name, &value) == cudaSuccess);
            return value >> 20;
        };
        std::uint64_t threshold = std::uint64_t{16} << 20;
        REQUIRE(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold) == cudaSuccess);
        void* first = nullptr;
        void* second = nullptr;
        REQUIRE(cudaMallocAsync(&first, 40 << 20, stream.get()) == cudaSuccess);
        CHECK(cudaMallocAsync(&second, 40 << 20, stream.get()) == cudaErrorMemoryAllocation);
        CHECK(second == nullptr);
        CHECK(cudaMalloc(&second, 40 << 20) == cudaErrorMemoryAllocation);
        cudaGetLastError();
        REQUIRE(cudaFreeAsync(first, stream.get()) == cudaSuccess);
        CHECK(attribute(cudaMemPoolAttrUsedMemCurrent) == 0);
        CHECK(attribute(cudaMemPoolAttrReservedMemCurrent) == 40);
        // Memory that the pool keeps is unavailable to others until a synchronisation reduces it to the threshold.
        CHECK(cudaMalloc(&second, 40 << 20) == cudaErrorMemoryAllocation);
        cudaGetLastError();
        stream.synchronize();
        CHECK(attribute(cudaMemPoolAttrReservedMemCurrent) == 16);
        REQUIRE(cudaMalloc(&second, 40 << 20) == cudaSuccess);
        REQUIRE(cudaMemPoolTrimTo(pool, 0) == cudaSuccess);
        CHECK(attribute(cudaMemPoolAttrReservedMemCurrent) == 0);
        REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
        CHECK(free == (std::size_t{24} << 20));
        REQUIRE(cudaFree(second) == cudaSuccess);
        CHECK(attribute(cudaMemPoolAttrReservedMemHigh) == 40);
    }
    emulator::configure(devices_before, std::int64_t{8} << 30);
}

TEST_CASE("cuda emulator: a kernel of one device does not reach the memory of another; a peer copy does") {
    const int own = emulator::devices();
    emulator::configure(own + 2, std::int64_t{64} << 20);
    {
        const cuda::CurrentDevice current(own);
        const cuda::Stream stream;
        const Buffer<float> x(std::vector<float>{1, 2, 3}, stream.get());
        {
            const cuda::CurrentDevice other(own + 1);
            const cuda::Stream other_stream;
            const Buffer<float> y(3, other_stream.get());
            if (emulator::accesses_are_checked) {
                CHECK_THROWS_AS(cuda::launch(copy_floats, 1, 1, 0, other_stream.get(), x.data(), y.data(), 3),
                                Error);
                expect_fault(FaultKind::wrong_device, {"reads", "on cuda:" + std::to_string(own)});
            }
            // A stream of a device that is not the current one.
            CHECK_THROWS_AS(cuda::launch(copy_floats, 1, 1, 0, stream.get(), x.data(), y.data(), 3), Error);
            expect_fault(FaultKind::launch, {"the stream is none of the current device"});
            stream.synchronize();
            CHECK(cudaMemcpyPeerAsync(y.data(), own, x.data(), own, 12, other_stream.get()) ==
                  cudaErrorInvalidValue);
            expect_fault(FaultKind::host_pointer, {"cudaMemcpyPeerAsync"});
            CHECK(cudaMemcpyPeerAsync(y.data(), own + 1, x.data(), own, 12, other_stream.get()) ==
                  cudaErrorInvalidValue);
            expect_fault(FaultKind::wrong_device,
                         {"cudaMemcpyPeerAsync", "on cuda:" + std::to_string(own), "cudaMemPoolSetAccess"});
            cudaMemPool_t pool = nullptr;
            cuda::check(cudaDeviceGetDefaultMemPool(&pool, own), "cudaDeviceGetDefaultMemPool");
            cudaMemAccessDesc access{};
            access.location.type = cudaMemLocationTypeDevice;
            access.location.id = own + 1;
            access.flags = cudaMemAccessFlagsProtReadWrite;
            emulator::set_peer_access(false);
            CHECK(cudaMemPoolSetAccess(pool, &access, 1) == cudaErrorInvalidDevice);
            emulator::set_peer_access(true);
            CHECK(cudaMemPoolSetAccess(pool, &access, 1) == cudaSuccess);
            CHECK(cudaMemcpyPeerAsync(y.data(), own + 1, x.data(), own, 12, other_stream.get()) ==
                  cudaSuccess);
            CHECK(y.to_host() == std::vector<float>{1, 2, 3});
        }
    }
    emulator::configure(own, std::int64_t{8} << 30);
}

TEST_CASE("cuda emulator: what is never freed is listed") {
    const std::size_t before = emulator::live_allocations().size();
    void* memory = nullptr;
    void* pinned = nullptr;
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    {
        const OpScope scope("leaking");
        REQUIRE(cudaMalloc(&memory, 100) == cudaSuccess);
        REQUIRE(cudaMallocHost(&pinned, 50) == cudaSuccess);
    }
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
    const std::vector<std::string> alive = emulator::live_allocations();
    CHECK(alive.size() == before + 4);
    bool is_named = false;
    for (const std::string& line : alive)
        is_named = is_named || line.find("100 bytes of cuda:0, made by leaking") != std::string::npos;
    CHECK(is_named);
    cudaFree(memory);
    cudaFreeHost(pinned);
    cudaStreamDestroy(stream);
    cudaEventDestroy(event);
    CHECK(emulator::live_allocations().size() == before);
}
