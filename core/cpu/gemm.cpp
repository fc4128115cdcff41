#include "core/cpu/gemm.h"

#include <omp.h>

#include <Eigen/Core>
#include <algorithm>
#include <concepts>
#include <memory>

#if POTLUCK_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#endif

#include "core/error.h"

namespace potluck::cpu {
namespace {

// Outside a parallel region both libraries split a product, and so its sums, by the number of threads: the bits would
// differ between machines. Restricted to one thread, they follow the caller's tiling.
class OneThread {
public:
    OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before_); }
    OneThread(const OneThread&) = delete;
    OneThread& operator=(const OneThread&) = delete;

private:
    int before_;
};

// The libraries require one axis without gaps, and a stride of the other axis of at least that axis's size.
template <class T>
bool is_row_major(const Matrix<T>& x) {
    return (x.column_stride == 1 || x.columns == 1) && (x.row_stride >= x.columns || x.rows == 1);
}

template <class T>
std::int64_t leading_stride(const Matrix<T>& row_major) {
    return row_major.rows == 1 ? row_major.columns : row_major.row_stride;
}

template <class T>
using RowMajor = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <class T>
auto map(const Matrix<const T>& row_major) {
    return Eigen::Map<const RowMajor<T>, 0, Eigen::OuterStride<>>(
        row_major.data, row_major.rows, row_major.columns, Eigen::OuterStride<>(leading_stride(row_major)));
}

template <class T>
void eigen_gemm(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<T>& c, bool accumulate) {
    Eigen::Map<RowMajor<T>, 0, Eigen::OuterStride<>> result(c.data, c.rows, c.columns,
                                                            Eigen::OuterStride<>(leading_stride(c)));
    const auto store = [&](const auto& left, const auto& right) {
        if (accumulate)
            result.noalias() += left * right;
        else
            result.noalias() = left * right;
    };
    const bool a_rows = is_row_major(a), b_rows = is_row_major(b);
    if (a_rows && b_rows)
        store(map(a), map(b));
    else if (a_rows)
        store(map(a), map(b.transposed()).transpose());
    else if (b_rows)
        store(map(a.transposed()).transpose(), map(b));
    else
        store(map(a.transposed()).transpose(), map(b.transposed()).transpose());
}

#if POTLUCK_ONEDNN
void check(dnnl_status_t status) {
    if (status == dnnl_out_of_memory) {
        throw OutOfMemory("matmul", "oneDNN found no memory for its packed operands.", 0);
    }
    if (status != dnnl_success) throw Error("matmul", "oneDNN refused the product.");
}

void library_gemm(const Matrix<const float>& a, const Matrix<const float>& b, const Matrix<float>& c,
                  bool accumulate) {
    const bool a_rows = is_row_major(a), b_rows = is_row_major(b);
    const dnnl_status_t status = dnnl_sgemm(
        a_rows ? 'N' : 'T', b_rows ? 'N' : 'T', c.rows, c.columns, a.columns, 1.0F, a.data,
        leading_stride(a_rows ? a : a.transposed()), b.data, leading_stride(b_rows ? b : b.transposed()),
        accumulate ? 1.0F : 0.0F, c.data, leading_stride(c));
    check(status);
}

dnnl::memory::desc described(const Matrix<const bfloat16>& x) {
    const bool rows = is_row_major(x);
    const std::int64_t stride = leading_stride(rows ? x : x.transposed());
    return {{x.rows, x.columns},
            dnnl::memory::data_type::bf16,
            rows ? dnnl::memory::dims{stride, 1} : dnnl::memory::dims{1, stride}};
}

template <class C>
bool library_bfloat16_gemm(const Matrix<const bfloat16>& a, const Matrix<const bfloat16>& b,
                           const Matrix<C>& c, bool accumulate) {
    static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    using Type = dnnl::memory::data_type;
    const dnnl::memory::desc a_described = described(a), b_described = described(b);
    const dnnl::memory::desc c_described({c.rows, c.columns}, std::same_as<C, float> ? Type::f32 : Type::bf16,
                                         dnnl::memory::dims{leading_stride(c), 1});
    dnnl::primitive_attr attributes;
    if (accumulate) {
        dnnl::post_ops sum;
        sum.append_sum();
        attributes.set_post_ops(sum);
    }
    try {
        // oneDNN keeps what it has generated for a shape.
#if DNNL_VERSION_MAJOR < 3
        const dnnl::matmul::primitive_desc product({a_described, b_described, c_described}, attributes,
                                                   engine, /*allow_empty=*/true);
#else
        const dnnl::matmul::primitive_desc product(engine, a_described, b_described, c_described, attributes,
                                                   /*allow_empty=*/true);
#endif
        if (!product) return false;
        dnnl::stream stream(engine);
        dnnl::matmul(product).execute(
            stream, {{DNNL_ARG_SRC, {a_described, engine, const_cast<bfloat16*>(a.data)}},
                     {DNNL_ARG_WEIGHTS, {b_described, engine, const_cast<bfloat16*>(b.data)}},
                     {DNNL_ARG_DST, {c_described, engine, c.data}}});
        stream.wait();
    } catch (const dnnl::error& error) {
        check(error.status);
    }
    return true;
}
#else
template <class C>
bool library_bfloat16_gemm(const Matrix<const bfloat16>&, const Matrix<const bfloat16>&, const Matrix<C>&,
                           bool) {
    return false;
}

void library_gemm(const Matrix<const float>& a, const Matrix<const float>& b, const Matrix<float>& c,
                  bool accumulate) {
    eigen_gemm(a, b, c, accumulate);
}
#endif

void library_gemm(const Matrix<const double>& a, const Matrix<const double>& b, const Matrix<double>& c,
                  bool accumulate) {
    eigen_gemm(a, b, c, accumulate);
}

template <class T>
bool has_dense_axis(const Matrix<const T>& x) {
    return is_row_major(x) || is_row_major(x.transposed());
}

// A row-major copy for the rare operand that has gaps in both axes (or repeats its elements).
template <class T>
Matrix<const T> packed(const Matrix<const T>& x, std::unique_ptr<T[]>& memory) {
    if (has_dense_axis(x)) return x;
    memory = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(x.rows * x.columns));
    for (std::int64_t i = 0; i < x.rows; ++i) {
        for (std::int64_t j = 0; j < x.columns; ++j) {
            memory[static_cast<std::size_t>(i * x.columns + j)] =
                x.data[i * x.row_stride + j * x.column_stride];
        }
    }
    return {memory.get(), x.rows, x.columns, x.columns, 1};
}

// The inner axis is copied in pieces of this many elements, to bound the memory.
constexpr std::int64_t packed_depth = 2048;

template <class T>
void fill_zeros(const Matrix<T>& c) {
    for (std::int64_t i = 0; i < c.rows; ++i) std::fill_n(c.data + i * c.row_stride, c.columns, T{});
}

template <class T>
void checked_gemm(const Matrix<const T>& a, const Matrix<const T>& b, const Matrix<T>& c, bool accumulate) {
    if (c.rows == 0 || c.columns == 0) return;
    const std::int64_t depth = a.columns;
    if (depth == 0) {
        if (accumulate) return;
        fill_zeros(c);
        return;
    }
    const OneThread guard;
    if (has_dense_axis(a) && has_dense_axis(b)) {
        library_gemm(a, b, c, accumulate);
        return;
    }
    for (std::int64_t first = 0; first < depth; first += packed_depth) {
        const std::int64_t length = std::min(packed_depth, depth - first);
        std::unique_ptr<T[]> a_memory, b_memory;
        library_gemm(packed(a.block(0, first, a.rows, length), a_memory),
                     packed(b.block(first, 0, length, b.columns), b_memory), c, accumulate || first > 0);
    }
}

template <class C>
bool checked_bfloat16_gemm(const Matrix<const bfloat16>& a, const Matrix<const bfloat16>& b,
                           const Matrix<C>& c, bool accumulate) {
    if (c.rows == 0 || c.columns == 0) return true;
    if (a.columns == 0) {
        if (!accumulate) fill_zeros(c);
        return true;
    }
    if (!has_dense_axis(a) || !has_dense_axis(b)) return false;
    const OneThread guard;
    return library_bfloat16_gemm(a, b, c, accumulate);
}

}  // namespace

void gemm(const Matrix<const float>& a, const Matrix<const float>& b, const Matrix<float>& c,
          bool accumulate) {
    checked_gemm(a, b, c, accumulate);
}

void gemm(const Matrix<const double>& a, const Matrix<const double>& b, const Matrix<double>& c,
          bool accumulate) {
    checked_gemm(a, b, c, accumulate);
}

bool has_fast_bfloat16_gemm() {
#if POTLUCK_ONEDNN && defined(__x86_64__)
    static const bool is_fast = [] {
        const auto has = [isa = dnnl_get_effective_cpu_isa()](dnnl_cpu_isa_t wanted) {
            return (isa & wanted) == wanted;
        };
        return has(dnnl_cpu_isa_avx512_core_amx) ||
               (has(dnnl_cpu_isa_avx512_core_bf16) && __builtin_cpu_is("amd"));
    }();
    return is_fast;
#else
    return false;
#endif
}

bool bfloat16_gemm(const Matrix<const bfloat16>& a, const Matrix<const bfloat16>& b, const Matrix<float>& c,
                   bool accumulate) {
    return checked_bfloat16_gemm(a, b, c, accumulate);
}

bool bfloat16_gemm(const Matrix<const bfloat16>& a, const Matrix<const bfloat16>& b,
                   const Matrix<bfloat16>& c, bool accumulate) {
    return checked_bfloat16_gemm(a, b, c, accumulate);
}

}  // namespace potluck::cpu
