// Arithmetic and comparisons of two tensors, selection between two, and scaled sums. One thread processes a pack of
// adjacent elements (element_map.h) and dispatches on the op once per pack, so there is one kernel per dtype, not one
// per dtype and op.
//
// Floors: 3 sizeof(T) bytes an element for two operands of the full shape (a comparison writes 1 byte), fewer where one
// is broadcast; where reads 1 + 2 sizeof(T) and writes sizeof(T); add_scaled reads x and y and writes y; a chain reads each
// input and writes y once, however many steps it has. One to twenty operations an element and step.

#include "core/dtype_policy.h"
#include "core/elementwise_errors.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/computed.h"
#include "cuda/kernels/convert.h"
#include "cuda/kernels/element_map.h"
#include "cuda/kernels/elementary.h"

namespace potluck::cuda {
namespace {

struct Binary {
    BinaryOp op;
    template <int N, class T>
    __device__ void operator()(std::int64_t, Pack<T, N>& y, const Pack<T, N>& a, const Pack<T, N>& b) const {
        compute_type<T> left[N], right[N];
        to_computed(a, left);
        to_computed(b, right);
        apply_binary(op, left, right, left);
        from_computed(left, y);
    }
};

/// One of the operands is a number.
template <class Computed>
struct BinaryWithNumber {
    BinaryOp op;
    Computed number;
    bool number_first;
    template <int N, class T>
    __device__ void operator()(std::int64_t, Pack<T, N>& y, const Pack<T, N>& x) const {
        Computed left[N], right[N];
        for (int i = 0; i < N; ++i) {
            const Computed value = to_compute(x.values[i]);
            left[i] = number_first ? number : value;
            right[i] = number_first ? value : number;
        }
        apply_binary(op, left, right, left);
        from_computed(left, y);
    }
};

template <int N, class Computed>
__device__ void apply_compare(CompareOp op, const Computed (&a)[N], const Computed (&b)[N],
                              Pack<bool, N>& y) {
    const auto each = [&](auto function) {
        for (int i = 0; i < N; ++i) y.values[i] = function(a[i], b[i]);
    };
    switch (op) {
        case CompareOp::equal:
            return each([](auto u, auto v) { return u == v; });
        case CompareOp::not_equal:
            return each([](auto u, auto v) { return u != v; });
        case CompareOp::less:
            return each([](auto u, auto v) { return u < v; });
        case CompareOp::less_equal:
            return each([](auto u, auto v) { return u <= v; });
        case CompareOp::greater:
            return each([](auto u, auto v) { return u > v; });
        default:  // greater_equal
            return each([](auto u, auto v) { return u >= v; });
    }
}

struct Compare {
    CompareOp op;
    template <int N, class T>
    __device__ void operator()(std::int64_t, Pack<bool, N>& y, const Pack<T, N>& a,
                               const Pack<T, N>& b) const {
        compute_type<T> left[N], right[N];
        to_computed(a, left);
        to_computed(b, right);
        apply_compare(op, left, right, y);
    }
};

template <class Computed>
struct CompareWithNumber {
    CompareOp op;
    Computed number;
    template <int N, class T>
    __device__ void operator()(std::int64_t, Pack<bool, N>& y, const Pack<T, N>& x) const {
        Computed left[N], right[N];
        to_computed(x, left);
        for (int i = 0; i < N; ++i) right[i] = number;
        apply_compare(op, left, right, y);
    }
};

/// Moves words of the element's size, whatever the dtype.
struct Where {
    template <int N, class Word>
    __device__ void operator()(std::int64_t, Pack<Word, N>& y, const Pack<bool, N>& condition,
                               const Pack<Word, N>& a, const Pack<Word, N>& b) const {
        for (int i = 0; i < N; ++i) y.values[i] = condition.values[i] ? a.values[i] : b.values[i];
    }
};

/// y + factor x, where x may have another floating dtype.
template <class Computed>
struct AddScaled {
    Computed factor;
    template <int N, class T, class From>
    __device__ void operator()(std::int64_t, Pack<T, N>& y, const Pack<T, N>& sum,
                               const Pack<From, N>& x) const {
        for (int i = 0; i < N; ++i) {
            const Computed term = convert_element<Computed>(x.values[i]);
            if constexpr (std::is_integral_v<Computed>)
                y.values[i] = from_compute<T>(detail::integer(detail::bits(to_compute(sum.values[i])) +
                                                              detail::bits(factor) * detail::bits(term)));
            else
                y.values[i] = from_compute<T>(to_compute(sum.values[i]) + factor * term);
        }
    }
};

/// A chain of steps in registers. The steps are kernel parameters. The input of a step is selected by a branch, once
/// per pack, because registers cannot be indexed at run time.
struct Chain {
    int count;
    std::array<ChainStep, most_chain_steps> steps;

    template <int N, class T, class... More>
    __device__ void operator()(std::int64_t, Pack<T, N>& y, const Pack<T, N>& x, const More&... more) const {
        using Computed = compute_type<T>;
        Computed value[N], other[N];
        to_computed(x, value);
        for (int i = 0; i < count; ++i) {
            const ChainStep& step = steps[static_cast<std::size_t>(i)];
            if (step.kind == ChainStep::Kind::apply) {
                apply_unary(step.function, value);
                continue;
            }
            if (step.input == 0) to_computed(x, other);
            int place = 0;
            ((++place == step.input ? to_computed(more, other) : void()), ...);
            if (step.input == ChainStep::no_input)
                for (int j = 0; j < N; ++j) other[j] = static_cast<Computed>(step.number);
            if (step.kind == ChainStep::Kind::combine)
                apply_binary(step.op, value, other, value);
            else if (step.kind == ChainStep::Kind::combine_into)
                apply_binary(step.op, other, value, value);
            else
                apply_unary_backward(step.function, other, value, value);
        }
        from_computed(value, y);
    }
};

// Reports the first element of b that is 0 (for quotients) or negative (for exponents). Floor: reads b once.
template <class Index, class T>
__global__ void __launch_bounds__(256)
    check_operand_kernel(const Layout<1> layout, bool divides, const T* b, unsigned long long* fault) {
    for (std::int64_t i = global_thread(); i < layout.count; i += global_threads()) {
        std::int64_t offset[1];
        layout.offsets(static_cast<Index>(i), offset);
        const std::int64_t value = to_compute(b[offset[0]]);
        if (divides ? value == 0 : value < 0) atomicMin(fault, static_cast<unsigned long long>(i));
    }
}

/// The element at a row-major position, on the host.
std::int64_t integer_at(const Tensor& x, std::int64_t position) {
    std::int64_t offset = x.offset();
    for (std::size_t axis = x.shape().size(); axis-- > 0; position /= x.shape()[axis])
        offset += position % x.shape()[axis] * x.strides()[axis];
    return x.alias({}, {}, offset).item<std::int64_t>();
}

/// A number in the type in which the kernels compute with it.
template <class Computed>
Computed computed(const Scalar& number) {
    if constexpr (std::is_integral_v<Computed>)
        return number.to_int64();
    else
        return static_cast<Computed>(number.to_double());
}

}  // namespace

void binary(KernelDevice& device, BinaryOp op, const Operand& a, const Operand& second, Tensor& y) {
    const bool divides = op == BinaryOp::divide || op == BinaryOp::floor_divide || op == BinaryOp::remainder;
    const bool checked = !is_floating(y.dtype()) && (divides || op == BinaryOp::power) && y.count() > 0;
    if (checked && second.is_number()) {
        const std::int64_t value = second.number().to_int64();
        if (divides ? value == 0 : value < 0) throw bad_integer_operand(op, 0, value);
    }
    if (checked && !second.is_number()) {
        // Integers have no quotient by zero and no power with a negative exponent.
        const Tensor& b = second.tensor();
        FaultReporter report = [op, divides, b](std::int64_t position) {
            const std::int64_t value = integer_at(b, position);
            if (divides ? value == 0 : value < 0) throw bad_integer_operand(op, position, value);
        };
        const Layout<1> layout = layout_of<1>({&b});
        visit_device(b.dtype(), [&](auto zero) {
            using T = decltype(zero);
            if constexpr (std::is_integral_v<T>)
                launch(layout.fits<std::uint32_t>() ? check_operand_kernel<std::uint32_t, T>
                                                    : check_operand_kernel<std::uint64_t, T>,
                       dim3(blocks_for(layout.count, 256)), dim3(256), 0, device.stream(), layout, divides,
                       static_cast<const T*>(elements_of<T>(b)), device.fault_slot(std::move(report)));
        });
    }
    visit_device(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        if (a.is_number() || second.is_number()) {
            const BinaryWithNumber<Computed> body{
                op, computed<Computed>((a.is_number() ? a : second).number()), a.is_number()};
            ElementMap<T, T>::run(device.stream(), body, y, (a.is_number() ? second : a).tensor());
        } else {
            ElementMap<T, T, T>::run(device.stream(), Binary{op}, y, a.tensor(), second.tensor());
        }
    });
}

void compare(KernelDevice& device, CompareOp op, const Tensor& a, const Operand& b, Tensor& y) {
    visit_device(a.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        if (b.is_number())
            ElementMap<bool, T>::run(device.stream(),
                                     CompareWithNumber<Computed>{op, computed<Computed>(b.number())}, y, a);
        else
            ElementMap<bool, T, T>::run(device.stream(), Compare{op}, y, a, b.tensor());
    });
}

void where(KernelDevice& device, const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& y) {
    visit_word(y.dtype(), [&](auto zero) {
        using Word = decltype(zero);
        ElementMap<Word, bool, Word, Word>::run(device.stream(), Where{}, y, condition, a, b);
    });
}

void chain(KernelDevice& device, std::span<const Tensor> inputs, std::span<const ChainStep> steps,
           Tensor& y) {
    Chain body{static_cast<int>(steps.size()), {}};
    std::copy(steps.begin(), steps.end(), body.steps.begin());
    visit_device_floating(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        if (inputs.size() == 3)
            ElementMap<T, T, T, T>::run(device.stream(), body, y, inputs[0], inputs[1], inputs[2]);
        else
            ElementMap<T, T, T>::run(device.stream(), body, y, inputs[0], inputs[inputs.size() - 1]);
    });
}

void add_scaled(KernelDevice& device, const Tensor& x, double scale, Tensor& y) {
    const auto converted = [&](DType dtype) {
        if (x.dtype() == dtype) return x;
        Tensor copy_of_x = Tensor::empty(x.shape(), {dtype, x.device()});
        device.copy(x, copy_of_x);
        return copy_of_x;
    };
    if (!is_floating(y.dtype())) {
        const std::int64_t factor = Scalar(scale).to_int64();
        if (static_cast<double>(factor) != scale) throw no_integer_scale(scale, y.dtype());
        const Tensor whole = converted(DType::i64);
        visit_device(y.dtype(), [&](auto zero) {
            using T = decltype(zero);
            if constexpr (std::is_integral_v<T>)
                ElementMap<T, T, std::int64_t>::run(device.stream(), AddScaled<std::int64_t>{factor}, y, y,
                                                    whole);
        });
        return;
    }
    const Tensor terms = is_floating(x.dtype()) ? x : converted(accumulation_dtype(y.dtype()));
    visit_device_floating(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using Computed = compute_type<T>;
        visit_device_floating(terms.dtype(), [&](auto other) {
            ElementMap<T, T, decltype(other)>::run(
                device.stream(), AddScaled<Computed>{static_cast<Computed>(scale)}, y, y, terms);
        });
    });
}

}  // namespace potluck::cuda
