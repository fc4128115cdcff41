#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nn/module.h"
#include "nn/optim/optimizer.h"
#include "nn/train/manifest.h"

namespace potluck {

/// Writes the parameters and saved buffers of a module to a safetensors file, under their names. Tied tensors are stored
/// once; their other names stand in the metadata ("tied.lm_head.weight": "transformer.wte.weight"). The file is replaced
/// as a whole or not at all. Throws Error for a module that has no tensors (one that was moved from).
void save(const nn::Module& module, const std::string& path);

/// Loads a safetensors file into a module: see Module::load_state_dict(). Files of other programs can be used if names
/// and shapes agree.
nn::LoadReport load(nn::Module& module, const std::string& path, bool strict = true);

/// Writes everything that a run needs to continue as if it had never stopped to `folder`/step_00000010: the tensors in
/// model-0.safetensors (like save()) and optimizer-0.safetensors, and finally manifest.json (nn/train/manifest.h),
/// which lists them with their checksums and marks the checkpoint as complete. The folder has a temporary name until it
/// is complete. Of the complete checkpoints in `folder` the newest `keep` are kept (0: all). Returns the path.
std::string save_checkpoint(const std::string& folder, const nn::Module& module,
                            const optim::Optimizer& optimizer, const TrainingState& state,
                            std::int64_t keep = 0);

/// Loads a checkpoint (the path of one step), with its tensors in any number of files, into a module and an optimizer,
/// sets the generators of the CPU and of those devices that exist here, and returns the rest. Also reads version 1, in
/// which a file DONE marks a complete checkpoint instead of a manifest. Throws Error that names a file that is missing,
/// damaged, or of another checkpoint (by its checksum), or what does not fit; then nothing is changed.
///
/// The module may have another floating dtype than the one that was saved. Values are converted, and no digit is lost on
/// the way that the memory here can hold: masters that the optimizer needs now are taken from the saved weights before
/// these are rounded, and weights that need none any more are taken from the saved masters
/// (Optimizer::exchange_masters()). The optimizer must be of the kind that was saved: moments are not made up.
TrainingState load_checkpoint(const std::string& path, nn::Module& module, optim::Optimizer& optimizer);

/// The path of the newest complete checkpoint in `folder`, judged by manifest and file sizes: checkpoints whose writing
/// was interrupted, or that lost a part later, do not count. None if there is none.
std::optional<std::string> latest_checkpoint(const std::string& folder);

struct ResumedCheckpoint {
    std::string path;  // empty: there is none
    TrainingState state;
    std::vector<std::string> damaged;  // newer checkpoints that were skipped, and why: a sentence each
};

/// Throws Error if a run cannot be continued from this state of a checkpoint.
using StateCheck = std::function<void(const TrainingState&)>;

/// Loads the newest sound checkpoint in `folder`, checksums included, like load_checkpoint(). Throws Error when there
/// is none, with what is wrong with each, and when the sound one does not fit or `check`, which is called before
/// anything is changed, refuses its state.
ResumedCheckpoint load_latest_checkpoint(const std::string& folder, nn::Module& module,
                                         optim::Optimizer& optimizer, const StateCheck& check = {});

/// The same, but where no checkpoint was ever finished, or there is not even the folder, it returns an empty path.
ResumedCheckpoint load_latest_checkpoint_if_any(const std::string& folder, nn::Module& module,
                                                optim::Optimizer& optimizer, const StateCheck& check = {});

// ---- what save_checkpoint() is made of ----

/// What a checkpoint holds.
struct CheckpointContent {
    nn::StateDict model;                      // parameters and saved buffers, tied ones once
    nn::StateDict optimizer;                  // Optimizer::state_dict()
    std::map<std::string, std::string> tied;  // further names of tied tensors, and the first name of each
    TrainingState state;
};

/// The tensors themselves, not copies.
CheckpointContent checkpoint_content(const nn::Module& module, const optim::Optimizer& optimizer,
                                     const TrainingState& state);

/// Writes it as save_checkpoint() does. Nothing is left of one that fails.
std::string write_checkpoint(const std::string& folder, const CheckpointContent& content, std::int64_t keep);

// ---- what write_checkpoint() is made of, for ranks that hold a part each ----

/// A tensor, or consecutive elements of it in row-major order.
struct TensorPart {
    Tensor values;           // the whole tensor, or its elements as one axis
    Shape shape;             // of the whole
    std::int64_t begin = 0;  // position of the first of these elements in the whole
};
using TensorParts = std::map<std::string, TensorPart>;

/// Whole tensors as parts.
TensorParts whole_parts(const nn::StateDict& tensors);

/// Creates the folder in which the checkpoint of `step` is written, and removes unfinished ones. The root rank calls it
/// before any other rank writes.
std::string begin_checkpoint(const std::string& folder, std::int64_t step);

/// Writes the tensors of one rank to model-<rank>.safetensors and optimizer-<rank>.safetensors in that folder (no file
/// where it has none), and returns its part of the manifest. `tied` are the other names of tied tensors. Throws Error
/// when `values` exceed `shape`.
Manifest write_checkpoint_parts(const std::string& partial, std::int64_t rank, const TensorParts& model,
                                const TensorParts& optimizer, const std::map<std::string, std::string>& tied);

/// Writes the manifest, which lists what all ranks wrote (Manifest::add()) and the state, renames the checkpoint to its
/// final name, and removes all but the newest `keep`. The root rank calls it when all ranks are done. Returns the path.
/// Throws Error when the parts do not cover a tensor.
std::string finish_checkpoint(const std::string& folder, const Manifest& manifest, std::int64_t keep);

}  // namespace potluck
