// Backward in several threads. They share leaves (whose gradients are summed) and tensors that are only read. They do
// not share graphs and leaves with a gradient buffer.

#include <doctest/doctest.h>

#include <any>
#include <atomic>
#include <cmath>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/random.h"
#include "tests/expect_error.h"

using namespace potluck;
using namespace potluck::test;

namespace {

/// Runs work(index) in several threads that start at the same time.
void in_threads(int count, const std::function<void(int)>& work) {
    std::latch start(count);
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i)
        threads.emplace_back([&, i] {
            start.arrive_and_wait();
            work(i);
        });
    for (std::thread& thread : threads) thread.join();
}

constexpr int thread_count = 4, rounds = 200;

}  // namespace

TEST_CASE("threads: backward into one shared leaf gives the sum of all") {
    Tensor plain = ones({64}).set_requires_grad(), accumulated = ones({64}).set_requires_grad(),
           hooked = ones({64}).set_requires_grad(), matrix = ones({8, 8}).set_requires_grad();
    std::atomic<int> calls{0};
    add_accumulated_hook(accumulated, [&](const Tensor& gradient) {
        CHECK(gradient.defined());
        ++calls;
    });
    add_gradient_hook(hooked, [](const Tensor& gradient) { return gradient * 2; });
    const Tensor shared_input = ones({3, 8});  // only read
    bool with_a_gradient = false;
    SUBCASE("from nothing") {}
    SUBCASE("onto a gradient that is there") {
        with_a_gradient = true;
        for (Tensor* x : {&plain, &accumulated, &hooked}) x->set_grad(ones({64}));
    }
    in_threads(thread_count, [&](int index) {
        for (int i = 0; i < rounds; ++i) {
            const double factor = index + 1;
            const Tensor product = sum(matmul(shared_input, matrix)) * factor;
            backward(sum((plain + accumulated + hooked) * factor) + product);
        }
    });
    const double start = with_a_gradient ? 1 : 0;
    const double total = rounds * (1 + 2 + 3 + 4);
    CHECK(plain.grad().to_vector() == std::vector<double>(64, start + total));
    CHECK(accumulated.grad().to_vector() == std::vector<double>(64, start + total));
    CHECK(hooked.grad().to_vector() == std::vector<double>(64, start + 2 * total));
    CHECK(matrix.grad().to_vector() == std::vector<double>(64, 3 * total));
    CHECK(calls == thread_count * rounds);
}

TEST_CASE("threads: a graph is one thread's at a time, and another gets an Error") {
    Tensor leaf = ones({16}).set_requires_grad();
    for (const bool retain : {true, false}) {
        CAPTURE(retain);
        leaf.set_grad({});
        Tensor trunk = leaf;
        for (int i = 0; i < 50; ++i) trunk = tanh(trunk);
        std::atomic<int> done{0}, refused{0}, other{0};
        in_threads(thread_count, [&](int index) {
            const Tensor root = sum(trunk * (index + 1.0));
            try {
                backward(root, {.retain_graph = retain});
                ++done;
            } catch (const Error& error) {
                const std::string text = error.what();
                ++(contains(text, "another thread") || contains(text, "freed") ? refused : other);
            }
        });
        CHECK(done + refused == thread_count);
        CHECK(done >= 1);
        CHECK(other == 0);
    }

    // ensures that they overlap in time
    const Tensor trunk = leaf * 2;
    const Tensor one = trunk * 3, two = trunk * 4;
    std::string text;
    add_gradient_hook(one, [&](const Tensor&) {
        std::thread([&] { text = error_of([&] { backward(sum(two)); }); }).join();
        return Tensor();
    });
    leaf.set_grad({});
    backward(sum(one));
    CHECK(contains(text, "another thread is walking through 'multiply' (16)"));
    CHECK(leaf.grad().to_vector() == std::vector<double>(16, 6));
}

TEST_CASE("threads: a leaf with a gradient buffer takes part in one backward at a time") {
    Tensor leaf = ones({16}).set_requires_grad();
    set_gradient_buffer(leaf, zeros({16}));
    std::atomic<int> done{0}, refused{0};
    in_threads(thread_count, [&](int) {
        for (int i = 0; i < rounds; ++i) {
            try {
                backward(sum(leaf * 2));
                ++done;
            } catch (const Error& error) {
                if (contains(error.what(), "a leaf with a gradient buffer")) ++refused;
            }
        }
    });
    CHECK(done + refused == thread_count * rounds);
    CHECK(leaf.grad().to_vector() == std::vector<double>(16, 2.0 * done));
}

TEST_CASE("threads: graphs, modes and hooks of one thread are no matter of another") {
    const Tensor weight = full({8, 8}, 0.1).set_requires_grad();
    in_threads(thread_count, [&](int index) {
        for (int i = 0; i < rounds / 4; ++i) {
            const Tensor x = full({2, 8}, index + 1.0).set_requires_grad();
            if (index % 2 == 0) {
                const NoGrad no_grad;
                CHECK(!matmul(x, weight).requires_grad());
            } else {
                const SavedTensorHooks guard(
                    [](const Tensor& kept) { return std::any(kept.clone()); },
                    [](const std::any& kept) { return std::any_cast<Tensor>(kept); });
                CHECK(sum(matmul(x, weight)).requires_grad());
            }
            const Tensor slope = gradients(sum(matmul(x, weight)), {x})[0];
            CHECK(std::abs(slope.to_vector()[3] - 0.8) < 1e-6);
        }
    });
    CHECK(!weight.grad().defined());
}
