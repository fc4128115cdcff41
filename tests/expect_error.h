#pragma once

#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "core/device_registry.h"
#include "core/error.h"

namespace potluck::test {

/// Waits for every device: bad elements that only kernels detect are reported at the next wait.
inline void wait_for_devices() {
    for (const Device device : registered_devices()) synchronize(device);
}

/// The text of the Error that `function` throws, at the latest when the devices have finished the work that it started;
/// empty (and a failed check) when it throws none.
template <class Function>
std::string error_of(Function&& function) {
    try {
        function();
        wait_for_devices();
    } catch (const Error& error) {
        return error.what();
    }
    FAIL_CHECK("no Error was thrown");
    return {};
}

inline bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

}  // namespace potluck::test
