#include "nn/train/layered_accumulation.h"

#include <algorithm>
#include <utility>

#include "autograd/autocast.h"
#include "autograd/grad_mode.h"
#include "autograd/ops/cross_entropy.h"
#include "autograd/recompute.h"
#include "autograd/tape.h"
#include "core/async_copy.h"
#include "core/dtype_policy.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/random.h"
#include "core/random_scope.h"
#include "nn/train/micro_batches.h"
#include "nn/train/offload_store.h"

namespace potluck {
namespace {

/// The parameters of one stage, which are at home in the host's memory and on the device while the stage computes. Where
/// nothing is offloaded they are there all the time.
class Residence {
public:
    Residence(std::vector<Tensor> parameters, Device device) : device_(device) {
        for (Tensor& parameter : parameters) parameters_.push_back({std::move(parameter)});
    }
    Residence(Residence&&) = default;
    /// After an exception the parameters go home, without their gradients.
    ~Residence() {
        for (OffloadedParameter& offloaded : parameters_) {
            if (offloaded.inside) go_home(offloaded);
            drop_buffer(offloaded);
        }
    }

    /// Starts to copy them to the device.
    void prefetch() {
        for (OffloadedParameter& offloaded : parameters_) {
            if (offloaded.visiting.defined() || offloaded.parameter.device() == device_) continue;
            offloaded.home = offloaded.parameter.detach();
            offloaded.visiting = copied_to(device_, offloaded.home, offloaded.coming);
        }
    }
    /// From here on the parameters are on the device.
    void enter() {
        prefetch();
        for (OffloadedParameter& offloaded : parameters_) {
            if (!offloaded.visiting.defined() || offloaded.inside) continue;
            offloaded.coming.wait_on(StreamKind::compute);
            offloaded.coming = CopyHandle();
            offloaded.parameter.set_elements(offloaded.visiting);
            offloaded.version = offloaded.visiting.storage()->version();
            offloaded.inside = true;
        }
    }
    /// Memory for the gradients, so that it does not depend on the number of micro-batches; f32 for half types.
    void collect_gradients() {
        for (OffloadedParameter& offloaded : parameters_) {
            const Tensor& x = offloaded.parameter;
            if (!x.requires_grad() || x.node()->gradient_buffer.defined()) continue;
            set_gradient_buffer(x, empty(x.shape(), {accumulation_dtype(x.dtype()), x.device()}));
            offloaded.has_buffer = true;
        }
    }
    /// Back home; gradients that they have collected go along.
    void leave() {
        for (OffloadedParameter& offloaded : parameters_) {
            if (offloaded.inside) {
                const Tensor gradient = offloaded.parameter.grad();
                if (gradient.defined())
                    offloaded.gradient = copied_to(offloaded.home.device(), gradient, offloaded.going);
                if (offloaded.visiting.storage()->version() !=
                    offloaded.version) {  // a buffer that was written
                    const NoGrad guard;
                    offloaded.home.copy_(offloaded.visiting);
                }
                go_home(offloaded);
            }
            offloaded.visiting = offloaded.home = Tensor();
            drop_buffer(offloaded);
        }
    }
    /// Gives the parameters at home the gradients that went there.
    void settle() {
        for (OffloadedParameter& offloaded : parameters_) {
            offloaded.going.wait();
            if (offloaded.gradient.defined())
                offloaded.parameter.set_grad(std::exchange(offloaded.gradient, Tensor()));
        }
    }

private:
    struct OffloadedParameter {
        Tensor parameter;
        Tensor home = {}, visiting = {};  // its elements there and here, while it is away
        bool inside = false;
        std::uint64_t version = 0;  // of what is visiting, when it came
        bool has_buffer = false;
        CopyHandle coming = {}, going = {};
        Tensor gradient = {};  // on its way home
    };

    /// The gradient that shows the buffer stays.
    static void drop_buffer(OffloadedParameter& offloaded) {
        if (std::exchange(offloaded.has_buffer, false) && offloaded.parameter.requires_grad())
            set_gradient_buffer(offloaded.parameter, {});
    }
    static void go_home(OffloadedParameter& offloaded) {
        offloaded.parameter.set_grad({});
        offloaded.parameter.set_elements(offloaded.home);
        offloaded.inside = false;
    }

    Device device_;
    std::vector<OffloadedParameter> parameters_;
};

Tensor cross_entropy_of(const Tensor& logits, const Tensor& targets) {
    return cross_entropy(logits, targets);
}

}  // namespace

/// One walk through the stages.
class LayeredAccumulation::Pass {
public:
    Pass(LayeredAccumulation& owner, std::vector<MicroBatch> batches)
        : model_(owner.model_),
          loss_(owner.loss_),
          device_(owner.device()),
          layers_(static_cast<std::size_t>(model_.layers())),
          batches_(std::move(batches)),
          store_(device_, owner.options_.offload_inputs ? owner.options_.host : device_) {
        for (std::vector<Tensor>& parameters : owner.parameters_of_stages())
            stages_.emplace_back(std::move(parameters), device_);
        outside().enter();
    }

    /// The sum of the losses of all micro-batches, (1) f64 on the device, without gradients; the inputs of the blocks are
    /// dropped as soon as they have been used.
    LossSum evaluate() {
        const NoGrad guard;
        forward(/*keep=*/false);
        const Tensor sum = zeros({1}, {DType::f64, device_});
        std::int64_t count = 0;
        for (std::size_t m = 0; m < batches_.size(); ++m) {
            const RandomItemsScope items = items_of(m);
            const LossSum loss = loss_of(store_.take(place(layers_, m)), m);
            sum.add_(loss.sum);
            count += loss.count;
        }
        outside().leave();
        return {sum, count};
    }

    /// The same with the gradients of `loss_scale` times the sum.
    LossSum add_gradients(double loss_scale, PhaseTimer& timer) {
        timer.begin(Phase::forward);
        {
            const NoGrad guard;
            forward(/*keep=*/true);
        }
        const Tensor sum = zeros({1}, {DType::f64, device_});
        std::int64_t count = 0;
        outside().collect_gradients();
        timer.begin(Phase::backward);
        for (std::size_t m = 0; m < batches_.size(); ++m) {
            const RandomItemsScope items = items_of(m);
            store_.prefetch(place(layers_, m + 1));
            const Tensor x = store_.take(place(layers_, m)).set_requires_grad();
            const LossSum loss = loss_of(x, m);
            backward(loss.sum, {.gradient = scaled_gradient(loss.sum, loss_scale)});
            sum.add_(loss.sum.detach());
            count += loss.count;
            pass_on(m, place(layers_, m), x);
        }
        for (std::size_t i = layers_; i-- > 0;) {
            stages_[i].enter();
            if (i > 0) stages_[i - 1].prefetch();
            stages_[i].collect_gradients();
            for (std::size_t m = 0; m < batches_.size(); ++m) {
                const RandomItemsScope items = items_of(m);
                if (!flows_[m]) continue;
                store_.prefetch(place(i, m + 1));
                store_.prefetch(place(i + 1, m + 1));
                const Tensor x = store_.take(place(i, m)).set_requires_grad();
                const Tensor dy = store_.take(place(i + 1, m));
                const Tensor y = run_again([&] { return run(i, x); });
                if (y.requires_grad()) backward(y, {.gradient = dy});
                pass_on(m, place(i, m), x);
            }
            stages_[i].leave();
        }
        for (std::size_t m = 0; m < batches_.size(); ++m) {
            if (!flows_[m]) continue;
            const RandomItemsScope items = items_of(m);
            const Tensor dy = store_.take(place(0, m));
            const Tensor x = run_again([&] { return model_.embed(batches_[m].inputs.to(device_), 0); });
            if (x.requires_grad()) backward(x, {.gradient = dy});
        }
        outside().leave();
        for (Residence& stage : stages_) stage.settle();
        timer.end();
        return {sum, count};
    }

private:
    /// The last stage: all that belongs to no block.
    Residence& outside() { return stages_.back(); }
    /// Of what goes into block `layer` (the head for the last one) of micro-batch m.
    std::size_t place(std::size_t layer, std::size_t m) const {
        return m < batches_.size() ? layer * batches_.size() + m : static_cast<std::size_t>(-1);
    }
    RandomItemsScope items_of(std::size_t m) const {
        return {batches_[m].first_item, batches_[m].inputs.size(0)};
    }
    Tensor run(std::size_t layer, const Tensor& x) {
        const auto index = static_cast<std::int64_t>(layer);
        return model_.layer(index).forward(x, nullptr, index);
    }
    LossSum loss_of(const Tensor& x, std::size_t m) {
        const Tensor& targets = batches_[m].targets;
        return loss_(model_.head(model_.finish(x)), targets.defined() ? targets.to(device_) : targets,
                     batches_[m].counted);
    }

    /// Running statistics count the first run of a block alone.
    template <class Run>
    static Tensor run_again(const Run& run) {
        const detail::RecomputingScope again;
        return run();
    }
    /// Puts the gradient of x in the store for what comes before; without one, micro-batch m goes no further back.
    void pass_on(std::size_t m, std::size_t place, const Tensor& x) {
        const Tensor gradient = x.grad();
        flows_[m] = gradient.defined();
        if (flows_[m]) store_.put(place, gradient);
    }

    /// Puts what the head gets in the store, and with `keep` the inputs of all blocks.
    void forward(bool keep) {
        for (std::size_t m = 0; m < batches_.size(); ++m) {
            const RandomItemsScope items = items_of(m);
            store_.put(place(0, m), model_.embed(batches_[m].inputs.to(device_), 0));
        }
        for (std::size_t i = 0; i < layers_; ++i) {
            stages_[i].enter();
            if (i + 1 < layers_) stages_[i + 1].prefetch();
            for (std::size_t m = 0; m < batches_.size(); ++m) {
                const RandomItemsScope items = items_of(m);
                store_.prefetch(place(i, m + 1));
                store_.put(place(i + 1, m),
                           run(i, keep ? store_.get(place(i, m)) : store_.take(place(i, m))));
            }
            // The last block comes first on the way back.
            if (!keep || i + 1 < layers_) stages_[i].leave();
        }
    }

    nn::LanguageModel& model_;
    const LossFunction& loss_;
    Device device_;
    std::size_t layers_;
    std::vector<MicroBatch> batches_;
    OffloadStore store_;
    std::vector<bool> flows_ =
        std::vector<bool>(batches_.size(), true);  // a gradient goes on back, by micro-batch
    std::vector<Residence> stages_;                // the blocks, and one of all that is outside
};

LayeredAccumulation::LayeredAccumulation(nn::LanguageModel& model, optim::Optimizer& optimizer,
                                         LossFunction loss, const LayeredOptions& options)
    : model_(model),
      optimizer_(optimizer),
      loss_(loss ? std::move(loss) : LossFunction(cross_entropy_of)),
      options_(options),
      step_(model, optimizer, scaler_options(options.precision, options.loss_scaler)) {
    const Device home = model.parameters().front().device();
    if (options.offload_parameters && home != options.host)
        throw Error(
            "layered_accumulation",
            fmt::format("the model is on {}, but its parameters are to be kept on {}. Leave it there: "
                        "model.to({}), before the optimizer is made.",
                        home, options.host, options.host));
    if (!options.offload_parameters && options.device && *options.device != home)
        throw Error("layered_accumulation",
                    fmt::format("the model is on {} and is to be computed on {}. Move it there, or let "
                                "offload_parameters bring its blocks one by one.",
                                home, *options.device));
    if (options.offload_parameters) {
        std::vector<Tensor> seen;
        for (const std::vector<Tensor>& stage : parameters_of_stages()) {
            for (const Tensor& parameter : stage) {
                if (std::any_of(seen.begin(), seen.end(),
                                [&](const Tensor& x) { return x.is_same(parameter); }))
                    throw Error(
                        "layered_accumulation",
                        fmt::format(
                            "two blocks share a parameter {}, which cannot be on the device for one and "
                            "at home for the other. Leave offload_parameters out.",
                            pretty(parameter.shape())));
                seen.push_back(parameter);
            }
        }
    }
    model_.assign_random_sites();
}

LayeredAccumulation::~LayeredAccumulation() = default;

Device LayeredAccumulation::device() const {
    return options_.device ? *options_.device : model_.parameters().front().device();
}

std::vector<std::vector<Tensor>> LayeredAccumulation::parameters_of_stages() const {
    std::vector<std::vector<Tensor>> stages;
    std::vector<Tensor> outside = model_.parameters();
    for (std::int64_t i = 0; i < model_.layers(); ++i) {
        stages.push_back(model_.layer(i).parameters());
        for (const Tensor& parameter : stages.back())
            std::erase_if(outside, [&](const Tensor& other) { return other.is_same(parameter); });
    }
    // Buffers belong to the whole model: blocks share tables.
    if (options_.offload_parameters)
        for (const nn::NamedTensor& buffer : model_.named_buffers()) outside.push_back(buffer.tensor);
    stages.push_back(std::move(outside));
    return stages;
}

UpdateResult LayeredAccumulation::update(std::span<const data::Batch> micro_batches,
                                         const UpdateRequest& request) {
    const std::vector<Tensor> parameters = model_.parameters();
    StateBefore before(model_, parameters, buffer_copies_);
    try {
        const RandomUpdateScope random_update(request.number);
        const RandomSiteScope site(model_.random_site());
        UpdateResult result{.outcome = UpdateResult::Outcome::no_targets};
        const std::vector<MicroBatch> batches = counted_micro_batches(micro_batches);
        const std::int64_t targets = counted_targets(batches);
        if (targets > 0) {
            const double loss_scale = step_.begin(targets);
            LossSum loss;
            PhaseTimer pass_timer(device());
            {
                const Autocast precision(dtype_of(options_.precision));
                loss = Pass(*this, batches).add_gradients(loss_scale, pass_timer);
            }
            const Device home = parameters.front().device();
            const Tensor losses[] = {loss.sum.to(home)};
            PhaseTimer step_timer(home);
            result = step_.finish(request, home, loss.count, losses, step_timer);
            result.time += pass_timer.seconds();
        }
        if (result.outcome != UpdateResult::Outcome::applied) before.restore();
        optimizer_.zero_grad();
        model_.zero_grad();
        return result;
    } catch (...) {
        before.restore();
        optimizer_.zero_grad();
        model_.zero_grad();
        throw;
    }
}

LossTotal LayeredAccumulation::evaluate(data::Loader& loader) {
    const Autocast precision(dtype_of(options_.precision));
    const nn::EvalMode evaluating(model_);
    const GeneratorStates generators = generator_states(model_.parameters());
    LossTotal total;
    for (const data::Batch& batch : loader.pass()) {
        const std::vector<MicroBatch> batches = counted_micro_batches(std::span(&batch, 1));
        if (batches.empty()) continue;
        const LossSum loss = Pass(*this, batches).evaluate();
        total.sum += loss.sum.item();
        total.count += loss.count;
    }
    set_generator_states(generators);
    return total;
}

}  // namespace potluck
