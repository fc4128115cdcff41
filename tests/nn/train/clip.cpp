// Gradient norms and clipping.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const double not_a_number = std::numeric_limits<double>::quiet_NaN();

Tensor with_gradient(const Tensor& gradient) {
    Tensor p = nn::parameter(ones(gradient.shape(), {gradient.dtype()}));
    p.set_grad(gradient);
    return p;
}

struct Two : nn::Module {
    Tensor a = nn::parameter(ones({2})), b = nn::parameter(ones({2}));
    void members(nn::Members& m) override { m("a", a)("b", b); }
};

}  // namespace

TEST_CASE("clip: gradients become one vector of at most the given norm") {
    on_each_device([] {
        const Tensor a = with_gradient(tensor({3., 0.})), b = with_gradient(full({1, 1}, 4.0));
        CHECK(gradient_norm({a, b}) == doctest::Approx(5.0));
        CHECK(gradient_norm({a, b}, 1.0) == doctest::Approx(7.0));
        CHECK(gradient_norm({a, b}, infinity) == 4.0);
        CHECK(clip_grad_norm({a, b}, 10.0) == doctest::Approx(5.0));
        CHECK(a.grad().to_vector<double>()[0] == 3.0);
        CHECK(clip_grad_norm({a, b}, 1.0) == doctest::Approx(5.0));
        CHECK(a.grad().to_vector<double>()[0] == doctest::Approx(0.6));
        CHECK(b.grad().to_vector<double>()[0] == doctest::Approx(0.8));
        CHECK(clip_grad_norm({a, b}, 0.4, infinity) == doctest::Approx(0.8));
        CHECK(b.grad().to_vector<double>()[0] == doctest::Approx(0.4));
    });
}

TEST_CASE("clip: huge gradients are clipped, not lost") {
    on_each_device([] {
        const Tensor p = with_gradient(full({100}, 1e20));
        CHECK(clip_grad_norm({p}, 1.0) == doctest::Approx(1e21));
        for (const double value : p.grad().to_vector<double>()) CHECK(value == doctest::Approx(0.1));
        const Tensor wide = with_gradient(full({100}, 1e200, {DType::f64}));  // squares overflow f64 as well
        CHECK(clip_grad_norm({wide}, 1.0) == doctest::Approx(1e201));
        CHECK(wide.grad().to_vector<double>()[99] == doctest::Approx(0.1));
    });
}

TEST_CASE("clip: half types are scaled by the factor itself, which they could not hold") {
    on_each_device([] {
        const Tensor p = with_gradient(full({1000000}, 60000.0, {DType::f16}));
        CHECK(gradient_norm({p}, 1.0) == doctest::Approx(6e10).epsilon(1e-3));
        CHECK(clip_grad_norm({p}, 1.0) == doctest::Approx(6e7).epsilon(1e-3));
        CHECK(gradient_norm({p}) == doctest::Approx(1.0).epsilon(1e-3));
        const Tensor wide = with_gradient(full({4}, 1e-3, {DType::bf16}));
        CHECK(clip_grad_norm({wide}, 1e-9) == doctest::Approx(2e-3).epsilon(1e-2));
        CHECK(gradient_norm({wide}) == doctest::Approx(1e-9).epsilon(1e-2));
    });
}

TEST_CASE("clip: a parameter given twice counts once") {
    on_each_device([] {
        const Tensor p = with_gradient(tensor({3.0, 4.0}));
        const Tensor view = nn::parameter(p.detach());
        for (const std::vector<Tensor>& given : {std::vector<Tensor>{p, p}, {p, view}, {view, p, p}}) {
            Tensor(p).set_grad(tensor({3.0, 4.0}));
            Tensor(view).set_grad(p.grad());
            CHECK(gradient_norm(given, 1.0) == doctest::Approx(7.0));
            CHECK(clip_grad_norm(given, 1.0) == doctest::Approx(5.0));
            CHECK(p.grad().to_vector()[0] == doctest::Approx(0.6));
            CHECK(p.grad().to_vector()[1] == doctest::Approx(0.8));
        }
    });
}

TEST_CASE("clip: tensors of the same elements are one parameter with the sum of their gradients") {
    on_each_device([] {
        const Tensor p = nn::parameter(ones({2})), view = nn::parameter(p.detach().reshape({2, 1}));
        for (const std::vector<Tensor>& given :
             {std::vector<Tensor>{p, view}, {view, p, view}, {p, nn::parameter(ones({2})), view}}) {
            Tensor(p).set_grad(tensor({1.0, 4.0}));
            Tensor(view).set_grad(tensor({{2.0}, {0.0}}));
            CHECK(gradient_norm(given, 1.0) == doctest::Approx(7.0));
            CHECK(gradient_norm(given, infinity) == doctest::Approx(4.0));
            CHECK(clip_grad_norm(given, 1.0) == doctest::Approx(5.0));
            CHECK(p.grad().to_vector()[0] == doctest::Approx(0.2));
            CHECK(view.grad().to_vector()[0] == doctest::Approx(0.4));
            CHECK(gradient_norm(given) == doctest::Approx(1.0));
            optim::SGD optimizer({{"p", p}, {"view", view}});
            CHECK(gradient_norm({optimizer.slices()[0].elements(), view}) == doctest::Approx(1.0));
        }
    });
}

TEST_CASE("clip: captured work reads no norm, on the CPU neither") {
    const Tensor p = with_gradient(ones({2}, {DType::f32, Device::cpu()}));
    const auto work = capture(Device::cpu(), [&] { clip_grad_norm({p}, 1.0); });
    check_error([&] { work->replay(); }, {"[clip_grad_norm]", "captured work cannot read"});
    CHECK(clip_grad_norm({p}, 10.0) == doctest::Approx(std::sqrt(2.0)));
}

TEST_CASE("clip: norms of f64 gradients whose squares f64 does not hold") {
    on_each_device([] {
        for (const double size : {1e200, 1e-200, 1e160, 1e-160, 1e308}) {
            const Tensor p = with_gradient(tensor({3.0, -4.0}, {DType::f64}).clone());
            p.grad().mul_(size / 4.0);
            CHECK(gradient_norm({p}) / size == doctest::Approx(1.25));
            const Tensor more = with_gradient(full({7}, 1.0, {DType::f64}));
            const double expected = size < 1.0 ? std::sqrt(7.0) : 1.25 * size;
            CHECK(gradient_norm({p, more}) / expected == doctest::Approx(1.0));
        }
    });
}

TEST_CASE("clip: a gradient that is not finite is reported by name, and nothing is touched") {
    on_each_device([] {
        for (const double bad : {infinity, -infinity, not_a_number}) {
            Two net;
            net.a.set_grad(tensor({1., 2.}));
            net.b.set_grad(tensor({1., bad}));
            check_error([&] { clip_grad_norm(net, 1.0); }, {"[clip_grad_norm]", "because of b"});
            CHECK(net.a.grad().to_vector<double>() == std::vector<double>{1, 2});
            CHECK(std::isnan(net.b.grad().to_vector<double>()[1]) == std::isnan(bad));
            CHECK(same(net.b.detach(), ones({2})));
            CHECK_FALSE(std::isfinite(gradient_norm(net.parameters())));
            CHECK(first_non_finite_gradient(net) == "b");
            check_error([&] { clip_grad_norm(net.parameters(), 1.0); }, {"parameter 1"});
        }
    });
}

TEST_CASE("clip: nothing to clip has norm 0") {
    on_each_device([] {
        CHECK(clip_grad_norm(std::vector<Tensor>{}, 1.0) == 0.0);
        CHECK(clip_grad_norm(std::vector<Tensor>{}, 1.0, infinity) == 0.0);
        const Tensor without = nn::parameter(ones({3})), empty = with_gradient(zeros({0}));
        for (const double p : {1.0, 2.0, infinity}) {
            CHECK(clip_grad_norm({without}, 1.0, p) == 0.0);
            CHECK(clip_grad_norm({empty, without}, 1.0, p) == 0.0);
        }
        CHECK_FALSE(without.grad().defined());
        CHECK(first_non_finite_gradient(Two()).empty());
    });
}

TEST_CASE("clip: a gradient that two parameters share is scaled once") {
    on_each_device([] {
        Tensor a = nn::parameter(ones({2})), b = nn::parameter(ones({2}));
        const Tensor gradient = ones({2});
        a.set_grad(gradient);
        b.set_grad(gradient);
        CHECK(clip_grad_norm({a, b}, 1.0) == doctest::Approx(2.0));
        CHECK(gradient.to_vector()[0] == doctest::Approx(0.5));
    });
}

TEST_CASE("clip: bad options are refused") {
    on_each_device([] {
        const Tensor p = with_gradient(ones({1}));
        check_error([&] { clip_grad_norm({p}, 0.0); }, {"[clip_grad_norm]", "0"});
        check_error([&] { clip_grad_norm({p}, 1.0, 3.0); }, {"[gradient_norm]", "p is 3"});
    });
}

TEST_CASE("clip: gradients of several devices have one norm") {
    std::vector<Tensor> parameters;
    for (const Device device : devices()) {
        const OnDevice here(device);
        parameters.push_back(with_gradient(tensor({3., 0.})));
        parameters.push_back(with_gradient(full({1, 1}, 4.0)));
    }
    const auto n = static_cast<double>(devices().size());
    CHECK(gradient_norm(parameters) == doctest::Approx(5.0 * std::sqrt(n)));
    CHECK(gradient_norm(parameters, infinity) == 4.0);
    CHECK(clip_grad_norm(parameters, 1.0) == doctest::Approx(5.0 * std::sqrt(n)));
    for (const Tensor& p : parameters)
        CHECK(p.grad().to_vector()[0] == doctest::Approx((p.ndim() == 1 ? 0.6 : 0.8) / std::sqrt(n)));
}

}  // namespace potluck::test
