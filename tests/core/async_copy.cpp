#include "core/async_copy.h"

#include <doctest/doctest.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/device_registry.h"
#include "core/factories.h"
#include "core/memory.h"
#include "tests/core/fake_device.h"
#include "tests/expect_error.h"

using namespace potluck;

namespace {

/// Work that ends when the test says so.
class Planned final : public PendingWork {
public:
    bool is_done() const noexcept override { return done; }
    void wait() const override { done = true; }
    void block(Device, StreamKind) const override {}

    mutable bool done = false;
};

Device another_cpu() {
    static const Device device = add_cpu_device({.threads = 1});
    return device;
}

}  // namespace

TEST_CASE("copy_async: between CPU devices, and with any device without streams, it is done at once") {
    const Tensor x = tensor({{1., 2.}, {3., 4.}});
    for (const Device device : {Device::cpu(), another_cpu(), test::fake_device()}) {
        const std::string name = name_of(device);
        CAPTURE(name);
        const Tensor there = Tensor::empty({2, 2}, {DType::f32, device});
        CopyHandle handle = copy_async(x, there);
        CHECK(handle.is_done());
        handle.wait_on(StreamKind::compute);
        handle.wait_on(StreamKind::communication);
        CHECK(there.to_vector() == x.to_vector());
        handle.wait();
        handle.wait();  // again: there is nothing to wait for
        const Tensor back = Tensor::empty({2, 2});
        copy_async(there, back).wait();
        CHECK(back.to_vector() == x.to_vector());
    }
    const Tensor there = Tensor::empty({2, 2}, {DType::f32, test::fake_device()});
    const Tensor also = Tensor::empty({2, 2}, {DType::f32, test::fake_device()});
    copy_async(x, there).wait();
    copy_async(there, also).wait();
    CHECK(also.to_vector() == x.to_vector());
}

TEST_CASE("copy_async: a part of a tensor, an empty one, and the version of the target") {
    const Tensor x = arange(0, 6, 1, {DType::f32});
    const Tensor y = zeros({6});
    const std::uint64_t before = y.storage()->version();
    copy_async(x.alias({2}, {1}, 3), y.alias({2}, {1}, 1)).wait();
    CHECK(y.to_vector() == std::vector<double>{0, 3, 4, 0, 0, 0});
    CHECK(y.storage()->version() == before + 1);
    copy_async(zeros({0, 3}), zeros({0, 3})).wait();
    copy_async(x.alias({3}, {1}, 0), x.alias({3}, {1}, 3)).wait();  // two parts of one storage
    CHECK(x.to_vector() == std::vector<double>{0, 1, 2, 0, 1, 2});
}

TEST_CASE("copy_async: what cannot be copied so is refused, and nothing was changed") {
    const Tensor x = ones({2, 3});
    const Tensor y = zeros({2, 3});
    const auto refuses = [&](const Tensor& from, const Tensor& to, const char* text) {
        CHECK_THROWS_WITH_AS(copy_async(from, to), doctest::Contains(text), Error);
    };
    refuses(Tensor(), y, "[copy_async] the source is an undefined tensor");
    refuses(x, Tensor(), "the target is an undefined tensor");
    refuses(x, zeros({3, 2}), "the source is (2, 3) of f32, the target (3, 2) of f32");
    refuses(x, zeros({2, 3}, {DType::f64}), "the target (2, 3) of f64");
    refuses(x.alias({3, 2}, {1, 3}, 0), zeros({3, 2}), "not row-major");
    refuses(zeros({3, 2}), y.alias({3, 2}, {1, 3}, 0), "not row-major");
    const Tensor both = arange(0, 6, 1, {DType::f32});
    refuses(both.alias({4}, {1}, 0), both.alias({4}, {1}, 2), "overlap");
    refuses(both, both, "overlap");
    CHECK(y.to_vector() == std::vector<double>(6, 0.0));
    CHECK(both.to_vector() == std::vector<double>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("pinned memory: counted, capped and told as other memory of the host") {
    const Device device = another_cpu();
    for (const Device host : {Device::cpu(), device}) {
        const std::int64_t before = memory_statistics(host).current;
        Tensor x = Tensor::empty({100}, {.dtype = DType::f64, .device = host, .pinned = true});
        CHECK(x.storage()->is_pinned());
        CHECK(memory_statistics(host).current == before + 800);
        x.data<double>()[99] = 4.0;
        CHECK(x.alias({}, {}, 99).item() == 4.0);
        x = Tensor();
        CHECK(memory_statistics(host).current == before);
        CHECK_FALSE(Tensor::empty({100}, {DType::f64, host}).storage()->is_pinned());
    }
    CHECK(full({2}, 7, {.pinned = true}).storage()->is_pinned());
    CHECK(tensor({1, 2}, {.pinned = true}).storage()->is_pinned());
    CHECK(tensor({1, 2}, {.pinned = true}).to_vector() == std::vector<double>{1, 2});
    CHECK(arange(0, 3, 1, {.dtype = DType::i64, .pinned = true}).storage()->is_pinned());
    CHECK_THROWS_WITH_AS(Tensor::empty({2}, {.device = test::fake_device(), .pinned = true}),
                         doctest::Contains("cannot be pinned"), Error);
    set_memory_cap(memory_statistics(device).current + 100, device);
    CHECK_THROWS_AS(Tensor::empty({100}, {.device = device, .pinned = true}), OutOfMemory);
    set_memory_cap(0, device);
    release_cached_memory(device);
    CHECK(memory_statistics(device).cached == 0);
}

TEST_CASE("storage: memory that a copy still uses is given to nobody else") {
    const Device device = add_cpu_device();
    for (const bool pinned : {false, true}) {
        const TensorOptions options{.dtype = DType::u8, .device = device, .pinned = pinned};
        const auto work = std::make_shared<Planned>();
        Tensor x = Tensor::empty({1000}, options);
        const void* const place = x.raw_data();
        x.storage()->keep_until(std::make_shared<Planned>());  // two pieces of work at once
        x.storage()->keep_until(work);
        const auto other = std::make_shared<Planned>();
        x.storage()->keep_until(other);
        other->done = true;
        x = Tensor();
        CHECK(memory_statistics(device).current == 0);  // tensors hold nothing; the block waits to be reused
        const std::int64_t cached = memory_statistics(device).cached;
        std::vector<Tensor> held;
        for (int i = 0; i < 4; ++i) {
            held.push_back(Tensor::empty({1000}, options));
            CHECK(held.back().raw_data() != place);
        }
        CHECK(memory_statistics(device).cached == cached);
        held.clear();
        release_cached_memory(device);  // waits for the planned work
        CHECK(work->done);
        CHECK(memory_statistics(device).cached == 0);
    }
}

TEST_CASE("storage: once the copy has ended its memory serves again") {
    const Device device = add_cpu_device();
    const TensorOptions options{.dtype = DType::u8, .device = device};
    const auto work = std::make_shared<Planned>();
    Tensor x = Tensor::empty({1000}, options);
    const void* const place = x.raw_data();
    x.storage()->keep_until(work);
    x = Tensor();
    Tensor y = Tensor::empty({1000}, options);
    CHECK(y.raw_data() != place);
    work->done = true;
    const Tensor z = Tensor::empty({1000}, options);
    CHECK(z.raw_data() == place);
}

TEST_CASE("storage: borrowed memory goes back to its owner after the copy has ended") {
    const auto work = std::make_shared<Planned>();
    std::vector<float> values(10);
    bool waited = false;
    {
        const Tensor x = borrow(values.data(), {10}, [&] { waited = work->done; });
        x.storage()->keep_until(work);
    }
    CHECK(waited);
}
