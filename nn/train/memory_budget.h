#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/options.h"
#include "core/tensor.h"
#include "data/loader.h"
#include "nn/module.h"
#include "nn/optim/optimizer.h"
#include "nn/train/loss.h"
#include "nn/train/precision.h"

namespace potluck {

struct BudgetOptions {
    LossFunction loss = {};  // none: the module's own
    Precision precision = Precision::f32;
    std::int64_t accumulate = 1;  // micro-batches of an update
    /// Batches beyond those of an update that lie in the device's memory: what a loader's workers have ready there. They
    /// only count when the sample lies on the device, too.
    std::int64_t read_ahead = 0;
};

/// What holds the memory of a device at the peak of an update, in bytes.
struct MemoryPrediction {
    std::int64_t items = 0;            // of a micro-batch
    std::int64_t before = 0;           // held by what is no part of the training
    std::int64_t parameters = 0;       //
    std::int64_t gradients = 0;        // those that are there at the peak; of half types the buffers in f32
    std::int64_t optimizer_state = 0;  // moments and master copies
    std::int64_t buffers = 0;  // of the module, and their copies for an update that does not take place
    std::int64_t rounded = 0;  // what Autocast rounded of parameters
    std::int64_t batches = 0;  // inputs and targets
    std::int64_t activations =
        0;  // what grows with the micro-batch: kept for backward, or of ops while they run
    std::int64_t workspace = 0;  // of ops, however large the micro-batch is

    std::int64_t peak() const {
        return before + parameters + gradients + optimizer_state + buffers + rounded + batches + activations +
               workspace;
    }
};

/// A table of it, a line a kind, in MB (10^6 bytes). With the peak that was measured the last lines compare the two.
std::string to_table(const MemoryPrediction& prediction, std::optional<std::int64_t> measured_peak = {});

/// Tells before a training what memory its updates will need, the way OneDevice computes them, once the optimizer's state is
/// there.
///
/// Parameters, buffers, gradients and state are counted. For the rest two micro-batches, of 1 and 2 items (or the smallest
/// two that the module takes), go through forward and backward, and what is allocated is written down step by step. Each
/// step's bytes are a fixed part and a part for each item, so those of any other size follow, and the peak is the highest
/// of the steps. What a loss allocates that depends on the values, and not on the sizes alone, is not foreseen.
///
/// Afterwards buffers, generators and training mode are as before; gradients are dropped. The measuring itself raises no
/// peak, but it is held to the cap of the device: it throws OutOfMemory when not even those micro-batches fit.
class MemoryBudget {
public:
    /// `sample`: any batch as the training will get them, of at least 1 item. Keeps references: module and optimizer must
    /// outlive it. Throws Error for a sample without items or of which no target counts, a module without parameters, and
    /// options out of range; and what the loss throws.
    MemoryBudget(nn::Module& module, optim::Optimizer& optimizer, const data::Batch& sample,
                 const BudgetOptions& options = {});
    template <std::size_t N>
    MemoryBudget(nn::Module&, optim::Optimizer&, const data::Batch&, MistypedOptions<N>,
                 Refused<"no such option: see BudgetOptions", N> = {});

    /// With micro-batches of `items` items. Throws Error when they are fewer than 1.
    MemoryPrediction at(std::int64_t items) const;
    /// The most items of a micro-batch, up to `most`, with which the peak is at most `bytes`; 0 when 1 is too many. It has
    /// been tried: forward and backward ran with it. Throws Error for a negative budget and `most` below 1.
    std::int64_t largest_batch(std::int64_t bytes, std::int64_t most = 65536) const;
    /// Whether micro-batches of `items` items fit into `bytes`, and if not by how much, and how many would: sentences. Empty
    /// when they do. Throws Error as at() and largest_batch() do.
    std::string shortfall(std::int64_t items, std::int64_t bytes) const;

private:
    /// What a forward and backward pass allocated.
    struct Probe {
        std::vector<std::int64_t> held;  // after each allocation, more than before the update
        std::int64_t gradients = 0, rounded = 0;
    };
    /// Held after one of the allocations: fixed + per_item * items.
    struct TimelinePoint {
        double fixed = 0.0, per_item = 0.0;
        double bytes(std::int64_t items) const { return fixed + per_item * static_cast<double>(items); }
    };

    void count_state();
    void extrapolate();
    void run(const data::Batch& rows, Probe& probe) const;
    Probe probe(std::int64_t items) const;
    std::int64_t predicted_batch(std::int64_t bytes, std::int64_t most) const;

    nn::Module& module_;
    optim::Optimizer& optimizer_;
    data::Batch sample_;
    BudgetOptions options_;
    Device device_;
    MemoryPrediction state_;       // what does not depend on the micro-batch and is always there
    std::int64_t item_bytes_ = 0;  // of an item in all batches that lie on the device
    std::int64_t gradients_ = 0;   // that come with backward
    std::int64_t rounded_ = 0;
    std::vector<TimelinePoint> timeline_;
};

}  // namespace potluck
