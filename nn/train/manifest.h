#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/random.h"
#include "core/tensor.h"
#include "data/loader.h"
#include "nn/train/loss_scaler.h"

namespace potluck {

/// The position of a training run, besides its module and its optimizer.
struct TrainingState {
    std::int64_t step = 0;    // completed updates
    std::int64_t epochs = 0;  // completed epochs
    data::LoaderState loader = {};
    GeneratorStates generators = {};                  // of the devices in use
    std::optional<LossScalerState> loss_scaler = {};  // where the loss is scaled
};

/// The contents of a checkpoint: its manifest.json.
struct Manifest {
    struct File {
        std::string name;
        std::int64_t bytes = 0;
        std::string xxh3;  // checksum of the file, 16 hexadecimal digits; empty in version 1, which had none
    };
    /// Elements begin .. end-1 of a tensor, in row-major order, are stored as tensor `stored_as` of a file.
    struct Part {
        std::string file;
        std::int64_t begin = 0, end = 0;
        std::string stored_as;
    };
    struct Described {
        Shape shape;  // of the whole
        DType dtype = DType::f32;
        std::vector<Part> parts;
    };

    std::vector<File> files;
    std::map<std::string, Described> tensors;  // those of the optimizer are prefixed with `optimizer_prefix`
    std::map<std::string, std::string> tied;   // the other names of tied tensors, each with the first name
    TrainingState state;

    static constexpr const char* optimizer_prefix = "optimizer/";

    /// Adds the files and tensors of another rank. Throws Error when a file name already exists, or when the ranks
    /// disagree on the shape or dtype of a tensor.
    void add(const Manifest& other);
    /// Throws Error(op, ...) unless the parts of every tensor cover it without gaps or overlap.
    void check(const std::string& op) const;
};

/// The manifest as JSON, version 2:
///
///     {"version": 2, "step": 100, "epochs": 3,
///      "files": [{"name": "model-0.safetensors", "bytes": 123904, "xxh3": "0f6e..."}],
///      "tensors": {"h.0.attn.c_attn.weight": {"shape": [768, 2304], "dtype": "float32",
///                  "parts": [{"file": "model-0.safetensors", "begin": 0, "end": 1769472}]}},
///      "tied": {"lm_head.weight": "transformer.wte.weight"},
///      "seed": 42, "generators": {"cpu": {"seed": 42, "offset": 256}},
///      "loader": {"seed": 0, "epoch": 3, "item": 0, "size": 4096},
///      "loss_scaler": {"scale": 65536.0, "good_updates": 7, "skipped_in_a_row": 0}}
///
/// begin and end count elements of the whole tensor in row-major order. A part that is the whole tensor is stored with
/// its shape, other parts with one axis. `seed` is that of the CPU's generator, for human readers.
std::string to_json(const Manifest& manifest);

/// Parses such a text; unknown fields are ignored. Throws Error that names `path` for a text that is damaged or has a
/// version above 2.
Manifest manifest_of(const std::string& text, const std::string& path);

/// The manifest of a checkpoint folder. For version 1 (the files model.safetensors, optimizer.safetensors, training.json
/// and DONE) it is reconstructed. Throws Error that names a file that is missing, damaged, too short, or of another step
/// than the folder's name; checksums are not verified.
Manifest read_manifest(const std::string& checkpoint);

inline constexpr const char* manifest_file = "manifest.json";

/// The step in the name of a checkpoint folder, 10 for step_00000010, or -1 for any other name.
std::int64_t step_of(const std::filesystem::path& checkpoint);

}  // namespace potluck
