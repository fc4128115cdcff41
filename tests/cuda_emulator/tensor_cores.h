#pragma once

// The matrix instructions of a warp, with the fragment layouts of the PTX ISA ("Matrix Fragments for mma.m16n8k16",
// "ldmatrix"), and asynchronous copies into shared memory. All 32 lanes call the warp functions together.

#include <cstdint>

namespace potluck::emulator {

/// mma.sync.aligned.m16n8k16.row.col.f32.{f16,bf16}.{f16,bf16}.f32: d = a b + c with a (16, 16), b (16, 8), c and d
/// (16, 8). Each lane passes its part: 4 words (8 halves) of a, 2 words of b, 4 floats of c and d. d may be c.
void mma_m16n8k16(const float* c, const std::uint32_t* a, const std::uint32_t* b, float* d, bool bfloat);

/// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16: four 8 x 8 matrices of half-type elements. Lane i passes the
/// address of row i % 8 of matrix i / 8 (16 bytes, aligned to 16); word m of each lane is its part of matrix m.
void ldmatrix_x4(std::uint32_t* words, const void* row, bool transposed);
/// The same for two matrices; only the addresses of lanes 0 to 15 are used.
void ldmatrix_x2(std::uint32_t* words, const void* row, bool transposed);

/// cp.async.cg.shared.global [shared], [global], 16, source_bytes: bytes beyond source_bytes are filled with zeros. The
/// bytes arrive when this thread waits for them; until then the target counts as never written.
void copy_async_16(void* shared, const void* global, int source_bytes);
void copy_async_commit();
/// Waits until at most `pending` of the newest committed groups of this thread are still running.
void copy_async_wait(int pending);

}  // namespace potluck::emulator
