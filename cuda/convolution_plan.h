#pragma once

// Internal: descriptors and the algorithm that cuDNN needs for a convolution, determined once per shape.
//
// This is cuDNN's older interface (cudnnConvolutionForward and its two gradients), which version 9 keeps but documents
// as deprecated in favour of the graph interface. It names its algorithms, so that we can choose the deterministic
// ones, which sum in f32; the graph interface leaves the choice to a heuristic. Everything that would change with the
// other interface is in this file and convolution_plan.cpp.

#include <cudnn.h>

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/kernel_specs.h"
#include "cuda/plan_cache.h"

namespace potluck::cuda {

enum class ConvolutionPass : std::uint8_t { forward, data_gradient, weight_gradient };

/// All parameters that determine the library's kernel. All tensors are contiguous.
struct ConvolutionShape {
    ConvolutionPass pass = ConvolutionPass::forward;
    DType dtype = DType::f32;
    bool tf32 = false;
    std::array<std::int64_t, 4> x{}, weight{}, y{};
    std::array<std::int64_t, 2> stride{}, padding{}, dilation{};
    std::int64_t groups = 1;

    auto operator<=>(const ConvolutionShape&) const = default;
};

struct CloseTensorDescriptor {
    void operator()(cudnnTensorDescriptor_t handle) const { cudnnDestroyTensorDescriptor(handle); }
};
struct CloseFilterDescriptor {
    void operator()(cudnnFilterDescriptor_t handle) const { cudnnDestroyFilterDescriptor(handle); }
};
struct CloseConvolutionDescriptor {
    void operator()(cudnnConvolutionDescriptor_t handle) const { cudnnDestroyConvolutionDescriptor(handle); }
};
using TensorDescriptor =
    std::unique_ptr<std::remove_pointer_t<cudnnTensorDescriptor_t>, CloseTensorDescriptor>;
using FilterDescriptor =
    std::unique_ptr<std::remove_pointer_t<cudnnFilterDescriptor_t>, CloseFilterDescriptor>;
using ConvolutionDescriptor =
    std::unique_ptr<std::remove_pointer_t<cudnnConvolutionDescriptor_t>, CloseConvolutionDescriptor>;

/// The library's descriptors and algorithm for one shape and pass.
class ConvolutionPlan {
public:
    ConvolutionPlan(cudnnHandle_t library, const ConvolutionShape& shape);

    /// Whether the library has a deterministic algorithm; without one, call no other function.
    bool exists() const { return exists_; }
    std::int64_t workspace_bytes() const { return static_cast<std::int64_t>(workspace_bytes_); }

    /// Enqueues the pass in the library's stream: it writes its result, or adds to it when `accumulate`, and reads the
    /// other two tensors. `workspace` has workspace_bytes(). Returns false, without doing anything, when the library
    /// refuses to run an algorithm although it reported a workspace for it.
    bool run(cudnnHandle_t library, void* x, void* weight, void* y, bool accumulate, void* workspace) const;

private:
    bool find_algorithm(cudnnHandle_t library);

    ConvolutionPass pass_;
    DType dtype_;
    bool exists_ = false;
    TensorDescriptor x_, y_;
    FilterDescriptor weight_;
    ConvolutionDescriptor convolution_;
    cudnnConvolutionFwdAlgo_t forward_ = CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM;
    std::size_t workspace_bytes_ = 0;
};

using ConvolutionPlans = PlanCache<ConvolutionShape, ConvolutionPlan>;

}  // namespace potluck::cuda
