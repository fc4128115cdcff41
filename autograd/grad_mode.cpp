#include "autograd/grad_mode.h"

namespace potluck {

namespace {
thread_local bool recording = true;
}

bool is_grad_enabled() noexcept { return recording; }

GradMode::GradMode(bool enabled) noexcept : outer_(recording) { recording = enabled; }
GradMode::~GradMode() { recording = outer_; }

}  // namespace potluck
