#pragma once

// The settings of a run of train_gpt: from the command line, or from the folder of the run that is resumed.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "examples/training.h"

struct Settings : training::Options {
    Settings() { batch = 8; }

    // the settings of the run: stored in its folder, and read from there when it is resumed
    std::vector<std::string> text;  // empty: the sources of Potluck
    double validation_fraction = 0.1;
    std::string model = "gpt2";
    std::int64_t layers = 4, heads = 4, width = 128, context = 64;
    double dropout = 0.0;
    std::int64_t accumulate = 1, steps = 2400;  // and batch, learning_rate, precision
    std::int64_t warmup = 100;
    double weight_decay = 0.1, clip = 1.0;
    std::string recompute = "none";
    std::uint64_t seed = 42;
    std::int64_t validate_every = 800, checkpoint_every = 400;
    std::uint64_t text_fingerprint = 0;

    // the settings of this process
    bool fit = false;                // batch becomes the largest that the memory allows
    std::int64_t memory_budget = 0;  // MB; 0: what the device has free
    std::int64_t log_every = 100;
    std::string run_folder;
    std::string resume;  // the folder of the run that goes on; empty: a new one begins
    bool resume_if_possible = false;
    std::string prompt;  // empty: a prompt that suits the text
    std::int64_t sample_tokens = 400, top_k = 40;
    double temperature = 0.8;
};

/// Calls visit(name, value) for all settings of the run.
template <class AnySettings, class Visit>
void for_each_setting(AnySettings& settings, Visit&& visit) {
    visit("text", settings.text);
    visit("validation-fraction", settings.validation_fraction);
    visit("model", settings.model);
    visit("layers", settings.layers);
    visit("heads", settings.heads);
    visit("width", settings.width);
    visit("context", settings.context);
    visit("dropout", settings.dropout);
    visit("batch", settings.batch);
    visit("accumulate", settings.accumulate);
    visit("steps", settings.steps);
    visit("learning-rate", settings.learning_rate);
    visit("warmup", settings.warmup);
    visit("weight-decay", settings.weight_decay);
    visit("clip", settings.clip);
    visit("precision", settings.precision);
    visit("recompute", settings.recompute);
    visit("seed", settings.seed);
    visit("validate-every", settings.validate_every);
    visit("checkpoint-every", settings.checkpoint_every);
}

/// Fills `settings`. If it returns a number, the program must end with it: --help was given or an option was wrong.
/// Throws Error for options that contradict each other, or a run that cannot be resumed.
std::optional<int> read_command_line(int argc, char** argv, Settings& settings);

/// "runs/gpt2-1", or the first number that is free.
std::string new_run_folder(const std::string& model);
/// Creates the folder and writes the settings into it. Throws Error when it is not empty.
void start_run_folder(const Settings& settings);
