// The emulator's blocks and warps: barriers, shuffles, votes, shared memory, matrix instructions. Correct use gives the
// documented results; wrong use is a fault.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <utility>

#include "cuda/launch.h"
#include "tests/cuda/emulator_support.h"

using namespace potluck;
using potluck::test::Buffer;
using potluck::test::expect_fault;
using potluck::test::FaultKind;

namespace {

constexpr unsigned everyone = 0xffffffffu;

// ---- correct use ----

__global__ void shuffle_all_ways(int* to) {
    const int lane = static_cast<int>(threadIdx.x);
    int* own = to + 8 * lane;
    own[0] = __shfl_sync(everyone, lane, 5);
    own[1] = __shfl_sync(everyone, lane, 9, 8);
    own[2] = __shfl_up_sync(everyone, lane, 3);
    own[3] = __shfl_up_sync(everyone, lane, 3, 8);
    own[4] = __shfl_down_sync(everyone, lane, 3);
    own[5] = __shfl_down_sync(everyone, lane, 3, 8);
    own[6] = __shfl_xor_sync(everyone, lane, 5);
    own[7] = __shfl_xor_sync(everyone, lane, 12, 8);
}
__global__ void vote(unsigned* to) {
    const unsigned lane = threadIdx.x;
    unsigned* own = to + 8 * lane;
    own[0] = __ballot_sync(everyone, lane % 3 == 0);
    own[1] = static_cast<unsigned>(__any_sync(everyone, lane == 7)) +
             2 * static_cast<unsigned>(__all_sync(everyone, lane < 32));
    own[2] = __reduce_add_sync(everyone, lane);
    own[3] = static_cast<unsigned>(__reduce_min_sync(everyone, static_cast<int>(lane) - 5));
    own[4] = __match_any_sync(everyone, lane / 4);
    own[5] = static_cast<unsigned>(__syncthreads_count(lane < 10));
    own[6] = static_cast<unsigned>(__syncthreads_and(lane < 31)) +
             2 * static_cast<unsigned>(__syncthreads_or(lane == 31));
    // Half a warp does something on its own.
    own[7] = lane < 16 ? __ballot_sync(0x0000ffffu, 1) : __ballot_sync(0xffff0000u, lane % 2);
}
__global__ void reverse_in_shared(const float* from, float* to) {
    __shared__ float fixed[256];
    float* dynamic = cuda::dynamic_shared_memory<float>();
    const unsigned i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    fixed[i] = from[256 * blockIdx.x + i];
    __syncthreads();
    dynamic[i] = fixed[255 - i];
    __syncthreads();
    to[256 * blockIdx.x + 255 - i] = dynamic[255 - i];
}
__global__ void pass_in_warp(int* to) {
    int* place = cuda::dynamic_shared_memory<int>();
    place[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncwarp();
    const int next = place[threadIdx.x / 32 * 32 + (threadIdx.x + 1) % 32];
    __syncwarp();
    place[threadIdx.x] = next;
    to[threadIdx.x] = place[threadIdx.x];
}
__global__ void share_word(__half* to) {
    // Neighbours in one word, written by different threads, are no race.
    __half* place = cuda::dynamic_shared_memory<__half>();
    place[threadIdx.x] = __float2half_rn(static_cast<float>(threadIdx.x));
    place[threadIdx.x] = __hadd(place[threadIdx.x], __float2half_rn(1.0f));
    __syncthreads();
    to[threadIdx.x] = place[threadIdx.x ^ 1u];
}
__global__ void histogram(const int* from, int* to) {
    int* counts = cuda::dynamic_shared_memory<int>();
    if (threadIdx.x < 8) counts[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&counts[from[threadIdx.x]], 1);
    __syncthreads();
    if (threadIdx.x < 8) to[threadIdx.x] = counts[threadIdx.x];
}

// ---- wrong use ----

__global__ void leave_before_barrier() {
    if (threadIdx.x >= 40) return;
    __syncthreads();
}
__global__ void wait_at_two_kinds() {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads_count(1);
}
__global__ void wait_in_warp_and_at_barrier() {
    if (threadIdx.x == 3)
        __syncthreads();
    else
        __shfl_sync(everyone, 1, 0);
}
__global__ void shuffle_without_me() { __shfl_xor_sync(0xfffffffeu, 1, 2); }
__global__ void shuffle_with_absent() {
    if (threadIdx.x == 31) return;
    __shfl_xor_sync(everyone, 1, 1);
}
__global__ void shuffle_from_outside(int lane) { __shfl_sync(0x0000ffffu, 1, lane); }
__global__ void shuffle_half(int lane) {
    if (threadIdx.x < 16) shuffle_from_outside(lane);
}
__global__ void meet_at_different_functions() {
    if (threadIdx.x % 2 == 0)
        __shfl_xor_sync(everyone, 1, 1);
    else
        __ballot_sync(everyone, 1);
}
__global__ void read_too_early(int* to) {
    int* place = cuda::dynamic_shared_memory<int>();
    place[threadIdx.x] = 1;
    to[threadIdx.x] = place[(threadIdx.x + 32) % 64];
}
__global__ void read_without_syncwarp(int* to) {
    int* place = cuda::dynamic_shared_memory<int>();
    place[threadIdx.x] = 1;
    __shfl_sync(everyone, 1, 0);  // orders no memory
    to[threadIdx.x] = place[(threadIdx.x + 1) % 32];
}
__global__ void write_too_early(int* to) {
    __shared__ int place;
    if (threadIdx.x == 0) place = 1;
    __syncthreads();
    const int value = place;
    if (threadIdx.x == 0) place = 2;  // others may not have read it yet
    to[threadIdx.x] = value;
}
__global__ void write_twice(int* to) {
    __shared__ int place;
    place = static_cast<int>(threadIdx.x);
    __syncthreads();
    to[threadIdx.x] = place;
}
__global__ void read_shared_unwritten(float* to) {
    float* place = cuda::dynamic_shared_memory<float>();
    if (blockIdx.x == 0) place[threadIdx.x] = 1.0f;
    to[threadIdx.x] = place[threadIdx.x];  // block 1 does not see what block 0 wrote
}
__global__ void overrun_shared() { cuda::dynamic_shared_memory<float>()[threadIdx.x] = 1.0f; }

// ---- tensor cores ----

template <class Half>
__device__ std::uint32_t pair_of(float low, float high) {
    const auto bits = [](float value) {
        std::uint16_t result;
        const Half half(value);
        std::memcpy(&result, &half, 2);
        return static_cast<std::uint32_t>(result);
    };
    return bits(low) | bits(high) << 16;
}
/// a (16, 16), b (16, 8), c and d (16, 8), row-major.
template <class Half>
__global__ void multiply(const float* a, const float* b, const float* c, float* d) {
    const unsigned group = threadIdx.x / 4;
    const unsigned pair = threadIdx.x % 4;
    std::uint32_t a_part[4];
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned row = group + i % 2 * 8;
        const unsigned column = 2 * pair + i / 2 * 8;
        a_part[i] = pair_of<Half>(a[16 * row + column], a[16 * row + column + 1]);
    }
    std::uint32_t b_part[2];
    for (unsigned i = 0; i < 2; ++i)
        b_part[i] = pair_of<Half>(b[8 * (2 * pair + 8 * i) + group], b[8 * (2 * pair + 8 * i + 1) + group]);
    float part[4];
    for (unsigned i = 0; i < 4; ++i) part[i] = c[8 * (group + i / 2 * 8) + 2 * pair + i % 2];
    emulator::mma_m16n8k16(part, a_part, b_part, part, std::is_same_v<Half, __nv_bfloat16>);
    for (unsigned i = 0; i < 4; ++i) d[8 * (group + i / 2 * 8) + 2 * pair + i % 2] = part[i];
}
/// Four matrices, one below the other: (32, 8) half-type elements; each lane stores what it gets.
__global__ void load_matrices(const std::uint16_t* from, std::uint32_t* to, bool transposed) {
    auto* place = cuda::dynamic_shared_memory<std::uint16_t>();
    for (unsigned i = 0; i < 8; ++i) place[8 * threadIdx.x + i] = from[8 * threadIdx.x + i];
    __syncthreads();
    std::uint32_t words[4];
    emulator::ldmatrix_x4(words, place + 8 * threadIdx.x, transposed);
    for (unsigned m = 0; m < 4; ++m) to[4 * threadIdx.x + m] = words[m];
}
/// Copies 16 bytes per thread; the flags omit steps of a correct kernel.
__global__ void copy_asynchronously(const float* from, float* to, bool with_wait, bool with_barrier) {
    float* place = cuda::dynamic_shared_memory<float>();
    emulator::copy_async_16(place + 4 * threadIdx.x, from + 4 * threadIdx.x, threadIdx.x == 31 ? 8 : 16);
    emulator::copy_async_commit();
    if (with_wait) emulator::copy_async_wait(0);
    if (with_barrier) __syncthreads();
    for (unsigned i = 0; i < 4; ++i) to[4 * threadIdx.x + i] = place[(4 * threadIdx.x + i + 4) % 128];
}

}  // namespace

TEST_CASE("cuda emulator: shuffles take the lane that the documentation names") {
    const cuda::Stream stream;
    const Buffer<int> y(std::size_t{32} * 8, stream.get());
    cuda::launch(shuffle_all_ways, 1, 32, 0, stream.get(), y.data());
    const std::vector<int> got = y.to_host();
    for (int lane = 0; lane < 32; ++lane) {
        const int* own = got.data() + 8 * lane;
        const int segment = lane / 8 * 8;
        CHECK(own[0] == 5);
        CHECK(own[1] == segment + 1);
        CHECK(own[2] == (lane < 3 ? lane : lane - 3));
        CHECK(own[3] == (lane - segment < 3 ? lane : lane - 3));
        CHECK(own[4] == (lane + 3 > 31 ? lane : lane + 3));
        CHECK(own[5] == (lane + 3 > segment + 7 ? lane : lane + 3));
        CHECK(own[6] == (lane ^ 5));
        // Beyond the end of its segment a lane keeps its own value; an earlier segment may be read.
        CHECK(own[7] == ((lane ^ 12) > segment + 7 ? lane : lane ^ 12));
    }
}

TEST_CASE("cuda emulator: votes, folds and counting barriers") {
    const cuda::Stream stream;
    const Buffer<unsigned> y(std::size_t{32} * 8, stream.get());
    cuda::launch(vote, 1, 32, 0, stream.get(), y.data());
    const std::vector<unsigned> got = y.to_host();
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned* own = got.data() + 8 * lane;
        CHECK(own[0] == 0x49249249u);
        CHECK(own[1] == 3);
        CHECK(own[2] == 496);
        CHECK(own[3] == static_cast<unsigned>(-5));
        CHECK(own[4] == 0xfu << (lane / 4 * 4));
        CHECK(own[5] == 10);
        CHECK(own[6] == 2);
        CHECK(own[7] == (lane < 16 ? 0x0000ffffu : 0xaaaa0000u));
    }
}

TEST_CASE("cuda emulator: static and dynamic shared memory with barriers, in blocks of three dimensions") {
    const cuda::Stream stream;
    std::vector<float> values(std::size_t{256} * 64);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    const Buffer<float> x(values, stream.get());
    const Buffer<float> y(values.size(), stream.get());
    cuda::launch(reverse_in_shared, 64, dim3(8, 4, 8), 1024, stream.get(), x.data(), y.data());
    std::vector<float> wanted(values.size());
    for (std::size_t block = 0; block < 64; ++block)
        for (std::size_t i = 0; i < 256; ++i) wanted[256 * block + i] = values[256 * block + 255 - i];
    CHECK(y.to_host() == wanted);
}

TEST_CASE("cuda emulator: what is right is no race") {
    const cuda::Stream stream;
    const Buffer<int> passed(64, stream.get());
    cuda::launch(pass_in_warp, 1, 64, 256, stream.get(), passed.data());
    const std::vector<int> got = passed.to_host();
    for (int i = 0; i < 64; ++i) CHECK(got[static_cast<std::size_t>(i)] == i / 32 * 32 + (i + 1) % 32);
    const Buffer<__half> halves(64, stream.get());
    cuda::launch(share_word, 1, 64, 128, stream.get(), halves.data());
    CHECK(__half2float(halves.to_host()[6]) == 8.0f);
    std::vector<int> bins(64);
    for (std::size_t i = 0; i < bins.size(); ++i) bins[i] = static_cast<int>(i * i % 8);
    const Buffer<int> x(bins, stream.get());
    const Buffer<int> counts(8, stream.get());
    cuda::launch(histogram, 1, 64, 32, stream.get(), x.data(), counts.data());
    CHECK(counts.to_host() == std::vector<int>{16, 32, 0, 0, 16, 0, 0, 0});
    test::expect_no_fault();
}

TEST_CASE("cuda emulator: a barrier that not all threads reach is a fault, and says how many wait") {
    const cuda::Stream stream;
    CHECK_THROWS_AS(cuda::launch(leave_before_barrier, 2, 64, 0, stream.get()), Error);
    expect_fault(FaultKind::barrier, {"barrier not reached by all", "40 of 64 threads wait at __syncthreads",
                                      "24 have returned"});
    CHECK_THROWS_AS(cuda::launch(wait_at_two_kinds, 1, 64, 0, stream.get()), Error);
    expect_fault(FaultKind::barrier, {"wait at different barriers"});
    CHECK_THROWS_AS(cuda::launch(wait_in_warp_and_at_barrier, 1, 32, 0, stream.get()), Error);
    expect_fault(FaultKind::barrier,
                 {"1 of 32 threads wait at __syncthreads", "31 wait at a function of their warp",
                  "__shfl_sync with mask 0xffffffff"});
}

TEST_CASE("cuda emulator: warp functions with wrong masks and absent lanes are faults") {
    const cuda::Stream stream;
    CHECK_THROWS_AS(cuda::launch(shuffle_without_me, 1, 32, 0, stream.get()), Error);
    expect_fault(FaultKind::warp, {"lane 0 calls it, and the mask does not name it"});
    CHECK_THROWS_AS(cuda::launch(shuffle_with_absent, 1, 32, 0, stream.get()), Error);
    expect_fault(FaultKind::warp, {"0x80000000", "absent"});
    // A block of 20 threads has no lanes 20 to 31.
    CHECK_THROWS_AS(cuda::launch(shuffle_with_absent, 1, 20, 0, stream.get()), Error);
    expect_fault(FaultKind::warp, {"0xfff00000", "the block has no such threads"});
    CHECK_THROWS_AS(cuda::launch(shuffle_half, 1, 32, 0, stream.get(), 20), Error);
    expect_fault(FaultKind::warp, {"lane 0 asks for the value of lane 20, which the mask does not name"});
    CHECK_THROWS_AS(cuda::launch(meet_at_different_functions, 1, 32, 0, stream.get()), Error);
    expect_fault(FaultKind::warp, {"other lanes of the mask wait at __shfl_xor_sync"});
}

TEST_CASE("cuda emulator: races in shared memory are faults") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const Buffer<int> y(64, stream.get());
    CHECK_THROWS_AS(cuda::launch(read_too_early, 1, 64, 256, stream.get(), y.data()), Error);
    // The thread that runs first finds nothing written; on a GPU it could also read the data of an earlier kernel.
    expect_fault(FaultKind::never_written, {"byte 128 of the dynamic shared memory"});
    CHECK_THROWS_AS(cuda::launch(read_without_syncwarp, 1, 32, 128, stream.get(), y.data()), Error);
    expect_fault(FaultKind::shared_race, {"reads", "with no barrier between"});
    CHECK_THROWS_AS(cuda::launch(write_too_early, 1, 64, 0, stream.get(), y.data()), Error);
    expect_fault(FaultKind::shared_race, {"a __shared__ variable", "with no barrier between"});
    CHECK_THROWS_AS(cuda::launch(write_twice, 1, 64, 0, stream.get(), y.data()), Error);
    expect_fault(FaultKind::shared_race, {"thread (0, 0, 0) wrote", "thread (1, 0, 0)"});
}

TEST_CASE("cuda emulator: shared memory has an end, and begins without content in every block") {
    if (!test::accesses_are_checked()) return;
    const cuda::Stream stream;
    const Buffer<float> y(32, stream.get());
    CHECK_THROWS_AS(cuda::launch(overrun_shared, 1, 32, 100, stream.get()), Error);
    expect_fault(FaultKind::out_of_bounds,
                 {"writes 4 bytes at byte 100 of dynamic shared memory, of which the block "
                  "has 100"});
    CHECK_THROWS_AS(cuda::launch(read_shared_unwritten, 2, 32, 128, stream.get(), y.data()), Error);
    expect_fault(FaultKind::never_written, {"which no thread of the block wrote", "block (1, 0, 0)"});
}

TEST_CASE_TEMPLATE("cuda emulator: the matrix instruction multiplies in its documented layout", Half, __half,
                   __nv_bfloat16) {
    const cuda::Stream stream;
    std::vector<float> a(256);
    std::vector<float> b(128);
    std::vector<float> c(128);
    for (std::size_t i = 0; i < 256; ++i) a[i] = static_cast<float>(static_cast<int>(i * 7 % 31) - 15);
    for (std::size_t i = 0; i < 128; ++i) b[i] = static_cast<float>(static_cast<int>(i * 5 % 17) - 8);
    for (std::size_t i = 0; i < 128; ++i) c[i] = static_cast<float>(i) * 0.25f;
    const Buffer<float> on_a(a, stream.get());
    const Buffer<float> on_b(b, stream.get());
    const Buffer<float> on_c(c, stream.get());
    const Buffer<float> on_d(128, stream.get());
    cuda::launch(multiply<Half>, 1, 32, 0, stream.get(), on_a.data(), on_b.data(), on_c.data(), on_d.data());
    std::vector<float> wanted = c;
    for (std::size_t row = 0; row < 16; ++row)
        for (std::size_t column = 0; column < 8; ++column)
            for (std::size_t k = 0; k < 16; ++k)
                wanted[8 * row + column] += a[16 * row + k] * b[8 * k + column];
    CHECK(on_d.to_host() == wanted);
}

TEST_CASE(
    "cuda emulator: ldmatrix gives each lane its two neighbours, and with transposition those of a column") {
    const cuda::Stream stream;
    std::vector<std::uint16_t> matrices(256);
    for (std::size_t i = 0; i < 256; ++i) matrices[i] = static_cast<std::uint16_t>(i);
    const Buffer<std::uint16_t> x(matrices, stream.get());
    const Buffer<std::uint32_t> y(128, stream.get());
    for (const bool transposed : {false, true}) {
        cuda::launch(load_matrices, 1, 32, 512, stream.get(), x.data(), y.data(), transposed);
        const std::vector<std::uint32_t> got = y.to_host();
        for (unsigned lane = 0; lane < 32; ++lane)
            for (unsigned m = 0; m < 4; ++m) {
                const unsigned i = lane / 4;
                const unsigned j = 2 * (lane % 4);
                const unsigned low = 64 * m + (transposed ? 8 * j + i : 8 * i + j);
                const unsigned high = low + (transposed ? 8 : 1);
                CHECK(got[4 * lane + m] == (low | high << 16));
            }
    }
}

TEST_CASE("cuda emulator: an asynchronous copy arrives at its wait, for others after a barrier") {
    const cuda::Stream stream;
    std::vector<float> values(128);
    for (std::size_t i = 0; i < 128; ++i) values[i] = static_cast<float>(i + 1);
    const Buffer<float> x(values, stream.get());
    const Buffer<float> y(128, stream.get());
    cuda::launch(copy_asynchronously, 1, 32, 512, stream.get(), x.data(), y.data(), true, true);
    const std::vector<float> got = y.to_host();
    CHECK(got[0] == 5.0f);
    CHECK(got[121] == 126.0f);
    CHECK(got[122] == 0.0f);  // beyond the 8 bytes that the last thread asked for
    if (!test::accesses_are_checked()) return;
    CHECK_THROWS_AS(
        cuda::launch(copy_asynchronously, 1, 32, 512, stream.get(), x.data(), y.data(), false, true), Error);
    expect_fault(FaultKind::never_written, {"dynamic shared memory"});
    CHECK_THROWS_AS(
        cuda::launch(copy_asynchronously, 1, 1, 512, stream.get(), x.data() + 1, y.data(), true, true),
        Error);
    expect_fault(FaultKind::misaligned, {"copy_async_16"});
}
