#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "core/random.h"
#include "data/loader.h"
#include "nn/module.h"
#include "nn/optim/optimizer.h"

namespace potluck {

/// Writes the parameters and saved buffers of a module to a safetensors file, under their names. Tied tensors are stored
/// once; their other names stand in the metadata ("tied.lm_head.weight": "transformer.wte.weight"). The file is replaced
/// as a whole or not at all.
void save(const nn::Module& module, const std::string& path);

/// Reads a safetensors file into a module: see Module::load_state_dict(). Files of others will do when names and shapes
/// agree.
nn::LoadReport load(nn::Module& module, const std::string& path, bool strict = true);

/// Where a training run stands, besides its module and its optimizer.
struct TrainingState {
    std::int64_t step = 0;    // updates done
    std::int64_t epochs = 0;  // epochs done
    data::LoaderState loader = {};
    std::map<std::string, RandomKey> generators = {};  // of the devices in use, by name
};

/// Writes everything that a run needs to go on as if it had never stopped to `folder`/step_00000010:
/// model.safetensors (as save() writes it), optimizer.safetensors, training.json, and last the marker DONE. All of it is
/// written under another name, which is changed when it is complete. Of the complete checkpoints in `folder` the newest
/// `keep` stay (0: all). Returns the path.
std::string save_checkpoint(const std::string& folder, const nn::Module& module,
                            const optim::Optimizer& optimizer, const TrainingState& state,
                            std::int64_t keep = 0);

/// Reads such a checkpoint (the path of one step) into a module and an optimizer, sets the generators of the devices,
/// and returns the rest. Throws Error that names what is missing or does not fit.
TrainingState load_checkpoint(const std::string& path, nn::Module& module, optim::Optimizer& optimizer);

/// The path of the newest complete checkpoint in `folder`; those that were cut off in the writing, or have lost a part
/// since, do not count. None when there is none.
std::optional<std::string> latest_checkpoint(const std::string& folder);

/// The generators of the CPU and of the devices that a module's tensors are on, as TrainingState keeps them.
std::map<std::string, RandomKey> generator_states(const nn::Module& module);

}  // namespace potluck
