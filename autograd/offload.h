#pragma once

#include <cstdint>
#include <memory>

#include "autograd/saved.h"
#include "core/device.h"

namespace potluck {

namespace detail {
class OffloadedTensors;
}  // namespace detail

struct OffloadOptions {
    Device to = Device::cpu();        // whose memory keeps them: pinned memory beside a GPU
    std::int64_t smallest = 1 << 16;  // bytes; smaller tensors stay where they are
    std::int64_t read_ahead = 2;      // tensors that come back before backward asks for them
};

/// `Offload guard;` moves what ops keep for their backward to the memory of another device (the host's), until the end of
/// the block, on the copy stream and beside what computes. Backward gets each tensor back when it comes to its op; as it goes
/// through them in the opposite order, the next ones are read ahead. Values and gradients are the same bits.
///
/// Parameters stay where they are, and so do tensors that are there already: on a model in the memory of `to` the guard does
/// nothing. A tensor that several ops keep is moved once. Around recompute() it moves the inputs of the regions, which is
/// all that those keep. A tensor that was changed in place since is an Error in backward. Threads may share a guard's graphs.
class Offload {
public:
    /// Throws Error for negative numbers.
    [[nodiscard]] explicit Offload(const OffloadOptions& options = {});
    Offload(const Offload&) = delete;
    Offload& operator=(const Offload&) = delete;

private:
    explicit Offload(const std::shared_ptr<detail::OffloadedTensors>& tensors);

    SavedTensorHooks hooks_;
};

}  // namespace potluck
