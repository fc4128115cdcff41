#include "cuda/library_check.h"

#include <array>
#include <string>

#include "core/error.h"
#include "core/format.h"
#include "core/op_scope.h"
#if POTLUCK_CUDA_EMULATED
#include "tests/cuda_emulator/library_refusal.h"
#endif

namespace potluck::cuda {

void check(cublasStatus_t status, const char* call) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    std::string reason = cublasLtGetStatusString(status);
#if POTLUCK_CUDA_EMULATED
    reason += ": " + emulator::last_library_refusal();
#endif
    throw Error(OpScope::current(), fmt::format("{} failed: {}.", call, reason));
}

void check(cudnnStatus_t status, const char* call) {
    if (status == CUDNN_STATUS_SUCCESS) return;
    std::array<char, 512> reason{};
    cudnnGetLastErrorString(reason.data(), reason.size());
    throw Error(OpScope::current(), fmt::format("{} failed: {}{}{}.", call, cudnnGetErrorString(status),
                                                reason[0] == '\0' ? "" : ": ", reason.data()));
}

}  // namespace potluck::cuda
