#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/device.h"

namespace potluck {

/// The queues of a device. What is put into one runs in its order, beside what stands in the others. Ops compute in
/// `compute`. On a CPU device everything is done at once, in whatever queue.
enum class StreamKind : std::uint8_t { compute, communication, copy };

/// Something that was put into a stream of a device and may still be running.
class PendingWork {
public:
    virtual ~PendingWork() = default;

    /// Whether it has ended (or failed).
    virtual bool is_done() const noexcept = 0;
    /// Lets the host wait for it. Throws the Error of what failed.
    virtual void wait() const = 0;
    /// Lets this stream of `device` wait for it: what is put into the stream from now on begins after it. The host goes on.
    virtual void block(Device device, StreamKind stream) const = 0;
};
using PendingWorks = std::vector<std::shared_ptr<const PendingWork>>;

}  // namespace potluck
