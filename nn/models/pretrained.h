#pragma once

#include <string>

#include "nn/models/gpt2.h"
#include "nn/models/llama.h"
#include "nn/module.h"

namespace potluck::nn {

/// Reads weights as Hugging Face publishes them into a model: `gpt2` and its larger sisters, in a safetensors file.
///
/// The names may lack the "transformer." in front, as in the published files. Without lm_head.weight the output layer
/// has the embedding's weights, which is how GPT-2 was trained, also in a model that does not tie the two. The attention
/// masks of these files (h.0.attn.bias, h.0.attn.masked_bias) are no weights: they are skipped, and stand in the report
/// as `unexpected`. Dtypes are converted. Throws Error that names the file for everything else that is missing, does not
/// fit or is not known, and then nothing was changed.
LoadReport load_pretrained(GPT2& model, const std::string& path);

/// The same for Llama. The names may lack the "model." in front, as in files of the model without its output layer; a
/// missing lm_head.weight is an Error unless the model ties it to the embedding. Tables of rotary angles
/// (model.layers.0.self_attn.rotary_emb.inv_freq) are skipped and reported: the model computes its own.
LoadReport load_pretrained(Llama& model, const std::string& path);

}  // namespace potluck::nn
