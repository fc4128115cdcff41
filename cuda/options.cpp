#include "cuda/options.h"

#include "core/backend.h"
#include "core/error.h"
#include "core/format.h"
#include "cuda/device_options.h"

namespace potluck::cuda {
namespace {

DeviceOptions& options_of(Device device) {
    if (auto* const cuda = dynamic_cast<HasOptions*>(&backend(device))) return cuda->options();
    throw Error("cuda", fmt::format("{} is no CUDA device, and has no options of one.", device));
}

}  // namespace

void set_tf32(bool allowed, Device device) { options_of(device).tf32 = allowed; }
bool tf32(Device device) { return options_of(device).tf32; }

void set_bias_epilogue(bool enabled, Device device) { options_of(device).bias_epilogue = enabled; }
bool bias_epilogue(Device device) { return options_of(device).bias_epilogue; }

void set_gelu_epilogue(bool enabled, Device device) { options_of(device).gelu_epilogue = enabled; }
bool gelu_epilogue(Device device) { return options_of(device).gelu_epilogue; }

void set_fused_attention(bool allowed, Device device) { options_of(device).fused_attention = allowed; }
bool fused_attention(Device device) { return options_of(device).fused_attention; }

}  // namespace potluck::cuda
