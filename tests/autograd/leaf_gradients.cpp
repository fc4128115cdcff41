// Leaves whose gradients accumulate in a buffer of the caller, and hooks that run when a gradient is complete.

#include <cstdint>
#include <functional>
#include <stdexcept>

#include "autograd/ops.h"
#include "core/random.h"
#include "tests/autograd/support.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

/// A flat block and its parts, laid out as for a reduction of gradients over processes.
struct Block {
    Tensor flat;
    Tensor part(std::int64_t start, const Shape& shape) const {
        return flat.narrow(0, start, element_count(shape)).reshape(shape);
    }
};

Block block(std::int64_t count, DType dtype = DType::f32) { return {full({count}, -7.0, {dtype})}; }

}  // namespace

TEST_CASE("set_gradient_buffer: gradients are stored in a part of a flat block, then added there") {
    on_each_device([] {
        const Block all = block(10);
        Tensor w = tensor({1, 2, 3, 4}, {2, 2}).set_requires_grad();
        const Tensor part = all.part(3, {2, 2});
        set_gradient_buffer(w, part);
        CHECK_FALSE(w.grad().defined());
        CHECK(near(all.flat, Values(10, -7.0)));

        backward(sum(w * 2));  // overwrites the previous content
        CHECK(w.grad().storage() == all.flat.storage());
        CHECK(w.grad().offset() == part.offset());
        CHECK(near(all.flat, {-7, -7, -7, 2, 2, 2, 2, -7, -7, -7}));
        backward(sum(w * w));
        CHECK(near(w.grad(), {4, 6, 8, 10}));
        CHECK(near(all.flat, {-7, -7, -7, 4, 6, 8, 10, -7, -7, -7}));

        w.set_grad({});  // the memory is not changed
        CHECK_FALSE(w.grad().defined());
        CHECK(near(part, {4, 6, 8, 10}));
        backward(sum(w));
        CHECK(near(w.grad(), {1, 1, 1, 1}));

        w.set_grad(tensor({5, 6, 7, 8}, {2, 2}));
        CHECK(near(part, {5, 6, 7, 8}));
        CHECK(w.grad().storage() == all.flat.storage());

        set_gradient_buffer(w, {});
        CHECK(near(w.grad(), {5, 6, 7, 8}));
        backward(sum(w));
        CHECK(near(w.grad(), {6, 7, 8, 9}));
        CHECK(near(part, {5, 6, 7, 8}));  // no longer added to
        CHECK(near(all.flat, {-7, -7, -7, 5, 6, 7, 8, -7, -7, -7}));
    });
}

TEST_CASE("set_gradient_buffer: every op that makes gradients writes there what it makes elsewhere") {
    Generator generator(5);
    on_each_device([&] {
        const auto draw = [&](const Shape& shape, DType dtype) {
            return randn(shape, {DType::f32, test_device()}, &generator).to(dtype);
        };
        const Tensor ids = tensor({2, 0, 2, 2}, {4}, {DType::i64});
        struct Case {
            const char* name;
            Shape leaf;
            std::function<Tensor(const Tensor&, const std::vector<Tensor>&)> run;
            std::vector<Shape> others;
            bool through_half = false;  // a half type's gradient is rounded on its way to the leaf
        };
        const std::vector<Case> cases{
            {"linear weight", {3, 5}, [](auto& w, auto& x) { return linear(x[0], w); }, {{4, 5}}},
            {"linear bias", {3}, [](auto& b, auto& x) { return linear(x[0], x[1], b); }, {{4, 5}, {3, 5}}},
            {"linear transposed",
             {5, 3},
             [](auto& w, auto& x) { return linear(x[0], transpose(w)); },
             {{4, 5}},
             true},
            {"matmul right", {5, 3}, [](auto& w, auto& x) { return matmul(x[0], w); }, {{2, 4, 5}}},
            {"matmul batch", {2, 5, 3}, [](auto& w, auto& x) { return matmul(x[0], w); }, {{2, 4, 5}}},
            {"matmul broadcast", {1, 5, 3}, [](auto& w, auto& x) { return matmul(x[0], w); }, {{2, 4, 5}}},
            {"layer_norm weight",
             {5},
             [](auto& w, auto& x) { return layer_norm(x[0], w, x[1]); },
             {{4, 5}, {5}}},
            {"layer_norm bias",
             {5},
             [](auto& b, auto& x) { return layer_norm(x[0], x[1], b); },
             {{4, 5}, {5}}},
            {"layer_norm x",
             {4, 5},
             [](auto& a, auto& x) { return layer_norm(a, x[0], x[1]); },
             {{5}, {5}},
             true},
            {"rms_norm weight", {5}, [](auto& w, auto& x) { return rms_norm(x[0], w); }, {{4, 5}}},
            {"batch_norm weight",
             {3},
             [](auto& w, auto& x) { return batch_norm(x[0], w, x[1]); },
             {{4, 3, 2}, {3}}},
            {"batch_norm bias",
             {3},
             [](auto& b, auto& x) { return batch_norm(x[0], x[1], b); },
             {{4, 3, 2}, {3}}},
            {"linear_gelu bias",
             {3},
             [](auto& b, auto& x) { return linear_gelu(x[0], x[1], b); },
             {{4, 5}, {3, 5}},
             true},
            {"embedding", {3, 5}, [&](auto& w, auto&) { return embedding(w, ids); }, {}},
            {"gather",
             {3, 5},
             [&](auto& w, auto&) {
                 return gather(w, 0, ids.reshape({4, 1}));
             },
             {}},
            {"conv weight", {3, 2, 2, 2}, [](auto& w, auto& x) { return conv2d(x[0], w); }, {{2, 2, 4, 4}}},
            {"conv bias",
             {3},
             [](auto& b, auto& x) { return conv2d(x[0], x[1], b); },
             {{2, 2, 4, 4}, {3, 2, 2, 2}}},
            {"narrow", {4, 5}, [](auto& a, auto&) { return narrow(a, 1, 1, 3); }, {}},
            {"select", {4, 5}, [](auto& a, auto&) { return select(a, 0, 2); }, {}},
            {"broadcast rows", {5}, [](auto& a, auto& x) { return x[0] * a; }, {{4, 5}}, true},
            {"broadcast columns", {4, 1}, [](auto& a, auto& x) { return x[0] + a; }, {{4, 5}}},
            {"twice", {5}, [](auto& a, auto& x) { return x[0] * a + a; }, {{4, 5}}, true},
            {"cast", {5}, [](auto& a, auto&) { return square(a.to(DType::f64)); }, {}, true},
        };
        for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
            for (const Case& c : cases) {
                CAPTURE(c.name);
                CAPTURE(name_of(dtype));
                const Tensor values = draw(c.leaf, dtype);
                std::vector<Tensor> others, exact_others;
                for (const Shape& shape : c.others) {
                    others.push_back(draw(shape, dtype));
                    exact_others.push_back(others.back().to(DType::f64));
                }
                // the reference: in f64, two backwards
                Tensor exact = values.clone().to(DType::f64).set_requires_grad();
                const Tensor result = c.run(exact, exact_others);
                const Tensor weights = draw(result.shape(), dtype);
                for (int i = 0; i < 2; ++i)
                    backward(c.run(exact, exact_others), {.gradient = weights.to(DType::f64)});

                const DType wide = size_of(dtype) == 2 ? DType::f32 : dtype;
                Tensor x = values.clone().set_requires_grad();
                const Block all = block(x.count() + 2, wide);
                set_gradient_buffer(x, all.part(1, c.leaf));
                for (int i = 0; i < 2; ++i) {
                    const Tensor y = c.run(x, others);
                    backward(y, {.gradient = weights.to(y.dtype())});
                }
                REQUIRE(x.grad().defined());
                CHECK(x.grad().dtype() == wide);
                CHECK(x.grad().storage() == all.flat.storage());
                const double tolerance = dtype == DType::f64                      ? 1e-12
                                         : dtype == DType::f32 || !c.through_half ? 2e-5
                                         : dtype == DType::f16                    ? 1e-2
                                                                                  : 6e-2;
                CHECK(near(x.grad(), exact.grad().to_vector(), tolerance));
                const Values block_values = all.flat.to_vector();
                CHECK(block_values.front() == -7.0);
                CHECK(block_values.back() == -7.0);
            }
        }
    });
}

TEST_CASE("set_gradient_buffer: 4096 gradients of a half type are summed in f32 as in f64") {
    for (const DType dtype : {DType::f16, DType::bf16}) {
        on_each_device([dtype] {
            CAPTURE(name_of(dtype));
            // d/dw of mean(2 w x), however the batch is divided: 2, as the sum of 4096 times 2 / 4096
            Tensor w = tensor({1.0}, {1}, {dtype}).set_requires_grad();
            set_gradient_buffer(w, zeros({1}));
            const Tensor x = tensor({2.0 / 4096}, {1}, {dtype});
            for (int i = 0; i < 4096; ++i) backward(sum(w * x));
            CHECK(w.grad().item() == 2.0);

            // values whose sum no half type can represent: the weight of a linear layer, one sample at a time
            Generator generator(3);
            Tensor weight =
                randn({3, 4}, {DType::f32, test_device()}, &generator).to(dtype).set_requires_grad();
            Tensor bias = zeros({3}, {dtype}).set_requires_grad();
            set_gradient_buffer(weight, zeros({3, 4}));
            set_gradient_buffer(bias, zeros({3}));
            Tensor weight_sum = zeros({3, 4}, {DType::f64}), bias_sum = zeros({3}, {DType::f64});
            for (int i = 0; i < 256; ++i) {
                const Tensor sample = randn({1, 4}, {DType::f32, test_device()}, &generator).to(dtype);
                const Tensor dy = rand({1, 3}, {DType::f32, test_device()}, &generator).to(dtype);
                backward(linear(sample, weight, bias), {.gradient = dy});
                weight_sum.add_(matmul(transpose(dy.to(DType::f64)), sample.to(DType::f64)));
                bias_sum.add_(dy.to(DType::f64).reshape({3}));
            }
            CHECK(near(weight.grad(), weight_sum.to_vector(), 2e-5));
            CHECK(near(bias.grad(), bias_sum.to_vector(), 2e-6));
        });
    }
}

TEST_CASE("backward: gradients of a half type are summed in f32 without a buffer, too") {
    for (const DType dtype : {DType::f16, DType::bf16}) {
        on_each_device([dtype] {
            CAPTURE(name_of(dtype));
            Tensor w = tensor({1.0}, {1}, {dtype}).set_requires_grad();
            const Tensor x = tensor({2.0 / 4096}, {1}, {dtype});
            backward(sum(w * x));
            CHECK(w.grad().dtype() == dtype);
            const Tensor held = w.grad();  // somebody may look on
            for (int i = 1; i < 2048; ++i) backward(sum(w * x));
            CHECK(w.grad().dtype() == DType::f32);
            for (int i = 0; i < 2048; ++i) backward(sum(w * x), {.create_graph = i == 1000});
            CHECK(w.grad().item() == 2.0);
            CHECK(held.item() == 2.0 / 4096);

            // Through a layer, which writes its gradients itself, and by a hook, which sees the leaf's dtype.
            Generator generator(3);
            Tensor weight =
                randn({3, 4}, {DType::f32, test_device()}, &generator).to(dtype).set_requires_grad();
            Tensor bias = zeros({3}, {dtype}).set_requires_grad();
            add_gradient_hook(bias, [dtype](const Tensor& gradient) {
                CHECK(gradient.dtype() == dtype);
                return Tensor();
            });
            Tensor weight_sum = zeros({3, 4}, {DType::f64}), bias_sum = zeros({3}, {DType::f64});
            for (int i = 0; i < 256; ++i) {
                const Tensor sample = randn({1, 4}, {DType::f32, test_device()}, &generator).to(dtype);
                const Tensor dy = rand({1, 3}, {DType::f32, test_device()}, &generator).to(dtype);
                backward(linear(sample, weight, bias), {.gradient = dy});
                const Tensor share = matmul(transpose(dy.to(DType::f64)), sample.to(DType::f64));
                weight_sum.add_(i == 0 ? share.to(dtype) : share);  // the first alone is of the leaf's dtype
                bias_sum.add_(dy.to(DType::f64).reshape({3}));
            }
            CHECK(near(weight.grad(), weight_sum.to_vector(), 2e-5));
            CHECK(near(bias.grad(), bias_sum.to_vector(), 2e-6));
        });
    }
}

TEST_CASE("backward: a tensor of a half type that is used thousands of times is summed in f32") {
    constexpr int uses = 4096;  // bf16 stops counting at 256, f16 at 2048
    for (const DType dtype : {DType::f16, DType::bf16}) {
        on_each_device([dtype] {
            CAPTURE(name_of(dtype));
            Tensor leaf = ones({2}, {dtype, test_device()}).set_requires_grad();
            const Tensor inner = leaf * 1.0;
            retain_gradient(inner);
            DType seen = DType::f32;
            add_gradient_hook(inner, [&seen](const Tensor& gradient) {
                seen = gradient.dtype();
                return Tensor();
            });
            const auto loss_of = [](const Tensor& x) {
                Tensor loss = sum(to(x, DType::f32));
                for (int i = 1; i < uses; ++i) loss = loss + sum(to(x, DType::f32));
                return loss;
            };
            backward(loss_of(inner));
            CHECK(seen == dtype);
            CHECK(inner.grad().dtype() == dtype);
            CHECK(near(inner.grad(), {uses, uses}, 0.0));
            CHECK(leaf.grad().dtype() == dtype);
            CHECK(near(leaf.grad(), {uses, uses}, 0.0));

            leaf.set_grad({});
            backward(loss_of(leaf));
            CHECK(leaf.grad().dtype() == dtype);
            CHECK(near(leaf.grad(), {uses, uses}, 0.0));
            for (const bool create_graph : {false, true}) {
                const Tensor gradient = gradients(loss_of(leaf), {leaf}, {.create_graph = create_graph})[0];
                CHECK(gradient.dtype() == dtype);
                CHECK(near(gradient, {uses, uses}, 0.0));
            }
        });
    }
}

TEST_CASE("set_gradient_buffer: buffers that overlap are refused before anything is changed") {
    Tensor a = leaf({1, 2}, {2}), b = leaf({1, 2}, {2}), c = leaf({1, 2}, {2});
    const Block all = block(6);
    set_gradient_buffer(a, all.part(0, {2}));
    set_gradient_buffer(b, all.part(1, {2}));
    set_gradient_buffer(c, all.part(4, {2}));
    CHECK(contains(error_of([&] { backward(sum(c * b) + sum(a)); }), "overlap in memory"));
    CHECK(near(all.flat, {-7, -7, -7, -7, -7, -7}));
    CHECK_FALSE(a.grad().defined());
    backward(sum(c * a));
    CHECK(near(all.flat, {1, 2, -7, -7, 1, 2}));
    set_gradient_buffer(b, all.part(2, {2}));
    backward(sum(b * a));
    CHECK(near(all.flat, {2, 4, 1, 2, 1, 2}));
}

TEST_CASE("set_gradient_buffer: a leaf that takes no part is not touched, also when an op throws") {
    Tensor used = leaf({1, 2}, {2}), unused = leaf({1, 2}, {2});
    const Block all = block(4);
    set_gradient_buffer(used, all.part(0, {2}));
    set_gradient_buffer(unused, all.part(2, {2}));
    backward(sum(used * 3));
    CHECK_FALSE(unused.grad().defined());
    CHECK(near(all.flat, {3, 3, -7, -7}));

    used.set_grad({});
    const Tensor inner = used * 1;
    add_gradient_hook(inner, [](const Tensor&) -> Tensor { throw std::runtime_error("stop"); });
    const Tensor root = sum(used * 5 + inner);
    CHECK_THROWS(backward(root));
    CHECK_FALSE(used.grad().defined());  // so a second attempt starts without a gradient
    backward(sum(used * 4));
    CHECK(near(used.grad(), {4, 4}));
}

TEST_CASE("set_gradient_buffer: takes part in walks within walks, hooks and gradients()") {
    Tensor w = leaf({2}, {1});
    const Tensor buffer = full({1}, 99.0);
    set_gradient_buffer(w, buffer);
    const Tensor y = w * 3, inner = sum(w * w);
    add_gradient_hook(y, [&](const Tensor&) {
        backward(inner);  // 4
        return Tensor();
    });
    backward(sum(y) + sum(w * 10));
    CHECK(near(buffer, {17}));

    CHECK(near(gradients(sum(w * 8), {w})[0], {8}));
    CHECK(near(buffer, {17}));
    CHECK(contains(error_of([&] { backward(sum(w * w), {.create_graph = true}); }), "gradient buffer"));
    CHECK(near(gradients(gradients(sum(w * w * w), {w}, {.create_graph = true})[0], {w})[0], {12}));

    Tensor hooked = leaf({1, 1}, {2}, DType::bf16);
    set_gradient_buffer(hooked, full({2}, 99.0));
    add_gradient_hook(hooked, [](const Tensor& g) { return g * 2; });
    for (int i = 0; i < 2; ++i) backward(sum(hooked * 3 + hooked));
    CHECK(near(hooked.grad(), {16, 16}));
    CHECK(hooked.grad().dtype() == DType::f32);
}

TEST_CASE("set_gradient_buffer: refuses what does not fit, and moves what is there") {
    Tensor w = leaf({1, 2, 3, 4}, {2, 2}), half = leaf({1, 2}, {2}, DType::bf16);
    CHECK(contains(error_of([&] { set_gradient_buffer(w, zeros({4})); }), "buffer is f32 (4)"));
    CHECK(contains(error_of([&] { set_gradient_buffer(w, zeros({2, 2}, {DType::f64})); }), "dtype"));
    CHECK(contains(error_of([&] { set_gradient_buffer(w, zeros({2, 2}, {DType::bf16})); }), "dtype"));
    CHECK(contains(error_of([&] { set_gradient_buffer(w, transpose(zeros({2, 2}))); }), "not contiguous"));
    CHECK(contains(error_of([&] { set_gradient_buffer(half, zeros({2}, {DType::f64})); }), "dtype"));
    CHECK(contains(error_of([&] { set_gradient_buffer(w * 2, zeros({2, 2})); }), "leaf"));
    CHECK(contains(error_of([&] { set_gradient_buffer(zeros({2}), zeros({2})); }), "leaf"));
    CHECK(contains(error_of([&] { set_gradient_buffer({}, zeros({2})); }), "leaf"));
    CHECK(contains(error_of([&] { set_gradient_buffer(w, w.detach()); }), "memory of the leaf itself"));
    backward(sum(w));
    CHECK(near(w, {1, 2, 3, 4}));

    backward(sum(half * 3));
    const Tensor buffer = full({2}, 99.0);
    set_gradient_buffer(half, buffer);
    CHECK(near(half.grad(), {3, 3}));
    backward(sum(half));
    CHECK(near(buffer, {4, 4}));
}

TEST_CASE("add_accumulated_hook: runs once a backward, with the sum, before the walk ends") {
    for (const bool buffered : {false, true}) {
        CAPTURE(buffered);
        Tensor early = leaf({1, 2}, {2}), late = leaf({3, 4}, {2});
        const Tensor buffer = full({2}, 99.0);
        if (buffered) set_gradient_buffer(early, buffer);
        std::vector<Values> seen;
        bool late_was_done = false;
        add_accumulated_hook(early, [&](const Tensor& g) { seen.push_back(g.to_vector()); });
        add_accumulated_hook(late, [&](const Tensor&) { late_was_done = true; });
        add_accumulated_hook(early, [&](const Tensor&) { CHECK_FALSE(late_was_done); });
        for (int i = 0; i < 2; ++i) {
            late_was_done = false;
            const Tensor hidden = late * 2 * 2 * 2;
            backward(sum((hidden + early) * early));
            CHECK(late_was_done);
        }
        REQUIRE(seen.size() == 2);
        CHECK(seen[0] == Values{26, 36});
        CHECK(seen[1] == Values{52, 72});
        CHECK(near(early.grad(), {52, 72}));
        gradients(sum(early * 2), {early});
        CHECK(seen.size() == 2);
        backward(sum(late * 2));
        CHECK(seen.size() == 2);
    }
}

TEST_CASE("add_accumulated_hook: may update the leaf and drop its gradient, or change it in place") {
    Tensor w = leaf({1, 2}, {2});
    add_accumulated_hook(w, [node = w.node().get(), values = w.detach()](const Tensor& g) {
        values.add_(g, -0.5);
        node->gradient = Tensor();
    });
    backward(sum(w * w));
    CHECK_FALSE(w.grad().defined());
    CHECK(near(w, {0, 0}));

    Tensor shared = leaf({1, 2}, {2});
    add_accumulated_hook(shared, [](const Tensor& g) { g.mul_(0.5); });
    backward(sum(shared * 4));
    backward(sum(shared * 4));
    CHECK(near(shared.grad(), {3, 3}));

    CHECK(contains(error_of([&] { add_accumulated_hook(shared * 2, [](const Tensor&) {}); }), "leaf"));
    CHECK(contains(error_of([&] { add_accumulated_hook(shared, nullptr); }), "empty"));
}

TEST_CASE("a hook that throws leaves leaves of every kind without a gradient, if they had none") {
    Tensor plain = leaf({1}, {1}), hooked = leaf({1}, {1}), buffered = leaf({1}, {1}), last = leaf({1}, {1});
    set_gradient_buffer(buffered, full({1}, 99.0));
    add_accumulated_hook(hooked, [](const Tensor&) {});
    const Tensor deep = last * 2 * 2 * 2 * 2;
    add_accumulated_hook(last, [](const Tensor&) { throw std::runtime_error("stop"); });
    CHECK_THROWS_AS(backward(sum(deep + plain * hooked + buffered)), std::runtime_error);
    for (const Tensor& x : {plain, hooked, buffered, last}) CHECK_FALSE(x.grad().defined());
}

}  // namespace potluck::test
