#pragma once

// Internal: errors of cuBLASLt and cuDNN as exceptions.

#include <cublasLt.h>
#include <cudnn.h>

namespace potluck::cuda {

/// Throw Error(the running op) that names the call and the library's reason, unless `status` is success.
void check(cublasStatus_t status, const char* call);
void check(cudnnStatus_t status, const char* call);

}  // namespace potluck::cuda
