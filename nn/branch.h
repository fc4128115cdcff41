#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include "nn/module.h"

namespace potluck::nn {

/// A module whose output is added to that of a layer. It is held by value: a copy of the layer contains a copy of it. A
/// Linear and a Conv1D compute x weight + bias + branch(x); the branch's parameters are named "branch." below the
/// layer's. So an adapter can be added to a given model without another model type:
///
///     gpt2.set_requires_grad(false);
///     gpt2.transformer.h[0].attn.c_attn.branch = Lora(768, 3 * 768, 8);
class Branch {
public:
    Branch() = default;
    template <class M>
    requires(std::derived_from<M, Module>&& std::copy_constructible<M>) Branch(M module)
        : module_(std::make_unique<M>(std::move(module))),
          copy_([](const Module& original) -> std::unique_ptr<Module> {
              return std::make_unique<M>(static_cast<const M&>(original));
          }) {}
    Branch(const Branch& other)
        : module_(other ? other.copy_(*other.module_) : nullptr),
          copy_(other.copy_),
          joined_(other.joined_) {}
    Branch(Branch&&) noexcept = default;
    Branch& operator=(Branch other) noexcept {
        joined_ = false;
        module_ = std::move(other.module_);
        copy_ = other.copy_;
        return *this;
    }
    ~Branch() = default;

    /// Whether there is a branch.
    explicit operator bool() const { return module_ != nullptr; }
    /// The module. Throws Error when there is none.
    Module& operator*() const;
    /// Puts a branch that was assigned after its layer was created into the layer's mode, once. Called whenever the
    /// layer is called or its members are listed.
    void join(bool training) {
        if (module_ != nullptr && !joined_) module_->train(training);
        joined_ = true;
    }
    /// Returns y + branch(x), or y without a branch. Throws Error when the two differ in shape or dtype.
    Tensor add_to(const Tensor& y, const Tensor& x, bool training) {
        if (module_ == nullptr) return y;
        join(training);
        return sum(y, x);
    }

private:
    Tensor sum(const Tensor& y, const Tensor& x) const;

    std::unique_ptr<Module> module_;
    std::unique_ptr<Module> (*copy_)(const Module&) = nullptr;
    bool joined_ = false;  // has got the mode of its layer
};

}  // namespace potluck::nn
