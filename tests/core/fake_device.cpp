#include "tests/core/fake_device.h"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "core/backend.h"
#include "core/cpu/cpu_backend.h"
#include "core/device_registry.h"
#include "core/memory.h"
#include "core/tensor.h"

namespace potluck::test {
namespace {

constexpr std::uintptr_t shift = std::uintptr_t{1} << 47;  // no address of a Linux process has this bit

FakeMemory state;
std::int64_t capacity = std::numeric_limits<std::int64_t>::max();

std::byte* moved(const void* data, std::uintptr_t by) {
    return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(data) + by);
}

/// The same elements as a CPU tensor.
Tensor here(const Tensor& x) {
    if (x.device() == Device::cpu()) return x;
    std::byte* data = x.storage()->data() == nullptr ? nullptr : moved(x.storage()->data(), 0 - shift);
    auto storage = std::make_shared<Storage>(Device::cpu(), data, x.storage()->bytes(), [] {});
    return Tensor::view_of(std::move(storage), x.dtype(), x.shape(), x.strides(), x.offset());
}

/// A CPU whose memory has shifted addresses: only overridden functions can be called on it.
class FakeBackend final : public CpuBackend {
public:
    void* allocate(std::int64_t bytes) override {
        ++state.allocations;
        if (bytes > capacity - state.bytes) return nullptr;
        state.bytes += bytes;
        return moved(std::aligned_alloc(64, static_cast<std::size_t>((bytes + 63) / 64 * 64)), shift);
    }
    void release(void* data, std::int64_t bytes) noexcept override {
        state.bytes -= bytes;
        std::free(moved(data, 0 - shift));
    }
    void copy_from_host(void* to, const void* from, std::int64_t bytes) override {
        if (bytes > 0) std::memcpy(moved(to, 0 - shift), from, static_cast<std::size_t>(bytes));
    }
    void copy_to_host(void* to, const void* from, std::int64_t bytes) override {
        if (bytes > 0) std::memcpy(to, moved(from, 0 - shift), static_cast<std::size_t>(bytes));
    }
    std::string describe() const override { return "a test device"; }
    void copy(const Tensor& from, Tensor& to) override {
        Tensor target = here(to);
        backend(Device::cpu()).copy(here(from), target);
    }
    void fill(Tensor& to, const Scalar& value) override {
        Tensor target = here(to);
        backend(Device::cpu()).fill(target, value);
    }
    void uniform(RandomKey key, double low, double high, Tensor& y) override {
        Tensor target = here(y);
        backend(Device::cpu()).uniform(key, low, high, target);
    }
    void normal(RandomKey key, double mean, double std, Tensor& y) override {
        Tensor target = here(y);
        backend(Device::cpu()).normal(key, mean, std, target);
    }
    void random_integers(RandomKey key, std::int64_t low, std::int64_t high, Tensor& y) override {
        Tensor target = here(y);
        backend(Device::cpu()).random_integers(key, low, high, target);
    }
};

}  // namespace

Device fake_device() {
    static const Device device = [] {
        register_device(Device::cuda(40), std::make_unique<FakeBackend>());
        // A leak checker cannot see the shifted addresses of cached blocks.
        std::atexit([] { release_cached_memory(Device::cuda(40)); });
        return Device::cuda(40);
    }();
    return device;
}

FakeMemory fake_memory() { return state; }

void set_fake_capacity(std::int64_t bytes) { capacity = bytes; }

}  // namespace potluck::test
