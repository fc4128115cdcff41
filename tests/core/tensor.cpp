#include "core/tensor.h"

#include <doctest/doctest.h>

#include <limits>

#include "core/factories.h"
#include "core/memory.h"

using namespace potluck;

namespace {

constexpr std::int64_t giga = std::int64_t{1} << 40;

Tensor counting(const Shape& shape) {
    const std::int64_t count = element_count(shape);
    const Tensor flat = arange(0, count, 1, {DType::f32});
    return flat.alias(shape, contiguous_strides(shape), 0);
}

}  // namespace

TEST_CASE("element_count: products, zeros, and what is refused") {
    CHECK(element_count({}) == 1);
    CHECK(element_count({2, 3, 4}) == 24);
    CHECK(element_count({2, 0, 4}) == 0);
    CHECK(element_count({giga, giga / (1 << 20), 4}) == std::int64_t{1} << 62);
    CHECK_THROWS_WITH_AS(element_count({2, -3}), doctest::Contains("(2, -3) has a negative size"), Error);
    CHECK_THROWS_WITH_AS(element_count({giga, giga}), doctest::Contains("more than 2^63 - 1 elements"),
                         Error);
    CHECK_THROWS_AS(element_count({giga, 0, giga}), Error);  // its strides would not fit
    CHECK_THROWS_AS(element_count({std::numeric_limits<std::int64_t>::max(), 2}), Error);
}

TEST_CASE("contiguous_strides: row-major, and safe for zeros") {
    CHECK(contiguous_strides({2, 3, 4}) == Strides{12, 4, 1});
    CHECK(contiguous_strides({}) == Strides{});
    CHECK(contiguous_strides({3, 0, 2}) == Strides{2, 2, 1});
    CHECK_THROWS_AS(contiguous_strides({giga, giga}), Error);
}

TEST_CASE("broadcast_shapes: aligned at the end") {
    CHECK(broadcast_shapes("add", {2, 1, 4}, {3, 1}) == Shape{2, 3, 4});
    CHECK(broadcast_shapes("add", {}, {3, 1}) == Shape{3, 1});
    CHECK(broadcast_shapes("add", {0}, {1}) == Shape{0});
    CHECK(broadcast_shapes("add", {2, 1}, {0}) == Shape{2, 0});
    CHECK_THROWS_WITH_AS(broadcast_shapes("add", {2, 3}, {4, 3, 2}),
                         doctest::Contains("[add] shapes (2, 3) and (4, 3, 2) do not broadcast"), Error);
    CHECK_THROWS_AS(broadcast_shapes("add", {0}, {2}), Error);
}

TEST_CASE("normalize_axis: from the back, and out of range") {
    CHECK(normalize_axis("sum", -1, 3) == 2);
    CHECK(normalize_axis("sum", -3, 3) == 0);
    CHECK(normalize_axis("sum", 2, 3) == 2);
    CHECK_THROWS_WITH_AS(normalize_axis("sum", 3, 3),
                         doctest::Contains("[sum] axis 3 is out of range for 3 axes"), Error);
    CHECK_THROWS_AS(normalize_axis("sum", -4, 3), Error);
    CHECK_THROWS_WITH_AS(normalize_axis("sum", 0, 0), doctest::Contains("a scalar has no axes"), Error);
}

TEST_CASE("to_string(Shape)") {
    CHECK(to_string(Shape{2, 3}) == "(2, 3)");
    CHECK(to_string(Shape{}) == "()");
}

TEST_CASE("Tensor::empty: what it says about itself") {
    const Tensor x = Tensor::empty({2, 3}, {DType::f16});
    CHECK(x.defined());
    CHECK(x.shape() == Shape{2, 3});
    CHECK(x.strides() == Strides{3, 1});
    CHECK(x.ndim() == 2);
    CHECK(x.size(0) == 2);
    CHECK(x.size(-1) == 3);
    CHECK(x.count() == 6);
    CHECK(x.bytes() == 12);
    CHECK(x.dtype() == DType::f16);
    CHECK(x.device() == Device::cpu());
    CHECK(x.is_contiguous());
    CHECK(reinterpret_cast<std::uintptr_t>(x.raw_data()) % 64 == 0);
    CHECK_THROWS_AS(x.size(2), Error);
    CHECK_THROWS_WITH_AS(Tensor::empty({std::int64_t{1} << 61}),
                         doctest::Contains("more than 2^63 - 1 bytes"), Error);
    CHECK_THROWS_AS(Tensor::empty({2, -1}), Error);
}

TEST_CASE("Tensor: zero-size and scalar tensors are tensors") {
    const Tensor none = Tensor::empty({3, 0, 2});
    CHECK(none.count() == 0);
    CHECK(none.bytes() == 0);
    CHECK(none.is_contiguous());
    CHECK(none.to_vector().empty());
    CHECK_THROWS_AS(none.item(), Error);
    const Tensor one = tensor(2.5);
    CHECK(one.ndim() == 0);
    CHECK(one.count() == 1);
    CHECK(one.item() == 2.5);
    CHECK(one.to_vector<float>() == std::vector<float>{2.5F});
}

TEST_CASE("Tensor: an undefined one refuses everything by name") {
    const Tensor none;
    CHECK_FALSE(none.defined());
    CHECK_THROWS_WITH_AS(none.shape(), doctest::Contains("undefined tensor"), Error);
    CHECK_THROWS_AS(none.item(), Error);
    CHECK_THROWS_AS(none.to_vector(), Error);
    CHECK_THROWS_AS(none.data<float>(), Error);
    CHECK_THROWS_AS(none.detach(), Error);
}

TEST_CASE("data<T>: only for the tensor's own dtype") {
    const Tensor x = zeros({2}, {DType::i32});
    CHECK(x.data<std::int32_t>() != nullptr);
    CHECK_THROWS_WITH_AS(x.data<float>(), doctest::Contains("dtype i32 and was asked for f32"), Error);
}

TEST_CASE("view_of: inside the storage, or refused") {
    const Tensor base = counting({12});
    const auto view = [&](Shape shape, Strides strides, std::int64_t offset) {
        return Tensor::view_of(base.storage(), DType::f32, std::move(shape), std::move(strides), offset);
    };
    CHECK(view({3, 4}, {4, 1}, 0).is_contiguous());
    CHECK(view({4, 3}, {1, 4}, 0).to_vector() == std::vector<double>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11});
    CHECK(view({3}, {-2}, 6).to_vector() == std::vector<double>{6, 4, 2});
    CHECK(view({2, 5}, {0, 2}, 3).to_vector() == std::vector<double>{3, 5, 7, 9, 11, 3, 5, 7, 9, 11});
    CHECK(view({0, 5}, {100, 100}, 12).count() == 0);
    CHECK_THROWS_WITH_AS(view({3, 4}, {4, 1}, 1), doctest::Contains("reaches outside its storage of 12 f32"),
                         Error);
    CHECK_THROWS_AS(view({3}, {-2}, 3), Error);
    CHECK_THROWS_AS(view({1}, {1}, -1), Error);
    CHECK(view({0}, {1}, 13).offset() == 0);  // a part of an empty tensor may begin anywhere
    CHECK_THROWS_AS(view({0}, {1}, -1), Error);
    CHECK_THROWS_AS(view({2}, {giga}, 0), Error);
    CHECK_THROWS_AS(view({giga}, {giga}, 0), Error);  // the reach itself overflows
    CHECK_THROWS_AS(view({2, 2}, {1}, 0), Error);
    CHECK_THROWS_AS(view({-1}, {1}, 0), Error);
    CHECK_THROWS_AS(Tensor::view_of(nullptr, DType::f32, {1}, {1}, 0), Error);
    // The same bytes as wider elements: only half as many fit.
    CHECK(Tensor::view_of(base.storage(), DType::f64, {6}, {1}, 0).count() == 6);
    CHECK_THROWS_AS(Tensor::view_of(base.storage(), DType::f64, {7}, {1}, 0), Error);
}

TEST_CASE("is_contiguous: sizes of 1 do not matter, holes do") {
    const Tensor x = counting({4, 1, 3});
    CHECK(x.alias({4, 1, 3}, {3, 99, 1}, 0).is_contiguous());
    CHECK_FALSE(x.alias({4, 2}, {3, 1}, 0).is_contiguous());
    CHECK_FALSE(x.alias({3, 4}, {1, 3}, 0).is_contiguous());
    CHECK(x.alias({1, 1}, {7, 9}, 5).is_contiguous());
    CHECK(x.alias({0, 4}, {7, 9}, 5).is_contiguous());
}

TEST_CASE("alias and detach share the memory, and is_unique tells") {
    const Tensor own = zeros({6});
    CHECK(own.is_unique());
    const Tensor view = own.detach();
    CHECK_FALSE(own.is_unique());
    CHECK_FALSE(view.is_same(own));
    view.data<float>()[2] = 7;
    CHECK(own.to_vector()[2] == 7);
    const Tensor handle = view;  // NOLINT: the copy is what is tested
    CHECK(handle.is_same(view));
}

TEST_CASE("broadcast_alias: strides of 0, no memory") {
    const Tensor row = counting({1, 3});
    const Tensor rows = row.broadcast_alias("expand", {2, 4, 3});
    CHECK(rows.strides() == Strides{0, 0, 1});
    CHECK(rows.to_vector().size() == 24);
    CHECK(rows.storage() == row.storage());
    CHECK(row.broadcast_alias("expand", {0, 3}).count() == 0);
    CHECK_THROWS_WITH_AS(row.broadcast_alias("expand", {2, 4}),
                         doctest::Contains("[expand] shape (1, 3) does not stretch to (2, 4)"), Error);
    CHECK_THROWS_AS(row.broadcast_alias("expand", {3}), Error);
    CHECK_THROWS_AS(counting({2}).broadcast_alias("expand", {1}), Error);
}

TEST_CASE("a tensor of 2^40 elements with strides of 0 takes no memory") {
    const auto before = memory_statistics().current;
    const Tensor huge = tensor(3.0).broadcast_alias("expand", {giga});
    CHECK(huge.count() == giga);
    CHECK(huge.alias({2}, {0}, 0).to_vector() == std::vector<double>{3, 3});
    CHECK(to_string(huge) == "[3. 3. 3. ... 3. 3. 3.]");
    CHECK(memory_statistics().current <= before + 4);
    CHECK_THROWS_AS(zeros({giga, 8}), OutOfMemory);  // 32 TiB are not available
    CHECK_THROWS_AS(huge.to_vector<float>(), OutOfMemory);
}

TEST_CASE("rank 9 works like any other") {
    const Shape shape{2, 1, 3, 1, 2, 1, 2, 1, 2};
    const Tensor x = counting(shape);
    CHECK(x.ndim() == 9);
    CHECK(x.to_vector<std::int64_t>()[47] == 47);
    Shape turned(shape.rbegin(), shape.rend());
    Strides strides(x.strides().rbegin(), x.strides().rend());
    const Tensor y = x.alias(turned, strides, 0);
    const auto values = y.to_vector();
    CHECK(values[1] == 24);  // the last axis of y is the first axis of x
    CHECK(values[2] == 8);
    CHECK(values[47] == 47);
}

TEST_CASE("item: any dtype, any view; one element only") {
    CHECK(tensor(std::vector<std::int64_t>{std::int64_t{1} << 62}, {1}).item<std::int64_t>() ==
          std::int64_t{1} << 62);
    CHECK(full({}, true, {DType::boolean}).item<bool>());
    CHECK(full({1, 1}, 1.5, {DType::f16}).item<float>() == 1.5F);
    CHECK(full({1, 1}, 200, {DType::u8}).item<int>() == 200);
    CHECK(counting({3, 4}).alias({1}, {5}, 7).item() == 7);
    CHECK_THROWS_WITH_AS(counting({2}).item(),
                         doctest::Contains("[item] a tensor of shape (2) has 2 elements"), Error);
}

TEST_CASE("to_vector: row-major whatever the strides, in any type") {
    const Tensor x = counting({2, 3}).alias({3, 2}, {1, 3}, 0);
    CHECK(x.to_vector<float>() == std::vector<float>{0, 3, 1, 4, 2, 5});
    CHECK(x.to_vector<std::int32_t>() == std::vector<std::int32_t>{0, 3, 1, 4, 2, 5});
    CHECK(x.to_vector<bool>() == std::vector<bool>{false, true, true, true, true, true});
    CHECK(x.to_vector<bfloat16>()[1] == bfloat16(3.0F));
}

TEST_CASE("Storage: a version that grows, and a release that runs once") {
    int released = 0;
    float numbers[4] = {1, 2, 3, 4};
    {
        const Tensor x = borrow(numbers, {2, 2}, [&] { ++released; });
        CHECK_FALSE(x.storage()->owns_memory());
        CHECK(x.storage()->version() == 0);
        x.storage()->bump_version();
        CHECK(x.storage()->version() == 1);
        const Tensor view = x.detach();
        CHECK(view.storage()->version() == 1);
        x.data<float>()[3] = 9;
        CHECK(released == 0);
    }
    CHECK(released == 1);
    CHECK(numbers[3] == 9);
    CHECK_THROWS_AS(Storage(Device::cpu(), -1), Error);
    CHECK_THROWS_AS(Storage(Device::cpu(), nullptr, 8, {}), Error);
}
