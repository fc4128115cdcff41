#pragma once

// Internal: a batch that is copied to another device beside what that computes.

#include "core/async_copy.h"
#include "data/loader.h"

namespace potluck::data {

/// The copy of one batch to a device. It begins when this is made, after what the device's compute stream was given
/// before; from pinned memory, the host does not wait for it.
class BatchCopy {
public:
    BatchCopy(Batch batch, Device device);

    /// The batch, whose tensors are the device's: what the compute stream is given from now on comes after the copy.
    Batch arrived() const;

private:
    Batch batch_;
    CopyHandle inputs_, targets_;
};

}  // namespace potluck::data
