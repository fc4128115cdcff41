#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/device.h"

namespace potluck {

/// The streams of a device. Work in one stream runs in order, and concurrently with the other streams. Ops run in
/// `compute`. On a CPU device all work is executed immediately, whatever the stream.
enum class StreamKind : std::uint8_t { compute, communication, copy };

/// Work that was enqueued in a stream of a device and may still be running.
class PendingWork {
public:
    virtual ~PendingWork() = default;

    /// Whether it has ended (or failed).
    virtual bool is_done() const noexcept = 0;
    /// Blocks the host until it has ended. Throws the Error of what failed.
    virtual void wait() const = 0;
    /// Makes this stream of `device` wait for it: work enqueued from now on begins after it. The host does not wait.
    virtual void block(Device device, StreamKind stream) const = 0;
};
using PendingWorks = std::vector<std::shared_ptr<const PendingWork>>;

}  // namespace potluck
