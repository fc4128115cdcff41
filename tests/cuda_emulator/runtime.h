#pragma once

// Internal: shared code of the runtime's functions.

#include <cuda_runtime_api.h>

#include "core/op_scope.h"
#include "tests/cuda_emulator/state.h"

namespace potluck::emulator {

/// Stores an error for cudaGetLastError, and returns it.
cudaError_t finish(cudaError_t status);
/// The error that a fault left on the device of this thread, until the test takes the fault.
cudaError_t device_error();

inline bool is_device(int index) {
    return index >= 0 && static_cast<std::size_t>(index) < state().devices.size();
}
inline EmulatedDevice& device(int index) { return *state().devices[static_cast<std::size_t>(index)]; }

/// The host waits for the operations in this clock; pools free what exceeds their thresholds.
void host_waits(const Clock& clock, int device_index);
/// The host waits for everything on the device.
void wait_for_device(int device_index);

}  // namespace potluck::emulator
