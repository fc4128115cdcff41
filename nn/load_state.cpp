// How a state is loaded into a module.

#include <algorithm>
#include <set>

#include "autograd/grad_mode.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "core/format.h"
#include "nn/module.h"
#include "nn/names.h"
#include "nn/tied.h"

namespace potluck::nn {

using detail::saved_tensors_of;
using detail::Tied;

namespace {

bool same_values(const Tensor& a, const Tensor& b) {
    if (a.is_same(b)) return true;
    return a.dtype() == b.dtype() && all(a.to(Device::cpu()) == b.to(Device::cpu())).item<bool>();
}

}  // namespace

LoadReport Module::load_state_dict(const StateDict& state, bool strict) {
    struct Copy {
        Tensor to, from;
    };
    std::vector<Copy> copies;
    std::vector<std::string> unfit;
    LoadReport report;
    std::set<std::string> known;
    const std::vector<Tied> saved = saved_tensors_of(*this);
    for (const Tied& tied : saved) {
        std::string given_name;
        Tensor given;
        for (const std::string& name : tied.names) {
            known.insert(name);
            const auto found = state.find(name);
            if (found == state.end()) continue;
            const Tensor& value = found->second;
            if (value.shape() != tied.tensor.shape()) {
                unfit.push_back(fmt::format("{} has shape {} here and {} in the state", name,
                                            pretty(tied.tensor.shape()), pretty(value.shape())));
            } else if (is_floating(value.dtype()) != is_floating(tied.tensor.dtype())) {
                unfit.push_back(fmt::format("{} is {} here and {} in the state", name, tied.tensor.dtype(),
                                            value.dtype()));
            } else if (given.defined() && !same_values(given, value)) {
                unfit.push_back(
                    fmt::format("{} and {} are one tensor here and differ in the state", given_name, name));
            } else {
                given_name = name;
                given = value;
            }
        }
        if (given.defined()) {
            copies.push_back({tied.tensor, given});
        } else if (std::none_of(tied.names.begin(), tied.names.end(),
                                [&](const std::string& name) { return state.contains(name); })) {
            report.missing.push_back(fmt::format("{}", fmt::join(tied.names, " or ")));
        }
    }
    for (const auto& [name, value] : state) {
        if (!known.contains(name)) report.unexpected.push_back(name);
    }
    const std::string faults =
        faults_of({{"Missing", strict ? report.missing : std::vector<std::string>()},
                   {"Unexpected", strict ? report.unexpected : std::vector<std::string>()},
                   {"Unfit", unfit}});
    if (!faults.empty()) {
        throw Error("load_state_dict",
                    fmt::format("the state does not fit {}.{} Nothing was loaded.", describe(), faults));
    }
    if (copies.empty() && !saved.empty()) {
        throw Error(
            "load_state_dict",
            fmt::format("the state has no tensor of {}: it has {}, and the module {}. Nothing was loaded.",
                        describe(), state.empty() ? "none" : state.begin()->first + " ...",
                        saved.front().names.front() + " ..."));
    }
    const NoGrad guard;
    // A state may lie in the module's own memory, swapped or overlapping: it is read before that is written.
    for (Copy& copy : copies) {
        const bool aliases = std::any_of(copies.begin(), copies.end(), [&](const Copy& other) {
            return copy.from.storage() == other.to.storage();
        });
        if (aliases && !copy.from.is_same(copy.to)) copy.from = copy.from.clone();
    }
    for (const Copy& copy : copies) copy.to.copy_(copy.from.to(copy.to.device()));
    return report;
}

}  // namespace potluck::nn
