#include "autograd/recompute.h"

#include <any>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "autograd/anomaly.h"
#include "autograd/autocast.h"
#include "autograd/ops/support.h"
#include "autograd/tape.h"
#include "core/device_registry.h"
#include "core/format.h"
#include "core/op_scope.h"
#include "core/random.h"
#include "core/random_scope.h"

namespace potluck {

namespace {

using Region = std::function<Tensor(const std::vector<Tensor>&)>;

thread_local bool recomputing = false;
thread_local int open_regions = 0;

/// The region is computed while one lives.
class OpenRegion {
public:
    OpenRegion() noexcept { ++open_regions; }
    ~OpenRegion() { --open_regions; }
    OpenRegion(const OpenRegion&) = delete;
    OpenRegion& operator=(const OpenRegion&) = delete;
};

/// Of all default generators: a region may draw on any device.
GeneratorStates all_generator_states() {
    GeneratorStates states;
    for (const Device device : registered_devices())
        states[name_of(device)] = default_generator(device).state();
    return states;
}

/// Thrown through the region when it has made all that backward needs. No std::exception, which a region may catch.
struct Enough {};

/// One call of a region: what it needs to run again, and what that brought.
class Call {
public:
    Call(Region region, const std::vector<Tensor>& inputs) : region_(std::move(region)) {
        place_.name = "recompute";
        inputs_ = Saved(place_, {}, inputs);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    /// The place of the next tensor that an op of the region keeps.
    std::size_t next_place() { return places_++; }
    /// Parameters that Autocast rounded in the first run, which the second one must find as they were.
    void note(detail::RoundedParameters::Uses rounded) { rounded_ = std::move(rounded); }
    Tensor take(std::size_t place) {
        if (place >= made_.size() || !made_[place].defined()) run_again();
        return std::exchange(made_[place], Tensor());
    }

private:
    void run_again() {
        const OpScope scope("recompute");
        for (const auto& [storage, version] : rounded_)
            if (const auto alive = storage.lock(); alive == nullptr || alive->version() != version)
                throw Error(
                    "recompute",
                    "a parameter that the region uses was changed in place since. Call backward() before the "
                    "optimizer's step.");
        std::vector<Tensor> inputs;
        for (std::size_t i = 0; i < inputs_.size(); ++i) inputs.push_back(inputs_[i]);
        const GradMode recording(true);
        const Autocast precision(precision_);
        const AnomalyCheck no_check(false);  // the first time was checked
        const RandomContextScope random(random_);
        const detail::RecomputingScope again;
        const GeneratorStates now = all_generator_states();
        set_generator_states(generators_);

        made_.assign(places_, Tensor());
        std::size_t next = 0;
        const auto keep = [&](const Tensor& x) {
            if (x.storage()->is_parameter()) return std::any();
            if (next < places_) made_[next] = x.detach();
            if (++next == places_) throw Enough();
            return std::any();
        };
        try {
            const SavedTensorHooks hooks(keep, [](const std::any&) { return Tensor(); });
            const OpenRegion open;
            (void)region_(inputs);
        } catch (const Enough&) {
        } catch (...) {
            set_generator_states(now);
            throw;
        }
        set_generator_states(now);
        if (next != places_)
            throw Error("recompute",
                        fmt::format("the region kept {} tensors for backward when it was computed first, and "
                                    "{} the second time. It must do the same both times.",
                                    places_, next));
    }

    Region region_;
    Node place_;  // names the region in errors
    Saved inputs_;
    GeneratorStates generators_ = all_generator_states();
    detail::RoundedParameters::Uses rounded_;
    RandomContext random_ = RandomContext::current();
    DType precision_ = Autocast::dtype();
    std::size_t places_ = 0;
    std::vector<Tensor> made_;
};

/// Stands for a tensor that an op of the region keeps.
struct RecomputedTensor {
    std::shared_ptr<Call> call;
    std::size_t index;
};

}  // namespace

bool is_recomputing() noexcept { return recomputing; }
bool detail::is_in_region() noexcept { return open_regions > 0; }

detail::RecomputingScope::RecomputingScope() noexcept : outer_(std::exchange(recomputing, true)) {}
detail::RecomputingScope::~RecomputingScope() { recomputing = outer_; }

Tensor recompute(const Region& region, const std::vector<Tensor>& inputs) {
    if (!region) throw Error("recompute", "the region is empty. Give a function of the inputs.");
    if (!is_grad_enabled()) return region(inputs);
    const auto call = std::make_shared<Call>(region, inputs);
    const auto pack = [call](const Tensor& x) {
        if (x.storage()->is_parameter()) return std::any(x);
        return std::any(RecomputedTensor{call, call->next_place()});
    };
    const auto unpack = [](const std::any& packed) {
        if (const auto* x = std::any_cast<Tensor>(&packed)) return *x;
        const auto& packed_tensor = std::any_cast<const RecomputedTensor&>(packed);
        return packed_tensor.call->take(packed_tensor.index);
    };
    Tensor y;
    {
        const SavedTensorHooks hooks(pack, unpack);
        const OpenRegion open;
        detail::RoundedParameters rounded;
        y = region(inputs);
        call->note(rounded.take());
    }
    if (!y.defined() || y.node() == nullptr) return y;
    // The region's end shows on the tape.
    return record("recompute", y.detach(), {y}, {},
                  [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, dy); });
}

Tensor recompute(std::function<Tensor(const Tensor&)> region, const Tensor& input) {
    if (!region) throw Error("recompute", "the region is empty. Give a function of the input.");
    return recompute(
        [region = std::move(region)](const std::vector<Tensor>& inputs) { return region(inputs[0]); },
        {input});
}

}  // namespace potluck
