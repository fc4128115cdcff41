#pragma once

#include <functional>
#include <memory>

#include "core/device.h"

namespace potluck {

/// Work of one device that was recorded and can be started again as one piece: see capture().
class CapturedWork {
public:
    virtual ~CapturedWork() = default;

    /// Does the work again, on the tensors that it was recorded with: inputs are read from where they were then, results
    /// are written to where they were. Throws the Error of what fails.
    virtual void replay() = 0;
};

/// Records what `work` starts on `device`, without doing it; nothing has happened before the first replay(). A GPU then
/// gets hundreds of kernels in one call, as a CUDA graph, and does not wait for the host between them; the CPU simply
/// runs `work` at each replay.
///
///     Tensor input = ..., loss;                       // the memory that each replay reads
///     step();                                         // once without recording: libraries choose their plans
///     auto graph = capture(device, [&] { optimizer.zero_grad(); loss = ...; loss.backward(); });
///     for (...) { input.copy_(next batch); graph->replay(); optimizer.step(); }
///
/// A whole update may be recorded, optimizer included, when its numbers stand on the device: see core/update_control.h.
///
/// What `work` holds by value lives as long as the recording; other tensors that it reads must live as long, at the same
/// place. Shapes and addresses are recorded as they are, and so is what came from the host or from a generator of one's
/// own. Work on the CPU is done at once, while the rest is recorded, and not again; work on another GPU throws Error. After
/// another manual_seed() the work must be recorded again. What differs from replay to replay is what stands in the tensors,
/// and the random numbers: each replay takes fresh ones of default_generator(device), the same that running `work` would
/// take. Inside `work` no value can be read on the host (item(), printing, the norm of
/// clip_grad_norm, an optimizer's step by numbers of the host, AnomalyCheck): such a call throws Error, and nothing was
/// recorded. A bad element that a replay meets (an id or label out of range) is told when the thread next waits for the
/// device. On the CPU, where item() and to_vector() of its tensors throw, that is at the replay, which runs the
/// work.
std::unique_ptr<CapturedWork> capture(Device device, std::function<void()> work);

namespace detail {
/// Whether a replay runs captured work of `device` on the host in this thread.
bool is_replaying(Device device);
/// Whether what this thread starts on `device` is being recorded instead of done.
bool is_recording(Device device);
/// Throws Error(op, ...) inside captured work that a replay runs on the host in this thread, for a tensor of `device`.
void require_readable(const char* op, Device device);
}  // namespace detail

}  // namespace potluck
