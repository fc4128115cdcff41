#include "nn/layers/attention.h"

#include <tuple>

#include "autograd/grad_mode.h"
#include "autograd/ops/attention.h"
#include "autograd/ops/rotary.h"
#include "autograd/ops/view.h"
#include "core/format.h"
#include "nn/recompute.h"

namespace potluck::nn {
namespace {

/// The config with its defaults filled in.
AttentionConfig completed(AttentionConfig config) {
    if (!config.kv_heads) config.kv_heads = config.heads;
    if (config.head_size == 0) {
        check_heads("attention", config.width, config.heads, *config.kv_heads);
        config.head_size = config.width / config.heads;
    } else {
        check_heads("attention", config.heads * config.head_size, config.heads, *config.kv_heads);
    }
    if (config.width < 1 || config.head_size < 1) {
        throw Error("attention", fmt::format("width {} and head_size {} must be at least 1.", config.width,
                                             config.head_size));
    }
    if (!(config.dropout >= 0.0 && config.dropout <= 1.0)) {
        throw Error("attention", fmt::format("dropout is {}. A probability lies in [0, 1].", config.dropout));
    }
    const Tensor& cosine = config.rotary.cosine;
    if (cosine.defined() && cosine.size(-1) * 2 != config.head_size) {
        throw Error("attention", fmt::format("the rotary table is for heads of {}, and the heads have {}.",
                                             cosine.size(-1) * 2, config.head_size));
    }
    return config;
}

Linear projection(const AttentionConfig& config, std::int64_t in, std::int64_t out) {
    return Linear(in, out, {.bias = config.bias, .initialize = config.initialize});
}

}  // namespace

void check_heads(std::string_view op, std::int64_t width, std::int64_t heads, std::int64_t kv_heads) {
    if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0) {
        throw Error(
            op, fmt::format("{} heads cannot share {} key and value heads. Choose numbers from 1 on of which "
                            "the second divides the first.",
                            heads, kv_heads));
    }
    if (width < 1 || width % heads != 0) {
        throw Error(
            op, fmt::format("a width of {} cannot be cut into {} heads. Choose a multiple.", width, heads));
    }
}

Tensor split_heads(const Tensor& x, std::int64_t heads) {
    check_heads("split_heads", x.size(2), heads, heads);
    return x.reshape({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
}

Tensor merge_heads(const Tensor& x) {
    return x.transpose(1, 2).reshape({x.size(0), x.size(2), x.size(1) * x.size(3)});
}

KeyValueCache::KeyValueCache(std::int64_t layers, std::int64_t batch, std::int64_t kv_heads,
                             std::int64_t capacity, std::int64_t head_size, TensorOptions options)
    : capacity_(capacity) {
    if (layers < 1 || batch < 1 || kv_heads < 1 || capacity < 1 || head_size < 1 ||
        !is_floating(options.dtype)) {
        throw Error("key_value_cache",
                    fmt::format("{} layers, batch {}, {} kv_heads, capacity {} and head_size {} must be at "
                                "least 1, and the dtype ({}) floating.",
                                layers, batch, kv_heads, capacity, head_size, options.dtype));
    }
    for (std::int64_t i = 0; i < layers; ++i) {
        keys_.push_back(Tensor::empty({batch, kv_heads, capacity, head_size}, options));
        values_.push_back(Tensor::empty({batch, kv_heads, capacity, head_size}, options));
    }
}

std::pair<Tensor, Tensor> KeyValueCache::append(std::int64_t layer, const Tensor& keys,
                                                const Tensor& values) {
    if (is_grad_enabled()) {
        throw Error("key_value_cache",
                    "gradients are being recorded. A cache is for inference: put `NoGrad guard;` before.");
    }
    if (layer < 0 || layer >= static_cast<std::int64_t>(keys_.size())) {
        throw Error("key_value_cache", fmt::format("there is no layer {} among {}.", layer, keys_.size()));
    }
    const Tensor& stored = keys_[static_cast<std::size_t>(layer)];
    const std::int64_t time = keys.size(2);
    Shape fitting = stored.shape();
    fitting[2] = time;
    if (keys.shape() != fitting || values.shape() != fitting) {
        throw Error("key_value_cache",
                    fmt::format("keys {} and values {} do not belong to a cache of {}. Make a cache for "
                                "this batch and model.",
                                pretty(keys.shape()), pretty(values.shape()), pretty(stored.shape())));
    }
    if (length_ + time > capacity_) {
        throw Error("key_value_cache", fmt::format("{} tokens after {} do not fit into a cache of {}.", time,
                                                   length_, capacity_));
    }
    const auto store = [&](const Tensor& whole, const Tensor& fresh) {
        whole.narrow(2, length_, time).copy_(fresh);
        return whole.narrow(2, 0, length_ + time);
    };
    return {store(stored, keys), store(values_[static_cast<std::size_t>(layer)], values)};
}

Attention::Attention(AttentionConfig config) : Attention(completed(std::move(config)), Completed{}) {}

Attention::Attention(AttentionConfig config, Completed)
    : q_proj(projection(config, config.width, config.heads * config.head_size)),
      k_proj(projection(config, config.width, *config.kv_heads * config.head_size)),
      v_proj(projection(config, config.width, *config.kv_heads * config.head_size)),
      o_proj(projection(config, config.heads * config.head_size, config.width)),
      config_(std::move(config)) {}

void Attention::members(Members& m) {
    m("q_proj", q_proj)("k_proj", k_proj)("v_proj", v_proj)("o_proj", o_proj);
    m.buffer("rotary.cosine", config_.rotary.cosine, false).buffer("rotary.sine", config_.rotary.sine, false);
}

Tensor Attention::forward(const Tensor& x, KeyValueCache* cache, std::int64_t layer) {
    const RandomSiteScope site(random_site());
    if (x.ndim() != 3 || x.size(2) != q_proj.weight.size(1)) {
        throw Error("attention", fmt::format("the input is {}. It must be (batch, time, {}).",
                                             pretty(x.shape()), q_proj.weight.size(1)));
    }
    const std::vector<Tensor> projected{q_proj(x), k_proj(x), v_proj(x)};
    if (!recompute_ || cache != nullptr) return attend(projected, cache, layer);
    return recompute_in(
        *this, [this](const std::vector<Tensor>& in) { return attend(in, nullptr, 0); }, projected);
}

Tensor Attention::attend(const std::vector<Tensor>& projected, KeyValueCache* cache, std::int64_t layer) {
    const std::int64_t time = projected[0].size(1);
    Tensor q = split_heads(projected[0], heads());     // (batch, heads, time, head_size)
    Tensor k = split_heads(projected[1], kv_heads());  // (batch, kv_heads, time, head_size)
    Tensor v = split_heads(projected[2], kv_heads());
    if (config_.rotary.cosine.defined()) {
        const std::int64_t position = cache != nullptr ? cache->length() : 0;
        const Tensor cosine = config_.rotary.cosine.narrow(0, position, time);
        const Tensor sine = config_.rotary.sine.narrow(0, position, time);
        q = rotary(q, cosine, sine);
        k = rotary(k, cosine, sine);
    }
    if (cache != nullptr) std::tie(k, v) = cache->append(layer, k, v);
    const Tensor y = scaled_dot_product_attention(
        q, k, v, {.causal = config_.causal, .dropout = is_training() ? config_.dropout : 0.0});
    return o_proj(merge_heads(y));
}

std::string Attention::describe() const {
    return fmt::format("Attention({}, {} heads of {}, {} for keys and values{})", q_proj.weight.size(1),
                       heads(), config_.head_size, kv_heads(),
                       config_.rotary.cosine.defined() ? ", rotary" : "");
}

}  // namespace potluck::nn
