#include "core/device.h"

#include <array>
#include <atomic>
#include <charconv>
#include <mutex>
#include <ostream>

#include "core/cpu/cpu_backend.h"
#include "core/device_registry.h"
#include "core/error.h"
#include "core/format.h"

namespace potluck {

DeviceEntry::DeviceEntry(Device which, std::unique_ptr<Backend> kernels)
    : device(which), backend(std::move(kernels)), memory(which, *backend) {}
DeviceEntry::~DeviceEntry() = default;

namespace {

struct Registry {
    std::array<std::array<std::atomic<DeviceEntry*>, most_devices>, 2> entries{};  // by kind and index
    std::atomic<int> count{0};
    std::mutex mutex;  // held to add one
    std::string (*discover)() = nullptr;
    std::once_flag discovered;
    std::string why_none = "this build has no CUDA";  // why discovery found nothing; empty when it did

    Registry() { add(std::make_unique<DeviceEntry>(Device::cpu(), std::make_unique<CpuBackend>())); }

    /// Null for an index that no device can have.
    std::atomic<DeviceEntry*>* place_of(Device device) {
        if (device.index < 0 || device.index >= most_devices) return nullptr;
        return &entries[static_cast<std::size_t>(device.kind)][static_cast<std::size_t>(device.index)];
    }
    void add(std::unique_ptr<DeviceEntry> entry) {
        place_of(entry->device)->store(entry.get(), std::memory_order_release);
        (void)entry.release();  // never destroyed: see DeviceEntry
        ++count;
    }
};

Registry& registry() {
    static auto& instance = *new Registry;  // never destroyed, as its entries
    return instance;
}

DeviceEntry* find_registered(Device device) {
    const std::atomic<DeviceEntry*>* place = registry().place_of(device);
    return place == nullptr ? nullptr : place->load(std::memory_order_acquire);
}

void discover_devices() {
    Registry& all = registry();
    std::call_once(all.discovered, [&all] {
        if (all.discover != nullptr) all.why_none = all.discover();
    });
}

DeviceEntry* find(Device device) {
    if (DeviceEntry* entry = find_registered(device); entry != nullptr || device.is_cpu()) return entry;
    discover_devices();
    return find_registered(device);
}

int checked_threads(const char* op, int count) {
    constexpr int most = 1024;  // OpenMP terminates the program when the system refuses to create a thread
    if (count < 0 || count > most)
        throw Error(op, fmt::format("{} threads. Give 1 to {}, or 0 for one per core.", count, most));
    return count;
}

CpuBackend& cpu_backend(const char* op, Device device) {
    if (auto* const cpu = dynamic_cast<CpuBackend*>(&backend(device))) return *cpu;
    throw Error(op, fmt::format("{} has no threads of the CPU. Give a CPU device.", device));
}

}  // namespace

std::string name_of(Device device) {
    if (device == Device::cpu()) return "cpu";
    return fmt::format("{}:{}", device.kind == DeviceKind::cpu ? "cpu" : "cuda", device.index);
}

std::ostream& operator<<(std::ostream& stream, Device device) { return stream << name_of(device); }

Device parse_device(const std::string& text) {
    for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::cuda}) {
        const std::string_view name = kind == DeviceKind::cpu ? "cpu" : "cuda";
        if (!text.starts_with(name)) continue;
        if (text == name) return {kind, 0};
        if (text[name.size()] != ':') break;
        int index = -1;
        const char* end = text.data() + text.size();
        const auto [stop, failure] = std::from_chars(text.data() + name.size() + 1, end, index);
        if (failure == std::errc() && stop == end && index >= 0) return {kind, index};
    }
    throw Error("parse_device",
                fmt::format("\"{}\" names no device. Write \"cpu\", \"cuda\" or \"cuda:1\".", text));
}

DeviceEntry& device_entry(Device device) {
    if (DeviceEntry* entry = find(device)) return *entry;
    std::string all;
    for (const Device known : registered_devices()) all += (all.empty() ? "" : ", ") + name_of(known);
    const std::string& why = registry().why_none;
    const std::string advice = device.is_cpu() ? " Use one of these, or make another by add_cpu_device()."
                                               : " Use one of these: best_device() is the fastest.";
    throw Error("device",
                fmt::format("there is no device {} here; this build and machine offer: {}.{}{}", device, all,
                            why.empty() || device.is_cpu() ? "" : " Reason: " + why + ".", advice));
}

void register_device(Device device, std::unique_ptr<Backend> backend) {
    if (backend == nullptr) throw Error("register_device", fmt::format("{} has no backend.", device));
    Registry& all = registry();
    if (all.place_of(device) == nullptr)
        throw Error("register_device", fmt::format("{} is none of {} devices.", device, most_devices));
    const std::lock_guard lock(all.mutex);
    if (find_registered(device) != nullptr)
        throw Error("register_device", fmt::format("{} is registered already.", device));
    all.add(std::make_unique<DeviceEntry>(device, std::move(backend)));
}

Device add_cpu_device(CpuDeviceOptions options) {
    const char* const op = "add_cpu_device";
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    Device device = Device::cpu();
    while (device.index < most_devices && find_registered(device) != nullptr) ++device.index;
    if (device.index == most_devices)
        throw Error(op, fmt::format("there are {} CPU devices already. Use one of them.", most_devices));
    auto entry = std::make_unique<DeviceEntry>(
        device, std::make_unique<CpuBackend>(checked_threads(op, options.threads)));
    entry->memory.set_cap(options.memory_cap, op);
    entry->generator = Generator(default_generator().state().seed);
    all.add(std::move(entry));
    return device;
}

void set_device_discovery(std::string (*discover)()) { registry().discover = discover; }

std::vector<Device> registered_devices() {
    discover_devices();
    std::vector<Device> devices;
    for (const auto& kind : registry().entries)
        for (const auto& place : kind)
            if (const DeviceEntry* entry = place.load(std::memory_order_acquire))
                devices.push_back(entry->device);
    return devices;
}

int device_count() {
    discover_devices();
    return registry().count;
}

Device best_device() { return find(Device::cuda()) != nullptr ? Device::cuda() : Device::cpu(); }

std::string describe(Device device) { return backend(device).describe(); }

void synchronize(Device device) { backend(device).synchronize(); }

Backend& backend(Device device) { return *device_entry(device).backend; }

void set_threads(int count, Device device) {
    cpu_backend("set_threads", device).set_threads(checked_threads("set_threads", count));
}

int threads(Device device) { return cpu_backend("threads", device).threads(); }

}  // namespace potluck
