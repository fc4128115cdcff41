// Code above the backends must not access a device's memory: the device used here crashes any that does.

#include <doctest/doctest.h>

#include <array>

#include "core/factories.h"
#include "core/memory.h"
#include "core/safetensors.h"
#include "tests/core/fake_device.h"
#include "tests/core/temporary_folder.h"

using namespace potluck;

TEST_CASE("second device: factories, item, to_vector, printing and saving go through its backend") {
    const Device device = test::fake_device();
    const auto on_device = [&](DType dtype) { return TensorOptions{dtype, device}; };
    const Tensor x = tensor({{1., 2., 3.}, {4., 5., 6.}}, on_device(DType::f32));
    CHECK(x.device() == device);
    CHECK(x.to_vector() == std::vector<double>{1, 2, 3, 4, 5, 6});
    const Tensor turned = x.alias({3, 2}, {1, 3}, 0);
    CHECK(turned.to_vector<std::int64_t>() == std::vector<std::int64_t>{1, 4, 2, 5, 3, 6});
    CHECK(turned.alias({}, {}, 5).item() == 6);
    CHECK(to_string(turned) == "[[1. 4.]\n [2. 5.]\n [3. 6.]] (cuda:40)");
    CHECK(to_string(full({2000}, 7, on_device(DType::f16))) == "[7. 7. 7. ... 7. 7. 7.] (f16, cuda:40)");
    CHECK(full({2}, true, on_device(DType::boolean)).to_vector<bool>() == std::vector<bool>{true, true});
    CHECK(arange(0, 4, 1, on_device(DType::i32)).to_vector() == std::vector<double>{0, 1, 2, 3});
    CHECK(linspace(0, 1, 3, on_device(DType::f64)).to_vector() == std::vector<double>{0, 0.5, 1});
    CHECK(eye(2, on_device(DType::f32)).to_vector() == std::vector<double>{1, 0, 0, 1});
    const std::array<float, 2> values{8, 9};
    CHECK(from_values<float>(values, {2}, device).to_vector() == std::vector<double>{8, 9});
    CHECK(zeros({0}, on_device(DType::f32)).to_vector().empty());
    Generator first(4);
    Generator second(4);
    CHECK(randn({100}, on_device(DType::f32), &first).to_vector() == randn({100}, {}, &second).to_vector());
    CHECK(rand({3}, on_device(DType::f32)).device() == device);
    CHECK(randint(0, 9, {3}, on_device(DType::i64)).to_vector().size() == 3);

    const test::TemporaryFolder folder;
    save_safetensors(folder / "x.safetensors", {{{"turned", turned}, {"x", x}}, {}});
    const TensorFile loaded = load_safetensors(folder / "x.safetensors");
    CHECK(loaded.tensors.at("turned").to_vector() == turned.to_vector());
    CHECK(loaded.tensors.at("x").device() == Device::cpu());
}

TEST_CASE("second device: has its own memory and generator") {
    const Device device = test::fake_device();
    const auto cpu_before = memory_statistics().current;
    const auto before = memory_statistics(device).current;
    const Tensor x = zeros({1000}, {DType::f32, device});
    CHECK(memory_statistics(device).current == before + 4000);
    CHECK(memory_statistics().current == cpu_before);
    CHECK(&default_generator(device) != &default_generator());
    const RandomKey cpu_state = default_generator().state();
    manual_seed(12);
    CHECK(default_generator(device).state().seed == 12);
    CHECK(default_generator().state().seed == 12);
    default_generator().set_state(cpu_state);
}
