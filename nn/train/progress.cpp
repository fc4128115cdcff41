#include "nn/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "core/format.h"

namespace potluck {
namespace {

/// How long a line may be that does not wrap; 0 when nobody knows.
std::size_t terminal_columns() {
    winsize size = {};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 0;
    return size.ws_col - 1U;
}

}  // namespace

Progress::Progress(std::int64_t total_steps, std::int64_t log_every, bool quiet)
    : total_steps_(total_steps),
      log_every_(std::max<std::int64_t>(log_every, 1)),
      quiet_(quiet),
      terminal_(isatty(STDOUT_FILENO) == 1) {}

void Progress::show(const StepMetrics& metrics, const char* unit) {
    // A moving average that adapts to changes of speed within about ten steps.
    seconds_per_step_ =
        seconds_per_step_ == 0.0 ? metrics.seconds : 0.9 * seconds_per_step_ + 0.1 * metrics.seconds;
    if (quiet_) return;
    const bool last = metrics.step == total_steps_;
    const auto now = std::chrono::steady_clock::now();
    if (terminal_) {
        if (!last && now - last_ < std::chrono::milliseconds(100)) return;
    } else if (!last && metrics.step % log_every_ != 0 && metrics.step != 1 && !metrics.validated) {
        return;
    }
    last_ = now;
    std::optional<double> left;
    if (total_steps_ > 0) left = static_cast<double>(total_steps_ - metrics.step) * seconds_per_step_;
    const std::string line =
        progress_line(metrics, unit, total_steps_, left, terminal_ ? terminal_columns() : 0);
    if (!terminal_) {
        fmt::print("{}\n", line);
    } else {
        const std::size_t padding = shown_ > line.size() ? shown_ - line.size() : 0;
        fmt::print("\r{}{}", line, std::string(padding, ' '));
        shown_ = line.size();
        if (metrics.validated) end_line();  // stays on the screen
    }
    std::fflush(stdout);
}

void Progress::say(const std::string& text) {
    if (quiet_) return;
    end_line();
    fmt::print("{}\n", text);
    std::fflush(stdout);
}

void Progress::warn(const std::string& text) {
    end_line();
    fmt::print(stderr, "[trainer] warning: {}\n", text);
}

void Progress::end_line() {
    if (shown_ > 0) std::fputs("\n", stdout);
    shown_ = 0;
}

std::string progress_line(const StepMetrics& metrics, const char* unit, std::int64_t total_steps,
                          std::optional<double> seconds_left, std::size_t columns) {
    enum Field : std::uint8_t { step, loss, validation, speed, mfu, data, memory, left };
    std::array<std::string, 8> parts;
    parts[step] = total_steps > 0 ? fmt::format("step {}/{}", metrics.step, total_steps)
                                  : fmt::format("step {}", metrics.step);
    parts[loss] = fmt::format("  loss {:.4f}", metrics.loss);
    if (metrics.validation_loss)
        parts[validation] = fmt::format("  validation {:.4f}", *metrics.validation_loss);
    parts[speed] = fmt::format("  {} {}/s", readable_number(metrics.tokens_per_second), unit);
    if (metrics.mfu) parts[mfu] = fmt::format("  mfu {:.1f} %", 100.0 * *metrics.mfu);
    if (metrics.time.total() > 0.0)
        parts[data] = fmt::format("  data {:.0f} %", 100.0 * metrics.time.share(Phase::data));
    parts[memory] = "  " + readable_bytes(metrics.memory_bytes);
    if (seconds_left) parts[left] = fmt::format("  {} left", clock_time(*seconds_left));
    const auto line = [&] { return fmt::format("{}", fmt::join(parts, "")); };
    for (const Field field : {memory, data, mfu, left, validation}) {
        if (columns == 0 || line().size() <= columns) break;
        parts[field].clear();
    }
    return line();
}

std::string clock_time(double seconds) {
    const auto total = static_cast<std::int64_t>(std::llround(std::max(seconds, 0.0)));
    if (total < 3600) return fmt::format("{}:{:02}", total / 60, total % 60);
    return fmt::format("{}:{:02}:{:02}", total / 3600, total / 60 % 60, total % 60);
}

std::string readable_bytes(std::int64_t bytes) {
    const auto size = static_cast<double>(bytes);
    return size < 1e9 ? fmt::format("{:.0f} MB", size / 1e6) : fmt::format("{:.1f} GB", size / 1e9);
}

std::string readable_number(double number) {
    if (number < 1e3) return fmt::format("{:.0f}", number);
    return number < 1e6 ? fmt::format("{:.1f}k", number / 1e3) : fmt::format("{:.1f}M", number / 1e6);
}

}  // namespace potluck
