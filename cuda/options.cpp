#include "cuda/options.h"

#include <atomic>

namespace potluck::cuda {
namespace {

// Settings of the process, not of a device, so that they can be made before the first device is opened.
std::atomic<bool> tf32_allowed{false};
std::atomic<bool> bias_epilogue_enabled{true};
std::atomic<bool> gelu_epilogue_enabled{false};
std::atomic<bool> fused_attention_allowed{false};

}  // namespace

void set_tf32(bool allowed) { tf32_allowed.store(allowed, std::memory_order_relaxed); }
bool tf32() { return tf32_allowed.load(std::memory_order_relaxed); }

void set_bias_epilogue(bool enabled) { bias_epilogue_enabled.store(enabled, std::memory_order_relaxed); }
bool bias_epilogue() { return bias_epilogue_enabled.load(std::memory_order_relaxed); }

void set_gelu_epilogue(bool enabled) { gelu_epilogue_enabled.store(enabled, std::memory_order_relaxed); }
bool gelu_epilogue() { return gelu_epilogue_enabled.load(std::memory_order_relaxed); }

void set_fused_attention(bool allowed) { fused_attention_allowed.store(allowed, std::memory_order_relaxed); }
bool fused_attention() { return fused_attention_allowed.load(std::memory_order_relaxed); }

}  // namespace potluck::cuda
