// The double of cuDNN's graph interface: descriptors and their attributes, according to the reference of cuDNN 9
// ("cudnn_graph library"). It supports what cuda/cudnn_graph.cpp uses and refuses everything else. It is not fully
// documented for which graphs the real library has an engine; this double runs any graph. The graphs of
// cuda/fused_attention.cpp were given to the real library, version 9.19, for devices of compute capability 8.0 and 9.0
// that were described by their properties (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION): it proposed engines and compiled
// their kernels.

#include "tests/cuda_emulator/cudnn_graph.h"

#include <atomic>
#include <set>

#include "tests/cuda_emulator/cudnn.h"
#include "tests/cuda_emulator/library_refusal.h"

namespace potluck::emulator {
namespace {

constexpr const char* backend_kind = "cudnn backend descriptor";

std::atomic<bool> graphs_are_refused{false};

struct Attribute {
    cudnnBackendAttributeType_t type;
    std::size_t bytes;  // of one element
    bool is_required = true;
    bool is_list = false;  // false: it has a single element
};

const Attribute a_part{CUDNN_TYPE_BACKEND_DESCRIPTOR, sizeof(void*)};
const Attribute a_type{CUDNN_TYPE_DATA_TYPE, sizeof(cudnnDataType_t)};
const Attribute a_number{CUDNN_TYPE_INT64, sizeof(std::int64_t)};
const Attribute numbers{CUDNN_TYPE_INT64, sizeof(std::int64_t), true, true};

Attribute optional_of(Attribute attribute) {
    attribute.is_required = false;
    return attribute;
}
Attribute list_of(Attribute attribute) {
    attribute.is_list = true;
    return attribute;
}

using Attributes = std::map<int, Attribute>;

/// The attributes that can be set, by kind of descriptor.
const std::map<int, Attributes>& attributes_of_kinds() {
    static const std::map<int, Attributes> all{
        {CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR,
         {{CUDNN_ATTR_DEVICEPROP_HANDLE, {CUDNN_TYPE_HANDLE, sizeof(cudnnHandle_t)}}}},
        {CUDNN_BACKEND_TENSOR_DESCRIPTOR,
         {{CUDNN_ATTR_TENSOR_UNIQUE_ID, a_number},
          {CUDNN_ATTR_TENSOR_DATA_TYPE, a_type},
          {CUDNN_ATTR_TENSOR_DIMENSIONS, numbers},
          {CUDNN_ATTR_TENSOR_STRIDES, numbers},
          {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, a_number},
          {CUDNN_ATTR_TENSOR_IS_VIRTUAL, {CUDNN_TYPE_BOOLEAN, sizeof(bool), false}},
          {CUDNN_ATTR_TENSOR_IS_BY_VALUE, {CUDNN_TYPE_BOOLEAN, sizeof(bool), false}}}},
        {CUDNN_BACKEND_MATMUL_DESCRIPTOR, {{CUDNN_ATTR_MATMUL_COMP_TYPE, a_type}}},
        {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
         {{CUDNN_ATTR_OPERATION_MATMUL_ADESC, a_part},
          {CUDNN_ATTR_OPERATION_MATMUL_BDESC, a_part},
          {CUDNN_ATTR_OPERATION_MATMUL_CDESC, a_part},
          {CUDNN_ATTR_OPERATION_MATMUL_DESC, a_part}}},
        {CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
         {{CUDNN_ATTR_POINTWISE_MODE, {CUDNN_TYPE_POINTWISE_MODE, sizeof(cudnnPointwiseMode_t)}},
          {CUDNN_ATTR_POINTWISE_MATH_PREC, a_type},
          {CUDNN_ATTR_POINTWISE_AXIS, optional_of(a_number)}}},
        {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
         {{CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, a_part},
          {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a_part},
          {CUDNN_ATTR_OPERATION_POINTWISE_BDESC, optional_of(a_part)},
          {CUDNN_ATTR_OPERATION_POINTWISE_TDESC, optional_of(a_part)},
          {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, a_part}}},
        {CUDNN_BACKEND_REDUCTION_DESCRIPTOR,
         {{CUDNN_ATTR_REDUCTION_OPERATOR,
           {CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, sizeof(cudnnReduceTensorOp_t)}},
          {CUDNN_ATTR_REDUCTION_COMP_TYPE, a_type}}},
        {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
         {{CUDNN_ATTR_OPERATION_REDUCTION_DESC, a_part},
          {CUDNN_ATTR_OPERATION_REDUCTION_XDESC, a_part},
          {CUDNN_ATTR_OPERATION_REDUCTION_YDESC, a_part}}},
        {CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
         {{CUDNN_ATTR_OPERATION_RESHAPE_XDESC, a_part}, {CUDNN_ATTR_OPERATION_RESHAPE_YDESC, a_part}}},
        {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, {{CUDNN_ATTR_OPERATIONGRAPH_OPS, list_of(a_part)}}},
        {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
         {{CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, a_part},
          {CUDNN_ATTR_ENGINEHEUR_MODE, {CUDNN_TYPE_HEUR_MODE, sizeof(cudnnBackendHeurMode_t)}},
          {CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, a_part}}},
        {CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, {}},
        {CUDNN_BACKEND_ENGINE_DESCRIPTOR, {}},
        {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
         {{CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, a_part}, {CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, a_part}}},
        {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
         {{CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, numbers},
          {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, {CUDNN_TYPE_VOID_PTR, sizeof(void*), true, true}},
          {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, {CUDNN_TYPE_VOID_PTR, sizeof(void*), false}}}},
    };
    return all;
}

BackendDescriptor* as_descriptor(void* handle) {
    return is_library_object(handle, backend_kind) ? static_cast<BackendDescriptor*>(handle) : nullptr;
}

cudnnStatus_t no_descriptor() {
    return refused(CUDNN_STATUS_BAD_PARAM, "the backend descriptor was never created, or was destroyed");
}
std::string named(const char* what, int name) { return std::string(what) + " " + std::to_string(name); }

cudnnStatus_t finalize_tensor(const BackendDescriptor& descriptor) {
    const auto sizes = descriptor.list<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS);
    const auto strides = descriptor.list<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES);
    if (sizes.size() != 4 || strides.size() != 4)
        return refused(CUDNN_STATUS_NOT_SUPPORTED, "this double knows tensors of 4 axes only");
    for (std::size_t axis = 0; axis < 4; ++axis)
        if (sizes[axis] <= 0 || strides[axis] <= 0)
            return refused(CUDNN_STATUS_BAD_PARAM, "a size or a stride of a tensor is not positive");
    const bool is_by_value = descriptor.value<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE);
    if (is_by_value && sizes != std::vector<std::int64_t>(4, 1))
        return refused(CUDNN_STATUS_BAD_PARAM, "a tensor that is passed by value has one element");
    if (is_by_value && descriptor.value<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL))
        return refused(CUDNN_STATUS_BAD_PARAM, "a tensor is passed by value and virtual");
    return CUDNN_STATUS_SUCCESS;
}

/// Whether all descriptors in its attributes still exist and are finalised.
bool parts_are_final(const BackendDescriptor& descriptor) {
    for (const auto& [name, parts] : descriptor.parts)
        for (BackendDescriptor* part : parts)
            if (!is_library_object(part, backend_kind) || !part->is_final) return false;
    return true;
}

}  // namespace

void refuse_graphs(bool refuse) { graphs_are_refused = refuse; }

}  // namespace potluck::emulator

using namespace potluck::emulator;

extern "C" {

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind,
                                           cudnnBackendDescriptor_t* descriptor) {
    if (descriptor == nullptr) return refused(CUDNN_STATUS_BAD_PARAM, "no place for the backend descriptor");
    if (attributes_of_kinds().count(kind) == 0)
        return refused(CUDNN_STATUS_NOT_SUPPORTED, named("this double has no descriptors of kind", kind));
    auto made = std::make_unique<BackendDescriptor>();
    made->kind = kind;
    library_object_created(made.get(), backend_kind);
    *descriptor = made.release();
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    if (!library_object_destroyed(descriptor, backend_kind)) return no_descriptor();
    delete static_cast<BackendDescriptor*>(descriptor);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t count,
                                       const void* values) {
    BackendDescriptor* self = as_descriptor(descriptor);
    if (self == nullptr) return no_descriptor();
    if (self->is_final) return refused(CUDNN_STATUS_BAD_PARAM, "a finalized descriptor cannot be changed");
    const Attributes& attributes = attributes_of_kinds().at(self->kind);
    const auto found = attributes.find(name);
    if (found == attributes.end())
        return refused(CUDNN_STATUS_NOT_SUPPORTED,
                       named("descriptor of kind", self->kind) + named(" has no attribute", name));
    const Attribute& attribute = found->second;
    if (type != attribute.type)
        return refused(CUDNN_STATUS_BAD_PARAM, named("wrong type for attribute", name));
    if (count < 1 || (!attribute.is_list && count != 1) || values == nullptr)
        return refused(CUDNN_STATUS_BAD_PARAM, named("wrong number of elements for attribute", name));
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        std::vector<BackendDescriptor*> parts;
        for (std::int64_t i = 0; i < count; ++i) {
            parts.push_back(as_descriptor(static_cast<void* const*>(values)[i]));
            if (parts.back() == nullptr) return no_descriptor();
            if (!parts.back()->is_final)
                return refused(CUDNN_STATUS_BAD_PARAM,
                               named("a descriptor that is not finalized as attribute", name));
        }
        self->parts[name] = parts;
    }
    const auto* first = static_cast<const std::byte*>(values);
    self->values[name].assign(first, first + static_cast<std::size_t>(count) * attribute.bytes);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    BackendDescriptor* self = as_descriptor(descriptor);
    if (self == nullptr) return no_descriptor();
    for (const auto& [name, attribute] : attributes_of_kinds().at(self->kind))
        if (attribute.is_required && self->values.count(name) == 0)
            return refused(CUDNN_STATUS_BAD_PARAM, named("missing attribute", name));
    if (!parts_are_final(*self))
        return refused(CUDNN_STATUS_BAD_PARAM, "a descriptor that an attribute names was destroyed");
    switch (self->kind) {
        case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
            if (const cudnnStatus_t status = finalize_tensor(*self); status != CUDNN_STATUS_SUCCESS)
                return status;
            break;
        case CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR:
            if (!is_library_object(self->value<cudnnHandle_t>(CUDNN_ATTR_DEVICEPROP_HANDLE),
                                   cudnn_handle_kind))
                return refused(CUDNN_STATUS_BAD_PARAM, "device properties of a handle that does not exist");
            break;
        case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
            self->graph = make_graph(*self);
            if (self->graph == nullptr) return CUDNN_STATUS_BAD_PARAM;
            break;
        case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
            self->graph = self->part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)->graph;
            break;
        case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
            self->graph = self->part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)->graph;
            break;
        case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR: {
            const auto ids = self->list<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
            if (std::set<std::int64_t>(ids.begin(), ids.end()).size() != ids.size() ||
                ids.size() != self->list<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS).size())
                return refused(CUDNN_STATUS_BAD_PARAM,
                               "a variant pack needs one pointer for each id, and each id once");
            break;
        }
        default:
            break;
    }
    self->is_final = true;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                       cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                       std::int64_t requested, std::int64_t* count, void* values) {
    const BackendDescriptor* self = as_descriptor(descriptor);
    if (self == nullptr) return no_descriptor();
    if (!self->is_final)
        return refused(CUDNN_STATUS_BAD_PARAM, "an attribute is asked of a descriptor that is not finalized");
    if (count == nullptr || (requested > 0 && values == nullptr))
        return refused(CUDNN_STATUS_BAD_PARAM, "no place for the attribute");
    const auto give_part = [&](cudnnBackendDescriptorType_t kind) {
        BackendDescriptor* part = as_descriptor(*static_cast<void**>(values));
        if (part == nullptr || part->kind != kind)
            return refused(CUDNN_STATUS_BAD_PARAM, "what the attribute is put into is of another kind");
        part->graph = self->graph;
        part->is_final = true;
        return CUDNN_STATUS_SUCCESS;
    };
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS && type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        *count = graphs_are_refused ? 0 : 1;
        return requested == 0 || *count == 0 ? CUDNN_STATUS_SUCCESS
                                             : give_part(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    }
    *count = 1;
    if (requested < 1) return CUDNN_STATUS_SUCCESS;
    if (name == CUDNN_ATTR_ENGINECFG_ENGINE && type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
        return give_part(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE && type == CUDNN_TYPE_NUMERICAL_NOTE) {
        *static_cast<cudnnBackendNumericalNote_t*>(values) = CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
        return CUDNN_STATUS_SUCCESS;
    }
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && type == CUDNN_TYPE_INT64) {
        *static_cast<std::int64_t*>(values) = graph_workspace_bytes;
        return CUDNN_STATUS_SUCCESS;
    }
    return refused(CUDNN_STATUS_NOT_SUPPORTED, named("this double does not tell attribute", name));
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
    const BackendDescriptor* planned = as_descriptor(plan);
    const BackendDescriptor* packed = as_descriptor(pack);
    if (!is_library_object(handle, cudnn_handle_kind) || planned == nullptr || packed == nullptr)
        return no_descriptor();
    if (!is_handle_of_this_thread(handle)) return refused(CUDNN_STATUS_BAD_PARAM, handle_of_another_thread);
    if (planned->kind != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR || !planned->is_final ||
        packed->kind != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR || !packed->is_final)
        return refused(CUDNN_STATUS_BAD_PARAM, "a finalized plan and a finalized variant pack are needed");
    const auto ids = packed->list<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const auto data = packed->list<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    std::map<std::int64_t, void*> pointers;
    for (std::size_t i = 0; i < ids.size(); ++i) pointers[ids[i]] = data[i];
    return run_graph(handle, planned->graph, pointers,
                     packed->value<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE));
}

}  // extern "C"
