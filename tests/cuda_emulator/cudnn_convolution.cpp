// The double of cuDNN: convolution and its two gradients. It checks what the reference of cuDNN 9 requires, and
// computes by the definition: sums in the compute type, in a fixed order.

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/half.h"
#include "tests/cuda_emulator/cudnn.h"
#include "tests/cuda_emulator/library_refusal.h"
#include "tests/cuda_emulator/memory.h"

namespace potluck::emulator {
namespace {

enum class Pass { forward, data_gradient, weight_gradient };

/// The descriptors of one convolution, by value: a captured call outlives them.
struct Problem {
    cudnnTensorStruct x, y;
    cudnnFilterStruct w;
    cudnnConvolutionStruct convolution;
    Pass pass;
};

/// The tables "data type configurations": type of the tensors, compute type.
bool is_configuration(cudnnDataType_t type, cudnnDataType_t compute) {
    switch (type) {
        case CUDNN_DATA_HALF:  // TRUE_HALF_CONFIG, PSEUDO_HALF_CONFIG
            return compute == CUDNN_DATA_HALF || compute == CUDNN_DATA_FLOAT;
        case CUDNN_DATA_BFLOAT16:  // PSEUDO_BFLOAT16_CONFIG
        case CUDNN_DATA_FLOAT:     // FLOAT_CONFIG
            return compute == CUDNN_DATA_FLOAT;
        default:  // DOUBLE_CONFIG
            return compute == CUDNN_DATA_DOUBLE;
    }
}

cudnnStatus_t read_problem(cudnnHandle_t handle, cudnnTensorDescriptor_t x, cudnnFilterDescriptor_t w,
                           cudnnConvolutionDescriptor_t convolution, cudnnTensorDescriptor_t y, Pass pass,
                           Problem& problem) {
    if (!is_library_object(handle, cudnn_handle_kind))
        return refused(CUDNN_STATUS_BAD_PARAM, "the handle was never created, or was destroyed");
    if (!is_handle_of_this_thread(handle)) return refused(CUDNN_STATUS_BAD_PARAM, handle_of_another_thread);
    if (!is_library_object(x, cudnn_tensor_kind) || !is_library_object(y, cudnn_tensor_kind) ||
        !is_library_object(w, cudnn_filter_kind) || !is_library_object(convolution, cudnn_convolution_kind))
        return refused(CUDNN_STATUS_BAD_PARAM, "a descriptor was never created, or was destroyed");
    if (count_of(x->size) == 0 || count_of(y->size) == 0 || count_of(w->size) == 0 ||
        convolution->stride[0] == 0)
        return refused(CUDNN_STATUS_BAD_PARAM, "a descriptor was never set");
    problem = {*x, *y, *w, *convolution, pass};
    if (x->type != w->type || x->type != y->type)
        return refused(CUDNN_STATUS_BAD_PARAM, "x, w and y have different types");
    if (!is_configuration(x->type, convolution->compute))
        return refused(CUDNN_STATUS_NOT_SUPPORTED,
                       "no configuration has these types of tensors and computation");
    if (convolution->mode != CUDNN_CROSS_CORRELATION || convolution->compute == CUDNN_DATA_HALF)
        return refused(CUDNN_STATUS_NOT_SUPPORTED,
                       "this double only cross-correlates, and sums in f32 or f64");
    const std::int64_t groups = convolution->groups;
    if (x->size[1] != w->size[1] * groups)
        return refused(CUDNN_STATUS_BAD_PARAM,
                       "x has " + std::to_string(x->size[1]) + " channels, the filters take " +
                           std::to_string(w->size[1]) + " in each of " + std::to_string(groups) + " groups");
    if (w->size[0] % groups != 0)
        return refused(CUDNN_STATUS_BAD_PARAM,
                       "the filters do not divide into " + std::to_string(groups) + " groups");
    if (y->size[0] != x->size[0] || y->size[1] != w->size[0])
        return refused(CUDNN_STATUS_BAD_PARAM,
                       "y has another batch or number of channels than x and w give it");
    for (std::size_t axis = 0; axis < 2; ++axis) {
        // cudnnGetConvolution2dForwardOutputDim() gives the formula.
        const std::int64_t reach = (w->size[2 + axis] - 1) * convolution->dilation[axis] + 1;
        const std::int64_t room = x->size[2 + axis] + 2 * convolution->padding[axis] - reach;
        if (room < 0 || y->size[2 + axis] != 1 + room / convolution->stride[axis])
            return refused(CUDNN_STATUS_BAD_PARAM,
                           "y has " + std::to_string(y->size[2 + axis]) +
                               " places where x, w, padding, stride and "
                               "dilation give " +
                               std::to_string(room < 0 ? 0 : 1 + room / convolution->stride[axis]));
    }
    if (convolutions_are_refused())
        return refused(CUDNN_STATUS_NOT_SUPPORTED, "the test lets every algorithm be refused");
    return CUDNN_STATUS_SUCCESS;
}

/// The workspace of an algorithm; -1 for one that this double does not have. The real sizes are undocumented: these
/// make sure that a caller asks for them.
std::int64_t workspace_of(const Problem& p, int algorithm) {
    switch (p.pass) {
        case Pass::forward:
            if (algorithm == CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_GEMM) return 0;
            if (algorithm != CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM) return -1;
            return p.w.size[1] * p.w.size[2] * p.w.size[3] * 4;
        case Pass::data_gradient:
            return algorithm == CUDNN_CONVOLUTION_BWD_DATA_ALGO_1 ? count_of(p.w.size) * bytes_of(p.w.type)
                                                                  : -1;
        case Pass::weight_gradient:
            break;
    }
    return algorithm == CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1 ? count_of(p.w.size) * 4 : -1;
}

cudnnStatus_t give_workspace(const Problem& p, int algorithm, std::size_t* bytes) {
    if (bytes == nullptr) return refused(CUDNN_STATUS_BAD_PARAM, "no place for the size");
    const std::int64_t needed = workspace_of(p, algorithm);
    if (needed < 0)
        return refused(CUDNN_STATUS_NOT_SUPPORTED,
                       "this double has no algorithm " + std::to_string(algorithm));
    *bytes = static_cast<std::size_t>(needed);
    return CUDNN_STATUS_SUCCESS;
}

double element_at(cudnnDataType_t type, const void* data, std::int64_t i) {
    switch (type) {
        case CUDNN_DATA_DOUBLE:
            return static_cast<const double*>(data)[i];
        case CUDNN_DATA_FLOAT:
            return static_cast<double>(static_cast<const float*>(data)[i]);
        case CUDNN_DATA_HALF:
            return static_cast<double>(static_cast<float>(static_cast<const float16*>(data)[i]));
        default:
            return static_cast<double>(static_cast<float>(static_cast<const bfloat16*>(data)[i]));
    }
}

void store_at(cudnnDataType_t type, void* data, std::int64_t i, double value) {
    switch (type) {
        case CUDNN_DATA_DOUBLE:
            static_cast<double*>(data)[i] = value;
            return;
        case CUDNN_DATA_FLOAT:
            static_cast<float*>(data)[i] = static_cast<float>(value);
            return;
        case CUDNN_DATA_HALF:
            static_cast<float16*>(data)[i] = float16(static_cast<float>(value));
            return;
        default:
            static_cast<bfloat16*>(data)[i] = bfloat16(static_cast<float>(value));
    }
}

/// All elements in the compute type; with TF32 rounded to 10 bits of mantissa.
template <class T>
std::vector<T> read_all(cudnnDataType_t type, const void* data, std::int64_t count, bool tf32) {
    std::vector<T> values(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
        const double value = element_at(type, data, i);
        int exponent = 0;
        const double fraction = std::frexp(value, &exponent);
        values[static_cast<std::size_t>(i)] = static_cast<T>(
            tf32 && std::isfinite(value) ? std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11)
                                         : value);
    }
    return values;
}

/// Calls visit(input, output, index of the weight in w) for all products of one image, group, filter and channel.
template <class Visit>
void for_each_product(const Problem& p, std::int64_t filter, std::int64_t channel, const Visit& visit) {
    const auto& c = p.convolution;
    for (std::int64_t ky = 0; ky < p.w.size[2]; ++ky)
        for (std::int64_t kx = 0; kx < p.w.size[3]; ++kx) {
            const std::int64_t factor =
                ((filter * p.w.size[1] + channel) * p.w.size[2] + ky) * p.w.size[3] + kx;
            for (std::int64_t row = 0; row < p.y.size[2]; ++row) {
                const std::int64_t y = row * c.stride[0] + ky * c.dilation[0] - c.padding[0];
                if (y < 0 || y >= p.x.size[2]) continue;
                for (std::int64_t column = 0; column < p.y.size[3]; ++column) {
                    const std::int64_t x = column * c.stride[1] + kx * c.dilation[1] - c.padding[1];
                    if (x >= 0 && x < p.x.size[3])
                        visit(y * p.x.size[3] + x, row * p.y.size[3] + column, factor);
                }
            }
        }
}

template <class T>
void convolve(const Problem& p, const void* x_data, const void* w_data, const void* y_data, void* result,
              double alpha, double beta) {
    const bool tf32 = p.x.type == CUDNN_DATA_FLOAT && p.convolution.math != CUDNN_FMA_MATH;
    const std::int64_t x_count = count_of(p.x.size), w_count = count_of(p.w.size),
                       y_count = count_of(p.y.size);
    std::vector<T> x, w, y;
    if (p.pass != Pass::data_gradient) x = read_all<T>(p.x.type, x_data, x_count, tf32);
    if (p.pass != Pass::weight_gradient) w = read_all<T>(p.w.type, w_data, w_count, tf32);
    if (p.pass != Pass::forward) y = read_all<T>(p.y.type, y_data, y_count, tf32);
    std::vector<T>& sums = p.pass == Pass::forward ? y : p.pass == Pass::data_gradient ? x : w;
    const std::int64_t count = p.pass == Pass::forward         ? y_count
                               : p.pass == Pass::data_gradient ? x_count
                                                               : w_count;
    sums.assign(static_cast<std::size_t>(count), T{0});
    const std::int64_t group_filters = p.w.size[0] / p.convolution.groups, group_channels = p.w.size[1];
    const std::int64_t x_plane = p.x.size[2] * p.x.size[3], y_plane = p.y.size[2] * p.y.size[3];
    const auto planes = [&](std::int64_t image, std::int64_t filter, std::int64_t channel) {
        const std::int64_t all_channels = filter / group_filters * group_channels + channel;
        T* in = x.data() + (image * p.x.size[1] + all_channels) * x_plane;
        T* out = y.data() + (image * p.y.size[1] + filter) * y_plane;
        switch (p.pass) {
            case Pass::forward:
                for_each_product(p, filter, channel, [&](std::int64_t i, std::int64_t o, std::int64_t f) {
                    out[o] += in[i] * w[static_cast<std::size_t>(f)];
                });
                break;
            case Pass::data_gradient:
                for_each_product(p, filter, channel, [&](std::int64_t i, std::int64_t o, std::int64_t f) {
                    in[i] += out[o] * w[static_cast<std::size_t>(f)];
                });
                break;
            case Pass::weight_gradient:
                for_each_product(p, filter, channel, [&](std::int64_t i, std::int64_t o, std::int64_t f) {
                    w[static_cast<std::size_t>(f)] += in[i] * out[o];
                });
                break;
        }
    };
    if (p.pass == Pass::weight_gradient) {
#pragma omp parallel for schedule(static)
        for (std::int64_t filter = 0; filter < p.w.size[0]; ++filter)
            for (std::int64_t image = 0; image < p.x.size[0]; ++image)
                for (std::int64_t channel = 0; channel < group_channels; ++channel)
                    planes(image, filter, channel);
    } else {
#pragma omp parallel for schedule(static)
        for (std::int64_t image = 0; image < p.x.size[0]; ++image)
            for (std::int64_t filter = 0; filter < p.w.size[0]; ++filter)
                for (std::int64_t channel = 0; channel < group_channels; ++channel)
                    planes(image, filter, channel);
    }
    for (std::int64_t i = 0; i < count; ++i) {
        T value = static_cast<T>(alpha) * sums[static_cast<std::size_t>(i)];
        if (beta != 0) value += static_cast<T>(beta) * static_cast<T>(element_at(p.x.type, result, i));
        store_at(p.x.type, result, i, static_cast<double>(value));
    }
}

/// The common part of the three passes. The result is one of x, w, y.
cudnnStatus_t run(cudnnHandle_t handle, const Problem& p, const void* alpha, const void* beta, const void* x,
                  const void* w, const void* y, void* result, int algorithm, void* workspace,
                  std::size_t workspace_bytes, const char* name) {
    if (alpha == nullptr || beta == nullptr || x == nullptr || w == nullptr || y == nullptr)
        return refused(CUDNN_STATUS_BAD_PARAM, "alpha, beta or a tensor is NULL");
    const std::int64_t needed = workspace_of(p, algorithm);
    if (needed < 0)
        return refused(CUDNN_STATUS_NOT_SUPPORTED,
                       "this double has no algorithm " + std::to_string(algorithm));
    if (workspace_bytes < static_cast<std::size_t>(needed) || (needed > 0 && workspace == nullptr))
        return refused(CUDNN_STATUS_BAD_PARAM,
                       "the algorithm needs a workspace of " + std::to_string(needed) +
                           " bytes and was given " +
                           std::to_string(workspace == nullptr ? 0 : workspace_bytes));
    for (const void* pointer : {x, w, y})
        if (reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes_of(p.x.type)) != 0)
            return refused(CUDNN_STATUS_BAD_PARAM, "a tensor is not aligned to its elements");
    // The reference: "alpha and beta are of type float, for double tensors of type double".
    const auto scalar = [&](const void* pointer) {
        return p.x.type == CUDNN_DATA_DOUBLE ? *static_cast<const double*>(pointer)
                                             : static_cast<double>(*static_cast<const float*>(pointer));
    };
    const double factor = scalar(alpha), kept = scalar(beta);
    const cudaError_t status = library_call(handle->stream, name, [=] {
        const std::int64_t element = bytes_of(p.x.type);
        if (p.pass != Pass::data_gradient || kept != 0) check_read(x, count_of(p.x.size) * element, "x");
        if (p.pass != Pass::weight_gradient || kept != 0) check_read(w, count_of(p.w.size) * element, "w");
        if (p.pass != Pass::forward || kept != 0) check_read(y, count_of(p.y.size) * element, "y");
        const auto& size = p.pass == Pass::forward         ? p.y.size
                           : p.pass == Pass::data_gradient ? p.x.size
                                                           : p.w.size;
        check_write(result, count_of(size) * element, "the result");
        if (needed > 0) {
            check_write(workspace, needed, "workspace");
            std::memset(workspace, 0xff, static_cast<std::size_t>(needed));  // destroys the previous content
        }
        if (p.x.type == CUDNN_DATA_DOUBLE)
            convolve<double>(p, x, w, y, result, factor, kept);
        else
            convolve<float>(p, x, w, y, result, factor, kept);
    });
    return status == cudaSuccess ? CUDNN_STATUS_SUCCESS
                                 : refused(CUDNN_STATUS_EXECUTION_FAILED, last_fault_text());
}

}  // namespace
}  // namespace potluck::emulator

using namespace potluck::emulator;

extern "C" {

cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t handle, const cudnnTensorDescriptor_t x,
                                                      const cudnnFilterDescriptor_t w,
                                                      const cudnnConvolutionDescriptor_t convolution,
                                                      const cudnnTensorDescriptor_t y,
                                                      cudnnConvolutionFwdAlgo_t algorithm, size_t* bytes) {
    Problem p;
    const cudnnStatus_t status = read_problem(handle, x, w, convolution, y, Pass::forward, p);
    return status == CUDNN_STATUS_SUCCESS ? give_workspace(p, algorithm, bytes) : status;
}

cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(
    cudnnHandle_t handle, const cudnnFilterDescriptor_t w, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t convolution, const cudnnTensorDescriptor_t dx,
    cudnnConvolutionBwdDataAlgo_t algorithm, size_t* bytes) {
    Problem p;
    const cudnnStatus_t status = read_problem(handle, dx, w, convolution, dy, Pass::data_gradient, p);
    return status == CUDNN_STATUS_SUCCESS ? give_workspace(p, algorithm, bytes) : status;
}

cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dy,
    const cudnnConvolutionDescriptor_t convolution, const cudnnFilterDescriptor_t dw,
    cudnnConvolutionBwdFilterAlgo_t algorithm, size_t* bytes) {
    Problem p;
    const cudnnStatus_t status = read_problem(handle, x, dw, convolution, dy, Pass::weight_gradient, p);
    return status == CUDNN_STATUS_SUCCESS ? give_workspace(p, algorithm, bytes) : status;
}

cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t handle, const void* alpha,
                                      const cudnnTensorDescriptor_t x_layout, const void* x,
                                      const cudnnFilterDescriptor_t w_layout, const void* w,
                                      const cudnnConvolutionDescriptor_t convolution,
                                      cudnnConvolutionFwdAlgo_t algorithm, void* workspace,
                                      size_t workspace_bytes, const void* beta,
                                      const cudnnTensorDescriptor_t y_layout, void* y) {
    Problem p;
    if (const cudnnStatus_t status =
            read_problem(handle, x_layout, w_layout, convolution, y_layout, Pass::forward, p);
        status != CUDNN_STATUS_SUCCESS)
        return status;
    return run(handle, p, alpha, beta, x, w, y, y, algorithm, workspace, workspace_bytes,
               "cudnnConvolutionForward");
}

cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t handle, const void* alpha,
                                           const cudnnFilterDescriptor_t w_layout, const void* w,
                                           const cudnnTensorDescriptor_t dy_layout, const void* dy,
                                           const cudnnConvolutionDescriptor_t convolution,
                                           cudnnConvolutionBwdDataAlgo_t algorithm, void* workspace,
                                           size_t workspace_bytes, const void* beta,
                                           const cudnnTensorDescriptor_t dx_layout, void* dx) {
    Problem p;
    if (const cudnnStatus_t status =
            read_problem(handle, dx_layout, w_layout, convolution, dy_layout, Pass::data_gradient, p);
        status != CUDNN_STATUS_SUCCESS)
        return status;
    return run(handle, p, alpha, beta, dx, w, dy, dx, algorithm, workspace, workspace_bytes,
               "cudnnConvolutionBackwardData");
}

cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t handle, const void* alpha,
                                             const cudnnTensorDescriptor_t x_layout, const void* x,
                                             const cudnnTensorDescriptor_t dy_layout, const void* dy,
                                             const cudnnConvolutionDescriptor_t convolution,
                                             cudnnConvolutionBwdFilterAlgo_t algorithm, void* workspace,
                                             size_t workspace_bytes, const void* beta,
                                             const cudnnFilterDescriptor_t dw_layout, void* dw) {
    Problem p;
    if (const cudnnStatus_t status =
            read_problem(handle, x_layout, dw_layout, convolution, dy_layout, Pass::weight_gradient, p);
        status != CUDNN_STATUS_SUCCESS)
        return status;
    return run(handle, p, alpha, beta, x, dw, dy, dw, algorithm, workspace, workspace_bytes,
               "cudnnConvolutionBackwardFilter");
}

}  // extern "C"
