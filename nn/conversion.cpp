// How the tensors of a module are replaced, moved and converted.

#include <algorithm>
#include <utility>

#include "autograd/grad_mode.h"
#include "autograd/ops/copy.h"
#include "autograd/tape.h"
#include "core/format.h"
#include "nn/module.h"
#include "nn/tied.h"

namespace potluck::nn {

using detail::named_tensors_of;
using detail::NamedMember;
using detail::tensors_of;
using detail::Tied;
using Kind = Member::Kind;

namespace {

/// Whether two tensors show the same elements, in the same order: tied by their memory.
bool show_same_elements(const Tensor& a, const Tensor& b) {
    return a.storage() == b.storage() && a.offset() == b.offset() && a.dtype() == b.dtype() &&
           a.count() == b.count() && a.is_contiguous() && b.is_contiguous();
}

}  // namespace

void Module::replace_tensors(const std::function<Tensor(const Tensor&, Kind)>& change) {
    std::vector<std::pair<Tensor, Tensor>> replaced;
    for (const NamedMember& named : named_tensors_of(*this)) {
        const auto known = std::find_if(replaced.begin(), replaced.end(),
                                        [&](const auto& pair) { return pair.first.is_same(*named.tensor); });
        if (known != replaced.end()) {
            *named.tensor = known->second;
            continue;
        }
        const Tensor old = *named.tensor;
        Tensor fresh = change(old, named.kind);
        const auto tied = std::find_if(replaced.begin(), replaced.end(), [&](const auto& pair) {
            return show_same_elements(pair.first, old) && pair.second.dtype() == fresh.dtype() &&
                   pair.second.device() == fresh.device();
        });
        if (tied != replaced.end() && !fresh.is_same(old))
            fresh.set_elements(tied->second.detach().reshape(fresh.shape()));
        *named.tensor = fresh;
        replaced.emplace_back(old, fresh);
    }
}

namespace {

/// `fresh(tensor)` as a leaf like `tensor`, its gradient treated the same way.
template <class Fresh>
Tensor leaf_like(const Tensor& tensor, Fresh fresh) {
    const NoGrad guard;
    Tensor leaf = fresh(tensor.detach());
    if (tensor.requires_grad()) leaf.set_requires_grad();
    if (tensor.grad().defined()) leaf.set_grad(fresh(tensor.grad().detach()));
    return leaf;
}

}  // namespace

namespace {

/// Makes every tensor of the module what `convert` makes of its elements, where that is another tensor. Nothing has changed
/// when `convert` throws.
void convert_tensors(const Module& module,
                     const std::function<Tensor(const Tensor& elements, Kind kind)>& convert) {
    const NoGrad guard;
    struct Converted {
        Tensor tensor, elements, gradient;
    };
    std::vector<Converted> all;
    std::vector<Tied> tensors = tensors_of(module, [](Kind) { return true; });
    // Parameters first, so that a buffer that shows the memory of one goes with it.
    std::stable_partition(tensors.begin(), tensors.end(),
                          [](const Tied& tied) { return tied.kind == Kind::parameter; });
    for (const Tied& tied : tensors) {
        const Tensor before = tied.tensor.detach();
        const auto known = std::find_if(all.begin(), all.end(), [&](const Converted& other) {
            return show_same_elements(other.tensor, before);
        });
        Converted one{
            tied.tensor,
            known == all.end() ? convert(before, tied.kind) : known->elements.reshape(before.shape()),
            {}};
        if (one.elements.is_same(before)) continue;
        if (const Tensor gradient = tied.tensor.grad(); gradient.defined()) {
            // An f32 gradient of a half type is not rounded on its way to another, nor in a buffer that stays.
            const bool stays = gradient.dtype() == DType::f32 && is_half(one.elements.dtype()) &&
                               gradient.device() == one.elements.device() &&
                               (is_half(before.dtype()) || tied.tensor.node()->gradient_buffer.defined());
            one.gradient = stays ? gradient.detach() : convert(gradient.detach(), tied.kind);
        }
        all.push_back(std::move(one));
    }
    for (Converted& one : all) {
        const bool collects = one.tensor.requires_grad();
        one.tensor.set_grad({});
        one.tensor.set_elements(one.elements);
        if (collects && one.gradient.defined()) one.tensor.set_grad(one.gradient);
    }
}

}  // namespace

void Module::to(Device device) {
    convert_tensors(*this, [&](const Tensor& x, Kind) { return x.device() == device ? x : x.to(device); });
}

void Module::to(DType dtype) {
    if (!is_floating(dtype)) {
        throw Error("module.to",
                    fmt::format("parameters cannot be {}. Choose f64, f32, f16 or bf16.", dtype));
    }
    convert_tensors(*this, [&](const Tensor& x, Kind kind) {
        return kind != Kind::parameter || x.dtype() == dtype || !is_floating(x.dtype()) ? x : x.to(dtype);
    });
}

void detach_copies(Module& module) {
    module.replace_tensors([](const Tensor& tensor, Kind) {
        return leaf_like(tensor, [](const Tensor& x) { return x.clone(); });
    });
}

}  // namespace potluck::nn
