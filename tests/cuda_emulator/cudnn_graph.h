#pragma once

// The objects behind the descriptors of the double of cuDNN's graph interface, and the graphs that are built from them.

#include <cudnn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace potluck::emulator {

using FourSizes = std::array<std::int64_t, 4>;

struct GraphTensor {
    std::int64_t id = 0;
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    FourSizes sizes{}, strides{};
    std::int64_t alignment = 1;
    bool is_virtual = false;   // an intermediate result, without memory
    bool is_by_value = false;  // a number in host memory
};

enum class GraphStep : std::uint8_t { matmul, pointwise, reduction, reshape };

struct GraphOperation {
    GraphStep step = GraphStep::pointwise;
    int mode = 0;                             // cudnnPointwiseMode_t or cudnnReduceTensorOp_t
    std::int64_t axis = 0;                    // of gen_index
    cudnnDataType_t math = CUDNN_DATA_FLOAT;  // of a pointwise operation
    std::vector<GraphTensor> inputs;
    GraphTensor output;
};

/// A finished graph: the operations in the order in which they can run.
struct OperationGraph {
    std::vector<GraphOperation> operations;
};

/// The target of cudnnBackendDescriptor_t: the attributes as they were set.
struct BackendDescriptor {
    cudnnBackendDescriptorType_t kind{};
    bool is_final = false;
    std::map<int, std::vector<std::byte>> values;
    std::map<int, std::vector<BackendDescriptor*>> parts;
    std::shared_ptr<const OperationGraph> graph;  // of a finalised graph and of everything made from it

    template <class T>
    T value(cudnnBackendAttributeName_t name, T otherwise = {}) const {
        const auto found = values.find(name);
        return found == values.end() ? otherwise : *reinterpret_cast<const T*>(found->second.data());
    }
    template <class T>
    std::vector<T> list(cudnnBackendAttributeName_t name) const {
        const auto found = values.find(name);
        if (found == values.end()) return {};
        const T* first = reinterpret_cast<const T*>(found->second.data());
        return {first, first + found->second.size() / sizeof(T)};
    }
    BackendDescriptor* part(cudnnBackendAttributeName_t name) const {
        const auto found = parts.find(name);
        return found == parts.end() ? nullptr : found->second[0];
    }
};

/// Checks the operations of a graph and sorts them; returns null, and records the reason, for one that cannot run.
std::shared_ptr<const OperationGraph> make_graph(const BackendDescriptor& descriptor);

/// The workspace that the double requires, so that callers must provide one.
inline constexpr std::int64_t graph_workspace_bytes = 1024;
cudnnStatus_t run_graph(cudnnHandle_t handle, const std::shared_ptr<const OperationGraph>& graph,
                        const std::map<std::int64_t, void*>& pointers, void* workspace);

/// Makes the double find no engine for any graph, as the real library does for graphs that it does not recognise.
void refuse_graphs(bool refuse);

}  // namespace potluck::emulator
