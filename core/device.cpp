#include "core/device.h"

#include <omp.h>

#include <atomic>
#include <charconv>
#include <deque>
#include <mutex>

#include "core/cpu/cpu_backend.h"
#include "core/device_registry.h"
#include "core/error.h"
#include "core/format.h"

namespace potluck {
namespace {

struct Registry {
    std::mutex mutex;
    std::deque<DeviceEntry> entries;  // a deque: entries never move
    std::string (*discover)() = nullptr;
    std::once_flag discovered;
    std::string why_none = "this build has no CUDA";  // why discovery found nothing; empty when it did
};

Registry& registry() {
    static auto& instance = *new Registry;  // never destroyed: see DeviceEntry
    return instance;
}

DeviceEntry& cpu_entry() {
    static auto& entry = *new DeviceEntry(Device::cpu(), std::make_unique<CpuBackend>());
    return entry;
}

DeviceEntry* find_registered(Device device) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    for (DeviceEntry& entry : all.entries)
        if (entry.device == device) return &entry;
    return nullptr;
}

void discover_devices() {
    Registry& all = registry();
    std::call_once(all.discovered, [&all] {
        if (all.discover != nullptr) all.why_none = all.discover();
    });
}

DeviceEntry* find(Device device) {
    if (device == Device::cpu()) return &cpu_entry();
    discover_devices();
    return find_registered(device);
}

std::atomic<int> chosen_threads{0};

int default_threads() {
    static const int count = omp_get_max_threads();
    return count;
}

}  // namespace

std::string name_of(Device device) {
    if (device == Device::cpu()) return "cpu";
    return fmt::format("{}:{}", device.kind == DeviceKind::cpu ? "cpu" : "cuda", device.index);
}

Device parse_device(const std::string& text) {
    if (text == "cpu") return Device::cpu();
    if (text == "cuda") return Device::cuda();
    const std::string_view prefix = "cuda:";
    if (text.starts_with(prefix)) {
        int index = -1;
        const char* end = text.data() + text.size();
        const auto [stop, failure] = std::from_chars(text.data() + prefix.size(), end, index);
        if (failure == std::errc() && stop == end && index >= 0) return Device::cuda(index);
    }
    throw Error("parse_device",
                fmt::format("\"{}\" names no device. Write \"cpu\", \"cuda\" or \"cuda:1\".", text));
}

DeviceEntry& device_entry(Device device) {
    if (DeviceEntry* entry = find(device)) return *entry;
    std::string all;
    for (const Device known : registered_devices()) all += (all.empty() ? "" : ", ") + name_of(known);
    const std::string& why = registry().why_none;
    throw Error("device", fmt::format("there is no device {} here; this build and machine offer: {}.{}",
                                      device, all, why.empty() ? "" : " Reason: " + why + "."));
}

void register_device(Device device, std::unique_ptr<Backend> backend) {
    if (backend == nullptr) throw Error("register_device", fmt::format("{} has no backend.", device));
    if (device == Device::cpu() || find_registered(device) != nullptr)
        throw Error("register_device", fmt::format("{} is registered already.", device));
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.entries.emplace_back(device, std::move(backend));
}

void set_device_discovery(std::string (*discover)()) { registry().discover = discover; }

std::vector<Device> registered_devices() {
    discover_devices();
    std::vector<Device> devices{Device::cpu()};
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    for (const DeviceEntry& entry : all.entries) devices.push_back(entry.device);
    return devices;
}

Device best_device() { return find(Device::cuda()) != nullptr ? Device::cuda() : Device::cpu(); }

std::string describe(Device device) { return backend(device).describe(); }

void synchronize(Device device) { backend(device).synchronize(); }

Backend& backend(Device device) { return *device_entry(device).backend; }

void set_threads(int count) {
    constexpr int most = 1024;  // OpenMP ends the program when the system refuses a thread
    if (count < 0 || count > most)
        throw Error("set_threads",
                    fmt::format("{} threads. Give 1 to {}, or 0 for one per core.", count, most));
    const int standard = default_threads();  // asked before this thread's OpenMP setting changes
    chosen_threads = count;
    omp_set_num_threads(count == 0 ? standard : count);
}

int threads() {
    const int chosen = chosen_threads.load(std::memory_order_relaxed);
    return chosen == 0 ? default_threads() : chosen;
}

}  // namespace potluck
