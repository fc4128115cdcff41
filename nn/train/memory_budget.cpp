#include "nn/train/memory_budget.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "autograd/autocast.h"
#include "autograd/ops/join.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/memory_trace.h"
#include "core/random_scope.h"
#include "nn/train/gradient_buffers.h"
#include "nn/train/loss_scaler.h"
#include "nn/train/state_before.h"

namespace potluck {
namespace {

constexpr const char* op = "memory_budget";

std::string in_megabytes(std::int64_t bytes) {
    return fmt::format("{:.2f} MB", 1e-6 * static_cast<double>(bytes));
}

/// The first `items` rows of `x`, which begin anew when there are fewer.
Tensor rows_of(const Tensor& x, std::int64_t items) {
    if (!x.defined() || x.ndim() == 0) return x;
    const std::int64_t times = (items + x.size(0) - 1) / x.size(0);
    const Tensor enough = times > 1 ? cat(std::vector<Tensor>(static_cast<std::size_t>(times), x), 0) : x;
    return enough.narrow(0, 0, items);
}

std::int64_t bytes_on(Device device, const Tensor& x) {
    return x.defined() && x.device() == device ? x.bytes() : 0;
}

/// A module in training mode while it lives, then each part back to what it was.
struct TrainingMode {
    explicit TrainingMode(nn::Module& module) : modes(module) { module.train(); }
    nn::EvalMode modes;
};

/// Buffers in f32 for the gradients of half types while it lives, as an update has them.
class GradientBuffers {
public:
    explicit GradientBuffers(const std::vector<Tensor>& parameters)
        : buffered_(add_gradient_buffers(parameters)) {}
    ~GradientBuffers() {
        for (Tensor parameter : buffered_) {
            parameter.set_grad({});
            set_gradient_buffer(parameter, {});
        }
    }
    GradientBuffers(const GradientBuffers&) = delete;
    GradientBuffers& operator=(const GradientBuffers&) = delete;

private:
    std::vector<Tensor> buffered_;
};

void drop_gradients(nn::Module& module, optim::Optimizer& optimizer) {
    module.zero_grad();
    optimizer.zero_grad();  // it may have parameters that the module has not
}

}  // namespace

std::string to_table(const MemoryPrediction& prediction, std::optional<std::int64_t> measured_peak) {
    std::string table = fmt::format("memory of an update, micro-batches of {} {}\n", prediction.items,
                                    prediction.items == 1 ? "item" : "items");
    const auto line = [&](const char* name, std::int64_t bytes, const std::string& more = "") {
        table += fmt::format("  {:<16} {:>12}{}\n", name, in_megabytes(bytes), more);
    };
    line("parameters", prediction.parameters);
    line("gradients", prediction.gradients);
    line("optimizer state", prediction.optimizer_state);
    if (prediction.buffers > 0) line("buffers", prediction.buffers);
    if (prediction.rounded > 0) line("rounded copies", prediction.rounded);
    if (prediction.batches > 0) line("batches", prediction.batches);
    line("activations", prediction.activations);
    line("workspace", prediction.workspace);
    if (prediction.before > 0) line("held before", prediction.before);
    line("predicted peak", prediction.peak());
    if (!measured_peak) return table;
    const std::int64_t beyond = *measured_peak - prediction.peak();
    line("measured peak", *measured_peak,
         fmt::format("  {:+.1f} %", 100.0 * static_cast<double>(beyond) /
                                        static_cast<double>(std::max<std::int64_t>(prediction.peak(), 1))));
    return table;
}

MemoryBudget::MemoryBudget(nn::Module& module, optim::Optimizer& optimizer, const data::Batch& sample,
                           const BudgetOptions& options)
    : module_(module), optimizer_(optimizer), sample_(sample), options_(options) {
    const auto refuse = [](const std::string& message) { throw Error(op, message); };
    if (options_.accumulate < 1)
        refuse(fmt::format("accumulate is {}. An update needs at least 1 micro-batch.", options_.accumulate));
    if (options_.read_ahead < 0)
        refuse(fmt::format("read_ahead is {}. It must not be negative.", options_.read_ahead));
    const std::vector<Tensor> parameters = module_.parameters();
    if (parameters.empty()) refuse("the module has no parameters. Name them in members().");
    if (!sample_.inputs.defined() || sample_.inputs.ndim() == 0 || sample_.inputs.size(0) == 0)
        refuse("the sample batch is empty. Give a batch of at least 1 item, such as a loader makes.");
    const std::int64_t items = sample_.inputs.size(0);
    if (sample_.targets.defined() && (sample_.targets.ndim() == 0 || sample_.targets.size(0) != items))
        refuse(fmt::format("the sample batch has inputs {} and targets {}. Both need a row for each item.",
                           pretty(sample_.inputs.shape()), pretty(sample_.targets.shape())));
    device_ = parameters.front().device();
    const PausedPeak unseen(device_);
    if (count_targets(sample_) == 0)
        refuse("no target of the sample batch counts, so it is no update. Give a batch with targets.");
    if (!options_.loss) options_.loss = LossFunction(module_);
    module_.assign_random_sites();
    drop_gradients(module_, optimizer_);
    count_state();
    extrapolate();
}

void MemoryBudget::count_state() {
    const std::int64_t items = sample_.inputs.size(0);
    const std::int64_t sample_bytes = bytes_on(device_, sample_.inputs) + bytes_on(device_, sample_.targets);
    if (sample_.inputs.device() == device_)
        item_bytes_ = (options_.accumulate + options_.read_ahead) * (sample_bytes / items);
    std::int64_t known =
        memory_statistics(device_).current;  // what is left when all that is known has been taken off
    known -= sample_bytes;
    for (const auto& [name, tensor] : optimizer_.state_dict()) known -= bytes_on(device_, tensor);
    for (const Tensor& parameter : module_.parameters()) {
        state_.parameters += parameter.bytes();
        if (!parameter.requires_grad()) continue;
        known -= bytes_on(device_, parameter.node()->gradient_buffer);
        if (is_half(parameter.dtype())) state_.gradients += parameter.count() * size_of(DType::f32);
    }
    for (const auto& buffer : module_.named_buffers()) state_.buffers += bytes_on(device_, buffer.tensor);
    state_.before = std::max<std::int64_t>(known - state_.parameters - state_.buffers, 0);
    state_.buffers *= 2;
    state_.optimizer_state = optimizer_.state_bytes();
}

/// Finds the steps of an update of any size from those of two small ones.
void MemoryBudget::extrapolate() {
    Probe small, large;
    std::int64_t items = 1;
    for (;; items *= 2) {
        try {
            small = probe(items);
            large = probe(items + 1);
            break;
        } catch (const OutOfMemory&) {
            throw;
        } catch (const Error&) {  // a batch norm, for instance, learns nothing from a single number
            if (items >= 4) throw;
        }
    }
    gradients_ = large.gradients;
    rounded_ = large.rounded;
    if (small.held.size() !=
        large.held.size()) {  // it goes another way with another size: only the peaks compare
        for (Probe* one : {&small, &large})
            one->held = {one->held.empty() ? 0 : *std::max_element(one->held.begin(), one->held.end())};
    }
    for (std::size_t i = 0; i < small.held.size(); ++i) {
        const auto per_item = static_cast<double>(large.held[i] - small.held[i]);
        timeline_.push_back(
            {static_cast<double>(small.held[i]) - per_item * static_cast<double>(items), per_item});
    }
}

/// Forward and backward, twice where micro-batches are added up: the second time gradients are there already.
void MemoryBudget::run(const data::Batch& rows, Probe& probe) const {
    const std::int64_t items = rows.inputs.size(0);
    const std::int64_t counted = std::max<std::int64_t>(count_targets(rows), 1);
    const RandomUpdateScope random_update(0);
    const detail::LossIsScaled no_warning;
    const MemoryTrace trace(device_);
    const Autocast precision(dtype_of(options_.precision));
    for (std::int64_t pass = 0; pass < std::min<std::int64_t>(options_.accumulate, 2); ++pass) {
        const RandomItemsScope random_items(0, items);
        const Tensor inputs = rows.inputs.to(device_);
        const Tensor targets = rows.targets.defined() ? rows.targets.to(device_) : rows.targets;
        const LossSum loss = options_.loss(inputs, targets, counted);
        backward(loss.sum, {.gradient = scaled_gradient(loss.sum, 1.0)});
    }
    probe.held = trace.after_allocations();
    for (const Tensor& parameter : module_.parameters())
        if (parameter.requires_grad() && !parameter.node()->gradient_buffer.defined())
            probe.gradients += bytes_on(device_, parameter.grad());
    drop_gradients(module_, optimizer_);
    probe.rounded = std::max<std::int64_t>(trace.held(), 0);
}

MemoryBudget::Probe MemoryBudget::probe(std::int64_t items) const {
    const PausedPeak unseen(device_);
    const data::Batch rows{.inputs = rows_of(sample_.inputs, items),
                           .targets = rows_of(sample_.targets, items)};
    const std::vector<Tensor> parameters = module_.parameters();
    const TrainingMode training(module_);
    std::vector<StateBefore::BufferCopy> copies;
    StateBefore before(module_, parameters, copies);
    const GradientBuffers buffers(parameters);
    Probe probe;
    try {
        run(rows, probe);
    } catch (...) {
        drop_gradients(module_, optimizer_);
        before.restore();
        throw;
    }
    before.restore();
    return probe;
}

MemoryPrediction MemoryBudget::at(std::int64_t items) const {
    if (items < 1) throw Error(op, fmt::format("micro-batches of {} items. They have at least 1.", items));
    MemoryPrediction prediction = state_;
    prediction.items = items;
    prediction.batches = item_bytes_ * items;
    const auto highest = std::max_element(
        timeline_.begin(), timeline_.end(),
        [items](const TimelinePoint& a, const TimelinePoint& b) { return a.bytes(items) < b.bytes(items); });
    // The optimizer works when backward has freed all but the gradients.
    if (highest == timeline_.end() || highest->bytes(items) <= static_cast<double>(gradients_)) {
        prediction.gradients += gradients_;
        return prediction;
    }
    auto fixed = static_cast<std::int64_t>(highest->fixed);
    prediction.activations = static_cast<std::int64_t>(highest->bytes(items)) - fixed;
    const auto take = [&fixed](std::int64_t most) {
        const std::int64_t taken = std::clamp<std::int64_t>(fixed, 0, most);
        fixed -= taken;
        return taken;
    };
    prediction.rounded = take(rounded_);
    prediction.gradients += take(gradients_);
    prediction.workspace = fixed;
    return prediction;
}

/// By the prediction alone.
std::int64_t MemoryBudget::predicted_batch(std::int64_t bytes, std::int64_t most) const {
    std::int64_t fits = 0, too_many = most + 1;
    while (too_many - fits > 1) {
        const std::int64_t middle = fits + (too_many - fits) / 2;
        (at(middle).peak() <= bytes ? fits : too_many) = middle;
    }
    return fits;
}

std::int64_t MemoryBudget::largest_batch(std::int64_t bytes, std::int64_t most) const {
    if (bytes < 0) throw Error(op, fmt::format("a budget of {} bytes. It must not be negative.", bytes));
    if (most < 1) throw Error(op, fmt::format("at most {} items. A micro-batch has at least 1.", most));
    std::int64_t items = predicted_batch(bytes, most);
    while (items > 0) {
        double too_large = 9.0 / 8.0;  // by which factor, where it is not known
        try {
            const Probe tried = probe(items);
            const MemoryPrediction prediction = at(items);
            const std::int64_t always = prediction.peak() - prediction.activations - prediction.workspace -
                                        prediction.rounded - (prediction.gradients - state_.gradients);
            std::int64_t highest = tried.gradients;
            for (const std::int64_t held : tried.held) highest = std::max(highest, held);
            if (always + highest <= bytes) return items;
            too_large =
                static_cast<double>(always + highest) / static_cast<double>(std::max<std::int64_t>(bytes, 1));
        } catch (const OutOfMemory&) {  // the device has less than the budget
        }
        items = std::min(items - 1, static_cast<std::int64_t>(static_cast<double>(items) / too_large));
    }
    return 0;
}

std::string MemoryBudget::shortfall(std::int64_t items, std::int64_t bytes) const {
    const std::int64_t peak = at(items).peak();
    if (bytes >= 0 && peak <= bytes) return "";
    const std::int64_t fits = largest_batch(bytes, std::max<std::int64_t>(items - 1, 1));
    std::string text = fmt::format("micro-batches of {} {} need {}, {} more than the budget of {}.", items,
                                   items == 1 ? "item" : "items", in_megabytes(peak),
                                   in_megabytes(peak - bytes), in_megabytes(bytes));
    if (fits > 0)
        text += fmt::format(
            " Micro-batches of {} fit; more of them in an update (accumulate) train the same.", fits);
    else
        text += fmt::format(" Not even 1 item fits: it needs {}.", in_megabytes(at(1).peak()));
    return text;
}

}  // namespace potluck
