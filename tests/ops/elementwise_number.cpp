// Numbers beside tensors: they are not rounded to a half type, integers are exact, and numbers that a dtype cannot
// represent are refused.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "autograd/ops/elementwise.h"
#include "autograd/ops/join.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/view.h"
#include "autograd/tape.h"
#include "core/capture.h"
#include "core/error.h"
#include "tests/expect_error.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

const double infinity = std::numeric_limits<double>::infinity();

std::vector<double> values(const Tensor& x) { return x.to_vector<double>(); }

Tensor integers(const std::vector<std::int64_t>& numbers, DType dtype = DType::i64) {
    return tensor(numbers, {static_cast<std::int64_t>(numbers.size())}, {dtype});
}

/// The gradient of the sum of function(x).
template <class Function>
std::vector<double> gradient_of(Tensor x, Function function, bool create_graph) {
    x.set_requires_grad();
    BackwardOptions options;
    options.create_graph = create_graph;
    return values(gradients(function(x).sum(), {x}, options)[0]);
}

}  // namespace

TEST_CASE("numbers: a half type is rounded once, when the result is known") {
    on_each_device([] {
        for (const DType dtype : {DType::f16, DType::bf16}) {
            CAPTURE(name_of(dtype));
            const auto rounded = [&](double value) { return full({1}, value, {dtype}).item(); };
            const Tensor x = full({1}, 60000.0, {dtype});
            const double given = x.item();
            CHECK((x * 1e-8).item() == rounded(given * 1e-8));
            CHECK((1e-8 * x).item() == rounded(given * 1e-8));
            CHECK((x / 1e8).item() == rounded(given / 1e8));
            CHECK((x * 1e-8).item() > 0.0);
            const Tensor small = full({1}, 1e-3, {dtype});
            CHECK((small * -70000).item() == doctest::Approx(small.item() * -70000).epsilon(0.005));
            CHECK((100000.0 - x).item() == doctest::Approx(100000.0 - given).epsilon(0.005));
            CHECK((x - 100000).item() == doctest::Approx(given - 100000.0).epsilon(0.005));
            CHECK((-100000 + x).item() == doctest::Approx(given - 100000.0).epsilon(0.005));
            CHECK((1e5 / x).item() == doctest::Approx(1e5 / given).epsilon(0.005));
            CHECK(remainder(x, 70000.0).item() == given);
            CHECK(floor_divide(x, 70000.0).item() == 0.0);
            CHECK(minimum(x, 70000.0).item() == given);
            CHECK(maximum(x, -70000.0).item() == given);
            CHECK(clamp(x, -1e6, 1e6).item() == given);
            Tensor changed = x.clone();
            changed.mul_(1e-8);
            CHECK(changed.item() == rounded(given * 1e-8));
            changed.fill_(60000.0).add_(x, -1e-8);
            CHECK(changed.item() == given);
        }
        // f64 beside f64
        CHECK((full({1}, 1.0, {DType::f64}) * 0.1).item() == 0.1);
        CHECK((full({1}, 1e200, {DType::f64}) * 1e-300).item() == 1e200 * 1e-300);
    });
}

TEST_CASE("numbers: gradients of half types are rounded once too") {
    on_each_device([] {
        for (const bool create_graph : {false, true}) {
            const Tensor x = full({1}, 1e-3, {DType::f16});
            const double given = x.item();
            const auto of = [&](auto function) { return gradient_of(x.clone(), function, create_graph)[0]; };
            CHECK(of([](const Tensor& t) { return t * 70000 * 1e-5; }) == doctest::Approx(0.7).epsilon(2e-3));
            CHECK(of([](const Tensor& t) { return t / 1e-5 * 1e-5; }) == doctest::Approx(1.0).epsilon(2e-3));
            CHECK(of([](const Tensor& t) { return 5.0 - t * 3.0; }) == -3.0);
            CHECK(of([](const Tensor& t) { return maximum(t, 7.0); }) == 0.0);
            CHECK(of([](const Tensor& t) { return minimum(t, 7.0); }) == 1.0);
            CHECK(of([](const Tensor& t) { return t % 2.0; }) == 1.0);
            CHECK(of([](const Tensor& t) { return floor_divide(t, 2.0); }) == 0.0);
            if (!create_graph)
                CHECK(of([](const Tensor& t) { return 1e-2 / t; }) ==
                      doctest::Approx(-1e-2 / (given * given)).epsilon(2e-3));
        }
        // 3 (1/4096)^2 = 1.8e-7 is an f16 (rounded); (1/4096)^2 alone is nearly 0 there
        const Tensor tiny = full({1}, 1.0 / 4096, {DType::f16});
        CHECK(gradient_of(
                  tiny, [](const Tensor& t) { return power(t, 3) * 4096.0; }, false)[0] ==
              doctest::Approx(3.0 / 4096).epsilon(2e-3));
    });
}

TEST_CASE("numbers: integers beside numbers are exact") {
    on_each_device([] {
        const std::int64_t big = (std::int64_t{1} << 60) + 1;
        const Tensor x = integers({big, -7, 7});
        CHECK((x + big).to_vector<std::int64_t>() == std::vector<std::int64_t>{2 * big, big - 7, big + 7});
        CHECK((big - x).to_vector<std::int64_t>() == std::vector<std::int64_t>{0, big + 7, big - 7});
        CHECK((x * 3).to_vector<std::int64_t>() == std::vector<std::int64_t>{3 * big, -21, 21});
        CHECK((x == big).to_vector<bool>() == std::vector<bool>{true, false, false});
        CHECK(maximum(x, big - 1).to_vector<std::int64_t>() ==
              std::vector<std::int64_t>{big, big - 1, big - 1});
        // As in Python: the quotient is rounded down, the remainder has the sign of the divisor.
        CHECK(floor_divide(x, 2).to_vector<std::int64_t>() == std::vector<std::int64_t>{big / 2, -4, 3});
        CHECK((x % 4).to_vector<std::int64_t>() == std::vector<std::int64_t>{1, 1, 3});
        CHECK((x % -4).to_vector<std::int64_t>() == std::vector<std::int64_t>{-3, -3, -1});
        CHECK(floor_divide(integers({16777217}), 1).item<std::int64_t>() == 16777217);
        CHECK(floor_divide(integers({std::numeric_limits<std::int64_t>::min()}), 1).item<std::int64_t>() ==
              std::numeric_limits<std::int64_t>::min());
        for (const DType dtype : {DType::i64, DType::i32, DType::u8}) {
            const Tensor a = integers({7, 200, 255}, dtype), b = integers({2, 7, 255}, dtype);
            CHECK(floor_divide(a, b).dtype() == dtype);
            CHECK((a % b).dtype() == dtype);
            CHECK(floor_divide(a, b).to_vector<std::int64_t>() == std::vector<std::int64_t>{3, 28, 1});
            CHECK((a % b).to_vector<std::int64_t>() == std::vector<std::int64_t>{1, 4, 0});
        }
        CHECK(contains(error_of([&] { floor_divide(x, 0); }), "[floor_divide] the integer divisor"));
        CHECK(contains(error_of([&] { x % 0; }), "[remainder] the integer divisor"));
        CHECK(contains(error_of([&] {
                           integers({1, 2}, DType::u8) + 300;
                       }),
                       "[add] 300 does not fit dtype u8"));
    });
}

TEST_CASE("numbers: the quotient of floats is rounded down, as Python's //") {
    on_each_device([] {
        const auto doubles = [](const std::vector<double>& numbers) {
            return tensor(numbers, {static_cast<std::int64_t>(numbers.size())}, {DType::f64});
        };
        const Tensor a = doubles({1.0, 7.5, -7.5, 7.5, -7.5, 1.0, -1.0, 0.0, -0.0});
        const Tensor b = doubles({0.1, 2.0, 2.0, -2.0, -2.0, 0.0, 0.0, 3.0, 3.0});
        CHECK(values(floor_divide(a, b)) ==
              std::vector<double>{9.0, 3.0, -4.0, -4.0, 3.0, infinity, -infinity, 0.0, 0.0});
        CHECK(std::isnan(values(a % b)[5]));
        CHECK(floor_divide(full({1}, 7.0), 2.0).item() == 3.0);
        Tensor x = tensor({7.0});
        x.set_requires_grad();
        (floor_divide(x, tensor({2.0})) + x % tensor({2.0})).sum().backward();
        CHECK(values(x.grad()) == std::vector<double>{1.0});  // 0 of the quotient, 1 of the remainder
    });
}

TEST_CASE("numbers: nothing divided by 0 is nothing") {
    on_each_device([] {
        for (const DType dtype : {DType::i64, DType::i32, DType::u8}) {
            const Tensor none = zeros({0, 3}, {dtype});
            CHECK(floor_divide(none, 0).shape() == Shape{0, 3});
            CHECK((none % 0).shape() == Shape{0, 3});
            CHECK(floor_divide(none, zeros({1}, {dtype})).shape() == Shape{0, 3});
            CHECK(power(none, zeros({3}, {dtype})).shape() == Shape{0, 3});
            wait_for_devices();
        }
        CHECK_THROWS_AS((floor_divide(ones({1}, {DType::i64}), 0), wait_for_devices()), Error);
    });
}

TEST_CASE("numbers: comparisons take the number as it is") {
    on_each_device([] {
        const auto truth = [](const Tensor& x) { return x.to_vector<bool>(); };
        const Tensor bytes = integers({0, 255}, DType::u8);
        CHECK(truth(bytes < 300) == std::vector<bool>{true, true});
        CHECK(truth(bytes > -1) == std::vector<bool>{true, true});
        CHECK(truth(bytes == 256) == std::vector<bool>{false, false});
        CHECK(truth(bytes != 0.5) == std::vector<bool>{true, true});
        CHECK(truth(bytes <= 254.5) == std::vector<bool>{true, false});
        CHECK(truth(full({1}, 60000.0, {DType::f16}) < 70000) == std::vector<bool>{true});
        CHECK(truth(full({1}, 1.0, {DType::f16}) < 1.0001) == std::vector<bool>{true});
        CHECK(truth(full({1}, 3e38) < 1e300) == std::vector<bool>{true});
        const Tensor big = integers({(std::int64_t{1} << 53) + 1, std::numeric_limits<std::int64_t>::max()});
        CHECK(truth(big > 0x1p53) == std::vector<bool>{true, true});
        CHECK(truth(big == 0x1p53) == std::vector<bool>{false, false});
        CHECK(truth(big < 0x1p63) == std::vector<bool>{true, true});
        CHECK(truth(big >= 0x1p63) == std::vector<bool>{false, false});
        CHECK(truth(big > -infinity) == std::vector<bool>{true, true});
        CHECK(truth(big < NAN) == std::vector<bool>{false, false});
        CHECK(truth(big != NAN) == std::vector<bool>{true, true});
        CHECK(truth(full({1}, true, {DType::boolean}) == 2) == std::vector<bool>{false});
    });
}

TEST_CASE("numbers: what a dtype does not hold is refused everywhere") {
    on_each_device([] {
        const Tensor bytes = integers({1, 2}, DType::u8);
        const Tensor mask = bytes == 1;
        const auto refuses = [](const std::function<void()>& work, const char* op, const char* what) {
            const std::string text = error_of(work);
            CAPTURE(text);
            CHECK(contains(text, std::string("[") + op + "] " + what));
        };
        refuses([] { full({1}, 1.5, {DType::i64}); }, "full", "1.5 does not fit dtype i64, which has no");
        refuses([] { full({1}, 300.0, {DType::u8}); }, "full", "300 does not fit dtype u8, which holds 0 to");
        refuses([] { full({1}, NAN, {DType::i32}); }, "full", "NaN does not fit dtype i32");
        refuses([] { full({1}, 0x1p63, {DType::i64}); }, "full", "9.223372036854776e+18 does not fit");
        CHECK(full({1}, 2.5, {DType::boolean}).item<bool>());  // bool takes the truth of every number
        refuses([] { arange(0, 3, 1, {DType::boolean}); }, "arange", "2 does not fit dtype bool");
        refuses([] { tensor({300.0}, {DType::u8}); }, "tensor", "300 does not fit dtype u8");
        refuses([] { tensor(-1.0, {DType::u8}); }, "tensor", "-1 does not fit dtype u8");
        refuses([] { tensor({{1.0, 0.5}}, {DType::i64}); }, "tensor", "0.5 does not fit dtype i64");
        refuses([] { integers({std::int64_t{1} << 40}, DType::i32); }, "tensor", "1099511627776 does not");
        refuses([] { arange(0.0, 300.0, 1.0, {DType::u8}); }, "arange", "299 does not fit dtype u8");
        refuses([&] { bytes.fill_(1.5); }, "fill_", "1.5 does not fit dtype u8");
        refuses([&] { bytes.fill_(infinity); }, "fill_", "inf does not fit dtype u8");
        refuses([&] { bytes.mul_(300); }, "mul_", "300 does not fit dtype u8");
        refuses([&] { masked_fill(bytes, mask, -1); }, "masked_fill", "-1 does not fit dtype u8");
        refuses([&] { where(mask, bytes, 256); }, "where", "256 does not fit dtype u8");
        refuses([&] { clamp(bytes, 300, 400); }, "clamp", "no u8 lies between 300 and 400");
        CHECK(values(clamp(bytes, -1000, 1.5)) == std::vector<double>{1.0, 1.0});
        CHECK(where(mask, 0.5, bytes).dtype() == DType::f32);
        // Floating dtypes accept every number, rounded; beyond their range it becomes infinity.
        CHECK(full({1}, 1e6, {DType::f16}).item() == infinity);
        CHECK(masked_fill(full({1}, 1.0, {DType::f16}), full({1}, true, {DType::boolean}), -1e9).item() ==
              -infinity);
    });
}

TEST_CASE("in place: views that run backwards are changed like all others") {
    on_each_device([] {
        for (const DType dtype : {DType::f32, DType::f16, DType::f64, DType::i64, DType::u8}) {
            CAPTURE(name_of(dtype));
            const Tensor whole = tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, {dtype});
            const Tensor turned = whole.alias({2, 3}, {-3, -1}, 5);  // from the last to the first
            CHECK(values(turned) == std::vector<double>{6, 5, 4, 3, 2, 1});
            turned.mul_(2);
            CHECK(values(whole) == std::vector<double>{2, 4, 6, 8, 10, 12});
            turned.add_(tensor({1.0, 2.0, 3.0}, {dtype}), 2.0);
            CHECK(values(whole) == std::vector<double>{8, 8, 8, 14, 14, 14});
            turned.copy_(tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}, {dtype}));
            CHECK(values(whole) == std::vector<double>{6, 5, 4, 3, 2, 1});
            turned.copy_(whole);  // itself, in reverse order
            CHECK(values(whole) == std::vector<double>{1, 2, 3, 4, 5, 6});
            const Tensor every_other = whole.alias({2, 2}, {3, -2}, 2);
            every_other.fill_(9);
            CHECK(values(whole) == std::vector<double>{9, 2, 9, 9, 5, 9});
            CHECK(values(turned.clone()) == std::vector<double>{9, 5, 9, 9, 2, 9});
            CHECK(contains(error_of([&] { whole.alias({2, 3}, {0, 1}, 0).fill_(1); }), "broadcast"));
            CHECK(contains(error_of([&] { whole.alias({2, 2}, {-1, -1}, 3).fill_(1); }), "broadcast"));
        }
    });
}

TEST_CASE("sizes: what no memory holds is refused with its size") {
    const auto message = [](const std::function<void()>& work) { return error_of(work); };
    CHECK(contains(message([] { arange(0, std::int64_t{1000000000000000000}); }), "GiB asked"));
    CHECK(contains(message([] { arange(0.0, 1e18, 1.0, {DType::f32}); }), "GiB asked"));
    CHECK(contains(message([] { zeros({std::int64_t{1} << 61, 2}); }), "has more than 2^63 - 1 bytes"));
    CHECK(contains(message([] { ones({std::int64_t{1} << 61}); }), "has more than 2^63 - 1 bytes"));
    const std::int64_t most = std::int64_t{1} << 60;
    const Tensor wide = expand(ones({1}), {most});
    CHECK(contains(message([&] { expand(ones({1}), {most * 4}); }), "has more than 2^63 - 1 bytes"));
    CHECK(contains(message([&] { cat({wide, wide, wide, wide}, 0); }), "has more than 2^63 - 1 bytes"));
    const Tensor bytes = expand(full({1}, 1, {DType::u8}), {std::int64_t{1} << 62});
    CHECK(contains(message([&] { cat({bytes, bytes, bytes}, 0); }), "[cat] axis 0 of the result"));
    CHECK(contains(message([&] { wide + 1; }), "4294967296.00 GiB asked"));
    CHECK(contains(message([&] { wide.unsqueeze(1) * wide; }), "has more than 2^63 - 1 elements"));
}

TEST_CASE("capture: on the CPU too, captured work cannot read values") {
    const Tensor x = potluck::ones({3});
    Tensor y;
    const auto reads = capture(Device::cpu(), [&] { sum(x).item(); });
    CHECK(contains(error_of([&] { reads->replay(); }), "[item] captured work cannot read values"));
    const auto copies = capture(Device::cpu(), [&] { x.to_vector(); });
    CHECK(contains(error_of([&] { copies->replay(); }), "[to_vector] captured work cannot read values"));
    const auto work = capture(Device::cpu(), [&] { y = x * 2; });
    work->replay();
    CHECK(y.to_vector() == std::vector<double>{2, 2, 2});
}

}  // namespace potluck::test
