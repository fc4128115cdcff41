#include "tests/core/fake_device.h"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "core/backend.h"
#include "core/device_registry.h"
#include "core/error.h"
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

/// The same elements as a tensor of the CPU.
Tensor here(const Tensor& x) {
    if (x.device() == Device::cpu()) return x;
    std::byte* data = x.storage()->data() == nullptr ? nullptr : moved(x.storage()->data(), 0 - shift);
    auto storage = std::make_shared<Storage>(Device::cpu(), data, x.storage()->bytes(), [] {});
    return Tensor::view_of(std::move(storage), x.dtype(), x.shape(), x.strides(), x.offset());
}

[[noreturn]] void refuse(const char* kernel) { throw Error(kernel, "the test device has no such kernel."); }

class FakeBackend final : public Backend {
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

    void unary(UnaryOp, const Tensor&, Tensor&) override { refuse("unary"); }
    void unary_backward(UnaryOp, const Tensor&, const Tensor&, Tensor&) override { refuse("unary_backward"); }
    void binary(BinaryOp, const Tensor&, const Tensor&, Tensor&) override { refuse("binary"); }
    void compare(CompareOp, const Tensor&, const Tensor&, Tensor&) override { refuse("compare"); }
    void where(const Tensor&, const Tensor&, const Tensor&, Tensor&) override { refuse("where"); }
    void chain(std::span<const Tensor>, std::span<const ChainStep>, Tensor&) override { refuse("chain"); }
    void add_scaled(const Tensor&, double, Tensor&) override { refuse("add_scaled"); }
    void reduce(ReduceOp, const Tensor&, std::int64_t, Tensor&) override { refuse("reduce"); }
    void variance(const Tensor&, std::int64_t, double, Tensor&, Tensor&) override { refuse("variance"); }
    void matmul(const Tensor&, const Tensor&, Tensor&, bool) override { refuse("matmul"); }
    void linear(const Tensor&, const Tensor&, const Tensor&, Tensor&) override { refuse("linear"); }
    void linear_gelu(const Tensor&, const Tensor&, const Tensor&, Tensor&, Tensor&) override {
        refuse("linear_gelu");
    }
    void softmax(const Tensor&, bool, Tensor&) override { refuse("softmax"); }
    void softmax_backward(const Tensor&, const Tensor&, bool, Tensor&) override {
        refuse("softmax_backward");
    }
    void cross_entropy(const Tensor&, const Tensor&, const CrossEntropySpec&, Tensor&, Tensor&) override {
        refuse("cross_entropy");
    }
    void cross_entropy_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                const CrossEntropySpec&, Tensor&) override {
        refuse("cross_entropy_backward");
    }
    void layer_norm(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, Tensor&, Tensor&,
                    Tensor&, Tensor&) override {
        refuse("layer_norm");
    }
    void layer_norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool,
                             Tensor&, Tensor&, Tensor&) override {
        refuse("layer_norm_backward");
    }
    void rms_norm(const Tensor&, const Tensor&, const Tensor&, double, Tensor&, Tensor&, Tensor&) override {
        refuse("rms_norm");
    }
    void rms_norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, Tensor&,
                           Tensor&) override {
        refuse("rms_norm_backward");
    }
    void batch_norm_statistics(const Tensor&, double, Tensor&, Tensor&, Tensor&) override {
        refuse("batch_norm_statistics");
    }
    void batch_norm(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                    Tensor&) override {
        refuse("batch_norm");
    }
    void batch_norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool,
                             Tensor&, Tensor&, Tensor&) override {
        refuse("batch_norm_backward");
    }
    void convolution(const Tensor&, const Tensor&, const Tensor&, const ConvolutionSpec&, Tensor&) override {
        refuse("convolution");
    }
    void convolution_backward(const Tensor&, const Tensor&, const Tensor&, const ConvolutionSpec&, Tensor&,
                              Tensor&, Tensor&) override {
        refuse("convolution_backward");
    }
    void max_pool(const Tensor&, const PoolSpec&, Tensor&, Tensor&) override { refuse("max_pool"); }
    void max_pool_backward(const Tensor&, const Tensor&, const PoolSpec&, Tensor&) override {
        refuse("max_pool_backward");
    }
    void average_pool(const Tensor&, const PoolSpec&, Tensor&) override { refuse("average_pool"); }
    void average_pool_backward(const Tensor&, const PoolSpec&, Tensor&) override {
        refuse("average_pool_backward");
    }
    void embedding(const Tensor&, const Tensor&, Tensor&) override { refuse("embedding"); }
    void embedding_backward(const Tensor&, const Tensor&, Tensor&) override { refuse("embedding_backward"); }
    void gather(const Tensor&, std::int64_t, const Tensor&, Tensor&) override { refuse("gather"); }
    void scatter_add(std::int64_t, const Tensor&, const Tensor&, Tensor&) override { refuse("scatter_add"); }
    void tril(const Tensor&, std::int64_t, Tensor&) override { refuse("tril"); }
    void rotary(const Tensor&, const Tensor&, const Tensor&, bool, Tensor&) override { refuse("rotary"); }
    void attention(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const AttentionSpec&, Tensor&,
                   Tensor&) override {
        refuse("attention");
    }
    void attention_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            const Tensor&, const Tensor&, const AttentionSpec&, Tensor&, Tensor&, Tensor&,
                            Tensor&) override {
        refuse("attention_backward");
    }
    void dropout(RandomKey, const RandomPart&, double, const Tensor&, Tensor&) override { refuse("dropout"); }
    void topk(const Tensor&, std::int64_t, bool, Tensor&, Tensor&) override { refuse("topk"); }
    void multinomial(RandomKey, const Tensor&, bool, Tensor&) override { refuse("multinomial"); }
    void adamw(const AdamWSpec&, std::span<AdamWTensors>) override { refuse("adamw"); }
    void sgd(const SgdSpec&, std::span<SgdTensors>) override { refuse("sgd"); }
    void sum_of_squares(std::span<const Tensor>, Tensor&) override { refuse("sum_of_squares"); }
    void largest_magnitude(std::span<const Tensor>, Tensor&) override { refuse("largest_magnitude"); }
    void decide_update(Tensor&) override { refuse("decide_update"); }
};

}  // namespace

Device fake_device() {
    static const Device device = [] {
        register_device(Device::cuda(40), std::make_unique<FakeBackend>());
        // Kept blocks have no address that a leak checker knows.
        std::atexit([] { release_cached_memory(Device::cuda(40)); });
        return Device::cuda(40);
    }();
    return device;
}

FakeMemory fake_memory() { return state; }

void set_fake_capacity(std::int64_t bytes) { capacity = bytes; }

}  // namespace potluck::test
