// Hooks that replace the tensors that ops save for their backward.

#include <any>
#include <stdexcept>

#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

namespace {

/// Offloads to "host memory": the values as a vector.
struct Offloaded {
    Values values;
    Shape shape;
};
std::any to_host(const Tensor& x) { return Offloaded{x.to_vector(), x.shape()}; }
Tensor from_host(const std::any& packed) {
    const auto& kept = std::any_cast<const Offloaded&>(packed);
    return tensor(kept.values, kept.shape);
}
std::any as_it_is(const Tensor& x) { return x; }
Tensor from_itself(const std::any& packed) { return std::any_cast<Tensor>(packed); }

Tensor loss_of(const Tensor& x, const Tensor& w) { return sum(tanh(matmul(x, w)) * exp(x)); }

}  // namespace

TEST_CASE("saved-tensor hooks: a backward from unpacked values is the same, also a second derivative") {
    const Tensor x = leaf({0.1, 0.2, 0.3, 0.4}, {2, 2}), w = leaf({0.5, 0.6, 0.7, 0.8}, {2, 2});
    const std::vector<Tensor> expected = gradients(loss_of(x, w), {x, w});
    const std::vector<Tensor> expected_second =
        gradients(sum(square(gradients(loss_of(x, w), {x}, {.create_graph = true})[0])), {x, w});
    for (const bool host : {true, false}) {
        CAPTURE(host);
        Tensor loss;
        {
            const SavedTensorHooks guard(host ? to_host : as_it_is, host ? from_host : from_itself);
            loss = loss_of(x, w);
        }
        const std::vector<Tensor> first = gradients(loss, {x, w}, {.retain_graph = true});
        const std::vector<Tensor> again = gradients(loss, {x, w}, {.retain_graph = true});
        const Tensor slope = gradients(loss, {x}, {.create_graph = true})[0];
        const std::vector<Tensor> second = gradients(sum(square(slope)), {x, w});
        for (std::size_t i = 0; i < 2; ++i) {
            CHECK(near(first[i], expected[i].to_vector()));
            CHECK(near(again[i], expected[i].to_vector()));
            CHECK(near(second[i], expected_second[i].to_vector(), 1e-5));
        }
    }
}

TEST_CASE("saved-tensor hooks: one unpacking for each backward of an op, none outside of the guard") {
    int packed = 0, unpacked = 0;
    const Tensor x = leaf({1, 2}, {1, 2}), w = leaf({3, 4}, {2, 1});
    Tensor y;
    {
        const SavedTensorHooks guard(
            [&](const Tensor& kept) {
                ++packed;
                CHECK(!is_grad_enabled());
                (void)(kept * kept);  // is not recorded, and not packed
                return std::any(kept.clone());
            },
            [&](const std::any& kept) {
                ++unpacked;
                return std::any_cast<Tensor>(kept);
            });
        y = matmul(x, w);
    }
    CHECK(packed == 2);
    (void)(x * w.reshape({1, 2}));
    CHECK(packed == 2);
    backward(y, {.retain_graph = true});
    CHECK(unpacked == 2);
    backward(y);
    CHECK(unpacked == 4);
    CHECK(near(x.grad(), {6, 8}));
    CHECK(contains(error_of([&] { y.backward(); }), "freed"));
}

TEST_CASE("saved-tensor hooks: changes in place are caught where the memory is the tensor's own") {
    for (const bool host : {true, false}) {
        CAPTURE(host);
        const Tensor x = leaf({1, 2}, {2}), values = tensor({3, 4});
        Tensor y;
        {
            const SavedTensorHooks guard(host ? to_host : as_it_is, host ? from_host : from_itself);
            y = sum(x * values);
        }
        values.mul_(10);
        if (host) {
            y.backward();
            CHECK(near(x.grad(), {3, 4}));
        } else {
            CHECK(contains(error_of([&] { y.backward(); }), "changed in place"));
        }
    }
}

TEST_CASE("saved-tensor hooks: bytes are counted where they lie, and freed with the graph") {
    const Tensor x = leaf({1, 2}, {2});
    std::weak_ptr<int> alive;
    Tensor y;
    {
        const SavedTensorHooks guard(
            [&](const Tensor& kept) { return std::any(kept.to(DType::bf16)); },
            [](const std::any& kept) { return std::any_cast<Tensor>(kept).to(DType::f32); });
        y = exp(x);
    }
    CHECK(contains(tape_to_text(y), "exp(%0) (2) f32, saves 4 B"));
    {
        const SavedTensorHooks guard(
            [&](const Tensor&) {
                auto content = std::make_shared<int>(1);
                alive = content;
                return std::any(content);
            },
            [](const std::any&) { return ones({2}); });
        y = exp(x);
    }
    CHECK(!alive.expired());
    sum(y).backward();
    CHECK(alive.expired());

    // destroying a deep graph whose saved tensors are packed by hooks needs no recursion
    Tensor deep = x;
    const SavedTensorHooks guard(as_it_is, from_itself);
    for (int i = 0; i < 200'000; ++i) deep = deep * deep;
    deep = Tensor();
}

TEST_CASE("saved-tensor hooks: what they throw comes through, and leaves all as it was") {
    const Tensor x = leaf({1, 2}, {2});
    const auto stop = [](const auto&) -> Tensor { throw std::runtime_error("stop"); };
    {
        const SavedTensorHooks guard([](const Tensor&) -> std::any { throw std::runtime_error("full"); },
                                     stop);
        CHECK_THROWS_AS(exp(x), std::runtime_error);
        {
            const SavedTensorHooks inner(as_it_is, from_itself);
            sum(exp(x)).backward();
        }
        CHECK_THROWS_AS(exp(x), std::runtime_error);
    }
    CHECK(exp(x).requires_grad());
    x.node()->gradient = Tensor();

    Tensor y;
    {
        const SavedTensorHooks guard(as_it_is, stop);
        y = sum(exp(x));
    }
    CHECK_THROWS_AS(y.backward(), std::runtime_error);
    CHECK(!x.grad().defined());
    {
        const SavedTensorHooks guard(as_it_is, [](const std::any&) { return ones({3}); });
        y = sum(exp(x));
    }
    CHECK(contains(error_of([&] { y.backward(); }), "unpack hook must return f32 (2)"));
    CHECK(contains(error_of([&] { SavedTensorHooks(nullptr, stop); }), "empty"));
}
