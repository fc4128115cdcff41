#include "tests/cuda_emulator/tensor_cores.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "tests/cuda_emulator/block.h"
#include "tests/cuda_emulator/checks.h"
#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {
namespace {

// ---- mma.m16n8k16 ----
// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": with group = lane / 4 and pair = lane % 4,
//   a: half i of 8 is at row group + 8 if i is 2, 3, 6 or 7, column 2 pair + i % 2, + 8 for i >= 4
//   b: half i of 4 is at row 2 pair + i % 2, + 8 for i >= 2, column group
//   c: value i of 4 is at row group, + 8 for i >= 2, column 2 pair + i % 2

struct MultiplyLane {
    const float* c;
    const std::uint32_t* a;
    const std::uint32_t* b;
    float* d;
};

float bfloat_to_float(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}
float half_to_float(std::uint16_t bits) {
    __half_raw raw;
    raw.x = bits;
    return __half2float(__half(raw));
}

template <bool Bfloat>
void complete_multiply(PendingMeeting& meeting) {
    float a[16][16];  // (row, k)
    float b[16][8];   // (k, column)
    float d[16][8];
    const auto value = [](const std::uint32_t* words, unsigned i) {
        const auto bits = static_cast<std::uint16_t>(words[i / 2] >> (i % 2 * 16));
        return Bfloat ? bfloat_to_float(bits) : half_to_float(bits);
    };
    for (unsigned lane = 0; lane < lanes; ++lane) {
        const auto& part = *static_cast<const MultiplyLane*>(meeting.payload[lane]);
        const unsigned group = lane / 4;
        const unsigned pair = lane % 4;
        for (unsigned i = 0; i < 8; ++i)
            a[group + (i / 2 % 2) * 8][2 * pair + i % 2 + (i >= 4 ? 8 : 0)] = value(part.a, i);
        for (unsigned i = 0; i < 4; ++i) b[2 * pair + i % 2 + (i >= 2 ? 8 : 0)][group] = value(part.b, i);
        for (unsigned i = 0; i < 4; ++i) d[group + (i >= 2 ? 8 : 0)][2 * pair + i % 2] = part.c[i];
    }
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    for (unsigned lane = 0; lane < lanes; ++lane) {
        const auto& part = *static_cast<const MultiplyLane*>(meeting.payload[lane]);
        for (unsigned i = 0; i < 4; ++i) part.d[i] = d[lane / 4 + (i >= 2 ? 8 : 0)][2 * (lane % 4) + i % 2];
    }
}

// ---- ldmatrix ----
// PTX ISA, "ldmatrix": lane i gets the elements at row i / 4, columns 2 (i % 4) and the next, of each matrix; with
// .trans rows and columns are exchanged.

struct LoadLane {
    std::uint32_t* words;
    const void* row;
};

template <unsigned Matrices, bool Transposed>
void complete_load(PendingMeeting& meeting) {
    std::uint16_t matrix[8][8];
    for (unsigned m = 0; m < Matrices; ++m) {
        for (unsigned row = 0; row < 8; ++row)
            std::memcpy(matrix[row], static_cast<const LoadLane*>(meeting.payload[8 * m + row])->row, 16);
        for (unsigned lane = 0; lane < lanes; ++lane) {
            const unsigned i = lane / 4;
            const unsigned j = 2 * (lane % 4);
            const std::uint32_t low = Transposed ? matrix[j][i] : matrix[i][j];
            const std::uint32_t high = Transposed ? matrix[j + 1][i] : matrix[i][j + 1];
            static_cast<const LoadLane*>(meeting.payload[lane])->words[m] = low | high << 16;
        }
    }
}

void check_shared_address(const void* address, const char* what) {
    const auto place = reinterpret_cast<std::uintptr_t>(address);
    if (!active.worker->dynamic_shared.contains(place) && !active.worker->static_shared.contains(place))
        stop(FaultKind::out_of_bounds,
             fmt::format("out of bounds: {} of {} is given an address that is not in shared memory", what,
                         describe_running()));
    if (place % 16 != 0)
        stop(FaultKind::misaligned,
             fmt::format("misaligned: {} of {} needs an address of shared memory that is a multiple of 16",
                         what, describe_running()));
}

}  // namespace

void mma_m16n8k16(const float* c, const std::uint32_t* a, const std::uint32_t* b, float* d, bool bfloat) {
    const Muted muted;
    MultiplyLane lane{c, a, b, d};
    active.worker->meet(Meeting::multiply, ~0u, &lane,
                        bfloat ? complete_multiply<true> : complete_multiply<false>);
}

void ldmatrix_x4(std::uint32_t* words, const void* row, bool transposed) {
    const Muted muted;
    check_shared_address(row, "ldmatrix");
    check_access(reinterpret_cast<std::uintptr_t>(row), 16, false);
    LoadLane lane{words, row};
    active.worker->meet(Meeting::load_matrix, ~0u, &lane,
                        transposed ? complete_load<4, true> : complete_load<4, false>);
}

void ldmatrix_x2(std::uint32_t* words, const void* row, bool transposed) {
    const Muted muted;
    if (active.worker->thread % lanes < 16) {
        check_shared_address(row, "ldmatrix");
        check_access(reinterpret_cast<std::uintptr_t>(row), 16, false);
    }
    LoadLane lane{words, row};
    active.worker->meet(Meeting::load_matrix, ~0u, &lane,
                        transposed ? complete_load<2, true> : complete_load<2, false>);
}

// ---- asynchronous copies ----

void copy_async_16(void* shared, const void* global, int source_bytes) {
    const Muted muted;
    if (source_bytes < 0 || source_bytes > 16)
        stop(FaultKind::bad_argument,
             fmt::format("copy_async_16 of {} is asked for {} bytes: 0 to 16 are possible",
                         describe_running(), source_bytes));
    check_shared_address(shared, "copy_async_16");
    const auto source = reinterpret_cast<std::uintptr_t>(global);
    const auto target = reinterpret_cast<std::uintptr_t>(shared);
    if (source_bytes > 0 && source % 16 != 0)
        stop(FaultKind::misaligned,
             fmt::format("misaligned: copy_async_16 of {} needs a source that is a multiple of 16",
                         describe_running()));
    if (source_bytes > 0)
        check_stretch(source, static_cast<std::uint64_t>(source_bytes), false, "copy_async_16");
    Worker& worker = *active.worker;
    forget_shared(worker.dynamic_shared.contains(target) ? worker.dynamic_shared : worker.static_shared,
                  target, 16);
    AsyncCopies& own = worker.async_copies[worker.thread];
    own.copies.push_back({target, source, source_bytes, own.committed});
}

void copy_async_commit() {
    const Muted muted;
    ++active.worker->async_copies[active.worker->thread].committed;
}

void copy_async_wait(int pending) {
    const Muted muted;
    Worker& worker = *active.worker;
    AsyncCopies& own = worker.async_copies[worker.thread];
    std::erase_if(own.copies, [&](const AsyncCopy& copy) {
        if (copy.group >= own.committed - pending) return false;
        check_access(copy.shared, 16, true);
        auto* target = reinterpret_cast<unsigned char*>(copy.shared);
        std::memcpy(target, reinterpret_cast<const void*>(copy.global),
                    static_cast<std::size_t>(copy.source_bytes));
        std::memset(target + copy.source_bytes, 0, static_cast<std::size_t>(16 - copy.source_bytes));
        return true;
    });
}

}  // namespace potluck::emulator
