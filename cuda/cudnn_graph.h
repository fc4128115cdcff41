#pragma once

// Internal: a thin layer over cuDNN's graph interface (its "backend" descriptors). Operations on tensors of 4 axes form
// a graph; the library then finds an engine, a kernel that executes the whole graph.

#include <cudnn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace potluck::cuda {

using FourSizes = std::array<std::int64_t, 4>;

/// Strides of a row-major tensor of 4 axes.
FourSizes packed_strides(const FourSizes& sizes);

struct CloseBackendDescriptor {
    void operator()(void* handle) const { cudnnBackendDestroyDescriptor(handle); }
};
/// A descriptor of the graph interface, which uses one opaque type for all kinds.
using BackendDescriptor = std::unique_ptr<void, CloseBackendDescriptor>;

/// A tensor of a graph: the id that identifies it when the graph runs, and its shape.
struct GraphTensor {
    std::int64_t id = 0;
    FourSizes sizes{};
};

/// The value of a tensor or number of a graph in one run: device memory, or a number in host memory.
struct GraphOperand {
    GraphTensor tensor;
    void* data;
};

/// A graph with an engine that executes it. The OperationGraph that it came from must outlive it.
class GraphPlan {
public:
    std::int64_t workspace_bytes() const { return workspace_bytes_; }

    /// Enqueues the graph in the library's stream. `operands` gives every tensor and number that is not intermediate.
    void run(cudnnHandle_t library, std::span<const GraphOperand> operands, void* workspace) const;

private:
    friend class OperationGraph;
    BackendDescriptor graph_, configuration_;  // the plan may refer to them
    BackendDescriptor plan_;
    std::int64_t workspace_bytes_ = 0;
};

/// A graph under construction. Sums and intermediate results are f32 unless said otherwise.
class OperationGraph {
public:
    /// A tensor in memory, aligned to 16 bytes.
    GraphTensor tensor(cudnnDataType_t type, const FourSizes& sizes, const FourSizes& strides);
    GraphTensor number(cudnnDataType_t type = CUDNN_DATA_FLOAT);
    GraphTensor intermediate(const FourSizes& sizes, cudnnDataType_t type = CUDNN_DATA_FLOAT);
    GraphTensor intermediate(const FourSizes& sizes, const FourSizes& strides, cudnnDataType_t type);

    /// result = a (.., m, k) b (.., k, n). The second axis of b may divide that of a: groups of a then share b.
    void matmul(const GraphTensor& a, const GraphTensor& b, const GraphTensor& result);
    /// result = mode(x[, y]), with broadcasting.
    void pointwise(cudnnPointwiseMode_t mode, const GraphTensor& x, const GraphTensor& y,
                   const GraphTensor& result);
    void pointwise(cudnnPointwiseMode_t mode, const GraphTensor& x, const GraphTensor& result);
    /// result = condition ? x : y.
    void select(const GraphTensor& condition, const GraphTensor& x, const GraphTensor& y,
                const GraphTensor& result);
    /// result[i] = i[axis], with the shape of x.
    void index_along(std::int64_t axis, const GraphTensor& x, const GraphTensor& result);
    /// result = x reduced over the axes where result has size 1 or a divisor of the size of x.
    void reduce(cudnnReduceTensorOp_t operation, const GraphTensor& x, const GraphTensor& result);
    /// result = x in the shape and strides of result.
    void reshape(const GraphTensor& x, const GraphTensor& result);

    /// The first deterministic engine among the library's proposals that can be built; nullptr when there is none. For
    /// the current device of `library`.
    std::unique_ptr<GraphPlan> plan(cudnnHandle_t library) const;

private:
    GraphTensor add_tensor(cudnnDataType_t type, const FourSizes& sizes, const FourSizes& strides,
                           bool is_intermediate, bool is_number);
    void add_pointwise(cudnnPointwiseMode_t mode, const GraphTensor& x, const GraphTensor* y,
                       const GraphTensor* condition, const GraphTensor& result, std::int64_t axis);
    void* descriptor_of(const GraphTensor& tensor) const;

    std::vector<BackendDescriptor> tensors_;     // tensor `id` has index id - 1
    std::vector<BackendDescriptor> parameters_;  // of the operations
    std::vector<BackendDescriptor> operations_;
};

}  // namespace potluck::cuda
