#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "nn/train/curve.h"
#include "nn/train/metrics.h"

namespace potluck {

/// What the report shows of a run's steps: fed with the lines of metrics.jsonl in their order, it stays small however many
/// there are.
struct RunHistory {
    void add(const StepMetrics& metrics);
    /// A validation after the last step that is in no line.
    void add_validation(std::int64_t step, double loss) { validation.add(step, loss); }

    Curve loss, validation, learning_rate, gradient_norm, tokens_per_second, samples_per_second, mfu;
    std::array<Curve, phase_count> time;  // seconds a step
    PhaseSeconds total;                   // of all steps
    std::vector<std::int64_t> resumed_at;
    std::int64_t steps = 0;      // the last step
    bool counts_tokens = false;  // tokens are not samples
};

/// A picture that the model was shown.
struct ReportPicture {
    Tensor
        image;  // u8 (height, width, channels), on any device: 1 (grey), 3 (RGB) or 4 (with alpha) channels
    std::string label;      // what it is
    std::string predicted;  // what the model says
};

/// What stands in a report besides the steps.
struct ReportFacts {
    std::string title = {};
    std::string status = {};  // "running", "finished", "stopped at step 12"
    TrainingSummary summary = {};
    std::vector<std::pair<std::string, std::string>> settings = {};
    std::vector<ReportPicture> pictures = {};
};

/// One HTML page that needs nothing else: no script, no font, no picture from elsewhere. It shows loss and validation,
/// throughput, shares of time, what limits the speed, memory by what holds it, and the settings. All text is shown as
/// text, whatever it holds. Throws Error for a picture of another shape or dtype.
std::string report_page(const RunHistory& history, const ReportFacts& facts);

}  // namespace potluck
