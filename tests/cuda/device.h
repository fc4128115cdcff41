#pragma once

#include "core/device.h"
#include "core/device_registry.h"
#include "tests/skip.h"

namespace potluck::test {

/// Whether there is a CUDA device; marks the running test case as skipped when there is none.
inline bool has_cuda_device() {
    for (const Device device : registered_devices())
        if (device == Device::cuda()) return true;
    skip("no GPU here; the emulated device runs this test (./test --emulated)");
    return false;
}

}  // namespace potluck::test
