#pragma once

// Parses a command line and reports each mistake in one clear line. For .cpp files only: it includes CLI11.

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "examples/training.h"

namespace command_line {

/// The number of letters that must be changed, added or removed to turn one word into the other.
inline std::size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<std::size_t> row(b.size() + 1);
    for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        std::size_t diagonal = row[0];
        row[0] = i;
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
            diagonal = row[j];
            row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row[b.size()];
}

/// The long name of the option that is most similar to `word`.
inline std::string nearest_option(const CLI::App& app, const std::string& word) {
    std::string nearest;
    std::size_t least = std::string::npos;
    for (const CLI::Option* option : app.get_options()) {
        for (const std::string& name : option->get_lnames()) {
            const std::size_t distance = edit_distance(word, "--" + name);
            if (distance >= least) continue;
            least = distance;
            nearest = "--" + name;
        }
    }
    return nearest;
}

/// Sets the variables of `app`. Returns an exit status if the program must end now: 0 after --help, 2 after a mistake,
/// which has been reported in one line on standard error.
inline std::optional<int> read(CLI::App& app, int argc, char** argv) {
    app.allow_extras();
    try {
        app.parse(argc, argv);
        const std::vector<std::string> unknown = app.remaining();
        if (unknown.empty()) return std::nullopt;
        const std::string word = unknown.front().substr(0, unknown.front().find('='));
        if (word.starts_with("-"))
            std::cerr << "error: unknown option " << word << ". Did you mean " << nearest_option(app, word)
                      << "? --help lists all.\n";
        else
            std::cerr << "error: \"" << word << "\" belongs to no option. --help lists all.\n";
    } catch (const CLI::CallForHelp& help) {
        return app.exit(help);
    } catch (const CLI::ParseError& mistake) {
        std::string text = mistake.what();
        std::replace(text.begin(), text.end(), '\n', ' ');
        std::cerr << "error: " << text << ". --help lists all options.\n";
    }
    return 2;
}

/// A range check of a number; text that is not a number is left to the conversion, which reports it.
template <class Holds>
CLI::Validator number_check(Holds holds, const std::string& rule) {
    return CLI::Validator(
        [holds, rule](std::string& text) {
            char* end = nullptr;
            const double value = std::strtod(text.c_str(), &end);
            if (text.empty() || *end != '\0') return std::string();
            if (!holds(value)) return text + " is out of range: it must be " + rule;
            return value <= 1e15 ? std::string() : text + " is out of range: it is too large";
        },
        "");
}

template <class Number>
CLI::Validator at_least(Number least) {
    return number_check([least](double value) { return value >= static_cast<double>(least); },
                        fmt::format("at least {}", least));
}

template <class Number>
CLI::Validator above(Number limit) {
    return number_check([limit](double value) { return value > static_cast<double>(limit); },
                        fmt::format("above {}", limit));
}

/// Why `text` is not a device of this machine; empty when it is.
inline std::string device_fault(const std::string& text) try {
    if (text != "best") potluck::describe(potluck::parse_device(text));
    return "";
} catch (const potluck::Error& error) {
    std::string fault = error.what();
    if (fault.ends_with('.')) fault.pop_back();  // the surrounding message has its own
    return fault;
}

/// The options of all programs that train. `items`: what a batch consists of; it has `least_batch` of them or more.
inline void add_training_options(CLI::App& app, training::Options& options, const std::string& items,
                                 std::int64_t least_batch = 1) {
    app.add_option("--batch", options.batch, items + " in a batch")->check(at_least(least_batch));
    app.add_option("--learning-rate", options.learning_rate, "size of a step, at its highest")
        ->check(above(0.0));
    app.add_option("--precision", options.precision,
                   "what forward and backward compute in; parameters stay in f32")
        ->check(CLI::IsMember({"f32", "bf16", "f16"}));
    app.add_option("--device", options.device, "cpu, cuda, cuda:1, ...; best: a GPU where there is one")
        ->check([](const std::string& text) { return device_fault(text); });
    app.add_option("--threads", options.threads, "0: one for each core; no result depends on it")
        ->check(CLI::Range(0, 1024));
    app.add_option("--workers", options.workers, "threads that prepare batches ahead")
        ->check(CLI::Range(0, 64));
    app.add_flag("--tune", options.tune,
                 "instead of training, find the fastest precision, batch, workers and recomputation that "
                 "train as well, and print the command line for them");
    app.add_option("--tune-updates", options.tune_updates, "updates of each trial of --tune")
        ->check(at_least(4));
}

/// read(), then the combinations that --tune refuses: with `not_with`, options that it has no use for.
inline std::optional<int> read_training(CLI::App& app, int argc, char** argv, training::Options& options,
                                        const std::vector<std::string>& not_with = {}) {
    options.command.assign(argv, argv + argc);
    if (const std::optional<int> status = read(app, argc, argv)) return status;
    const auto is_given = [&](const std::string& name) { return app.get_option(name)->count() > 0; };
    if (!options.tune && is_given("--tune-updates"))
        throw potluck::Error("tune", "--tune-updates is for trials. Give --tune with it.");
    for (const std::string& name : not_with)
        if (options.tune && is_given(name))
            throw potluck::Error("tune", fmt::format("--tune has no use for {}. Leave it out.", name));
    return std::nullopt;
}

}  // namespace command_line
