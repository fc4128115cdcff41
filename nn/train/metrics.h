#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "nn/train/phase.h"

namespace potluck {

/// What one update of the parameters tells: a line of metrics.jsonl.
struct StepMetrics {
    std::int64_t step = 0;   // updates done, this one included
    std::int64_t epoch = 0;  // from 0
    double loss = 0.0;       // mean over the targets of this update, before it
    double learning_rate = 0.0;
    double gradient_norm = 0.0;  // before clipping
    std::int64_t tokens = 0;     // targets of this update that count
    std::int64_t samples = 0;    // items of the dataset in this update
    double seconds = 0.0;  // for this update, waiting for data included; without validation and checkpoints
    double tokens_per_second = 0.0;   // tokens / seconds
    double samples_per_second = 0.0;  // samples / seconds
    std::optional<double> mfu = {};   // of this update, see TrainingSummary; none without a run folder
    std::int64_t memory_bytes = 0;    // peak of the device so far
    bool validated = false;           // after this update
    std::optional<double> validation_loss = {};  // none when no target of the validation counts
    /// Where the time since the update before went (or since the start): the phases add up to the wall clock. A checkpoint
    /// is saved after its update's line is written, so its time is in the next one.
    PhaseSeconds time = {};
    bool resumed = false;  // the first update after a run was resumed
};

/// What holds the memory of a training on its device, in bytes.
struct MemoryUse {
    std::int64_t parameters = 0;
    std::int64_t buffers = 0;          // of the module: running statistics, tables
    std::int64_t optimizer_state = 0;  // moments, master copies
    std::int64_t gradients = 0;        // when all are there, in the dtype that they are added up in
    std::int64_t before = 0;           // what was held before the training, without its module and optimizer
    std::int64_t activations = 0;      // the rest of the peak: saved for backward, or of ops while they run
    std::int64_t peak = 0;
    std::map<std::string, std::int64_t> by_op = {};  // at the peak, by the op that allocated it
};

/// What limits the speed of a training: see find_bottleneck() in nn/train/bottleneck.h.
struct Bottleneck {
    enum class Kind : std::uint8_t { input, compute, bandwidth };
    Kind kind = Kind::compute;
    std::string reason;  // sentences with the numbers
};
/// "input", "compute" or "bandwidth".
const char* name_of(Bottleneck::Kind kind);

/// What a run came to: summary.json.
struct TrainingSummary {
    std::int64_t steps = 0;  // updates in all, those before a resume included
    bool finished = false;   // false: stopped early
    std::optional<double> final_train_loss = {};
    std::optional<double> final_val_loss = {};
    double tokens_per_second = 0.0;   // of this process, without validation and checkpoints
    double samples_per_second = 0.0;  // the same
    /// Model FLOPs utilisation: flops_per_token * tokens_per_second over `peak_flops_per_second`.
    std::optional<double> mfu = {};
    std::string mfu_formula;             // the same with its numbers; empty when there is no mfu
    double peak_flops_per_second = 0.0;  // of a matrix product in the model's dtype, measured before the run
    std::string peak_name;               // what was multiplied, and where
    std::int64_t peak_memory_bytes = 0;
    PhaseSeconds time = {};                     // of this process, from the first update on
    std::optional<Bottleneck> bottleneck = {};  // none when nothing was measured
    MemoryUse memory = {};
    std::string checkpoint;  // the last one, or empty
};

}  // namespace potluck
