#pragma once

#include <memory>

#include "core/stream.h"
#include "core/tensor.h"

namespace potluck {

/// A copy that copy_async() started. It holds both tensors until wait(). If it is dropped earlier, the copy still
/// completes, and the memory of both tensors is not reused before that.
class CopyHandle {
public:
    /// An empty handle: there is nothing to wait for.
    CopyHandle() = default;

    /// Whether the copy has ended. Does not wait.
    bool is_done() const { return work_ == nullptr || work_->is_done(); }
    /// Blocks the host until the copy has ended and releases the tensors. Throws the Error of what failed.
    void wait();
    /// Makes this stream of both devices wait for the copy without blocking the host: work that is enqueued from now on
    /// begins after it. (The host still needs wait() before it reads or writes the memory itself.)
    void wait_on(StreamKind stream = StreamKind::compute) const;

private:
    friend CopyHandle copy_async(const Tensor& from, const Tensor& to, StreamKind stream);

    Tensor from_, to_;
    std::shared_ptr<const PendingWork> work_;  // null: the copy has ended
};

/// Starts copying the elements of `from` into `to` in a stream that runs concurrently with computation: from the host
/// to a GPU, back, or between GPUs (directly where they have peer access, else through pinned host memory). The copy
/// begins after all work that is already enqueued in the compute streams of both devices, so the ops that produce
/// `from` need not be waited for. Until the handle has been waited for, nobody may write `from`, nor read or write
/// `to`.
///
/// Both must be contiguous, have the same shape and dtype, and not overlap; throws Error otherwise. Like Tensor::alias
/// this is a building block: nothing is recorded on the tape. Host memory that is not pinned (see TensorOptions) is
/// copied before the function returns, and so is every copy between CPU devices. During capture() a copy from the host
/// is recorded with the values of that moment, and a copy to the host is refused.
///
///     Tensor host = Tensor::empty(x.shape(), {.dtype = x.dtype(), .pinned = true});
///     CopyHandle copy = copy_async(x, host);   // from the GPU
///     ...                                      // the GPU computes on
///     copy.wait();                             // now the host may read
CopyHandle copy_async(const Tensor& from, const Tensor& to, StreamKind stream = StreamKind::copy);

}  // namespace potluck
