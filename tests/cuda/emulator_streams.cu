// The emulator's order between streams: unordered accesses are a fault, although they happen to run in order here.

#include <array>
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

__global__ void fill(float* to, float value) { to[threadIdx.x] = value; }
__global__ void copy(const float* from, float* to) { to[threadIdx.x] = from[threadIdx.x]; }

constexpr std::size_t count = 64;

void start_fill(float* to, float value, const cuda::Stream& stream) {
    const OpScope scope("filling");
    cuda::launch(fill, 1, count, 0, stream.get(), to, value);
}
void start_copy(const float* from, float* to, const cuda::Stream& stream) {
    const OpScope scope("copying");
    cuda::launch(copy, 1, count, 0, stream.get(), from, to);
}

/// Two streams, and memory that both may use.
struct Streams {
    cuda::Stream first;
    cuda::Stream second;
    Buffer<float> x{count, first.get()};
    Buffer<float> y{count, first.get()};

    Streams() { first.synchronize(); }
    ~Streams() {
        first.synchronize();
        second.synchronize();
    }
};

}  // namespace

TEST_CASE("cuda emulator: a stream reads what another wrote only after waiting for it") {
    if (!test::accesses_are_checked()) return;
    Streams on;
    start_fill(on.x.data(), 1.0f, on.first);
    CHECK_THROWS_AS(start_copy(on.x.data(), on.y.data(), on.second), Error);
    expect_fault(FaultKind::missing_order, {"kernel of op copying", "reads byte 0 of allocation",
                                            "kernel of op filling", "wrote", "Record an event"});

    const cuda::Event event;
    start_fill(on.x.data(), 2.0f, on.first);
    event.record(on.first.get());
    event.block(on.second.get());
    start_copy(on.x.data(), on.y.data(), on.second);
    on.second.synchronize();
    CHECK(on.y.to_host(on.second.get()) == std::vector<float>(count, 2.0f));
    test::expect_no_fault();
}

TEST_CASE("cuda emulator: an event covers what was recorded before it, and nothing after") {
    if (!test::accesses_are_checked()) return;
    Streams on;
    const cuda::Event event;
    start_fill(on.x.data(), 1.0f, on.first);
    event.record(on.first.get());
    start_fill(on.x.data(), 2.0f, on.first);
    event.block(on.second.get());
    CHECK_THROWS_AS(start_copy(on.x.data(), on.y.data(), on.second), Error);
    expect_fault(FaultKind::missing_order, {"copying"});
}

TEST_CASE("cuda emulator: a stream may not overwrite what another still reads, or writes") {
    if (!test::accesses_are_checked()) return;
    Streams on;
    start_fill(on.x.data(), 1.0f, on.first);
    on.first.synchronize();
    start_copy(on.x.data(), on.y.data(), on.first);
    CHECK_THROWS_AS(start_fill(on.x.data(), 2.0f, on.second), Error);
    expect_fault(FaultKind::missing_order,
                 {"kernel of op filling", "writes byte 0", "kernel of op copying", "reads"});
    CHECK_THROWS_AS(start_fill(on.y.data(), 2.0f, on.second), Error);
    expect_fault(FaultKind::missing_order, {"kernel of op copying", "wrote"});
    // Two streams may read the same memory, and access different parts of one allocation.
    start_copy(on.x.data(), on.y.data(), on.first);
    const Buffer<float> z(count, on.second.get());
    start_copy(on.x.data(), z.data(), on.second);
    test::expect_no_fault();
}

TEST_CASE("cuda emulator: whatever the host waited for is ordered before what it starts afterwards") {
    if (!test::accesses_are_checked()) return;
    Streams on;
    start_fill(on.x.data(), 1.0f, on.first);
    on.first.synchronize();
    start_copy(on.x.data(), on.y.data(), on.second);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    start_fill(on.y.data(), 3.0f, on.first);
    const cuda::Event event;
    event.record(on.first.get());
    event.synchronize();
    start_fill(on.y.data(), 4.0f, on.second);
    test::expect_no_fault();
}

TEST_CASE("cuda emulator: copies, library calls and freeing obey the order, too") {
    Streams on;
    REQUIRE(cudaMemsetAsync(on.x.data(), 0, count * sizeof(float), on.first.get()) == cudaSuccess);
    float host[count];
    CHECK(cudaMemcpyAsync(host, on.x.data(), sizeof(host), cudaMemcpyDeviceToHost, on.second.get()) ==
          cudaErrorLaunchFailure);
    expect_fault(FaultKind::missing_order, {"cudaMemcpyAsync", "cudaMemsetAsync"});
    CHECK(emulator::library_call(on.second.get(), "a library", [&] {
              emulator::check_write(on.x.data(), 16, "D");
          }) == cudaErrorLaunchFailure);
    expect_fault(FaultKind::missing_order, {"a library", "writes"});
    // One operation of both streams is ordered after both.
    const std::array both{on.first.get(), on.second.get()};
    CHECK(emulator::library_call(both, "a collective",
                                 [&] { emulator::check_write(on.x.data(), 16, "D"); }) == cudaSuccess);
    CHECK(cudaMemsetAsync(on.x.data(), 0, 16, on.second.get()) == cudaSuccess);

    void* memory = nullptr;
    REQUIRE(cudaMallocAsync(&memory, 64, on.first.get()) == cudaSuccess);
    CHECK(cudaMemsetAsync(memory, 0, 64, on.second.get()) == cudaErrorLaunchFailure);  // not present yet
    expect_fault(FaultKind::missing_order, {"cudaMallocAsync"});
    REQUIRE(cudaMemsetAsync(memory, 0, 64, on.first.get()) == cudaSuccess);
    CHECK(cudaFreeAsync(memory, on.second.get()) == cudaErrorLaunchFailure);  // still in use
    expect_fault(FaultKind::missing_order, {"cudaFreeAsync"});
}

TEST_CASE("cuda emulator: the legacy default stream and streams that do not opt out wait for one another") {
    cudaStream_t blocking = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault) == cudaSuccess);
    void* memory = nullptr;
    REQUIRE(cudaMalloc(&memory, 64) == cudaSuccess);
    CHECK(cudaMemsetAsync(memory, 0, 64, blocking) == cudaSuccess);
    CHECK(cudaMemsetAsync(memory, 0, 64, nullptr) == cudaSuccess);
    CHECK(cudaMemsetAsync(memory, 0, 64, blocking) == cudaSuccess);
    {
        const cuda::Stream independent;
        CHECK(cudaMemsetAsync(memory, 0, 64, independent.get()) == cudaErrorLaunchFailure);
        expect_fault(FaultKind::missing_order, {});
    }
    REQUIRE(cudaFree(memory) == cudaSuccess);
    REQUIRE(cudaStreamDestroy(blocking) == cudaSuccess);
}

TEST_CASE("cuda emulator: handles that were destroyed are refused") {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
    float milliseconds = 0;
    REQUIRE(cudaEventRecord(event, stream) == cudaSuccess);
    CHECK(cudaEventElapsedTime(&milliseconds, event, event) ==
          cudaErrorInvalidResourceHandle);  // created without timing
    REQUIRE(cudaEventDestroy(event) == cudaSuccess);
    CHECK(cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle);
    REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
    CHECK(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
}
