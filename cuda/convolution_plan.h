#pragma once

// Internal: what cuDNN wants to know about a convolution, asked once for each shape.
//
// This is cuDNN's older interface (cudnnConvolutionForward and its two gradients), which version 9 keeps and documents
// as deprecated in favour of the graph interface. It names its algorithms, so that the deterministic ones, which sum in
// f32, can be chosen by name; the graph interface leaves the choice to a heuristic. Everything that would change with
// the other interface is in this file and convolution_plan.cpp.

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

/// Everything that decides which kernel of the library fits. All tensors are contiguous.
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

/// The library's descriptors for one shape and pass, and its algorithm.
class ConvolutionPlan {
public:
    ConvolutionPlan(cudnnHandle_t library, const ConvolutionShape& shape);

    /// Whether the library has a deterministic algorithm; without one only this may be asked.
    bool exists() const { return exists_; }
    std::int64_t workspace_bytes() const { return static_cast<std::int64_t>(workspace_bytes_); }

    /// Puts the pass into the library's stream: its result is written, or added to when `accumulate`, and the other two
    /// tensors are read. `workspace` holds workspace_bytes(). False, and nothing was done, when the library refuses after
    /// all what it gave a workspace for.
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
