#include "nn/branch.h"

#include "autograd/autocast.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "core/format.h"

namespace potluck::nn {

Members& Members::operator()(const std::string& name, Branch& branch) {
    if (!branch) return *this;
    branch.join(training_);
    add({name, Member::Kind::module, nullptr, &*branch});
    return *this;
}

Module& Branch::operator*() const {
    if (module_ == nullptr) throw Error("branch", "there is none. Assign a module first.");
    return *module_;
}

Tensor Branch::sum(const Tensor& y, const Tensor& x) const {
    Tensor added = (*module_)(x);
    if (Autocast::dtype() != DType::f32) added = added.to(y.dtype());
    if (added.shape() != y.shape()) {
        throw Error("branch",
                    fmt::format("{} makes {} where the layer makes {}. It must have the layer's sizes.",
                                module_->describe(), pretty(added.shape()), pretty(y.shape())));
    }
    if (added.dtype() != y.dtype()) {
        throw Error(
            "branch",
            fmt::format("{} makes {} where the layer makes {}. Convert it: (*layer.branch).to(DType::{}).",
                        module_->describe(), added.dtype(), y.dtype(), y.dtype()));
    }
    return y + added;
}

}  // namespace potluck::nn
