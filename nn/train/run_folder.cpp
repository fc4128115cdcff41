#include "nn/train/run_folder.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "core/safetensors.h"

namespace potluck {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

constexpr const char* metrics_file = "/metrics.jsonl";
constexpr const char* summary_file = "/summary.json";
constexpr const char* checkpoints_folder = "/checkpoints";

json number_or_null(const std::optional<double>& number) { return number ? json(*number) : json(nullptr); }

json to_json(const StepMetrics& metrics) {
    json line = {{"step", metrics.step},
                 {"epoch", metrics.epoch},
                 {"loss", metrics.loss},
                 {"learning_rate", metrics.learning_rate},
                 {"gradient_norm", metrics.gradient_norm},
                 {"tokens", metrics.tokens},
                 {"seconds", metrics.seconds},
                 {"tokens_per_second", metrics.tokens_per_second},
                 {"memory_bytes", metrics.memory_bytes}};
    if (metrics.validated) line["val_loss"] = number_or_null(metrics.validation_loss);
    return line;
}

/// What an object of metrics.jsonl tells; fields that it lacks, or that hold no number, keep their defaults.
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
    read("seconds", metrics.seconds);
    read("tokens_per_second", metrics.tokens_per_second);
    read("memory_bytes", metrics.memory_bytes);
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
    fs::create_directories(path_, failure);
    if (!failure) metrics_.open(path_ + metrics_file, std::ios::app | std::ios::binary);
    if (failure || !metrics_.is_open()) {
        throw Error("run_folder",
                    fmt::format("cannot write to {}. Choose a folder that can be made and written.", path_));
    }
}

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

std::optional<StepMetrics> RunFolder::rewind(std::int64_t step) {
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
        if (object.contains("loss") && object["loss"].is_number()) last = metrics_of(object);
    }
    metrics_.close();
    write_file_atomically(path_ + metrics_file, kept);
    metrics_.open(path_ + metrics_file, std::ios::app | std::ios::binary);
    return last;
}

void RunFolder::append(const StepMetrics& metrics) {
    const std::string path = file(metrics_file);
    metrics_ << to_json(metrics).dump() << std::endl;
    if (!metrics_) throw Error("run_folder", fmt::format("cannot write to {}. Is the disk full?", path));
}

void RunFolder::write(const TrainingSummary& summary) const {
    const json content = {{"final_train_loss", number_or_null(summary.final_train_loss)},
                          {"final_val_loss", number_or_null(summary.final_val_loss)},
                          {"steps", summary.steps},
                          {"finished", summary.finished},
                          {"tokens_per_second", summary.tokens_per_second},
                          {"mfu", number_or_null(summary.mfu)},
                          {"mfu_formula", summary.mfu_formula},
                          {"peak_memory_bytes", summary.peak_memory_bytes},
                          {"checkpoint", summary.checkpoint}};
    write_file_atomically(file(summary_file), content.dump(2) + "\n");
}

}  // namespace potluck
