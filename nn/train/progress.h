#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "nn/train/run_folder.h"

namespace potluck {

/// Shows the progress of a run: on a terminal one line that is rewritten in place, elsewhere a plain line every
/// `log_every` steps. Writes to standard output. On a narrow terminal the line leaves out what matters less, so that it
/// stays one line.
class Progress {
public:
    /// `total_steps` 0: unknown, so no remaining time is shown. `quiet`: nothing is shown at all.
    Progress(std::int64_t total_steps, std::int64_t log_every, bool quiet);
    ~Progress() { end_line(); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    /// `unit`: what metrics.tokens counts, such as "tokens".
    void show(const StepMetrics& metrics, const char* unit);
    /// Prints a separate line, such as "checkpoint saved".
    void say(const std::string& text);
    /// The same on standard error, also when quiet.
    void warn(const std::string& text);

private:
    void end_line();

    std::int64_t total_steps_, log_every_;
    bool quiet_, terminal_;
    std::size_t shown_ = 0;  // length of the line that is shown on the terminal
    double seconds_per_step_ = 0.0;
    std::chrono::steady_clock::time_point last_ = {};
};

/// The line of a step: `unit` is what metrics.tokens counts, `seconds_left` none when that is not known. With more than
/// `columns` characters, leaves out memory, the share of waiting for data, mfu, the time left and the validation, in this
/// order, until it fits; 0: never.
std::string progress_line(const StepMetrics& metrics, const char* unit, std::int64_t total_steps,
                          std::optional<double> seconds_left, std::size_t columns);
/// Seconds as "1:02:03" or "4:05".
std::string clock_time(double seconds);
/// Bytes as "212 MB" or "1.9 GB".
std::string readable_bytes(std::int64_t bytes);
/// A number as "950", "48.2k" or "1.3M".
std::string readable_number(double number);

}  // namespace potluck
