#include "cuda/cudnn_graph.h"

#include "cuda/library_check.h"

namespace potluck::cuda {
namespace {

BackendDescriptor create(cudnnBackendDescriptorType_t kind) {
    cudnnBackendDescriptor_t handle = nullptr;
    check(cudnnBackendCreateDescriptor(kind, &handle), "cudnnBackendCreateDescriptor");
    return BackendDescriptor(handle);
}

template <class T>
void set(const BackendDescriptor& descriptor, cudnnBackendAttributeName_t name,
         cudnnBackendAttributeType_t type, std::span<const T> values) {
    check(cudnnBackendSetAttribute(descriptor.get(), name, type, static_cast<std::int64_t>(values.size()),
                                   values.data()),
          "cudnnBackendSetAttribute");
}
template <class T>
void set(const BackendDescriptor& descriptor, cudnnBackendAttributeName_t name,
         cudnnBackendAttributeType_t type, const T& value) {
    set(descriptor, name, type, std::span<const T>(&value, 1));
}
void set(const BackendDescriptor& descriptor, cudnnBackendAttributeName_t name, void* part) {
    set(descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, part);
}

void finalize(const BackendDescriptor& descriptor) {
    check(cudnnBackendFinalize(descriptor.get()), "cudnnBackendFinalize");
}

/// The compute type of an operation. It must be integer for indices and boolean for comparisons: otherwise the library
/// has no engine for a causal mask.
cudnnDataType_t math_type_of(cudnnPointwiseMode_t mode) {
    switch (mode) {
        case CUDNN_POINTWISE_GEN_INDEX:
            return CUDNN_DATA_INT32;
        case CUDNN_POINTWISE_CMP_EQ:
        case CUDNN_POINTWISE_CMP_NEQ:
        case CUDNN_POINTWISE_CMP_GT:
        case CUDNN_POINTWISE_CMP_GE:
        case CUDNN_POINTWISE_CMP_LT:
        case CUDNN_POINTWISE_CMP_LE:
            return CUDNN_DATA_BOOLEAN;
        default:
            return CUDNN_DATA_FLOAT;
    }
}

#if CUDNN_VERSION >= 90800
/// The device descriptor of a library handle.
BackendDescriptor device_of(cudnnHandle_t library) {
    BackendDescriptor device = create(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    set(device, CUDNN_ATTR_DEVICEPROP_HANDLE, CUDNN_TYPE_HANDLE, library);
    finalize(device);
    return device;
}

bool is_deterministic(void* configuration) {
    const BackendDescriptor engine = create(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    void* engine_handle = engine.get();
    std::int64_t count = 0;
    check(cudnnBackendGetAttribute(configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                   1, &count, static_cast<void*>(&engine_handle)),
          "cudnnBackendGetAttribute");
    std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
    check(cudnnBackendGetAttribute(engine.get(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                                   static_cast<std::int64_t>(notes.size()), &count, notes.data()),
          "cudnnBackendGetAttribute");
    for (std::int64_t i = 0; i < count; ++i)
        if (notes[static_cast<std::size_t>(i)] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return false;
    return true;
}
#endif

}  // namespace

FourSizes packed_strides(const FourSizes& sizes) {
    return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

GraphTensor OperationGraph::add_tensor(cudnnDataType_t type, const FourSizes& sizes, const FourSizes& strides,
                                       bool is_intermediate, bool is_number) {
    BackendDescriptor made = create(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    const auto id = static_cast<std::int64_t>(tensors_.size()) + 1;
    set(made, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
    set(made, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
    set(made, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, std::span<const std::int64_t>(sizes));
    set(made, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, std::span<const std::int64_t>(strides));
    set(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, std::int64_t{16});
    set(made, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_intermediate);
    set(made, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, is_number);
    finalize(made);
    tensors_.push_back(std::move(made));
    return {id, sizes};
}

GraphTensor OperationGraph::tensor(cudnnDataType_t type, const FourSizes& sizes, const FourSizes& strides) {
    return add_tensor(type, sizes, strides, /*is_intermediate=*/false, /*is_number=*/false);
}
GraphTensor OperationGraph::number(cudnnDataType_t type) {
    return add_tensor(type, {1, 1, 1, 1}, {1, 1, 1, 1}, /*is_intermediate=*/false, /*is_number=*/true);
}
GraphTensor OperationGraph::intermediate(const FourSizes& sizes, cudnnDataType_t type) {
    return intermediate(sizes, packed_strides(sizes), type);
}
GraphTensor OperationGraph::intermediate(const FourSizes& sizes, const FourSizes& strides,
                                         cudnnDataType_t type) {
    return add_tensor(type, sizes, strides, /*is_intermediate=*/true, /*is_number=*/false);
}

void* OperationGraph::descriptor_of(const GraphTensor& tensor) const {
    return tensors_[static_cast<std::size_t>(tensor.id - 1)].get();
}

void OperationGraph::matmul(const GraphTensor& a, const GraphTensor& b, const GraphTensor& result) {
    BackendDescriptor parameters = create(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(parameters, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    finalize(parameters);
    BackendDescriptor operation = create(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, descriptor_of(a));
    set(operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, descriptor_of(b));
    set(operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, descriptor_of(result));
    set(operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, parameters.get());
    finalize(operation);
    parameters_.push_back(std::move(parameters));
    operations_.push_back(std::move(operation));
}

void OperationGraph::add_pointwise(cudnnPointwiseMode_t mode, const GraphTensor& x, const GraphTensor* y,
                                   const GraphTensor* condition, const GraphTensor& result,
                                   std::int64_t axis) {
    BackendDescriptor parameters = create(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(parameters, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    set(parameters, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, math_type_of(mode));
    if (mode == CUDNN_POINTWISE_GEN_INDEX) set(parameters, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
    finalize(parameters);
    BackendDescriptor operation = create(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set(operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, parameters.get());
    set(operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, descriptor_of(x));
    if (y != nullptr) set(operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, descriptor_of(*y));
    if (condition != nullptr) set(operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, descriptor_of(*condition));
    set(operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, descriptor_of(result));
    finalize(operation);
    parameters_.push_back(std::move(parameters));
    operations_.push_back(std::move(operation));
}

void OperationGraph::pointwise(cudnnPointwiseMode_t mode, const GraphTensor& x, const GraphTensor& y,
                               const GraphTensor& result) {
    add_pointwise(mode, x, &y, nullptr, result, 0);
}
void OperationGraph::pointwise(cudnnPointwiseMode_t mode, const GraphTensor& x, const GraphTensor& result) {
    add_pointwise(mode, x, nullptr, nullptr, result, 0);
}
void OperationGraph::select(const GraphTensor& condition, const GraphTensor& x, const GraphTensor& y,
                            const GraphTensor& result) {
    add_pointwise(CUDNN_POINTWISE_BINARY_SELECT, x, &y, &condition, result, 0);
}
void OperationGraph::index_along(std::int64_t axis, const GraphTensor& x, const GraphTensor& result) {
    add_pointwise(CUDNN_POINTWISE_GEN_INDEX, x, nullptr, nullptr, result, axis);
}

void OperationGraph::reduce(cudnnReduceTensorOp_t operation_kind, const GraphTensor& x,
                            const GraphTensor& result) {
    BackendDescriptor parameters = create(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(parameters, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, operation_kind);
    set(parameters, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    finalize(parameters);
    BackendDescriptor operation = create(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set(operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, parameters.get());
    set(operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, descriptor_of(x));
    set(operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, descriptor_of(result));
    finalize(operation);
    parameters_.push_back(std::move(parameters));
    operations_.push_back(std::move(operation));
}

void OperationGraph::reshape(const GraphTensor& x, const GraphTensor& result) {
    BackendDescriptor operation = create(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set(operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, descriptor_of(x));
    set(operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, descriptor_of(result));
    finalize(operation);
    operations_.push_back(std::move(operation));
}

std::unique_ptr<GraphPlan> OperationGraph::plan([[maybe_unused]] cudnnHandle_t library) const {
#if CUDNN_VERSION < 90800
    return nullptr;  // in those versions an attribute that no longer exists bound graphs to a handle
#else
    const BackendDescriptor device = device_of(library);
    BackendDescriptor graph = create(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    std::vector<void*> operations;
    for (const BackendDescriptor& operation : operations_) operations.push_back(operation.get());
    set(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
        std::span<void* const>(operations));
    const auto is_unsupported = [](cudnnStatus_t status) {
        return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED;
    };
    cudnnStatus_t status = cudnnBackendFinalize(graph.get());
    if (is_unsupported(status)) return nullptr;
    check(status, "cudnnBackendFinalize");

    const BackendDescriptor heuristic = create(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set(heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.get());
    set(heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
    set(heuristic, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device.get());
    status = cudnnBackendFinalize(heuristic.get());
    if (is_unsupported(status)) return nullptr;
    check(status, "cudnnBackendFinalize");
    std::int64_t count = 0;
    check(cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
          "cudnnBackendGetAttribute");
    if (count == 0) return nullptr;
    std::vector<BackendDescriptor> configurations;
    std::vector<void*> handles;
    for (std::int64_t i = 0; i < count; ++i) {
        configurations.push_back(create(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
        handles.push_back(configurations.back().get());
    }
    // May return fewer than it counted: engines that turn out not to work here are left out.
    check(cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                   CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count,
                                   static_cast<void*>(handles.data())),
          "cudnnBackendGetAttribute");
    for (std::int64_t i = 0; i < count; ++i) {
        void* configuration = handles[static_cast<std::size_t>(i)];
        if (!is_deterministic(configuration)) continue;
        auto made = std::make_unique<GraphPlan>();
        made->plan_ = create(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set(made->plan_, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
        set(made->plan_, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device.get());
        status = cudnnBackendFinalize(made->plan_.get());
        if (is_unsupported(status)) continue;
        check(status, "cudnnBackendFinalize");
        std::int64_t one = 0;
        check(cudnnBackendGetAttribute(made->plan_.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                       CUDNN_TYPE_INT64, 1, &one, &made->workspace_bytes_),
              "cudnnBackendGetAttribute");
        made->graph_ = std::move(graph);
        for (BackendDescriptor& each : configurations)
            if (each.get() == configuration) made->configuration_ = std::move(each);
        return made;
    }
    return nullptr;
#endif
}

void GraphPlan::run(cudnnHandle_t library, std::span<const GraphOperand> operands, void* workspace) const {
    std::vector<std::int64_t> ids;
    std::vector<void*> pointers;
    for (const GraphOperand& operand : operands) {
        ids.push_back(operand.tensor.id);
        pointers.push_back(operand.data);
    }
    const BackendDescriptor pack = create(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, std::span<const std::int64_t>(ids));
    set(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, std::span<void* const>(pointers));
    set(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
    finalize(pack);
    check(cudnnBackendExecute(library, plan_.get(), pack.get()), "cudnnBackendExecute");
}

}  // namespace potluck::cuda
