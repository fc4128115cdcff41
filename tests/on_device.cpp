#include "tests/on_device.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>

#include "core/device_registry.h"

namespace potluck::test {
namespace {

thread_local Device under_test = Device::cpu();

bool is_registered(Device device) {
    const std::vector<Device> all = registered_devices();
    return std::find(all.begin(), all.end(), device) != all.end();
}

}  // namespace

std::vector<Device> devices() {
    if (const char* chosen = std::getenv("POTLUCK_TEST_DEVICE")) {
        const Device device = parse_device(chosen);
        if (device.is_cpu())  // "cpu:1" is created here, with another number of threads than "cpu"
            while (!is_registered(device)) add_cpu_device({.threads = 3});
        return {device};
    }
    std::vector<Device> found;
    for (const Device device : registered_devices())
        if (device.index == 0) found.push_back(device);
    return found;
}

Device test_device() { return under_test; }

OnDevice::OnDevice(Device device) : before_(under_test) { under_test = device; }
OnDevice::~OnDevice() { under_test = before_; }

void on_each_device(const std::function<void()>& body) {
    for (const Device device : devices()) {
        const std::string name = name_of(device);
        INFO("on " << name);
        const OnDevice here(device);
        body();
    }
}

}  // namespace potluck::test
