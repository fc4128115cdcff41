#pragma once

#include <functional>
#include <memory>

#include "core/device.h"

namespace potluck {

/// Recorded work of one device that can be launched again as a whole: see capture().
class CapturedWork {
public:
    virtual ~CapturedWork() = default;

    /// Executes the work again on the tensors with which it was recorded: it reads inputs from the same addresses and
    /// writes results to the same addresses. Throws the Error of what fails.
    virtual void replay() = 0;
};

/// Records what `work` starts on `device` without executing it; nothing is computed before the first replay(). A GPU
/// then receives hundreds of kernels in one launch, as a CUDA graph, and does not wait for the host between them; the
/// CPU simply runs `work` at each replay.
///
///     Tensor input = ..., loss;                       // each replay reads this memory
///     step();                                         // once without recording: libraries choose their plans
///     auto graph = capture(device, [&] { optimizer.zero_grad(); loss = ...; loss.backward(); });
///     for (...) { input.copy_(next batch); graph->replay(); optimizer.step(); }
///
/// A whole update may be recorded, optimizer included, if its numbers are on the device: see core/update_control.h.
///
/// Values that `work` captures by value live as long as the recording; other tensors that it reads must live as long,
/// at the same address. Shapes and addresses are frozen at recording time, and so are values that came from the host or
/// from a generator passed explicitly. Work on the CPU is executed once, while recording, and not replayed; work on
/// another GPU throws Error. After another manual_seed() the work must be recorded again. Only two things differ
/// between replays: the contents of the tensors, and the random numbers. Each replay takes fresh ones from
/// default_generator(device), the same that running `work` would take. Inside `work` no value can be read on the host
/// (item(), printing, the norm of clip_grad_norm, an optimizer's step with numbers on the host, AnomalyCheck): such a
/// call throws Error, and nothing is recorded. An invalid element that a replay meets (an id or label out of range) is
/// reported when the thread next waits for the device. On the CPU the replay itself runs `work`, so that item() and
/// to_vector() of its tensors throw only then.
std::unique_ptr<CapturedWork> capture(Device device, std::function<void()> work);

namespace detail {
/// Whether a replay runs captured work of `device` on the host in this thread.
bool is_replaying(Device device);
/// Whether what this thread starts on `device` is being recorded instead of done.
bool is_recording(Device device);
/// Throws Error(op, ...) while a replay runs captured work on the host in this thread, for a tensor of `device`.
void require_readable(const char* op, Device device);
}  // namespace detail

}  // namespace potluck
