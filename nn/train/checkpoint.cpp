#include "nn/train/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/checksum.h"
#include "core/format.h"
#include "core/safetensors.h"

namespace potluck {
namespace {

namespace fs = std::filesystem;

constexpr const char* tied_prefix = "tied.";
constexpr const char* unfinished = ".partial";

std::string step_name(std::int64_t step) { return fmt::format("step_{:08}", step); }

/// Whether it is the folder of an unfinished checkpoint. Nothing else there may be removed.
bool is_unfinished(const fs::directory_entry& entry) {
    const fs::path name = entry.path().filename();
    const std::int64_t step = step_of(name.stem());
    return step >= 0 && name == step_name(step) + unfinished && fs::is_directory(entry.symlink_status());
}

/// A sentence for each checkpoint after `step` that was never finished.
std::vector<std::string> unfinished_after(std::int64_t step, const fs::path& folder) {
    std::vector<std::string> sentences;
    std::error_code failure;
    for (const auto& entry : fs::directory_iterator(folder, failure))
        if (is_unfinished(entry) && step_of(entry.path().stem()) > step)
            sentences.push_back(fmt::format("{} was never finished: the program ended while it was written.",
                                            entry.path().string()));
    return sentences;
}

/// Makes a rename in this folder survive a power failure.
void sync_folder(const fs::path& folder) {
    const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    if (descriptor < 0) return;
    fsync(descriptor);
    close(descriptor);
}

/// Folders named like checkpoints, newest first.
std::vector<fs::path> checkpoints_in(const fs::path& folder) {
    std::vector<fs::path> found;
    std::error_code failure;
    for (const auto& entry : fs::directory_iterator(folder, failure))
        if (step_of(entry.path()) >= 0) found.push_back(entry.path());
    std::sort(found.begin(), found.end(),
              [](const fs::path& a, const fs::path& b) { return step_of(a) > step_of(b); });
    return found;
}

bool is_complete(const fs::path& checkpoint) {
    try {
        read_manifest(checkpoint);
        return true;
    } catch (const Error&) {
        return false;
    }
}

/// Throws Error that names the first file whose content is not what was written.
void verify_checksums(const Manifest& manifest, const fs::path& checkpoint) {
    for (const Manifest::File& file : manifest.files) {
        if (file.xxh3.empty()) continue;  // version 1
        const fs::path path = checkpoint / file.name;
        const std::string found = checksum_of_file("load_checkpoint", path);
        if (found != file.xxh3)
            throw Error(
                "load_checkpoint",
                fmt::format("{} is not what was written: its checksum is {}, not {}. It is damaged or "
                            "comes from another checkpoint. Use an older checkpoint.",
                            path.string(), found, file.xxh3));
    }
}

/// Assembles every tensor, from any number of files.
nn::StateDict read_tensors(const Manifest& manifest, const fs::path& checkpoint) {
    std::map<std::string, TensorFile> files;
    for (const Manifest::File& file : manifest.files)
        if (file.name.ends_with(".safetensors"))
            files.emplace(file.name, load_safetensors(checkpoint / file.name));
    nn::StateDict tensors;
    for (const auto& [name, described] : manifest.tensors) {
        // All parts are looked up before the tensor is allocated, because its size is only a claim of the manifest.
        std::vector<Tensor> stored;
        for (const Manifest::Part& part : described.parts) {
            const auto file = files.find(part.file);
            const bool is_there = file != files.end() && file->second.tensors.contains(part.stored_as);
            const Tensor tensor = is_there ? file->second.tensors.at(part.stored_as) : Tensor();
            if (!is_there || tensor.dtype() != described.dtype || tensor.count() != part.end - part.begin)
                throw Error("load_checkpoint",
                            fmt::format("{} does not hold elements {} to {} of {} as {}. Use an older "
                                        "checkpoint.",
                                        (checkpoint / part.file).string(), part.begin, part.end, name,
                                        described.dtype));
            stored.push_back(tensor);
        }
        Tensor whole;
        if (stored.size() == 1) {
            whole = stored.front();
            whole = whole.alias(described.shape, contiguous_strides(described.shape), whole.offset());
        } else {
            whole = Tensor::empty(described.shape, {described.dtype});
            for (std::size_t i = 0; i < stored.size(); ++i)
                if (stored[i].count() > 0)
                    std::memcpy(static_cast<std::byte*>(whole.raw_data()) +
                                    described.parts[i].begin * size_of(whole.dtype()),
                                stored[i].raw_data(), static_cast<std::size_t>(stored[i].bytes()));
        }
        tensors.emplace(name, std::move(whole));
    }
    return tensors;
}

/// Throws Error if anything is damaged.
CheckpointContent read_content(const fs::path& checkpoint) {
    const Manifest manifest = read_manifest(checkpoint);
    verify_checksums(manifest, checkpoint);
    const std::string prefix = Manifest::optimizer_prefix;
    CheckpointContent content{{}, {}, manifest.tied, manifest.state};
    for (auto& [name, tensor] : read_tensors(manifest, checkpoint)) {
        if (name.starts_with(prefix))
            content.optimizer.emplace(name.substr(prefix.size()), tensor);
        else
            content.model.emplace(name, tensor);
    }
    return content;
}

/// Gives tied tensors their further names.
void add_tied(nn::StateDict& tensors, const std::map<std::string, std::string>& tied) {
    for (const auto& [name, first_name] : tied)
        if (const auto first = tensors.find(first_name); first != tensors.end())
            tensors.emplace(name, first->second);
}

/// Loads all of what was read or nothing: everything that can fail is checked before anything is changed.
void apply(CheckpointContent content, const fs::path& checkpoint, nn::Module& module,
           optim::Optimizer& optimizer, const StateCheck& check) {
    try {
        if (check) check(content.state);
        optimizer.exchange_masters(content.optimizer, content.model);
        add_tied(content.model, content.tied);
        optimizer.check_state_dict(content.optimizer);
        module.load_state_dict(content.model);
        optimizer.load_state_dict(content.optimizer);
    } catch (const Error& error) {
        throw Error("load_checkpoint", fmt::format("{}: {}", checkpoint.string(), error.what()));
    }
    set_generator_states(content.state.generators);
}

/// The tensors of a module, tied ones once.
nn::StateDict stored_tensors(const nn::Module& module) {
    nn::StateDict tensors = module.state_dict();
    for (const auto& [name, first_name] : module.tied_names()) tensors.erase(name);
    return tensors;
}

/// Other programs read the "format" of a file and accept "pt".
std::map<std::string, std::string> metadata_of(const std::map<std::string, std::string>& tied) {
    std::map<std::string, std::string> metadata = {{"format", "pt"}};
    for (const auto& [name, first_name] : tied) metadata[tied_prefix + name] = first_name;
    return metadata;
}

/// Writes one file of a rank and lists it in the manifest. Without tensors no file is written.
void write_parts(const fs::path& folder, const std::string& name, const TensorParts& parts,
                 const std::string& prefix, const std::map<std::string, std::string>& tied,
                 Manifest& manifest) {
    if (parts.empty()) return;
    TensorFile file{{}, metadata_of(tied)};
    for (const auto& [tensor_name, part] : parts) {
        const std::string full_name = prefix + tensor_name;
        std::int64_t count = 1;
        for (const std::int64_t size : part.shape) count *= size;
        const std::int64_t held = part.values.defined() ? part.values.count() : -1;
        if (held < 0 || part.begin < 0 || part.begin > count - held)
            throw Error("save_checkpoint", fmt::format("{} elements from {} on do not lie in {} of shape {}.",
                                                       held, part.begin, full_name, pretty(part.shape)));
        file.tensors[full_name] = part.values;
        manifest.tensors[full_name] = {
            part.shape, part.values.dtype(), {{name, part.begin, part.begin + held, full_name}}};
    }
    const WrittenFile written = save_safetensors(folder / name, file);
    manifest.files.push_back({name, written.bytes, written.xxh3});
}

/// Calls `write` and converts file system errors to Error.
template <class Write>
auto writing(const fs::path& path, Write&& write) {
    try {
        return write();
    } catch (const fs::filesystem_error& error) {
        throw Error("save_checkpoint",
                    fmt::format("cannot write {}: {}", path.string(), error.code().message()));
    }
}

}  // namespace

void save(const nn::Module& module, const std::string& path) {
    if (module.state_dict().empty())
        throw Error(
            "save",
            fmt::format("the module has no tensors to be saved in {}: it names none in members(), or was "
                        "moved from. Save the module that it was moved to.",
                        path));
    save_safetensors(path, {stored_tensors(module), metadata_of(module.tied_names())});
}

nn::LoadReport load(nn::Module& module, const std::string& path, bool strict) {
    TensorFile file = load_safetensors(path);
    std::map<std::string, std::string> tied;
    for (const auto& [key, first_name] : file.metadata)
        if (key.starts_with(tied_prefix)) tied[key.substr(std::strlen(tied_prefix))] = first_name;
    add_tied(file.tensors, tied);
    try {
        return module.load_state_dict(file.tensors, strict);
    } catch (const Error& error) {
        throw Error("load", fmt::format("{}: {}", path, error.what()));
    }
}

TensorParts whole_parts(const nn::StateDict& tensors) {
    TensorParts parts;
    for (const auto& [name, tensor] : tensors) parts[name] = {tensor, tensor.shape(), 0};
    return parts;
}

std::string begin_checkpoint(const std::string& folder, std::int64_t step) {
    if (step < 0) throw Error("save_checkpoint", fmt::format("step is {}. It must not be negative.", step));
    if (folder.empty())
        throw Error("save_checkpoint", "the folder is empty (\"\"). Give the one that checkpoints go to.");
    const fs::path partial = fs::path(folder) / (step_name(step) + unfinished);
    return writing(partial, [&] {
        fs::create_directories(folder);
        for (const auto& entry : fs::directory_iterator(folder)) {  // left over from a run that was killed
            if (is_unfinished(entry)) fs::remove_all(entry.path());
        }
        fs::create_directory(partial);
        return partial.string();
    });
}

Manifest write_checkpoint_parts(const std::string& partial, std::int64_t rank, const TensorParts& model,
                                const TensorParts& optimizer,
                                const std::map<std::string, std::string>& tied) {
    for (const auto& [name, part] : model)
        if (name.starts_with(Manifest::optimizer_prefix))
            throw Error("save_checkpoint",
                        fmt::format("a tensor of the module is called {}. Names that begin with {} are for "
                                    "the optimizer's.",
                                    name, Manifest::optimizer_prefix));
    Manifest manifest;
    manifest.tied = tied;
    write_parts(partial, fmt::format("model-{}.safetensors", rank), model, "", tied, manifest);
    write_parts(partial, fmt::format("optimizer-{}.safetensors", rank), optimizer, Manifest::optimizer_prefix,
                {}, manifest);
    return manifest;
}

std::string finish_checkpoint(const std::string& folder, const Manifest& manifest, std::int64_t keep) {
    if (keep < 0) throw Error("save_checkpoint", fmt::format("keep is {}. It must not be negative.", keep));
    manifest.check("save_checkpoint");
    const fs::path complete = fs::path(folder) / step_name(manifest.state.step);
    const fs::path partial = complete.string() + unfinished;
    const fs::path replaced = complete.string() + ".replaced";
    return writing(complete, [&] {
        write_file_atomically(partial / manifest_file, to_json(manifest));
        sync_folder(partial);
        fs::remove_all(replaced);
        if (fs::exists(complete))
            fs::rename(complete, replaced);  // a rename cannot replace a folder that is not empty
        fs::rename(partial, complete);
        sync_folder(folder);
        fs::remove_all(replaced);
        if (keep > 0) {
            std::int64_t kept = 0;
            for (const fs::path& checkpoint : checkpoints_in(folder)) {
                if (!is_complete(checkpoint)) continue;
                if (kept++ < keep || checkpoint == complete)
                    continue;  // a newer run may have written lower steps
                // What is partly removed when the program is killed must not look complete, and goes with the next save.
                const fs::path leaving = checkpoint.string() + unfinished;
                fs::rename(checkpoint, leaving);
                fs::remove_all(leaving);
            }
        }
        return complete.string();
    });
}

CheckpointContent checkpoint_content(const nn::Module& module, const optim::Optimizer& optimizer,
                                     const TrainingState& state) {
    return {stored_tensors(module), optimizer.state_dict(), module.tied_names(), state};
}

std::string save_checkpoint(const std::string& folder, const nn::Module& module,
                            const optim::Optimizer& optimizer, const TrainingState& state,
                            std::int64_t keep) {
    return write_checkpoint(folder, checkpoint_content(module, optimizer, state), keep);
}

std::string write_checkpoint(const std::string& folder, const CheckpointContent& content, std::int64_t keep) {
    if (keep < 0) throw Error("save_checkpoint", fmt::format("keep is {}. It must not be negative.", keep));
    const std::string partial = begin_checkpoint(folder, content.state.step);
    try {
        Manifest manifest = write_checkpoint_parts(partial, 0, whole_parts(content.model),
                                                   whole_parts(content.optimizer), content.tied);
        manifest.state = content.state;
        return finish_checkpoint(folder, manifest, keep);
    } catch (...) {
        std::error_code ignored;
        fs::remove_all(partial, ignored);
        throw;
    }
}

TrainingState load_checkpoint(const std::string& path, nn::Module& module, optim::Optimizer& optimizer) {
    CheckpointContent content = read_content(path);
    TrainingState state = content.state;
    apply(std::move(content), path, module, optimizer, {});
    return state;
}

std::optional<std::string> latest_checkpoint(const std::string& folder) {
    for (const fs::path& checkpoint : checkpoints_in(folder))
        if (is_complete(checkpoint)) return checkpoint.string();
    return std::nullopt;
}

ResumedCheckpoint load_latest_checkpoint_if_any(const std::string& folder, nn::Module& module,
                                                optim::Optimizer& optimizer, const StateCheck& check) {
    ResumedCheckpoint resumed;
    for (const fs::path& checkpoint : checkpoints_in(folder)) {
        CheckpointContent content;
        try {
            content = read_content(checkpoint);
        } catch (const OutOfMemory&) {
            throw;  // not damage
        } catch (const Error& error) {
            resumed.damaged.push_back(std::string(error.what()).substr(error.op().size() + 3));
            continue;
        }
        resumed.path = checkpoint.string();
        resumed.state = content.state;
        apply(std::move(content), checkpoint, module, optimizer, check);
        break;
    }
    const bool all_damaged = resumed.path.empty() && !resumed.damaged.empty();
    std::vector<std::string> newer = unfinished_after(resumed.path.empty() ? -1 : resumed.state.step, folder);
    newer.insert(newer.end(), resumed.damaged.begin(), resumed.damaged.end());
    resumed.damaged = std::move(newer);
    if (all_damaged)
        throw Error(
            "load_checkpoint",
            fmt::format("none of the checkpoints in {} is sound. Bring one back from a copy, or begin "
                        "in another folder: a new run here would replace them. {}",
                        folder, fmt::join(resumed.damaged, " ")));
    return resumed;
}

ResumedCheckpoint load_latest_checkpoint(const std::string& folder, nn::Module& module,
                                         optim::Optimizer& optimizer, const StateCheck& check) {
    ResumedCheckpoint resumed = load_latest_checkpoint_if_any(folder, module, optimizer, check);
    if (!resumed.path.empty()) return resumed;
    throw Error(
        "load_checkpoint",
        fmt::format("there is no complete checkpoint in {} to resume from. Start without resuming, or "
                    "give the folder of another run.{}{}",
                    folder, resumed.damaged.empty() ? "" : " ", fmt::join(resumed.damaged, " ")));
}

}  // namespace potluck
