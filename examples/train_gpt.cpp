// Trains a GPT on text, byte by byte, and lets it generate text. `./demo` builds and runs it.

#include <potluck.h>

#include <filesystem>
#include <limits>
#include <memory>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "examples/train_gpt_settings.h"

using namespace potluck;
using json = nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

// ---- the text ----

/// The sources and the documentation from which this program was built, as far as they still exist.
std::vector<std::string> own_sources() {
    std::vector<std::string> paths;
    for (const char* name : {"README.md", "core", "autograd", "data", "nn", "docs"})
        if (fs::exists(fs::path(POTLUCK_SOURCE_FOLDER) / name))
            paths.push_back((fs::path(POTLUCK_SOURCE_FOLDER) / name).string());
    return paths;
}

/// A hash that detects changes of the text (FNV-1a).
std::uint64_t fingerprint(std::string_view text) {
    std::uint64_t hash = 0xcbf29ce484222325ULL;
    for (char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
    return hash;
}

/// The beginning of a text: its first line that is not blank, at most about 30 bytes.
std::string first_words(const std::string& text) {
    const std::size_t start = text.find_first_not_of(" \t\r\n");
    if (start == std::string::npos) return "\n";
    std::string line = text.substr(start, text.find_first_of("\r\n", start) - start);
    if (line.size() <= 30) return line;
    std::size_t end = line.rfind(' ', 30);
    if (end == std::string::npos)  // no blank: cut between two UTF-8 characters
        for (end = 30; end > 1 && (static_cast<unsigned char>(line[end]) & 0xc0) == 0x80;) --end;
    return line.substr(0, end);
}

struct Text {
    std::size_t files = 0;
    Tensor train, validation;  // (bytes) u8
};

Text read_text(Settings& settings) {
    if (settings.text.empty()) settings.text = own_sources();
    if (settings.text.empty())
        throw Error("text", "the sources of Potluck are not where they were. Name a text with --text PATH.");
    const std::vector<data::TextFile> files = data::read_text(settings.text);
    const data::TextSplit split = data::split_text(files, settings.validation_fraction);
    const std::uint64_t found = fingerprint(split.train);
    if (!settings.resume.empty() && found != settings.text_fingerprint)
        throw Error(
            "resume",
            fmt::format("the text has changed since the run in {} began, so it cannot go on. Start a new "
                        "run.",
                        settings.resume));
    settings.text_fingerprint = found;
    if (settings.prompt.empty())
        settings.prompt =
            settings.text == own_sources() ? "Tensor softmax(const Tensor& x" : first_words(split.train);
    return {files.size(), data::ByteTokenizer::encode(split.train, DType::u8),
            data::ByteTokenizer::encode(split.validation, DType::u8)};
}

// ---- the model ----

std::unique_ptr<nn::LanguageModel> make_blocks(const Settings& settings) {
    constexpr std::int64_t vocabulary = data::ByteTokenizer::vocabulary_size;
    if (settings.model == "gpt2")
        return std::make_unique<nn::GPT2>(nn::GPT2Config{.vocabulary = vocabulary,
                                                         .context = settings.context,
                                                         .width = settings.width,
                                                         .heads = settings.heads,
                                                         .layers = settings.layers,
                                                         .dropout = settings.dropout});
    const std::int64_t hidden =
        (settings.width * 8 / 3 + 31) / 32 * 32;  // as many parameters as an MLP of 4 * width
    return std::make_unique<nn::Llama>(nn::LlamaConfig{.vocabulary = vocabulary,
                                                       .context = settings.context,
                                                       .width = settings.width,
                                                       .hidden = hidden,
                                                       .heads = settings.heads,
                                                       .layers = settings.layers,
                                                       .tie_embeddings = true});
}

std::unique_ptr<nn::LanguageModel> make_model(const Settings& settings) {
    std::unique_ptr<nn::LanguageModel> model = make_blocks(settings);
    if (settings.recompute != "auto") model->set_recompute(parse_recompute(settings.recompute));
    return model;
}

optim::AdamWOptions optimizer_options(const Settings& settings) {
    return {.learning_rate = settings.learning_rate, .beta2 = 0.99, .weight_decay = settings.weight_decay};
}

// ---- the batches ----

data::Loader make_loader(const Settings& settings, const Text& text) {
    return data::Loader(data::TokenWindows(text.train, settings.context), {.batch = settings.batch,
                                                                           .shuffle = true,
                                                                           .drop_last = true,
                                                                           .workers = settings.workers,
                                                                           .seed = settings.seed,
                                                                           .device = device_of(settings)});
}

/// None when the text is too short for a window.
std::unique_ptr<data::Loader> make_validation(const Settings& settings, const Tensor& text) {
    if (text.count() <= settings.context) return nullptr;
    return std::make_unique<data::Loader>(
        data::TokenWindows(text, settings.context, settings.context),
        data::LoaderOptions{.batch = settings.batch, .device = device_of(settings)});
}

// ---- the memory ----

/// 0: none is given.
std::int64_t budget_in_bytes(const Settings& settings) {
    constexpr std::int64_t megabyte = 1'000'000;
    return std::min(settings.memory_budget, std::numeric_limits<std::int64_t>::max() / megabyte) * megabyte;
}

/// The first batch of the text.
data::Batch sample_batch(const Settings& settings, const Text& text) {
    const data::TokenWindows windows(text.train, settings.context);
    data::Loader loader(windows, {.batch = std::min(settings.batch, windows.size())});
    return *loader.begin();
}

/// Chooses batch or recomputation by the memory that there is, where the command line asks for it, and shows where it will
/// go. Throws Error when it does not suffice. Nothing when nothing was asked for.
std::optional<MemoryPrediction> fit_to_memory(Settings& settings, const Text& text,
                                              nn::LanguageModel& model) {
    if (!settings.fit && settings.recompute != "auto" && settings.memory_budget == 0) return std::nullopt;
    const Device device = device_of(settings);
    const std::int64_t limit = memory_limit(device);
    // Not the last byte of what other programs use, too; a cap is this program's own.
    const std::int64_t free_now = memory_statistics(device).cap > 0 ? limit : limit / 10 * 9;
    const std::int64_t bytes = settings.memory_budget > 0 ? budget_in_bytes(settings) : free_now;
    if (settings.fit) settings.batch = 1;  // what has to fit at least
    optim::AdamW optimizer(model, optimizer_options(settings));
    const data::Batch sample = sample_batch(settings, text);
    const BudgetOptions options{.precision = parse_precision(settings.precision),
                                .accumulate = settings.accumulate,
                                .read_ahead = std::int64_t{2} * settings.workers};
    if (settings.recompute == "auto")
        settings.recompute = name_of(choose_recompute(model, optimizer, sample, bytes, options));
    try {
        const MemoryBudget budget(model, optimizer, sample, options);
        const std::int64_t items =
            settings.fit ? budget.largest_batch(
                               bytes, std::min<std::int64_t>(text.train.count() - settings.context, 65536))
                         : settings.batch;
        if (const std::string missing = budget.shortfall(std::max<std::int64_t>(items, 1), bytes);
            !missing.empty())
            throw Error(
                "memory budget",
                fmt::format("{} {}", missing, what_needs_less(model, optimizer, sample, bytes, options)));
        settings.batch = std::max<std::int64_t>(items, 1);
        return budget.at(settings.batch);
    } catch (const OutOfMemory& error) {
        throw Error("memory budget", fmt::format("not even two small batches fit: {} {}", error.what(),
                                                 what_needs_less(model, optimizer, sample, bytes, options)));
    }
}

// ---- tuning ----

/// A training for a trial of --tune.
TrialTraining make_trial(Settings settings, const Text& text, const TunerSetting& setting) {
    settings.batch = setting.batch;
    settings.workers = setting.workers;
    settings.recompute = name_of(setting.recompute);
    std::unique_ptr<nn::LanguageModel> model = make_model(settings);
    model->to(device_of(settings));
    const double flops_per_token = model->flops_per_token(settings.context);
    auto optimizer = std::make_unique<optim::AdamW>(*model, optimizer_options(settings));
    const std::int64_t validated = std::min(text.validation.count(), 256 * settings.context + 1);
    return {.module = std::move(model),
            .optimizer = std::move(optimizer),
            .loader = std::make_unique<data::Loader>(make_loader(settings, text)),
            .validation = make_validation(settings, text.validation.narrow(0, 0, validated)),
            .clip = settings.clip,
            .flops_per_token = flops_per_token};
}

int tune(const Settings& settings, const Text& text) {
    TunerSetting base = setting_of(settings);
    base.accumulate = settings.accumulate;
    base.recompute = parse_recompute(settings.recompute);
    return training::tune(
        settings, [&](const TunerSetting& setting) { return make_trial(settings, text, setting); }, base,
        {.recompute = recompute_policies(settings.layers)}, budget_in_bytes(settings), settings.steps);
}

// ---- output ----

void show(std::string_view name, const std::string& value) { fmt::print("  {:<20} {}\n", name, value); }

void show_settings(const Settings& settings, const Text& text, const nn::LanguageModel& model) {
    const Device device = device_of(settings);
    for_each_setting(settings, [](const char* name, const auto& value) { show(name, json(value).dump()); });
    show("threads", std::to_string(threads()));
    show("workers", std::to_string(settings.workers));
    show("prompt", json(settings.prompt).dump(-1, ' ', false, json::error_handler_t::replace));
    show("sample-tokens", std::to_string(settings.sample_tokens));
    show("temperature", fmt::format("{}", settings.temperature));
    show("top-k", std::to_string(settings.top_k));
    show("run-folder", settings.run_folder);
    fmt::print("\n");
    show("device", fmt::format("{} ({})", name_of(device), describe(device)));
    show("files of text", std::to_string(text.files));
    show("training bytes", std::to_string(text.train.count()));
    show("validation bytes", std::to_string(text.validation.count()));
    show("parameters", std::to_string(model.parameter_count()));
    show("tokens in a step", std::to_string(settings.batch * settings.accumulate * settings.context));
    fmt::print("\n");
    std::fflush(stdout);
}

// ---- training and generating ----

/// Whether the run to be resumed has completed all of its steps; if so, loads its final model.
bool is_finished(const Settings& settings, nn::LanguageModel& model, optim::Optimizer& optimizer) {
    const std::string checkpoints = RunFolder(settings.run_folder, true).checkpoints();
    const std::optional<std::string> newest = latest_checkpoint(checkpoints);
    if (!newest || read_manifest(*newest).state.step < settings.steps) return false;
    const TrainingState state = load_latest_checkpoint_if_any(checkpoints, model, optimizer).state;
    if (state.step < settings.steps) return false;  // the newest is damaged
    fmt::print("This run is finished: it has done {} steps. To train on, give more: --steps {}\n", state.step,
               state.step + settings.steps);
    return true;
}

/// Trains until the end or Ctrl-C. Returns false when it was stopped.
bool train(const Settings& settings, const Text& text, nn::LanguageModel& model,
           const std::optional<MemoryPrediction>& prediction) {
    optim::AdamW optimizer(model, optimizer_options(settings));
    data::Loader loader = make_loader(settings, text);
    const std::unique_ptr<data::Loader> validation = make_validation(settings, text.validation);

    double first_loss = 0.0;
    TrainerOptions options{.steps = settings.steps, .accumulate = settings.accumulate, .clip = settings.clip};
    options.schedule = optim::cosine_schedule({.peak = settings.learning_rate,
                                               .steps = settings.steps,
                                               .warmup = settings.warmup,
                                               .floor = settings.learning_rate / 10});
    options.precision = parse_precision(settings.precision);
    options.run_folder = settings.run_folder;
    options.resume = !settings.resume.empty() && !settings.resume_if_possible;
    options.resume_if_possible = settings.resume_if_possible;
    options.checkpoint_every = settings.checkpoint_every;
    options.validation = validation.get();
    options.validate_every = validation ? settings.validate_every : 0;
    options.log_every = settings.log_every;
    options.flops_per_token = model.flops_per_token(settings.context);
    for_each_setting(settings, [&](const char* name, const auto& value) {
        options.settings.emplace_back("--" + std::string(name), json(value).dump());
    });
    options.should_stop = [] { return training::stop_requested.load(); };
    options.on_step = [&](const StepMetrics& metrics) {
        if (first_loss == 0.0) first_loss = metrics.loss;
    };
    Trainer trainer(model, optimizer, loader, options);

    const bool goes_on = !settings.resume.empty();
    if (goes_on && is_finished(settings, model, optimizer)) return true;
    if (!goes_on) start_run_folder(settings);  // last, so that a mistake leaves no folder behind
    const TrainingSummary summary = trainer.fit();
    if (!summary.finished) {
        fmt::print("To go on:  {} --resume {}\n", training::program_name(), settings.run_folder);
        return false;
    }
    fmt::print("\n");
    if (first_loss > 0.0)
        fmt::print("loss {:.3f} at first, {:.3f} at the end", first_loss,
                   summary.final_train_loss.value_or(0.0));
    if (summary.final_val_loss) fmt::print(", {:.3f} on text it has never seen", *summary.final_val_loss);
    fmt::print("\n{:.0f} tokens/s, at most {} MB of memory\n", summary.tokens_per_second,
               summary.peak_memory_bytes / 1'000'000);
    if (prediction) fmt::print("\n{}\n", to_table(*prediction, summary.peak_memory_bytes));
    fmt::print("All of it is in {}; open {}/report.html in a browser.\n", settings.run_folder,
               settings.run_folder);
    return true;
}

void write(const Settings& settings, nn::LanguageModel& model) {
    if (settings.sample_tokens == 0) return;
    fmt::print("\n--- what it writes ---\n{}", data::printable(settings.prompt));
    data::StreamingDecoder decoder;
    (void)generate(model, data::ByteTokenizer::encode(settings.prompt),
                   {.max_tokens = settings.sample_tokens,
                    .temperature = settings.temperature,
                    .top_k = settings.top_k,
                    .seed = settings.seed,
                    .on_token = [&](std::int64_t token) {
                        fmt::print("{}", data::printable(decoder.push(token)));
                        std::fflush(stdout);
                        return !training::stop_requested;
                    }});
    fmt::print("{}\n", data::printable(decoder.finish()));
}

}  // namespace

int main(int argc, char** argv) try {
    Settings settings;
    if (const std::optional<int> status = read_command_line(argc, argv, settings)) return *status;
    set_threads(settings.threads);
    manual_seed(settings.seed);
    const Text text = read_text(settings);
    if (settings.tune) {
        settings.command.front() = training::program_name();
        return tune(settings, text);
    }
    const std::unique_ptr<nn::LanguageModel> model = make_model(settings);
    model->to(device_of(settings));
    const std::optional<MemoryPrediction> prediction = fit_to_memory(settings, text, *model);
    if (settings.run_folder.empty()) settings.run_folder = new_run_folder(settings.model);
    show_settings(settings, text, *model);
    if (prediction) fmt::print("{}\n", to_table(*prediction));
    training::stop_on_signals();
    if (!train(settings, text, *model, prediction)) return training::interrupted;
    write(settings, *model);
    return training::stop_requested ? training::interrupted : 0;
} catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
}
