// Graphs that were made under one Offload guard, in several threads.

#include "autograd/offload.h"

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/factories.h"

using namespace potluck;

TEST_CASE("threads: graphs of one guard go back at once, while another is made") {
    static const Device home = add_cpu_device();
    constexpr std::size_t thread_count = 4, graphs_each = 200;
    Generator generator(1);
    const auto numbers = [&](const Shape& shape) { return randn(shape, {}, &generator).to(home); };
    const Tensor x = numbers({2, 4}), w = numbers({4, 4}).detach().set_requires_grad();
    const auto loss_of = [&](std::size_t number) {
        const Tensor inner = tanh(linear(x, w) * (0.01 * static_cast<double>(number + 1)));
        return square(linear(inner, w)).sum() + (x * tanh(linear(x, w))).sum();
    };
    std::vector<std::vector<double>> expected;
    for (std::size_t i = 0; i < thread_count * graphs_each; ++i)
        expected.push_back(gradients(loss_of(i), {w})[0].to_vector());

    std::vector<std::vector<double>> found(expected.size());
    std::vector<Tensor> losses;
    std::vector<std::string> errors(thread_count);
    {
        const Offload guard({.smallest = 0, .read_ahead = 100});
        for (std::size_t i = 0; i < expected.size(); ++i) losses.push_back(loss_of(i));
        std::vector<std::thread> threads;
        for (std::size_t t = 0; t < thread_count; ++t)
            threads.emplace_back([&, t] {
                try {
                    for (std::size_t i = t; i < losses.size(); i += thread_count)
                        found[i] = gradients(losses[i], {w})[0].to_vector();
                } catch (const std::exception& error) {
                    errors[t] = error.what();
                }
            });
        for (std::size_t i = 0; i < expected.size(); ++i) (void)loss_of(i);
        for (std::thread& thread : threads) thread.join();
    }
    for (const std::string& error : errors) CHECK(error.empty());
    CHECK(found == expected);
}
