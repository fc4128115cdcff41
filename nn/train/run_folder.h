#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace potluck {

/// What one update of the parameters tells: a line of metrics.jsonl.
struct StepMetrics {
    std::int64_t step = 0;   // updates done, this one included
    std::int64_t epoch = 0;  // from 0
    double loss = 0.0;       // mean over the targets of this update, before it
    double learning_rate = 0.0;
    double gradient_norm = 0.0;  // before clipping
    std::int64_t tokens = 0;     // targets of this update
    double seconds = 0.0;        // for this update, waiting for data included
    double tokens_per_second = 0.0;
    std::int64_t memory_bytes = 0;               // peak of the device so far
    bool validated = false;                      // after this update
    std::optional<double> validation_loss = {};  // none when no target of the validation counts
};

/// What a run came to: summary.json.
struct TrainingSummary {
    std::int64_t steps = 0;  // updates in all, those before a resume included
    bool finished = false;   // false: stopped early
    std::optional<double> final_train_loss = {};
    std::optional<double> final_val_loss = {};
    double tokens_per_second = 0.0;  // of this process, without validation and checkpoints
    std::optional<double> mfu = {};  // model FLOPs utilisation: share of the measured peak of matrix products
    std::string mfu_formula;
    std::int64_t peak_memory_bytes = 0;
    std::string checkpoint;  // the last one, which is complete; or empty
};

/// The files of a training run in one folder: metrics.jsonl (an object a step), summary.json and checkpoints/.
class RunFolder {
public:
    /// Makes the folder. Throws Error when it cannot be written to, or when it already holds a run: nothing is ever
    /// overwritten. `resume` instead opens what is there.
    RunFolder(std::string path, bool resume);

    /// Whether a run was begun in this folder.
    static bool holds_run(const std::string& path);

    std::string checkpoints() const;
    /// Drops the metrics of steps after `step`, which a resumed run will do again, and lines that are no JSON object with
    /// a step (cut off when the program was killed). Returns those of the last line kept that has a loss; fields that it
    /// lacks keep their defaults.
    std::optional<StepMetrics> rewind(std::int64_t step);
    /// Adds a line to metrics.jsonl. Throws Error when it cannot be written (disk full).
    void append(const StepMetrics& metrics);
    void write(const TrainingSummary& summary) const;

private:
    std::string file(const char* name) const;  // throws Error when the folder was moved from

    std::string path_;
    std::ofstream metrics_;
};

}  // namespace potluck
