// Functions of one tensor, among them the activations, and the fused gradients of these. One thread processes a pack of
// adjacent elements (element_map.h) and dispatches on the op once per pack, so there is one kernel per dtype, not one
// per dtype and op.
//
// Floors: unary reads and writes each element once (2 sizeof(T) bytes), unary_backward reads x and dy and writes dx (3
// sizeof(T) bytes). The arithmetic, at most some forty operations per element, overlaps with the memory accesses.

#include "core/elementwise_errors.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/computed.h"
#include "cuda/kernels/element_map.h"
#include "cuda/kernels/elementary.h"

namespace potluck::cuda {
namespace {

struct Unary {
    UnaryOp op;
    template <int N, class T>
    __device__ void operator()(std::int64_t, Pack<T, N>& y, const Pack<T, N>& x) const {
        compute_type<T> values[N];
        to_computed(x, values);
        apply_unary(op, values);
        from_computed(values, y);
    }
};

/// Not inlined: one copy of the long arithmetic serves the whole pack.
template <class T>
[[gnu::noinline]] __device__ T sine_or_cosine(UnaryOp op, T x) {
    return op == UnaryOp::sine ? std::sin(x) : std::cos(x);
}

/// A separate kernel: large arguments need long arithmetic with a stack frame, which would affect the whole kernel.
struct SineOrCosine {
    UnaryOp op;
    template <int N, class T>
    __device__ void operator()(std::int64_t, Pack<T, N>& y, const Pack<T, N>& x) const {
        for (int i = 0; i < N; ++i)
            y.values[i] = from_compute<T>(sine_or_cosine(op, to_compute(x.values[i])));
    }
};

/// is_nan, is_finite, logical_not.
struct Test {
    UnaryOp op;
    template <int N, class T>
    __device__ void operator()(std::int64_t, Pack<bool, N>& y, const Pack<T, N>& x) const {
        compute_type<T> values[N];
        to_computed(x, values);
        for (int i = 0; i < N; ++i) {
            const compute_type<T> value = values[i];
            if (op == UnaryOp::logical_not)
                y.values[i] = value == 0;
            else if (op == UnaryOp::is_nan)
                y.values[i] = value != value;
            else  // infinity - infinity and NaN - NaN are NaN, which is not equal to itself
                y.values[i] = value - value == 0;
        }
    }
};

struct UnaryBackward {
    UnaryOp op;
    template <int N, class T>
    __device__ void operator()(std::int64_t, Pack<T, N>& dx, const Pack<T, N>& x,
                               const Pack<T, N>& dy) const {
        compute_type<T> values[N], slopes[N];
        to_computed(x, values);
        to_computed(dy, slopes);
        apply_unary_backward(op, values, slopes, slopes);
        from_computed(slopes, dx);
    }
};

bool writes_bool(UnaryOp op) {
    return op == UnaryOp::is_nan || op == UnaryOp::is_finite || op == UnaryOp::logical_not;
}

bool integers_have(UnaryOp op) {
    switch (op) {
        case UnaryOp::negate:
        case UnaryOp::absolute:
        case UnaryOp::sign:
        case UnaryOp::square:
        case UnaryOp::floor:
        case UnaryOp::ceil:
        case UnaryOp::round:
        case UnaryOp::relu:
            return true;
        default:
            return writes_bool(op);
    }
}

}  // namespace

void unary(KernelDevice& device, UnaryOp op, const Tensor& x, Tensor& y) {
    if (!is_floating(x.dtype()) && !integers_have(op)) throw no_integer_version(op, x.dtype());
    if (writes_bool(op)) {
        visit_device(x.dtype(), [&](auto zero) {
            ElementMap<bool, decltype(zero)>::run(device.stream(), Test{op}, y, x);
        });
    } else if (op == UnaryOp::sine || op == UnaryOp::cosine) {
        visit_device_floating(x.dtype(), [&](auto zero) {
            using T = decltype(zero);
            ElementMap<T, T>::run(device.stream(), SineOrCosine{op}, y, x);
        });
    } else {
        visit_device(x.dtype(), [&](auto zero) {
            using T = decltype(zero);
            ElementMap<T, T>::run(device.stream(), Unary{op}, y, x);
        });
    }
}

void unary_backward(KernelDevice& device, UnaryOp op, const Tensor& x, const Tensor& dy, Tensor& dx) {
    if (op != UnaryOp::relu && op != UnaryOp::gelu && op != UnaryOp::gelu_tanh && op != UnaryOp::silu)
        throw no_fused_backward(op);
    visit_device_floating(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        ElementMap<T, T, T>::run(device.stream(), UnaryBackward{op}, dx, x, dy);
    });
}

}  // namespace potluck::cuda
