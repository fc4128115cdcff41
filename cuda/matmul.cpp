// Matrix products by cuBLASLt. Layouts that can be described by a transposition, a leading dimension or a stride
// between matrices are passed to the library; other operands are copied first.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "cuda/kernels/matmul.h"
#include "cuda/matmul_plan.h"
#include "cuda/resources.h"

namespace potluck {
namespace {

using cuda::MatmulOperand;
using cuda::MatmulPlan;
using cuda::MatmulShape;

// The library takes the number of matrices as 32 bits, and some of its kernels are limited by the grid's y and z
// dimensions, 65535 blocks (tensorflow pull request 44175 found the same and splits there); this is a rounder number.
constexpr std::int64_t most_matrices = std::int64_t{63} * 1024;

/// The largest power of two, up to 256, that divides the address.
std::uint32_t alignment_of(const void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer) | 256;
    return static_cast<std::uint32_t>(address & (~address + 1));
}

/// Whether the library supports the layout of the last two axes; if so, `operand` describes it.
bool describe(const Tensor& x, MatmulOperand& operand) {
    const std::int64_t rows = x.size(-2), columns = x.size(-1);
    const std::int64_t row_stride = *(x.strides().end() - 2), column_stride = x.strides().back();
    if ((column_stride == 1 || columns == 1) && (row_stride >= columns || rows == 1)) {
        operand.transposed = false;
        operand.leading = rows == 1 ? columns : row_stride;
        return true;
    }
    if ((row_stride == 1 || rows == 1) && (column_stride >= rows || columns == 1)) {
        operand.transposed = true;
        operand.leading = columns == 1 ? rows : column_stride;
        return true;
    }
    return false;
}

/// A row-major copy, in which broadcast batches still share one matrix.
Tensor packed(Backend& device, const Tensor& x) {
    Shape shape = x.shape();
    for (std::size_t axis = 0; axis + 2 < shape.size(); ++axis)
        if (x.strides()[axis] == 0) shape[axis] = 1;
    Tensor copy = Tensor::empty(shape, {x.dtype(), x.device()});
    device.copy(x.alias(shape, x.strides(), x.offset()), copy);
    Strides strides = copy.strides();
    for (std::size_t axis = 0; axis + 2 < shape.size(); ++axis)
        if (x.strides()[axis] == 0) strides[axis] = 0;
    return copy.alias(x.shape(), strides, copy.offset());
}

/// A batch axis, after merging where the strides of all three operands allow it. Strides in elements.
struct BatchAxis {
    std::int64_t size, a, b, y;
};

std::vector<BatchAxis> batch_axes(const Tensor& a, const Tensor& b, const Tensor& y) {
    std::vector<BatchAxis> axes;
    for (std::size_t i = 0; i + 2 < y.shape().size(); ++i) {
        const BatchAxis axis{y.shape()[i], a.strides()[i], b.strides()[i], y.strides()[i]};
        if (axis.size == 1) continue;
        if (!axes.empty() && axes.back().a == axis.a * axis.size && axes.back().b == axis.b * axis.size) {
            const std::int64_t outer = axes.back().size;
            axes.back() = axis;
            axes.back().size *= outer;
        } else {
            axes.push_back(axis);
        }
    }
    return axes;
}

/// Batches that share the matrix b become rows of a: one large product instead of many.
void fold_batches(std::vector<BatchAxis>& axes, MatmulShape& shape) {
    while (!axes.empty() && axes.back().b == 0 && axes.back().y == shape.m * shape.n) {
        const std::int64_t step = axes.back().a;
        const bool rows_go_on = shape.m == 1 ? step >= shape.k : step == shape.m * shape.a.leading;
        if (shape.a.transposed || !rows_go_on) return;
        if (shape.m == 1) shape.a.leading = step;
        shape.m *= axes.back().size;
        axes.pop_back();
    }
}

/// A product prepared for the library: operands with a supported layout, and their shape.
struct Product {
    Tensor a, b;                   // keep copies alive
    std::vector<BatchAxis> outer;  // one library call for each index along these axes
    MatmulShape shape;
};

Product prepare(CudaBackend& device, const Tensor& a, const Tensor& b, const Tensor& y) {
    Product p{a, b, {}, {}};
    p.shape.dtype = a.dtype();
    p.shape.y_dtype = y.dtype();
    p.shape.tf32 = device.options().tf32;
    p.shape.m = y.size(-2);
    p.shape.n = y.size(-1);
    p.shape.k = a.size(-1);
    if (!describe(p.a, p.shape.a)) describe(p.a = packed(device, a), p.shape.a);
    if (!describe(p.b, p.shape.b)) describe(p.b = packed(device, b), p.shape.b);
    p.outer = batch_axes(p.a, p.b, y);
    fold_batches(p.outer, p.shape);
    if (p.outer.empty()) return p;
    // The longest axis becomes the library's batch.
    const auto longest =
        std::max_element(p.outer.begin(), p.outer.end(),
                         [](const BatchAxis& x, const BatchAxis& z) { return x.size < z.size; });
    p.shape.batch = longest->size;
    p.shape.a.batch_stride = longest->a;
    p.shape.b.batch_stride = longest->b;
    p.shape.y_batch_stride = longest->y;
    p.outer.erase(longest);
    return p;
}

/// Passes the library as many products as it accepts in one call.
struct Caller {
    CudaBackend& device;
    cuda::MatmulPlans& plans;
    cudaStream_t stream;
    cuda::Epilogue epilogue;
    bool accumulate;

    /// Returns false, without doing anything, when the library has no algorithm.
    bool call(MatmulShape shape, const std::byte* a, const std::byte* b, std::byte* y) const {
        shape.a.alignment = alignment_of(a);
        shape.b.alignment = alignment_of(b);
        shape.y_alignment = alignment_of(y);
        shape.bias_alignment = epilogue.bias == nullptr ? 0 : alignment_of(epilogue.bias);
        shape.before_alignment = epilogue.before == nullptr ? 0 : alignment_of(epilogue.before);
        const cublasLtHandle_t library = device.cublas();
        const auto plan =
            plans.get(shape, [&] { return std::make_shared<MatmulPlan>(library, shape, epilogue); });
        if (!plan->exists()) return false;
        const Device where = Device::cuda(device.index());
        const Tensor workspace = Tensor::empty({plan->workspace_bytes()}, {DType::u8, where});
        plan->run(library, a, b, epilogue, y, accumulate, workspace.raw_data(), stream);
        return true;
    }
};

/// y = a b (+ y, or + bias). Returns false, without doing anything, when the library has no algorithm.
bool multiply(const Product& p, Tensor& y, const Caller& caller) {
    const auto at = [](const Tensor& x, std::int64_t elements) {
        return static_cast<std::byte*>(x.raw_data()) + elements * size_of(x.dtype());
    };
    std::int64_t calls = 1;
    for (const BatchAxis& axis : p.outer) calls *= axis.size;
    for (std::int64_t index = 0; index < calls; ++index) {
        std::int64_t a_offset = 0, b_offset = 0, y_offset = 0, rest = index;
        for (auto axis = p.outer.rbegin(); axis != p.outer.rend(); ++axis) {
            const std::int64_t place = rest % axis->size;
            rest /= axis->size;
            a_offset += place * axis->a;
            b_offset += place * axis->b;
            y_offset += place * axis->y;
        }
        for (std::int64_t first = 0; first < p.shape.batch; first += most_matrices) {
            MatmulShape shape = p.shape;
            shape.batch = std::min(most_matrices, p.shape.batch - first);
            if (!caller.call(shape, at(p.a, a_offset + first * shape.a.batch_stride),
                             at(p.b, b_offset + first * shape.b.batch_stride),
                             at(y, y_offset + first * shape.y_batch_stride)))
                return false;
        }
    }
    return true;
}

Tensor transposed(const Tensor& x) {
    return x.alias({x.size(1), x.size(0)}, {x.strides()[1], x.strides()[0]}, x.offset());
}

/// x (rows, in) weight (out, in)^T and the epilogue in one call. Returns false, without doing anything, where the
/// library does not support it: it adds no vector in f64, and only a contiguous one.
bool linear_by_epilogue(CudaBackend& device, cuda::MatmulPlans& plans, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, void* before, Tensor& y) {
    if (y.count() == 0 || x.size(1) == 0 || !is_floating(y.dtype()) || y.dtype() == DType::f64) return false;
    if (bias.strides()[0] != 1 && bias.size(0) != 1) return false;
    return multiply(prepare(device, x, transposed(weight), y), y,
                    {device, plans, device.stream(), {bias.raw_data(), before}, /*accumulate=*/false});
}

}  // namespace

void CudaBackend::matmul(const Tensor& a, const Tensor& b, Tensor& y, bool accumulate) {
    if (y.dtype() == DType::boolean)
        throw Error("matmul", "there is no product of bool matrices. Convert them with to(DType::f32).");
    if (y.count() == 0) return;
    if (a.size(-1) == 0) {
        if (!accumulate) fill(y, 0);
        return;
    }
    if (!is_floating(y.dtype())) {
        cuda::integer_matmul(a, b, y, accumulate, stream());
        return;
    }
    const Product product = prepare(*this, a, b, y);
    if (!multiply(product, y, {*this, resources().matmul_plans, stream(), {}, accumulate}))
        throw Error(
            "matmul",
            fmt::format("cuBLASLt has no algorithm for {} x {} of {} with the strides {} and {}. Call "
                        "contiguous() on the operands.",
                        pretty(a.shape()), pretty(b.shape()), y.dtype(), pretty(a.strides()),
                        pretty(b.strides())));
}

void CudaBackend::linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) {
    if (options().bias_epilogue &&
        linear_by_epilogue(*this, resources().matmul_plans, x, weight, bias, nullptr, y))
        return;
    // y is initialised with the bias, and the product is added to it: one rounding, also in half types.
    copy(bias.broadcast_alias("linear", y.shape()), y);
    matmul(x, transposed(weight), y, /*accumulate=*/true);
}

void CudaBackend::linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& before,
                              Tensor& y) {
    // cublasLt.h: the leading dimension of the second output must be a multiple of 8.
    if (options().gelu_epilogue && y.size(1) % 8 == 0 &&
        linear_by_epilogue(*this, resources().matmul_plans, x, weight, bias, before.raw_data(), y))
        return;
    linear(x, weight, bias, before);
    unary(UnaryOp::gelu_tanh, before, y);
}

}  // namespace potluck
