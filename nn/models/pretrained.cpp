#include "nn/models/pretrained.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/format.h"
#include "core/safetensors.h"

namespace potluck::nn {
namespace {

constexpr const char* head = "lm_head.weight";

/// The names of a published file's tensors in the model, and which of them the model does not use.
struct Published {
    StateDict state;
    std::vector<std::string> skipped;
};

/// All names but the head's may begin with `prefix` in the file; it is added where it is missing.
template <class IsTable>
Published read_published(const std::string& path, std::string_view prefix, IsTable is_table) {
    Published published;
    const TensorFile file = load_safetensors(path);
    const bool has_prefix = std::any_of(file.tensors.begin(), file.tensors.end(),
                                        [&](const auto& named) { return named.first.starts_with(prefix); });
    for (const auto& [name, tensor] : file.tensors) {
        if (is_table(std::string_view(name)))
            published.skipped.push_back(name);
        else
            published.state[has_prefix || name == head ? name : std::string(prefix) + name] = tensor;
    }
    return published;
}

LoadReport load_published(Module& model, const Published& published, const std::string& path) {
    try {
        LoadReport report = model.load_state_dict(published.state);
        report.unexpected = published.skipped;
        return report;
    } catch (const Error& error) {
        throw Error("load_pretrained", fmt::format("{}: {}", path, error.what()));
    }
}

}  // namespace

LoadReport load_pretrained(GPT2& model, const std::string& path) {
    Published published = read_published(path, "transformer.", [](std::string_view name) {
        return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    });
    const auto embedding = published.state.find("transformer.wte.weight");
    if (embedding != published.state.end()) published.state.emplace(head, embedding->second);
    return load_published(model, published, path);
}

LoadReport load_pretrained(Llama& model, const std::string& path) {
    const Published published = read_published(
        path, "model.", [](std::string_view name) { return name.ends_with(".rotary_emb.inv_freq"); });
    return load_published(model, published, path);
}

}  // namespace potluck::nn
