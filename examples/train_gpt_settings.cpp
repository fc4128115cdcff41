#include "examples/train_gpt_settings.h"

#include <potluck.h>

#include <filesystem>
#include <fstream>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "examples/command_line.h"

using namespace potluck;
using json = nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

constexpr const char* settings_file = "settings.json";

/// Why `text` is no setting of --recompute; empty when it is.
std::string recompute_fault(const std::string& text) try {
    if (text != "auto") parse_recompute(text);
    return "";
} catch (const Error& error) {
    std::string fault = error.what();
    if (fault.ends_with('.')) fault.pop_back();
    return fault;
}

/// Reads the settings of an earlier run from its folder.
void take_settings_of_run(const CLI::App& app, Settings& settings) {
    const fs::path path = fs::path(settings.resume) / settings_file;
    std::ifstream file(path);
    if (!file)
        throw Error("resume",
                    fmt::format("{} holds no run: {} cannot be read.", settings.resume, path.string()));
    const std::int64_t steps = settings.steps;
    try {
        const json content = json::parse(file);
        for_each_setting(settings, [&](const std::string& name, auto& value) {
            const bool is_given = app.get_option("--" + name)->count() > 0;
            if (is_given && name == "precision") return;  // a run may go on in another one
            if (is_given && name != "steps" && json(value) != content.at(name))
                throw Error(
                    "resume",
                    fmt::format("--{} belongs to the run in {}, where it is {}. Leave it out, or start a "
                                "new run.",
                                name, settings.resume,
                                content.contains(name) ? content.at(name).dump() : "not set"));
            if (content.contains(name)) content.at(name).get_to(value);  // runs of before know fewer settings
        });
        content.at("text-fingerprint").get_to(settings.text_fingerprint);
    } catch (const json::exception& error) {
        throw Error("resume", fmt::format("{} is damaged: {}", path.string(), error.what()));
    }
    if (app.get_option("--steps")->count() > 0) settings.steps = steps;
    settings.run_folder = settings.resume;
}

/// What --resume auto means here: to go on in the run folder, or to begin there.
void choose_run(Settings& settings) {
    if (settings.run_folder.empty())
        throw Error("resume", "--resume auto needs the folder of the run. Name it with --run-folder.");
    settings.resume_if_possible = true;
    settings.resume = fs::exists(fs::path(settings.run_folder) / settings_file) ? settings.run_folder : "";
}

}  // namespace

std::optional<int> read_command_line(int argc, char** argv, Settings& settings) {
    using command_line::at_least;
    CLI::App app("Trains a small GPT on text and lets it write. Ctrl-C saves a checkpoint.");
    app.option_defaults()->always_capture_default();
    const CLI::Range share(0.0, 0.99);

    app.add_option("--text", settings.text,
                   "files and folders to learn from (default: the sources of Potluck)");
    app.add_option("--validation-fraction", settings.validation_fraction,
                   "the end of every file, kept for validation")
        ->check(share);
    app.add_option("--model", settings.model, "gpt2 or llama")->check(CLI::IsMember({"gpt2", "llama"}));
    app.add_option("--layers", settings.layers, "blocks of attention and MLP")->check(CLI::Range(1, 1000));
    app.add_option("--heads", settings.heads, "attention heads; they divide the width")->check(at_least(1));
    app.add_option("--width", settings.width, "numbers that describe a token inside the model")
        ->check(at_least(1));
    app.add_option("--context", settings.context, "bytes that the model sees at once")->check(at_least(1));
    app.add_option("--dropout", settings.dropout, "share of activations dropped in training (gpt2)")
        ->check(share);
    command_line::add_training_options(app, settings, "windows of text");
    app.add_option("--accumulate", settings.accumulate, "batches in a step")->check(at_least(1));
    app.add_option("--steps", settings.steps, "updates of the parameters")->check(at_least(1));
    app.add_option("--warmup", settings.warmup, "steps until the learning rate is at its highest")
        ->check(at_least(0));
    app.add_option("--weight-decay", settings.weight_decay, "pull of weights towards 0")
        ->check(at_least(0.0));
    app.add_option("--clip", settings.clip, "largest norm of the gradient; 0: no limit")
        ->check(at_least(0.0));
    app.add_option("--recompute", settings.recompute,
                   "what backward computes again instead of keeping it: none, parts (attention and "
                   "activation), blocks, blocks:N (N together), or auto: as little as the memory allows")
        ->check([](const std::string& text) { return recompute_fault(text); });
    app.add_flag("--fit", settings.fit,
                 "take the largest batch that fits into the memory, found out before the training");
    app.add_option("--memory-budget", settings.memory_budget,
                   "MB (10^6 bytes) that the training may hold; 0: what the device has free")
        ->check(at_least(0));
    app.add_option("--seed", settings.seed, "the same seed gives the same bits")->check(at_least(0));
    app.add_option("--validate-every", settings.validate_every, "steps; 0: only at the end")
        ->check(at_least(0));
    app.add_option("--checkpoint-every", settings.checkpoint_every, "steps; 0: only at the end")
        ->check(at_least(0));
    app.add_option("--log-every", settings.log_every, "steps between lines when the output is no terminal")
        ->check(at_least(1));
    app.add_option("--run-folder", settings.run_folder,
                   "where the run is kept (default: a new folder in runs/)");
    app.add_option("--resume", settings.resume,
                   "folder of a run to go on with, whose settings are kept; auto: go on with that in "
                   "--run-folder, or begin it");
    app.add_option("--prompt", settings.prompt,
                   "what the text written at the end starts with (default: a line of the text)");
    app.add_option("--sample-tokens", settings.sample_tokens, "bytes to write at the end")
        ->check(at_least(0));
    app.add_option("--temperature", settings.temperature,
                   "below 1: safer text, above: wilder; 0: the likeliest")
        ->check(at_least(0.0));
    app.add_option("--top-k", settings.top_k, "choose among the k likeliest bytes; 0: among all")
        ->check(at_least(0));

    if (const std::optional<int> status =
            command_line::read_training(app, argc, argv, settings, {"--fit", "--resume"}))
        return status;
    if (settings.tune && settings.recompute == "auto")
        throw Error("tune", "--tune finds the recomputation itself. Leave --recompute auto out.");
    if (app.get_option("--prompt")->count() > 0 && settings.prompt.empty())
        throw Error("prompt", "--prompt is empty. Give at least one character.");
    if (settings.fit && app.get_option("--batch")->count() > 0)
        throw Error("fit", "--fit finds the batch. Leave --batch out.");
    if (settings.fit && settings.recompute == "auto")
        throw Error("fit",
                    "--fit finds the batch for one --recompute, and auto the recomputation for one --batch. "
                    "Give one of them.");
    for (std::string& path : settings.text)
        path = path.empty() ? path : fs::absolute(path).lexically_normal().string();
    if (settings.resume == "auto")
        choose_run(settings);
    else if (!settings.resume.empty() && !settings.run_folder.empty())
        throw Error("resume", "--resume names the run folder already. Leave --run-folder out.");
    if (settings.fit && !settings.resume.empty())
        throw Error("fit", "the run that is resumed has its batch already. Leave --fit out.");
    if (!settings.resume.empty()) take_settings_of_run(app, settings);
    return std::nullopt;
}

std::string new_run_folder(const std::string& model) {
    for (int number = 1;; ++number) {
        const std::string path = fmt::format("runs/{}-{}", model, number);
        if (!fs::exists(path)) return path;
    }
}

void start_run_folder(const Settings& settings) {
    const fs::path folder = settings.run_folder;
    std::error_code failure;
    if (fs::exists(folder / settings_file, failure))
        throw Error("run folder",
                    fmt::format("{} holds a run already. Go on with --resume {}, or name another folder.",
                                settings.run_folder, settings.run_folder));
    if (fs::exists(folder, failure) && (!fs::is_directory(folder, failure) || !fs::is_empty(folder, failure)))
        throw Error("run folder", fmt::format("{} is {}. Name a folder that is empty, or not there yet.",
                                              settings.run_folder,
                                              fs::is_directory(folder, failure) ? "not empty" : "no folder"));
    fs::create_directories(folder, failure);
    if (failure)
        throw Error("run folder", fmt::format("cannot make {}: {}.", settings.run_folder, failure.message()));
    json content;
    for_each_setting(settings, [&](const char* name, const auto& value) { content[name] = value; });
    content["text-fingerprint"] = settings.text_fingerprint;
    write_file_atomically((folder / settings_file).string(), content.dump(2) + "\n");
}
