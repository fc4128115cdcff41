#pragma once

#include <string>

#include "nn/models/gpt2.h"
#include "nn/models/llama.h"
#include "nn/module.h"

namespace potluck::nn {

/// Loads weights as published by Hugging Face into a model: `gpt2` and its larger variants, in a safetensors file.
///
/// The names may lack the prefix "transformer.", as in the published files. Without lm_head.weight the output layer
/// gets the embedding's weights, as GPT-2 was trained, even in a model that does not tie the two. The attention masks
/// in these files (h.0.attn.bias, h.0.attn.masked_bias) are not weights: they are skipped and reported as `unexpected`.
/// Dtypes are converted. Throws Error that names the file if anything else is missing, does not fit or is unknown; then
/// nothing is changed.
LoadReport load_pretrained(GPT2& model, const std::string& path);

/// The same for Llama. The names may lack the prefix "model.", as in files of the model without its output layer; a
/// missing lm_head.weight is an Error unless the model ties it to the embedding. Tables of rotary angles
/// (model.layers.0.self_attn.rotary_emb.inv_freq) are skipped and reported: the model computes its own.
LoadReport load_pretrained(Llama& model, const std::string& path);

}  // namespace potluck::nn
