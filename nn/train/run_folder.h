#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "nn/train/metrics.h"

namespace potluck {

class EventFile;

/// The files of a training run in one folder:
///
///     metrics.jsonl    an object a step: the fields of StepMetrics by their names, but for val_loss (when validated),
///                      mfu (when known), resumed (when true), and time, an object with the seconds of each Phase
///     summary.json     the TrainingSummary
///     report.html      both for people, see nn/train/report.h
///     tensorboard/     the same numbers for TensorBoard: `tensorboard --logdir RUN_FOLDER`
///     checkpoints/
class RunFolder {
public:
    /// Creates the folder. Throws Error when it cannot be written to, or when it already contains a run: nothing is
    /// ever overwritten. With `resume`, opens the existing folder instead.
    RunFolder(std::string path, bool resume);
    ~RunFolder();
    RunFolder(RunFolder&&) noexcept;
    RunFolder& operator=(RunFolder&&) noexcept;

    /// Whether a run was begun in this folder.
    static bool holds_run(const std::string& path);

    std::string checkpoints() const;
    /// Drops the metrics of steps after `step`, which a resumed run will do again, and lines that are no JSON object with
    /// a step (cut off when the program was killed). Calls `kept` with every line that stays and has a loss, and returns
    /// the last of them; fields that a line lacks keep their defaults.
    std::optional<StepMetrics> rewind(std::int64_t step,
                                      const std::function<void(const StepMetrics&)>& kept = {});
    /// Adds a line to metrics.jsonl, and its numbers to what TensorBoard reads. Throws Error when it cannot be written
    /// (disk full).
    void append(const StepMetrics& metrics);
    /// A validation after the last step, which has its line already: for TensorBoard.
    void append_validation(std::int64_t step, double loss);
    void write(const TrainingSummary& summary) const;
    void write_report(const std::string& html) const;

private:
    std::string file(const char* name) const;  // throws Error when the folder was moved from
    EventFile& events();

    std::string path_;
    std::ofstream metrics_;
    std::int64_t last_step_ = 0;         // that stays of what is there
    std::unique_ptr<EventFile> events_;  // made when there is something to write
};

}  // namespace potluck
