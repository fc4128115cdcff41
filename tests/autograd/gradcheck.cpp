#include "autograd/gradcheck.h"

#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

namespace {

Tensor f64_leaf(const Shape& shape) { return randn(shape, {DType::f64}).set_requires_grad(); }

}  // namespace

TEST_CASE("gradcheck passes right gradients of any layout") {
    const auto function = [](const std::vector<Tensor>& in) { return tanh(in[0]) * in[1]; };
    CHECK(gradcheck(function, {f64_leaf({3, 2}), f64_leaf({1, 2})}) == "");
    Tensor strided = randn({4, 6}, {DType::f64}).transpose(0, 1).narrow(0, 1, 3);
    CHECK(gradcheck(function, {strided.set_requires_grad(), randn({3, 4}, {DType::f64})}) == "");
    Tensor broadcast = randn({3, 1}, {DType::f64}).expand({3, 4});
    CHECK(gradcheck(function, {broadcast.set_requires_grad(), randn({4}, {DType::f64})}) == "");
    CHECK(gradcheck(function, {f64_leaf({}), f64_leaf({0, 3})}) == "");
}

TEST_CASE("gradcheck finds a planted wrong gradient and names its place") {
    const auto function = [](const std::vector<Tensor>& in) {
        const Tensor x = in[1];
        return record("planted", square(x).detach(), {x}, {x},
                      [](const Saved& saved, const Tensor& dy, Gradients& dx) {
                          // correct except for the last element
                          dx.add(0, dy * (2 * saved[0]) * tensor(std::vector<double>{1, 1, 1, 1.01}, {2, 2}));
                      });
    };
    const std::string text = gradcheck(function, {f64_leaf({2}), f64_leaf({2, 2})});
    CHECK(contains(text, "input 1, element (1, 1)"));
}

TEST_CASE("gradcheck finds a gradient that is missing or NaN") {
    const auto missing = [](const std::vector<Tensor>& in) { return in[0].detach() * in[1]; };
    CHECK(contains(gradcheck(missing, {f64_leaf({2}), f64_leaf({2})}), "input 0"));
    const auto broken = [](const std::vector<Tensor>& in) {
        return record("broken", in[0].detach(), {in[0]}, {},
                      [](const Saved&, const Tensor& dy, Gradients& dx) { dx.add(0, log(dy * 0 - 1)); });
    };
    CHECK(contains(gradcheck(broken, {f64_leaf({2})}), "nan"));
}

TEST_CASE("gradcheck leaves its inputs as they were") {
    const Tensor x = f64_leaf({3});
    const Values before = x.to_vector();
    gradcheck([](const std::vector<Tensor>& in) { return exp(in[0]); }, {x});
    CHECK(x.to_vector() == before);
    CHECK(!x.grad().defined());
    CHECK(x.storage()->version() == 0);
}

TEST_CASE("gradcheck refuses dtypes in which differences mean nothing") {
    const auto function = [](const std::vector<Tensor>& in) { return exp(in[0]); };
    CHECK(contains(error_of([&] { gradcheck(function, {leaf({1, 2}, {2})}); }), "f32"));
    CHECK(contains(error_of([&] { gradcheck(function, {tensor({1, 2})}); }), "set_requires_grad"));
    const auto narrows = [](const std::vector<Tensor>& in) { return in[0].to(DType::f32); };
    CHECK_THROWS_AS(gradcheck(narrows, {f64_leaf({2})}), Error);
}

TEST_CASE("gradcheck refuses an empty function and options that would let everything pass") {
    const auto function = [](const std::vector<Tensor>& in) { return exp(in[0]); };
    CHECK(contains(error_of([] { gradcheck({}, {f64_leaf({2})}); }), "the function is empty"));
    CHECK(contains(error_of([&] { gradcheck(function, {f64_leaf({2})}, {.step = 0.0}); }), "step 0"));
    CHECK(contains(error_of([&] { gradcheck(function, {f64_leaf({2})}, {.relative = NAN}); }), "nan"));
}
