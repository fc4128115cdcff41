#include "cuda/fused_attention.h"

#include <limits>
#include <vector>

namespace potluck::cuda {
namespace {

constexpr std::int64_t largest_size = 128;
constexpr std::int64_t alignment = 16;

cudnnDataType_t data_type(DType dtype) { return dtype == DType::f16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16; }

FourSizes transposed(FourSizes of) {
    std::swap(of[2], of[3]);
    return of;
}

/// The strides in the library's form, or nullopt. Strides of axes of size 1 are arbitrary.
std::optional<FourSizes> strides_of(const Tensor& x) {
    if (reinterpret_cast<std::uintptr_t>(x.raw_data()) % alignment != 0) return std::nullopt;
    const std::int64_t pack = alignment / size_of(x.dtype());
    FourSizes strides{};
    for (std::size_t axis = 0; axis < 4; ++axis) {
        strides[axis] = x.strides()[axis];
        if (axis == 3) {
            if (x.size(3) == 1 || strides[3] != 1) return std::nullopt;
        } else if (x.size(static_cast<std::int64_t>(axis)) == 1) {
            strides[axis] = x.count();
        } else if (strides[axis] <= 0 || strides[axis] % pack != 0) {
            return std::nullopt;
        }
    }
    return strides;
}

bool takes_strides(FusedAttentionShape& shape, const std::vector<const Tensor*>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto strides = strides_of(*tensors[i]);
        if (!strides) return false;
        shape.strides[i] = *strides;
    }
    return true;
}

}  // namespace

std::optional<FusedAttentionShape> fused_attention_shape(const Tensor& q, const Tensor& k, const Tensor& v,
                                                         const Tensor& mask_or_none,
                                                         const AttentionSpec& options, const Tensor& y) {
    if (!is_half(q.dtype()) || mask_or_none.defined() || options.dropout > 0.0) return std::nullopt;
    FusedAttentionShape shape;
    shape.causal = options.causal;
    shape.dtype = q.dtype();
    shape.batch = q.size(0);
    shape.heads = q.size(1);
    shape.kv_heads = k.size(1);
    shape.queries = q.size(2);
    shape.keys = k.size(2);
    shape.head_size = q.size(3);
    shape.value_size = v.size(3);
    if (shape.batch == 0 || shape.heads == 0 || shape.queries == 0 || shape.keys == 0) return std::nullopt;
    if (shape.causal && shape.queries != shape.keys) return std::nullopt;
    for (const std::int64_t size : {shape.head_size, shape.value_size})
        if (size == 0 || size % 8 != 0 || size > largest_size) return std::nullopt;
    if (!takes_strides(shape, {&q, &k, &v, &y})) return std::nullopt;
    return shape;
}

std::optional<FusedAttentionShape> fused_attention_shape(const Tensor& q, const Tensor& k, const Tensor& v,
                                                         const Tensor& mask_or_none,
                                                         const AttentionSpec& options, const Tensor& y,
                                                         const Tensor& dy, const Tensor& dq, const Tensor& dk,
                                                         const Tensor& dv) {
    auto shape = fused_attention_shape(q, k, v, mask_or_none, options, y);
    if (!shape || !takes_strides(*shape, {&q, &k, &v, &y, &dy, &dq, &dk, &dv})) return std::nullopt;
    shape->is_backward = true;
    return shape;
}

FusedAttentionPlan::FusedAttentionPlan(cudnnHandle_t library, const FusedAttentionShape& shape)
    : is_backward_(shape.is_backward), causal_(shape.causal) {
    const cudnnDataType_t type = data_type(shape.dtype);
    const FourSizes row_sizes{shape.batch, shape.heads, shape.queries, 1};
    q_ = graph_.tensor(type, {shape.batch, shape.heads, shape.queries, shape.head_size}, shape.strides[0]);
    // The product needs k with its last axes swapped: (batch, kv_heads, head_size, keys).
    k_ = graph_.tensor(type, {shape.batch, shape.kv_heads, shape.head_size, shape.keys},
                       transposed(shape.strides[1]));
    y_ = graph_.tensor(type, {shape.batch, shape.heads, shape.queries, shape.value_size}, shape.strides[3]);
    logsumexp_ = graph_.tensor(CUDNN_DATA_FLOAT, row_sizes, packed_strides(row_sizes));
    scale_ = graph_.number();
    if (is_backward_)
        build_backward(shape);
    else
        build_forward(shape);
    plan_ = graph_.plan(library);
}

/// The scores; when causal, with -inf for keys after the query.
GraphTensor FusedAttentionPlan::masked(const FusedAttentionShape& shape, const GraphTensor& scores) {
    if (!shape.causal) return scores;
    hidden_ = graph_.number();
    const GraphTensor row = graph_.intermediate(scores.sizes, CUDNN_DATA_INT32);
    const GraphTensor column = graph_.intermediate(scores.sizes, CUDNN_DATA_INT32);
    const GraphTensor is_seen = graph_.intermediate(scores.sizes, CUDNN_DATA_BOOLEAN);
    const GraphTensor result = graph_.intermediate(scores.sizes);
    graph_.index_along(2, scores, row);
    graph_.index_along(3, scores, column);
    graph_.pointwise(CUDNN_POINTWISE_CMP_GE, row, column, is_seen);
    graph_.select(is_seen, scores, hidden_, result);
    return result;
}

void FusedAttentionPlan::build_forward(const FusedAttentionShape& shape) {
    const FourSizes sizes{shape.batch, shape.heads, shape.queries, shape.keys};
    v_ = graph_.tensor(data_type(shape.dtype), {shape.batch, shape.kv_heads, shape.keys, shape.value_size},
                       shape.strides[2]);
    const GraphTensor products = graph_.intermediate(sizes);
    const GraphTensor scaled = graph_.intermediate(sizes);
    graph_.matmul(q_, k_, products);
    graph_.pointwise(CUDNN_POINTWISE_MUL, products, scale_, scaled);
    const GraphTensor scores = masked(shape, scaled);

    const GraphTensor largest = graph_.intermediate(logsumexp_.sizes);
    const GraphTensor shifted = graph_.intermediate(sizes);
    const GraphTensor exponentials = graph_.intermediate(sizes);
    const GraphTensor total = graph_.intermediate(logsumexp_.sizes);
    const GraphTensor log_total = graph_.intermediate(logsumexp_.sizes);
    const GraphTensor weights = graph_.intermediate(sizes, data_type(shape.dtype));
    graph_.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, largest);
    graph_.pointwise(CUDNN_POINTWISE_SUB, scores, largest, shifted);
    graph_.pointwise(CUDNN_POINTWISE_EXP, shifted, exponentials);
    graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, exponentials, total);
    graph_.pointwise(CUDNN_POINTWISE_LOG, total, log_total);
    graph_.pointwise(CUDNN_POINTWISE_ADD, largest, log_total, logsumexp_);
    graph_.pointwise(CUDNN_POINTWISE_DIV, exponentials, total, weights);
    graph_.matmul(weights, v_, y_);
}

void FusedAttentionPlan::build_backward(const FusedAttentionShape& shape) {
    const cudnnDataType_t type = data_type(shape.dtype);
    const FourSizes sizes{shape.batch, shape.heads, shape.queries, shape.keys};
    // Seen with the keys as rows: (batch, heads, keys, queries).
    const FourSizes turned = transposed(sizes), turned_strides = transposed(packed_strides(sizes));
    const FourSizes k_sizes{shape.batch, shape.kv_heads, shape.keys, shape.head_size};
    const FourSizes v_sizes{shape.batch, shape.kv_heads, shape.keys, shape.value_size};
    v_ = graph_.tensor(type, transposed(v_sizes), transposed(shape.strides[2]));
    dy_ = graph_.tensor(type, y_.sizes, shape.strides[4]);
    dq_ = graph_.tensor(type, q_.sizes, shape.strides[5]);
    dk_ = graph_.tensor(type, k_sizes, shape.strides[6]);
    dv_ = graph_.tensor(type, v_sizes, shape.strides[7]);
    one_ = graph_.number();
    row_sum_ = graph_.tensor(CUDNN_DATA_FLOAT, logsumexp_.sizes, packed_strides(logsumexp_.sizes));
    row_sums_ = shape.batch * shape.heads * shape.queries;

    // dy . y. The library expects a multiplication after it, which dropout would use.
    const GraphTensor elements = graph_.intermediate(y_.sizes);
    const GraphTensor unscaled_sum = graph_.intermediate(logsumexp_.sizes);
    graph_.pointwise(CUDNN_POINTWISE_MUL, dy_, y_, elements);
    graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, elements, unscaled_sum);
    graph_.pointwise(CUDNN_POINTWISE_MUL, unscaled_sum, one_, row_sum_);

    // The weights, and dv.
    const GraphTensor products = graph_.intermediate(sizes);
    const GraphTensor scaled = graph_.intermediate(sizes);
    const GraphTensor shifted = graph_.intermediate(sizes);
    const GraphTensor weights = graph_.intermediate(sizes);
    const GraphTensor turned_weights = graph_.intermediate(turned, turned_strides, type);
    graph_.matmul(q_, k_, products);
    graph_.pointwise(CUDNN_POINTWISE_MUL, products, scale_, scaled);
    graph_.pointwise(CUDNN_POINTWISE_SUB, scaled, logsumexp_, shifted);
    graph_.pointwise(CUDNN_POINTWISE_EXP, masked(shape, shifted), weights);
    graph_.reshape(weights, turned_weights);
    const bool is_grouped = shape.heads != shape.kv_heads;
    // With grouped heads, each query head gets its own gradient, and those of a group are then added.
    const auto multiply = [&](const GraphTensor& left, const GraphTensor& right, const GraphTensor& result) {
        if (!is_grouped) return graph_.matmul(left, right, result);
        FourSizes all_heads = result.sizes;
        all_heads[1] = shape.heads;
        const GraphTensor each = graph_.intermediate(all_heads, type);
        graph_.matmul(left, right, each);
        graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, each, result);
    };
    multiply(turned_weights, dy_, dv_);

    // The gradients of the scores, dk and dq. Writing dq directly as the product, and not as an accumulated sum that is
    // rounded afterwards, selects the library's deterministic variant: it keeps the gradients of all scores in its
    // workspace.
    const GraphTensor weight_gradients = graph_.intermediate(sizes);
    const GraphTensor centered = graph_.intermediate(sizes);
    const GraphTensor unscaled = graph_.intermediate(sizes);
    const GraphTensor gradients = graph_.intermediate(sizes);
    const GraphTensor turned_gradients = graph_.intermediate(turned, turned_strides, type);
    const GraphTensor k_rows = graph_.intermediate(k_sizes, shape.strides[1], type);
    graph_.matmul(dy_, v_, weight_gradients);
    graph_.pointwise(CUDNN_POINTWISE_SUB, weight_gradients, row_sum_, centered);
    graph_.pointwise(CUDNN_POINTWISE_MUL, centered, weights, unscaled);
    graph_.pointwise(CUDNN_POINTWISE_MUL, unscaled, scale_, gradients);
    graph_.reshape(gradients, turned_gradients);
    multiply(turned_gradients, q_, dk_);
    graph_.reshape(k_, k_rows);
    graph_.matmul(gradients, k_rows, dq_);
}

void FusedAttentionPlan::run(cudnnHandle_t library, const FusedAttentionTensors& tensors, float scale,
                             void* row_sums, void* workspace) const {
    float one = 1.0F;
    float hidden = -std::numeric_limits<float>::infinity();
    std::vector<GraphOperand> operands{
        {q_, tensors.q}, {k_, tensors.k}, {v_, tensors.v}, {y_, tensors.y}, {logsumexp_, tensors.logsumexp},
        {scale_, &scale}};
    if (causal_) operands.push_back({hidden_, &hidden});
    if (is_backward_)
        for (const GraphOperand& operand : std::initializer_list<GraphOperand>{{dy_, tensors.dy},
                                                                               {dq_, tensors.dq},
                                                                               {dk_, tensors.dk},
                                                                               {dv_, tensors.dv},
                                                                               {row_sum_, row_sums},
                                                                               {one_, &one}})
            operands.push_back(operand);
    plan_->run(library, operands, workspace);
}

}  // namespace potluck::cuda
