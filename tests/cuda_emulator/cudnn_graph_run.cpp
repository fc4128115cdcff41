// The double of cuDNN's graph interface: which graphs are valid, and their evaluation, operation by operation.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "core/dtype.h"
#include "tests/cuda_emulator/cudnn.h"
#include "tests/cuda_emulator/cudnn_graph.h"
#include "tests/cuda_emulator/library_refusal.h"
#include "tests/cuda_emulator/memory.h"

namespace potluck::emulator {
namespace {

GraphTensor tensor_of(const BackendDescriptor* descriptor) {
    GraphTensor tensor;
    if (descriptor == nullptr) return tensor;
    tensor.id = descriptor->value<std::int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
    tensor.type = descriptor->value<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE);
    const auto sizes = descriptor->list<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS);
    const auto strides = descriptor->list<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
    if (sizes.size() == 4) std::copy_n(sizes.begin(), 4, tensor.sizes.begin());
    if (strides.size() == 4) std::copy_n(strides.begin(), 4, tensor.strides.begin());
    tensor.alignment = descriptor->value<std::int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
    tensor.is_virtual = descriptor->value<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    tensor.is_by_value = descriptor->value<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE);
    return tensor;
}

GraphOperation operation_of(const BackendDescriptor& descriptor) {
    GraphOperation operation;
    const auto part = [&](cudnnBackendAttributeName_t name) { return tensor_of(descriptor.part(name)); };
    switch (descriptor.kind) {
        case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
            operation.step = GraphStep::matmul;
            operation.inputs = {part(CUDNN_ATTR_OPERATION_MATMUL_ADESC),
                                part(CUDNN_ATTR_OPERATION_MATMUL_BDESC)};
            operation.output = part(CUDNN_ATTR_OPERATION_MATMUL_CDESC);
            break;
        case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: {
            const BackendDescriptor* parameters =
                descriptor.part(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
            operation.step = GraphStep::pointwise;
            operation.mode = parameters->value<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
            operation.axis = parameters->value<std::int64_t>(CUDNN_ATTR_POINTWISE_AXIS, -1);
            operation.math = parameters->value<cudnnDataType_t>(CUDNN_ATTR_POINTWISE_MATH_PREC);
            for (const auto name :
                 {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                  CUDNN_ATTR_OPERATION_POINTWISE_TDESC})
                if (descriptor.part(name) != nullptr) operation.inputs.push_back(part(name));
            operation.output = part(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
            break;
        }
        case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
            operation.step = GraphStep::reduction;
            operation.mode = descriptor.part(CUDNN_ATTR_OPERATION_REDUCTION_DESC)
                                 ->value<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR);
            operation.inputs = {part(CUDNN_ATTR_OPERATION_REDUCTION_XDESC)};
            operation.output = part(CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
            break;
        default:
            operation.step = GraphStep::reshape;
            operation.inputs = {part(CUDNN_ATTR_OPERATION_RESHAPE_XDESC)};
            operation.output = part(CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
            break;
    }
    return operation;
}

std::size_t inputs_of(int mode) {
    switch (mode) {
        case CUDNN_POINTWISE_ADD:
        case CUDNN_POINTWISE_SUB:
        case CUDNN_POINTWISE_MUL:
        case CUDNN_POINTWISE_DIV:
        case CUDNN_POINTWISE_CMP_GE:
            return 2;
        case CUDNN_POINTWISE_EXP:
        case CUDNN_POINTWISE_LOG:
        case CUDNN_POINTWISE_GEN_INDEX:
            return 1;
        case CUDNN_POINTWISE_BINARY_SELECT:
            return 3;
        default:
            return 0;  // unknown here
    }
}

/// The compute type of each operation in the library's attention graphs; its engines accept no other.
cudnnDataType_t math_type_of(int mode) {
    if (mode == CUDNN_POINTWISE_GEN_INDEX) return CUDNN_DATA_INT32;
    return mode == CUDNN_POINTWISE_CMP_GE ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT;
}

std::int64_t count_of_tensor(const GraphTensor& tensor) { return count_of(tensor.sizes); }

/// The error in the shapes of an operation; "" when they are valid.
std::string misfit(const GraphOperation& operation) {
    const FourSizes& y = operation.output.sizes;
    const FourSizes& x = operation.inputs[0].sizes;
    switch (operation.step) {
        case GraphStep::matmul: {
            const FourSizes& b = operation.inputs[1].sizes;
            if (x[2] != y[2] || b[3] != y[3] || x[3] != b[2]) return "the inner sizes of a product differ";
            if (x[0] != y[0] || b[0] != y[0] || x[1] != y[1] || x[1] % b[1] != 0)
                return "the batches of a product differ";
            return "";
        }
        case GraphStep::pointwise:
            if (inputs_of(operation.mode) == 0)
                return "this double has no pointwise mode " + std::to_string(operation.mode);
            if (operation.inputs.size() != inputs_of(operation.mode))
                return "a pointwise operation has too many or too few operands";
            if (operation.mode == CUDNN_POINTWISE_GEN_INDEX && (operation.axis < 0 || operation.axis > 3))
                return "there is no such axis to count along";
            if (operation.math != math_type_of(operation.mode))
                return "a pointwise operation computes in the wrong type: INT32 for indices, BOOLEAN for "
                       "comparisons, FLOAT for all others";
            for (const GraphTensor& input : operation.inputs)
                for (std::size_t axis = 0; axis < 4; ++axis)
                    if (input.sizes[axis] != y[axis] && input.sizes[axis] != 1)
                        return "an operand of a pointwise operation does not broadcast";
            return "";
        case GraphStep::reduction:
            if (operation.mode != CUDNN_REDUCE_TENSOR_ADD && operation.mode != CUDNN_REDUCE_TENSOR_MAX)
                return "this double reduces by add and max only";
            for (std::size_t axis = 0; axis < 4; ++axis)
                if (x[axis] % y[axis] != 0) return "a reduced size does not divide";
            return "";
        case GraphStep::reshape:
            if (count_of_tensor(operation.inputs[0]) != count_of_tensor(operation.output))
                return "a reshape changes the number of elements";
            return "";
    }
    return "";
}

// ---- computing ----

/// A tensor during a run: its elements in row-major order. Integers and bools are small enough to be stored in f32.
struct Value {
    FourSizes sizes{};
    std::vector<float> elements;
};

std::size_t place(const FourSizes& sizes, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
    return static_cast<std::size_t>(((a * sizes[1] + b) * sizes[2] + c) * sizes[3] + d);
}

/// Calls visit(row-major position, offset in memory) for all elements.
template <class Visit>
void for_each_element(const GraphTensor& tensor, const Visit& visit) {
    const auto& [n, strides] = std::pair(tensor.sizes, tensor.strides);
    for (std::int64_t a = 0; a < n[0]; ++a)
        for (std::int64_t b = 0; b < n[1]; ++b)
            for (std::int64_t c = 0; c < n[2]; ++c)
                for (std::int64_t d = 0; d < n[3]; ++d)
                    visit(place(n, a, b, c, d),
                          a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]);
}

/// Calls visit(offset, elements) for contiguous pieces that together form the tensor.
template <class Visit>
void for_each_run(const GraphTensor& tensor, const Visit& visit) {
    const std::size_t along = tensor.strides[3] != 1 && tensor.strides[2] == 1 ? 2 : 3;
    GraphTensor starts = tensor;
    const std::int64_t run = tensor.strides[along] == 1 ? tensor.sizes[along] : 1;
    if (run > 1) starts.sizes[along] = 1;
    for_each_element(starts, [&](std::size_t, std::int64_t offset) { visit(offset, run); });
}

float load(cudnnDataType_t type, const void* data, std::int64_t i) {
    switch (type) {
        case CUDNN_DATA_HALF:
            return static_cast<float>(static_cast<const float16*>(data)[i]);
        case CUDNN_DATA_BFLOAT16:
            return static_cast<float>(static_cast<const bfloat16*>(data)[i]);
        case CUDNN_DATA_INT32:
            return static_cast<float>(static_cast<const std::int32_t*>(data)[i]);
        default:
            return static_cast<const float*>(data)[i];
    }
}

float rounded(cudnnDataType_t type, float value) {
    if (type == CUDNN_DATA_HALF) return static_cast<float>(float16(value));
    if (type == CUDNN_DATA_BFLOAT16) return static_cast<float>(bfloat16(value));
    return value;
}

void store(cudnnDataType_t type, void* data, std::int64_t i, float value) {
    switch (type) {
        case CUDNN_DATA_HALF:
            static_cast<float16*>(data)[i] = float16(value);
            return;
        case CUDNN_DATA_BFLOAT16:
            static_cast<bfloat16*>(data)[i] = bfloat16(value);
            return;
        default:
            static_cast<float*>(data)[i] = value;
    }
}

std::byte* address(void* data, cudnnDataType_t type, std::int64_t offset) {
    return static_cast<std::byte*>(data) + offset * bytes_of(type);
}

Value multiply(const Value& a, const Value& b, const FourSizes& sizes) {
    Value y{sizes, std::vector<float>(static_cast<std::size_t>(count_of(sizes)))};
    const std::int64_t group = sizes[1] / b.sizes[1];
    for (std::int64_t n = 0; n < sizes[0]; ++n)
        for (std::int64_t h = 0; h < sizes[1]; ++h)
            for (std::int64_t i = 0; i < sizes[2]; ++i)
                for (std::int64_t k = 0; k < a.sizes[3]; ++k) {
                    const float factor = a.elements[place(a.sizes, n, h, i, k)];
                    const float* row = b.elements.data() + place(b.sizes, n, h / group, k, 0);
                    float* sums = y.elements.data() + place(sizes, n, h, i, 0);
                    for (std::int64_t j = 0; j < sizes[3]; ++j) sums[j] += factor * row[j];
                }
    return y;
}

float apply(int mode, float x, float y) {
    switch (mode) {
        case CUDNN_POINTWISE_ADD:
            return x + y;
        case CUDNN_POINTWISE_SUB:
            return x - y;
        case CUDNN_POINTWISE_MUL:
            return x * y;
        case CUDNN_POINTWISE_DIV:
            return x / y;
        case CUDNN_POINTWISE_CMP_GE:
            return x >= y ? 1.0F : 0.0F;
        case CUDNN_POINTWISE_EXP:
            return std::exp(x);
        default:
            return std::log(x);
    }
}

Value compute_pointwise(const GraphOperation& operation, const std::vector<const Value*>& inputs) {
    const FourSizes& sizes = operation.output.sizes;
    Value y{sizes, std::vector<float>(static_cast<std::size_t>(count_of(sizes)))};
    for (std::int64_t a = 0; a < sizes[0]; ++a)
        for (std::int64_t b = 0; b < sizes[1]; ++b)
            for (std::int64_t c = 0; c < sizes[2]; ++c)
                for (std::int64_t d = 0; d < sizes[3]; ++d) {
                    const auto input = [&](std::size_t i) {
                        const FourSizes& n = inputs[i]->sizes;
                        return inputs[i]->elements[place(n, n[0] == 1 ? 0 : a, n[1] == 1 ? 0 : b,
                                                         n[2] == 1 ? 0 : c, n[3] == 1 ? 0 : d)];
                    };
                    float& result = y.elements[place(sizes, a, b, c, d)];
                    const std::array<std::int64_t, 4> indices{a, b, c, d};
                    if (operation.mode == CUDNN_POINTWISE_GEN_INDEX)
                        result = static_cast<float>(indices[static_cast<std::size_t>(operation.axis)]);
                    else if (operation.mode == CUDNN_POINTWISE_BINARY_SELECT)
                        result = input(2) != 0.0F ? input(0) : input(1);
                    else
                        result = apply(operation.mode, input(0), inputs.size() > 1 ? input(1) : 0.0F);
                }
    return y;
}

Value compute_reduction(const GraphOperation& operation, const Value& x) {
    const FourSizes& sizes = operation.output.sizes;
    const bool is_max = operation.mode == CUDNN_REDUCE_TENSOR_MAX;
    Value y{sizes, std::vector<float>(static_cast<std::size_t>(count_of(sizes)),
                                      is_max ? -std::numeric_limits<float>::infinity() : 0.0F)};
    const auto to = [&](std::size_t axis, std::int64_t i) { return i * sizes[axis] / x.sizes[axis]; };
    for (std::int64_t a = 0; a < x.sizes[0]; ++a)
        for (std::int64_t b = 0; b < x.sizes[1]; ++b)
            for (std::int64_t c = 0; c < x.sizes[2]; ++c)
                for (std::int64_t d = 0; d < x.sizes[3]; ++d) {
                    const float value = x.elements[place(x.sizes, a, b, c, d)];
                    float& result = y.elements[place(sizes, to(0, a), to(1, b), to(2, c), to(3, d))];
                    result = is_max ? std::max(result, value) : result + value;
                }
    return y;
}

/// The memory of x, including gaps, in the shape and strides of the output.
Value compute_reshape(const GraphOperation& operation, const Value& x) {
    std::int64_t extent = 1;
    for (const GraphTensor* tensor : {&operation.inputs[0], &operation.output})
        for_each_element(*tensor,
                         [&](std::size_t, std::int64_t offset) { extent = std::max(extent, offset + 1); });
    std::vector<float> memory(static_cast<std::size_t>(extent));
    for_each_element(operation.inputs[0], [&](std::size_t i, std::int64_t offset) {
        memory[static_cast<std::size_t>(offset)] = x.elements[i];
    });
    Value y{operation.output.sizes, std::vector<float>(x.elements.size())};
    for_each_element(operation.output, [&](std::size_t i, std::int64_t offset) {
        y.elements[i] = memory[static_cast<std::size_t>(offset)];
    });
    return y;
}

Value compute(const GraphOperation& operation, const std::vector<const Value*>& inputs) {
    switch (operation.step) {
        case GraphStep::matmul:
            return multiply(*inputs[0], *inputs[1], operation.output.sizes);
        case GraphStep::pointwise:
            return compute_pointwise(operation, inputs);
        case GraphStep::reduction:
            return compute_reduction(operation, *inputs[0]);
        case GraphStep::reshape:
            break;
    }
    return compute_reshape(operation, *inputs[0]);
}

Value read_tensor(const GraphTensor& tensor, void* data) {
    for_each_run(tensor, [&](std::int64_t offset, std::int64_t count) {
        check_read(address(data, tensor.type, offset), count * bytes_of(tensor.type), "a tensor of a graph");
    });
    Value value{tensor.sizes, std::vector<float>(static_cast<std::size_t>(count_of_tensor(tensor)))};
    for_each_element(tensor, [&](std::size_t i, std::int64_t offset) {
        value.elements[i] = load(tensor.type, data, offset);
    });
    return value;
}

void write_tensor(const GraphTensor& tensor, const Value& value, void* data) {
    for_each_run(tensor, [&](std::int64_t offset, std::int64_t count) {
        check_write(address(data, tensor.type, offset), count * bytes_of(tensor.type), "a result of a graph");
    });
    for_each_element(tensor, [&](std::size_t i, std::int64_t offset) {
        store(tensor.type, data, offset, value.elements[i]);
    });
}

}  // namespace

std::shared_ptr<const OperationGraph> make_graph(const BackendDescriptor& descriptor) {
    auto graph = std::make_shared<OperationGraph>();
    std::set<std::int64_t> written;
    for (const BackendDescriptor* part : descriptor.parts.at(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
        const GraphOperation operation = operation_of(*part);
        if (const std::string reason = misfit(operation); !reason.empty()) {
            record_library_refusal(reason);
            return nullptr;
        }
        for (const GraphTensor& input : operation.inputs)
            if (input.is_virtual && written.count(input.id) == 0) {
                record_library_refusal("an intermediate result is used that no operation before it makes");
                return nullptr;
            }
        if (!written.insert(operation.output.id).second || operation.output.is_by_value) {
            record_library_refusal("two operations have the same result, or a result is a number");
            return nullptr;
        }
        graph->operations.push_back(operation);
    }
    return graph;
}

cudnnStatus_t run_graph(cudnnHandle_t handle, const std::shared_ptr<const OperationGraph>& graph,
                        const std::map<std::int64_t, void*>& pointers, void* workspace) {
    if (workspace == nullptr) return refused(CUDNN_STATUS_BAD_PARAM, "the plan needs a workspace");
    // Numbers are read now, memory when the operation runs in the stream.
    std::map<std::int64_t, Value> numbers;
    for (const GraphOperation& operation : graph->operations) {
        std::vector<GraphTensor> tensors = operation.inputs;
        tensors.push_back(operation.output);
        for (const GraphTensor& tensor : tensors) {
            if (tensor.is_virtual) continue;
            const auto found = pointers.find(tensor.id);
            if (found == pointers.end() || found->second == nullptr)
                return refused(CUDNN_STATUS_BAD_PARAM,
                               "the variant pack lacks tensor " + std::to_string(tensor.id));
            if (tensor.is_by_value)
                numbers[tensor.id] = {tensor.sizes, {load(tensor.type, found->second, 0)}};
            else if (reinterpret_cast<std::uintptr_t>(found->second) %
                         static_cast<std::uintptr_t>(tensor.alignment) !=
                     0)
                return refused(CUDNN_STATUS_BAD_PARAM, "tensor " + std::to_string(tensor.id) +
                                                           " is not aligned as it was said to be");
        }
    }
    const cudaError_t status = library_call(handle->stream, "cudnnBackendExecute", [=] {
        check_write(workspace, graph_workspace_bytes, "workspace");
        std::memset(workspace, 0xff,
                    static_cast<std::size_t>(graph_workspace_bytes));  // destroys the previous content
        std::map<std::int64_t, Value> values = numbers;
        for (const GraphOperation& operation : graph->operations) {
            std::vector<const Value*> inputs;
            for (const GraphTensor& input : operation.inputs) {
                if (values.count(input.id) == 0) values[input.id] = read_tensor(input, pointers.at(input.id));
                inputs.push_back(&values.at(input.id));
            }
            Value y = compute(operation, inputs);
            for (float& element : y.elements) element = rounded(operation.output.type, element);
            if (!operation.output.is_virtual)
                write_tensor(operation.output, y, pointers.at(operation.output.id));
            values[operation.output.id] = std::move(y);
        }
    });
    return status == cudaSuccess ? CUDNN_STATUS_SUCCESS
                                 : refused(CUDNN_STATUS_EXECUTION_FAILED, last_fault_text());
}

}  // namespace potluck::emulator
