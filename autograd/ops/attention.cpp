#include "autograd/ops/attention.h"

#include <cmath>
#include <limits>

#include "autograd/autocast.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/dropout_numbers.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/matmul.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/softmax.h"
#include "autograd/ops/support.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/op_scope.h"

namespace potluck {

namespace {

struct Sizes {
    std::int64_t batch, heads, kv_heads, queries, keys, head_size, value_size;
};

Sizes check(const char* name, const Tensor& q, const Tensor& k, const Tensor& v, const Attention& options) {
    for (const auto& [x, what] : {std::pair{&q, "q"}, std::pair{&k, "k"}, std::pair{&v, "v"}}) {
        detail::require_defined(name, *x, what);
        detail::require_floating(name, *x, what);
        if (x->ndim() != 4)
            throw Error(name, fmt::format("{} is {}, but (batch, heads, time, size) is needed.", what,
                                          pretty(x->shape())));
    }
    detail::require_same_device(name, {q, k, v, options.mask});
    const Sizes s{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)};
    if (k.size(0) != s.batch || v.size(0) != s.batch || k.size(3) != s.head_size || v.size(1) != s.kv_heads ||
        v.size(2) != s.keys)
        throw Error(
            name, fmt::format(
                      "q {}, k {} and v {} do not fit: batches must agree, q and k in head size, k and v in "
                      "heads and time.",
                      pretty(q.shape()), pretty(k.shape()), pretty(v.shape())));
    if (s.heads > 0 && (s.kv_heads == 0 || s.heads % s.kv_heads != 0))
        throw Error(
            name,
            fmt::format("{} query heads cannot share {} key-value heads evenly. The first must be a multiple "
                        "of the second.",
                        s.heads, s.kv_heads));
    if (!(options.dropout >= 0.0 && options.dropout <= 1.0))
        throw Error(name,
                    fmt::format("dropout is {}, but a probability in [0, 1] is needed.", options.dropout));
    if (!std::isfinite(options.scale))
        throw Error(name, fmt::format("scale is {}. Use a finite number.", options.scale));
    if (options.mask.defined()) {
        const Tensor& mask = options.mask;
        if (mask.dtype() != DType::boolean && !is_floating(mask.dtype()))
            throw Error(
                name, fmt::format(
                          "the mask is {}, but bool (true: may be seen) or floating (added to the scores) is "
                          "needed.",
                          mask.dtype()));
        (void)mask.broadcast_alias(name,
                                   {s.batch, s.heads, s.queries, s.keys});  // throws when it does not fit
    }
    return s;
}

double scale_of(const Attention& options, const Sizes& s) {
    return options.scale != 0.0 || s.head_size == 0 ? options.scale
                                                    : 1.0 / std::sqrt(static_cast<double>(s.head_size));
}

/// One random number per attention weight. The composed form uses the same numbers.
MaskNumbers take_numbers(const Tensor& q, const Sizes& s, const Attention& options) {
    if (options.dropout == 0.0) return {};
    return take_mask_numbers({s.batch, s.heads, s.queries, s.keys}, q.device());
}

/// What is hidden from queries, bool, broadcastable to (batch, heads, queries, keys); empty if nothing is hidden.
std::vector<Tensor> hidden_places(const Attention& options, const Sizes& s, Device device) {
    std::vector<Tensor> hidden;
    if (options.mask.defined())
        hidden.push_back(options.mask.dtype() == DType::boolean
                             ? logical_not(options.mask)
                             : options.mask.detach() == -std::numeric_limits<double>::infinity());
    if (options.causal) {
        const TensorOptions places{DType::i64, device};
        const Tensor last_seen = unsqueeze(arange(0, s.queries, 1, places), 1) + (s.keys - s.queries);
        hidden.push_back(greater(arange(0, s.keys, 1, places), last_seen));
    }
    return hidden;
}

/// Whether a row along the last axis contains infinity or NaN.
Tensor is_bad_row(const Tensor& x) { return logical_not(all(is_finite(x.detach()), {-1})); }

Tensor composed(const Tensor& given_q, const Tensor& given_k, const Tensor& given_v, const Sizes& s,
                const Attention& options, const MaskNumbers& numbers) {
    // As in the fused kernel, half types are only used for storage.
    const DType dtype = promote(promote(given_q.dtype(), given_k.dtype()), given_v.dtype());
    const DType inner = promote(dtype, DType::f32);
    // Each kv head serves a group of query heads: (batch, kv_heads, group, time, size), where k and v have group 1.
    const std::int64_t group = s.kv_heads == 0 ? 1 : s.heads / s.kv_heads;
    Tensor q = reshape(to(given_q, inner), {s.batch, s.kv_heads, group, s.queries, s.head_size});
    Tensor k = unsqueeze(to(given_k, inner), 2);
    Tensor v = unsqueeze(to(given_v, inner), 2);
    const Shape by_group{s.batch, s.kv_heads, group, s.queries, s.keys};
    const Shape by_head{s.batch, s.heads, s.queries, s.keys};

    // Multiplying by 0 does not hide infinity or NaN. So where anything is hidden, such rows are replaced by 0, and the
    // results that depend on a visible one are set to NaN.
    const std::vector<Tensor> hidden = hidden_places(options, s, q.device());
    const auto hide = [&](Tensor x, double value) {  // (batch, heads, queries, keys)
        for (const Tensor& places : hidden) x = masked_fill(x, places, value);
        return x;
    };
    const double nan = std::numeric_limits<double>::quiet_NaN();
    Tensor bad_queries, bad_keys, bad_values;
    if (!hidden.empty()) {
        bad_queries = unsqueeze(is_bad_row(q), -1);  // (batch, kv_heads, group, queries, 1)
        bad_keys = unsqueeze(is_bad_row(k), -1);     // (batch, kv_heads, 1, keys, 1)
        bad_values = logical_not(is_finite(v.detach()));
        q = masked_fill(q, bad_queries, 0.0);
        k = masked_fill(k, bad_keys, 0.0);
        v = masked_fill(v, bad_values, 0.0);
    }
    Tensor scores = matmul(q, transpose(k)) * scale_of(options, s);
    if (!hidden.empty())
        scores = masked_fill(masked_fill(scores, bad_queries, nan), transpose(bad_keys), nan);
    scores = reshape(scores, by_head);
    if (options.mask.defined() && options.mask.dtype() != DType::boolean) scores = scores + options.mask;
    scores = hide(scores, -std::numeric_limits<double>::infinity());
    Tensor weights = hide(softmax(scores), 0.0);  // also where the rest of the row is NaN
    if (options.dropout > 0.0)
        weights = detail::dropout_by_numbers(contiguous(weights), options.dropout, numbers);
    Tensor y = matmul(reshape(weights, by_group), v);
    if (!hidden.empty()) {
        const Tensor seen = reshape(hide(ones(by_head, {inner, q.device()}), 0.0), by_group);
        y = masked_fill(y, matmul(seen, to(bad_values, inner)) > 0.0, nan);
    }
    return to(reshape(y, {s.batch, s.heads, s.queries, s.value_size}), dtype);
}

/// (batch, heads, time, size) with the memory layout (batch, time, heads, size): merging the heads then needs no copy.
Tensor empty_by_time(std::int64_t batch, std::int64_t heads, std::int64_t time, std::int64_t size,
                     const Tensor& like) {
    return detail::permuted_alias(Tensor::empty({batch, time, heads, size}, {like.dtype(), like.device()}),
                                  {0, 2, 1, 3});
}

Tensor mask_for(const Tensor& mask, DType dtype) {
    return mask.defined() && mask.dtype() != DType::boolean ? detail::cast(mask, dtype) : mask;
}

/// Second derivatives: the recorded gradients of the composed form. New views replace the inputs, so that only this op
/// is differentiated, however its inputs depend on each other.
void composed_backward(const Saved& saved, const Tensor& dy, Gradients& dx, const Sizes& s, Attention options,
                       const MaskNumbers& numbers) {
    std::vector<Tensor> inputs, wanted;
    for (std::size_t i = 0; i < 4; ++i) {
        const Tensor x = saved[i];
        inputs.push_back(x.defined() && dx.wants(i) ? view(x, x.shape()) : x);
        if (dx.wants(i)) wanted.push_back(inputs.back());
    }
    options.mask = inputs[3];
    const Tensor y = composed(inputs[0], inputs[1], inputs[2], s, options, numbers);
    const std::vector<Tensor> found = gradients(y, wanted, {.gradient = dy, .create_graph = true});
    for (std::size_t i = 0, next = 0; i < 4; ++i) {
        if (!dx.wants(i)) continue;
        if (found[next].defined()) dx.add(i, found[next]);
        ++next;
    }
}

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& given_q, const Tensor& given_k, const Tensor& given_v,
                                    const Attention& options) {
    const char* name = "scaled_dot_product_attention";
    const OpScope scope(name);
    const Sizes s = check(name, given_q, given_k, given_v, options);
    const auto [q, k, v] = detail::autocast_operands(given_q, given_k, given_v);
    const DType dtype = promote(promote(q.dtype(), k.dtype()), v.dtype());
    const MaskNumbers numbers = take_numbers(q, s, options);
    const AttentionSpec kernel_options{options.causal, scale_of(options, s), options.dropout, numbers.key,
                                       numbers.part};
    const Tensor y =
        empty_by_time(s.batch, s.heads, s.queries, s.value_size, Tensor::empty({0}, {dtype, q.device()}));
    Tensor target = y;
    Tensor logsumexp = Tensor::empty({s.batch, s.heads, s.queries}, {accumulation_dtype(dtype), q.device()});
    backend(q.device())
        .attention(detail::cast(q, dtype), detail::cast(k, dtype), detail::cast(v, dtype),
                   mask_for(options.mask, dtype), kernel_options, target, logsumexp);

    Attention kept = options;
    kept.mask = Tensor();  // the saved tensors are kept separately
    return record(name, y, {q, k, v, options.mask}, {q, k, v, options.mask, y, logsumexp},
                  [s, kept, kernel_options, numbers](const Saved& saved, const Tensor& dy, Gradients& dx) {
                      if (is_grad_enabled()) return composed_backward(saved, dy, dx, s, kept, numbers);
                      const DType dtype = dy.dtype();
                      Tensor dq = empty_by_time(s.batch, s.heads, s.queries, s.head_size, dy);
                      Tensor dk = empty_by_time(s.batch, s.kv_heads, s.keys, s.head_size, dy);
                      Tensor dv = empty_by_time(s.batch, s.kv_heads, s.keys, s.value_size, dy);
                      Tensor dmask;
                      if (dx.wants(3))
                          dmask = Tensor::empty({s.batch, s.heads, s.queries, s.keys}, {dtype, dy.device()});
                      backend(dy.device())
                          .attention_backward(detail::cast(saved[0], dtype), detail::cast(saved[1], dtype),
                                              detail::cast(saved[2], dtype), mask_for(saved[3], dtype),
                                              saved[4], saved[5], dy, kernel_options, dq, dk, dv, dmask);
                      dx.add(0, dq);
                      dx.add(1, dk);
                      dx.add(2, dv);
                      if (dmask.defined()) dx.add(3, dmask);
                  });
}

Tensor attention_composed(const Tensor& q, const Tensor& k, const Tensor& v, const Attention& options) {
    const OpScope scope("attention_composed");
    const Sizes s = check("attention_composed", q, k, v, options);
    return composed(q, k, v, s, options, take_numbers(q, s, options));
}

}  // namespace potluck
