#include "nn/train/run_folder.h"

#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/format.h"
#include "core/safetensors.h"
#include "nn/train/event_file.h"

namespace potluck {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

constexpr const char* metrics_file = "/metrics.jsonl";
constexpr const char* summary_file = "/summary.json";
constexpr const char* report_file = "/report.html";
constexpr const char* events_folder = "/tensorboard";
constexpr const char* checkpoints_folder = "/checkpoints";

json number_or_null(const std::optional<double>& number) { return number ? json(*number) : json(nullptr); }

json to_json(const PhaseSeconds& time) {
    json seconds = json::object();
    // Whole nanoseconds are short to write, and no clock tells more.
    for (const Phase phase : phases) seconds[name_of(phase)] = std::round(1e9 * time[phase]) / 1e9;
    return seconds;
}

json to_json(const StepMetrics& metrics) {
    json line = {{"step", metrics.step},
                 {"epoch", metrics.epoch},
                 {"loss", metrics.loss},
                 {"learning_rate", metrics.learning_rate},
                 {"gradient_norm", metrics.gradient_norm},
                 {"tokens", metrics.tokens},
                 {"samples", metrics.samples},
                 {"seconds", metrics.seconds},
                 {"tokens_per_second", metrics.tokens_per_second},
                 {"samples_per_second", metrics.samples_per_second},
                 {"memory_bytes", metrics.memory_bytes},
                 {"time", to_json(metrics.time)}};
    if (metrics.mfu) line["mfu"] = *metrics.mfu;
    if (metrics.resumed) line["resumed"] = true;
    if (metrics.validated) line["val_loss"] = number_or_null(metrics.validation_loss);
    return line;
}

json to_json(const MemoryUse& memory) {
    return {{"parameters", memory.parameters},
            {"gradients", memory.gradients},
            {"optimizer_state", memory.optimizer_state},
            {"buffers", memory.buffers},
            {"before", memory.before},
            {"activations", memory.activations},
            {"by_op", memory.by_op}};
}

double seconds_since_1970() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// The numbers of a step as curves of TensorBoard.
std::vector<EventScalar> scalars_of(const StepMetrics& metrics) {
    std::vector<EventScalar> scalars = {{"loss/train", metrics.loss},
                                        {"optimizer/learning_rate", metrics.learning_rate},
                                        {"optimizer/gradient_norm", metrics.gradient_norm},
                                        {"throughput/tokens_per_second", metrics.tokens_per_second},
                                        {"throughput/samples_per_second", metrics.samples_per_second},
                                        {"memory/peak_bytes", static_cast<double>(metrics.memory_bytes)}};
    if (metrics.mfu) scalars.push_back({"throughput/mfu", *metrics.mfu});
    if (metrics.validation_loss) scalars.push_back({"loss/validation", *metrics.validation_loss});
    // In the order of the phases.
    constexpr std::array<const char*, phase_count> tags = {
        "time/data",      "time/copy",       "time/forward", "time/backward",
        "time/optimizer", "time/validation", "time/saving",  "time/other"};
    for (const Phase phase : phases)
        scalars.push_back({tags[static_cast<std::size_t>(phase)], metrics.time.share(phase)});
    return scalars;
}

/// Reads an object of metrics.jsonl; fields that are missing or not numbers keep their defaults.
StepMetrics metrics_of(const json& line) {
    StepMetrics metrics;
    const auto read = [&](const char* name, auto& value) {
        const auto field = line.find(name);
        if (field != line.end() && field->is_number()) field->get_to(value);
    };
    read("step", metrics.step);
    read("epoch", metrics.epoch);
    read("loss", metrics.loss);
    read("learning_rate", metrics.learning_rate);
    read("gradient_norm", metrics.gradient_norm);
    read("tokens", metrics.tokens);
    read("samples", metrics.samples);
    read("seconds", metrics.seconds);
    read("tokens_per_second", metrics.tokens_per_second);
    read("samples_per_second", metrics.samples_per_second);
    read("memory_bytes", metrics.memory_bytes);
    if (double mfu = std::nan(""); read("mfu", mfu), !std::isnan(mfu)) metrics.mfu = mfu;
    metrics.resumed = line.value("resumed", json(false)) == json(true);
    if (const auto time = line.find("time"); time != line.end() && time->is_object())
        for (const Phase phase : phases)
            if (const auto field = time->find(name_of(phase)); field != time->end() && field->is_number())
                field->get_to(metrics.time[phase]);
    metrics.validated = line.contains("val_loss");
    if (double loss = std::nan(""); read("val_loss", loss), !std::isnan(loss)) metrics.validation_loss = loss;
    return metrics;
}

}  // namespace

RunFolder::RunFolder(std::string path, bool resume) : path_(std::move(path)) {
    if (path_.empty()) throw Error("run_folder", "the path is empty. Name a folder.");
    std::error_code failure;
    if (!resume && holds_run(path_)) {
        throw Error("run_folder",
                    fmt::format("{} already holds a run. Resume it, or choose another folder.", path_));
    }
    if (resume && !fs::is_directory(path_, failure)) {
        throw Error("run_folder", fmt::format("there is no folder {} to resume from.", path_));
    }
    if (resume) last_step_ = std::numeric_limits<std::int64_t>::max() - 1;  // all, until it is rewound
    fs::create_directories(path_, failure);
    if (!failure) metrics_.open(path_ + metrics_file, std::ios::app | std::ios::binary);
    if (failure || !metrics_.is_open()) {
        throw Error("run_folder",
                    fmt::format("cannot write to {}. Choose a folder that can be made and written.", path_));
    }
}

RunFolder::~RunFolder() = default;
RunFolder::RunFolder(RunFolder&&) noexcept = default;
RunFolder& RunFolder::operator=(RunFolder&&) noexcept = default;
bool RunFolder::holds_run(const std::string& path) {
    std::error_code failure;
    return fs::exists(path + metrics_file, failure) || fs::exists(path + checkpoints_folder, failure);
}

std::string RunFolder::file(const char* name) const {
    if (path_.empty())
        throw Error("run_folder", "this run folder was moved from. Use the one that it was moved to.");
    return path_ + name;
}

std::string RunFolder::checkpoints() const { return file(checkpoints_folder); }

std::optional<StepMetrics> RunFolder::rewind(std::int64_t step,
                                             const std::function<void(const StepMetrics&)>& on_kept) {
    std::ifstream stream(file(metrics_file), std::ios::binary);
    std::optional<StepMetrics> last;
    std::string kept;
    for (std::string line; std::getline(stream, line);) {
        const json object = json::parse(line, nullptr, false);
        const bool has_step =
            object.is_object() && object.contains("step") && object["step"].is_number_integer();
        if (!has_step) continue;  // cut off when the program was killed
        if (object["step"].get<std::int64_t>() > step) continue;
        kept += line + "\n";
        if (!object.contains("loss") || !object["loss"].is_number()) continue;
        last = metrics_of(object);
        if (on_kept) on_kept(*last);
    }
    last_step_ = step;
    metrics_.close();
    write_file_atomically(path_ + metrics_file, kept);
    metrics_.open(path_ + metrics_file, std::ios::app | std::ios::binary);
    return last;
}

void RunFolder::append(const StepMetrics& metrics) {
    const std::string path = file(metrics_file);
    metrics_ << to_json(metrics).dump() << std::endl;
    if (!metrics_) throw Error("run_folder", fmt::format("cannot write to {}. Is the disk full?", path));
    events().append(metrics.step, seconds_since_1970(), scalars_of(metrics));
}

void RunFolder::append_validation(std::int64_t step, double loss) {
    events().append(step, seconds_since_1970(), std::array{EventScalar{"loss/validation", loss}});
}

EventFile& RunFolder::events() {
    if (events_ == nullptr)
        events_ = std::make_unique<EventFile>(file(events_folder), last_step_, seconds_since_1970());
    return *events_;
}

void RunFolder::write(const TrainingSummary& summary) const {
    json content = {{"final_train_loss", number_or_null(summary.final_train_loss)},
                    {"final_val_loss", number_or_null(summary.final_val_loss)},
                    {"steps", summary.steps},
                    {"finished", summary.finished},
                    {"tokens_per_second", summary.tokens_per_second},
                    {"samples_per_second", summary.samples_per_second},
                    {"mfu", number_or_null(summary.mfu)},
                    {"mfu_formula", summary.mfu_formula},
                    {"peak_flops_per_second", summary.peak_flops_per_second},
                    {"peak_name", summary.peak_name},
                    {"peak_memory_bytes", summary.peak_memory_bytes},
                    {"memory", to_json(summary.memory)},
                    {"time", to_json(summary.time)},
                    {"bottleneck", nullptr},
                    {"checkpoint", summary.checkpoint}};
    if (summary.bottleneck)
        content["bottleneck"] = {{"limit", name_of(summary.bottleneck->kind)},
                                 {"reason", summary.bottleneck->reason}};
    write_file_atomically(file(summary_file), content.dump(2) + "\n");
}

void RunFolder::write_report(const std::string& html) const {
    write_file_atomically(file(report_file), html);
}

}  // namespace potluck
