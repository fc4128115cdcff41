#include "nn/train/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "core/format.h"
#include "core/safetensors.h"

namespace potluck {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* tied_prefix = "tied.";
constexpr const char* step_prefix = "step_";
constexpr const char* unfinished = ".partial";
constexpr const char* model_file = "model.safetensors";
constexpr const char* optimizer_file = "optimizer.safetensors";
constexpr const char* training_file = "training.json";
constexpr const char* marker_file = "DONE";

std::string step_name(std::int64_t step) { return fmt::format("{}{:08}", step_prefix, step); }

/// The step of a folder called step_00000010, or -1 for any other name.
std::int64_t step_of(const std::string& name) {
    const std::string digits = name.starts_with(step_prefix) ? name.substr(std::strlen(step_prefix)) : "";
    const bool all_digits =
        !digits.empty() && digits.size() < 19 && digits.find_first_not_of("0123456789") == std::string::npos;
    return all_digits ? std::stoll(digits) : -1;
}

std::string read_text(const fs::path& path) {
    std::ifstream stream(path, std::ios::binary);
    std::ostringstream content;
    content << stream.rdbuf();
    if (!stream) throw Error("checkpoint", fmt::format("{} cannot be read.", path.string()));
    return content.str();
}

/// Makes a rename in this folder last through a power cut.
void sync_folder(const fs::path& folder) {
    const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    if (descriptor < 0) return;
    fsync(descriptor);
    close(descriptor);
}

/// The marker lists the other files with their sizes, so that a lost or cut file is noticed.
std::string marker_of(const fs::path& checkpoint) {
    std::string text;
    for (const char* file : {model_file, optimizer_file, training_file}) {
        text += fmt::format("{} {}\n", file, fs::file_size(checkpoint / file));
    }
    return text;
}

bool is_complete(const fs::path& checkpoint) {
    std::error_code failure;
    if (!fs::is_regular_file(checkpoint / marker_file, failure)) return false;
    try {
        return read_text(checkpoint / marker_file) == marker_of(checkpoint);
    } catch (const std::exception&) {  // a file is missing
        return false;
    }
}

/// Complete checkpoints, the newest first.
std::vector<fs::path> complete_checkpoints(const fs::path& folder) {
    std::vector<fs::path> found;
    std::error_code failure;
    for (const auto& entry : fs::directory_iterator(folder, failure)) {
        if (step_of(entry.path().filename().string()) >= 0 && is_complete(entry.path()))
            found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end(), [](const fs::path& a, const fs::path& b) {
        return step_of(a.filename().string()) > step_of(b.filename().string());
    });
    return found;
}

std::string to_json(const TrainingState& state) {
    json generators = json::object();
    for (const auto& [device, key] : state.generators) {
        generators[device] = {{"seed", key.seed}, {"offset", key.offset}};
    }
    const json content = {{"step", state.step},
                          {"epochs", state.epochs},
                          {"loader",
                           {{"seed", state.loader.seed},
                            {"epoch", state.loader.epoch},
                            {"item", state.loader.item},
                            {"size", state.loader.size}}},
                          {"generators", generators}};
    return content.dump(2) + "\n";
}

TrainingState training_state_of(const fs::path& path) {
    try {
        const json content = json::parse(read_text(path));
        const json& loader = content.at("loader");
        TrainingState state;
        content.at("step").get_to(state.step);
        content.at("epochs").get_to(state.epochs);
        loader.at("seed").get_to(state.loader.seed);
        loader.at("epoch").get_to(state.loader.epoch);
        loader.at("item").get_to(state.loader.item);
        loader.at("size").get_to(state.loader.size);
        for (const auto& [device, key] : content.at("generators").items()) {
            state.generators[device] = {key.at("seed").get<std::uint64_t>(),
                                        key.at("offset").get<std::uint64_t>()};
        }
        return state;
    } catch (const json::exception& error) {
        throw Error("load_checkpoint", fmt::format("{} is damaged: {}", path.string(), error.what()));
    }
}

}  // namespace

void save(const nn::Module& module, const std::string& path) {
    TensorFile file;
    file.tensors = module.state_dict();
    for (const auto& [name, first_name] : module.tied_names()) {
        file.tensors.erase(name);
        file.metadata[tied_prefix + name] = first_name;
    }
    save_safetensors(path, file);
}

nn::LoadReport load(nn::Module& module, const std::string& path, bool strict) {
    TensorFile file = load_safetensors(path);
    for (const auto& [key, first_name] : file.metadata) {
        if (!key.starts_with(tied_prefix)) continue;
        const auto first = file.tensors.find(first_name);
        if (first != file.tensors.end())
            file.tensors.emplace(key.substr(std::strlen(tied_prefix)), first->second);
    }
    try {
        return module.load_state_dict(file.tensors, strict);
    } catch (const Error& error) {
        throw Error("load", fmt::format("{}: {}", path, error.what()));
    }
}

std::map<std::string, RandomKey> generator_states(const nn::Module& module) {
    std::map<std::string, RandomKey> states;
    states[name_of(Device::cpu())] = default_generator(Device::cpu()).state();
    for (const Tensor& parameter : module.parameters()) {
        const Device device = parameter.device();
        states[name_of(device)] = default_generator(device).state();
    }
    return states;
}

std::string save_checkpoint(const std::string& folder, const nn::Module& module,
                            const optim::Optimizer& optimizer, const TrainingState& state,
                            std::int64_t keep) {
    if (keep < 0 || state.step < 0) {
        throw Error("save_checkpoint",
                    fmt::format("keep is {} and step is {}. They must not be negative.", keep, state.step));
    }
    const fs::path complete = fs::path(folder) / step_name(state.step);
    const fs::path partial = complete.string() + unfinished;
    const fs::path replaced = complete.string() + ".replaced";
    try {
        fs::create_directories(folder);
        for (const auto& entry : fs::directory_iterator(folder)) {  // left over from a run that was killed
            if (entry.path().extension() == unfinished) fs::remove_all(entry.path());
        }
        fs::create_directory(partial);
        save(module, partial / model_file);
        save_safetensors(partial / optimizer_file, {optimizer.state_dict(), {}});
        write_file_atomically(partial / training_file, to_json(state));
        write_file_atomically(partial / marker_file, marker_of(partial));
        sync_folder(partial);
        fs::remove_all(replaced);
        if (fs::exists(complete))
            fs::rename(complete, replaced);  // a rename cannot replace a folder that is not empty
        fs::rename(partial, complete);
        sync_folder(folder);
        fs::remove_all(replaced);
        const std::vector<fs::path> checkpoints = complete_checkpoints(folder);
        for (std::size_t i = static_cast<std::size_t>(keep); keep > 0 && i < checkpoints.size(); ++i) {
            if (checkpoints[i] == complete) continue;  // older steps may follow a newer run's
            fs::remove(checkpoints[i] / marker_file);  // first, so that no half-removed folder looks complete
            fs::remove_all(checkpoints[i]);
        }
    } catch (const fs::filesystem_error& error) {
        std::error_code ignored;
        fs::remove_all(partial, ignored);
        throw Error("save_checkpoint",
                    fmt::format("cannot write {}: {}", complete.string(), error.code().message()));
    } catch (...) {
        std::error_code ignored;
        fs::remove_all(partial, ignored);
        throw;
    }
    return complete;
}

TrainingState load_checkpoint(const std::string& path, nn::Module& module, optim::Optimizer& optimizer) {
    const fs::path checkpoint = path;
    if (!fs::is_directory(checkpoint)) {
        throw Error("load_checkpoint", fmt::format("there is no checkpoint {}.", path));
    }
    if (!is_complete(checkpoint)) {
        throw Error(
            "load_checkpoint",
            fmt::format("{} is not complete: its files do not agree with the marker {}. Use an older one.",
                        path, marker_file));
    }
    const TrainingState state = training_state_of(checkpoint / training_file);
    const TensorFile optimizer_state = load_safetensors(checkpoint / optimizer_file);
    load(module, checkpoint / model_file);
    optimizer.load_state_dict(optimizer_state.tensors);
    for (const auto& [device, key] : state.generators) default_generator(parse_device(device)).set_state(key);
    return state;
}

std::optional<std::string> latest_checkpoint(const std::string& folder) {
    const std::vector<fs::path> checkpoints = complete_checkpoints(folder);
    if (checkpoints.empty()) return std::nullopt;
    return checkpoints.front().string();
}

}  // namespace potluck
