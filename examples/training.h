#pragma once

// What the programs that train have in common: the options that say how and where, Ctrl-C, and --tune.

#include <potluck.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/core.h>

namespace training {

/// command_line::add_training_options() reads them.
struct Options {
    std::int64_t batch = 64;  // items
    double learning_rate = 3e-3;
    std::string device = "best", precision = "f32";
    int threads = 0, workers = 1;
    bool tune = false;
    std::int64_t tune_updates = 64;
    std::vector<std::string> command = {};  // the program and its arguments, as they were given
};

inline potluck::Device device_of(const Options& options) {
    return options.device == "best" ? potluck::best_device() : potluck::parse_device(options.device);
}

/// What multiplies the loss: f16 needs it, to the others it does nothing.
inline potluck::LossScalerOptions scaler_options(const Options& options) {
    if (options.precision == "f16") return {};
    return {.initial = 1.0, .largest = 1.0};
}

// ---- stopping ----

inline std::atomic<bool> stop_requested = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // so that a signal handler may set it
constexpr int interrupted = 130;                        // the status of a program that was stopped

/// From now on the first Ctrl-C sets stop_requested, and the second one ends the program at once.
inline void stop_on_signals() {
    const auto handler = [](int signal) {
        stop_requested = true;
        std::signal(signal, SIG_DFL);
    };
    std::signal(SIGINT, handler);
    std::signal(SIGTERM, handler);
}

// ---- tuning ----

/// How to call this program: ./demo where that is.
inline std::string program_name() {
    namespace fs = std::filesystem;
    return fs::exists("demo") ? "./demo" : fs::read_symlink("/proc/self/exe").string();
}

/// The setting that the options name.
inline potluck::TunerSetting setting_of(const Options& options) {
    return {.precision = potluck::parse_precision(options.precision),
            .batch = options.batch,
            .workers = options.workers,
            .learning_rate = options.learning_rate};
}

/// What a program with --tune does instead of training: looks for a faster setting, and prints what it tried and the command
/// line to use. `steps`: updates of the training that was asked for; 0: it counts epochs. Returns the exit status.
inline int tune(const Options& options, const potluck::MakeTraining& make, const potluck::TunerSetting& base,
                potluck::TunerOptions tuner_options = {}, std::int64_t memory_bytes = 0,
                std::int64_t steps = 0) {
    stop_on_signals();
    potluck::ModelTrials trials(
        make, base, {.memory_bytes = memory_bytes, .should_stop = [] { return stop_requested.load(); }});
    fmt::print("trials of {} updates on {}\n", options.tune_updates, potluck::describe(device_of(options)));
    std::fflush(stdout);
    tuner_options.updates = options.tune_updates;
    tuner_options.on_row = [](const potluck::TunerRow& row) {
        fmt::print("{}{}{}\n", row.step, row.why.empty() ? "" : ": ", row.why);
        std::fflush(stdout);
    };
    const potluck::TunerResult result = potluck::Tuner(trials, base, std::move(tuner_options)).run();
    fmt::print("\n{}", potluck::to_table(result));
    if (result.stopped) return interrupted;
    const auto changes = potluck::tuned_options(result, steps);
    fmt::print("{}\n\n    {}\n",
               changes.empty() ? "no change is worth it:"
                               : fmt::format("{:.2f} times as fast as the base:", result.speed_ratio),
               potluck::command_line_of(options.command, changes, {{"--tune", 0}, {"--tune-updates", 1}}));
    return 0;
}

}  // namespace training
