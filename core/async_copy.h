#pragma once

#include <memory>

#include "core/stream.h"
#include "core/tensor.h"

namespace potluck {

/// A copy that copy_async() started. It holds both tensors until wait(); one that is dropped before lets the copy end all
/// the same, and their memory is given to nobody else until then.
class CopyHandle {
public:
    /// Nothing to wait for.
    CopyHandle() = default;

    /// Whether the copy has ended. Does not wait.
    bool is_done() const { return work_ == nullptr || work_->is_done(); }
    /// Lets the host wait for the end of the copy, and lets go of the tensors. Throws the Error of what failed.
    void wait();
    /// Lets this stream of both devices wait, and not the host: what is put into it from now on begins after the copy.
    /// (What the host itself reads or writes needs wait().)
    void wait_on(StreamKind stream = StreamKind::compute) const;

private:
    friend CopyHandle copy_async(const Tensor& from, const Tensor& to, StreamKind stream);

    Tensor from_, to_;
    std::shared_ptr<const PendingWork> work_;  // null: has ended
};

/// Starts copying the elements of `from` into `to`, in a stream of its own beside what computes: from the host to a GPU,
/// back, or between GPUs (from one to the other where they reach each other's memory, else through pinned memory of the
/// host). The copy begins after everything that the compute streams of both devices were given before, so ops that make
/// `from` need no waiting for. Until the handle was waited for, nobody may write `from`, nor read or write `to`.
///
/// Both must be contiguous, of one shape and dtype, and not overlap; Throws Error otherwise. It is a building block, as
/// Tensor::alias: nothing is recorded on the tape. Host memory that is not pinned (see TensorOptions) is copied before the
/// function returns, as is everything between CPU devices. While work is being recorded (capture()), what comes from the host
/// is recorded as it is, and nothing can go there.
///
///     Tensor host = Tensor::empty(x.shape(), {.dtype = x.dtype(), .pinned = true});
///     CopyHandle copy = copy_async(x, host);   // from the GPU
///     ...                                      // the GPU computes on
///     copy.wait();                             // now the host may read
CopyHandle copy_async(const Tensor& from, const Tensor& to, StreamKind stream = StreamKind::copy);

}  // namespace potluck
