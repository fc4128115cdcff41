// Loaders that hand their batches out on another device. Of a CUDA device: tests/cuda/loader.cpp.

#include <doctest/doctest.h>

#include "core/device_registry.h"
#include "core/factories.h"
#include "data/loader.h"
#include "tests/expect_error.h"

using namespace potluck;
using potluck::test::contains;
using potluck::test::error_of;

TEST_CASE("loader: batches on another device are the same as those here") {
    const Device other = add_cpu_device({.threads = 1});
    const data::TensorDataset dataset(rand({10, 3}), arange(0, 10));
    for (const int workers : {0, 2}) {
        data::Loader here(dataset, {.batch = 4, .shuffle = true, .seed = 1});
        data::Loader there(dataset,
                           {.batch = 4, .shuffle = true, .workers = workers, .seed = 1, .device = other});
        for (int i = 0; i < 7; ++i) {
            const data::Batch expected = here.next(), batch = there.next();
            CHECK(batch.inputs.device() == other);
            CHECK(batch.targets.device() == other);
            CHECK(batch.inputs.to_vector() == expected.inputs.to_vector());
            CHECK(batch.targets.to_vector() == expected.targets.to_vector());
            CHECK(batch.host_targets.device() == Device::cpu());
            CHECK(batch.host_targets.to_vector() == expected.targets.to_vector());
            CHECK(batch.share == expected.share);
            CHECK(batch.global_count == expected.global_count);
            CHECK(there.state() == here.state());
        }
        for (auto [x, y] : there.pass()) CHECK(x.device() == other);
    }
}

TEST_CASE("loader: on the device where the items are, nothing is copied") {
    const data::TensorDataset dataset(arange(0, 4), arange(0, 4));
    for (const std::optional<Device> device : {std::optional<Device>(), std::optional(Device::cpu())}) {
        const data::Batch batch = data::Loader(dataset, {.batch = 2, .device = device}).next();
        CHECK(batch.inputs.device() == Device::cpu());
        CHECK_FALSE(batch.inputs.storage()->is_pinned());
        CHECK_FALSE(batch.host_targets.defined());
    }
    const data::Batch bare =
        data::Loader(data::TensorDataset(arange(0, 4)), {.batch = 2, .device = Device::cpu()}).next();
    CHECK_FALSE(bare.targets.defined());
    CHECK(contains(error_of([&] { data::Loader(dataset, {.device = Device::cpu(99)}); }), "cpu:99"));
}
