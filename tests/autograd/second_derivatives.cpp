// Second derivatives: for every op, the gradient of a gradient is compared with finite differences.

#include <functional>
#include <limits>

#include "autograd/gradcheck.h"
#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

namespace {

using Function = std::function<Tensor(const std::vector<Tensor>&)>;

struct Row {
    const char* name;
    std::vector<Shape> shapes;
    Function function;
    double low = -1.5, high = 1.5;  // the inputs are uniform between them
};

Tensor ids(const std::vector<std::int64_t>& values, const Shape& shape) { return tensor(values, shape); }

std::vector<Row> rows() {
    const double infinity = std::numeric_limits<double>::infinity();
    return {
        {"add, subtract", {{2, 3}, {3}}, [](auto& in) { return (in[0] + in[1]) * (in[0] - in[1]); }},
        {"multiply", {{2, 3}, {2, 1}}, [](auto& in) { return in[0] * in[1]; }},
        {"divide", {{2, 3}, {3}}, [](auto& in) { return in[0] / in[1]; }, 0.5, 2.0},
        {"power", {{2, 3}, {3}}, [](auto& in) { return power(in[0], in[1]); }, 0.5, 2.0},
        {"power of a number", {{4}}, [](auto& in) { return power(in[0], 3.0) + power(in[0], 2.0); }},
        {"maximum, minimum",
         {{2, 3}, {2, 3}},
         [](auto& in) { return maximum(in[0], in[1]) * minimum(in[0], in[1]); }},
        {"remainder", {{5}}, [](auto& in) { return square(remainder(in[0], tensor(0.7))); }},
        {"negate, abs, square", {{5}}, [](auto& in) { return square(-abs(in[0])) * in[0]; }},
        {"sqrt, rsqrt, reciprocal",
         {{5}},
         [](auto& in) { return sqrt(in[0]) + rsqrt(in[0]) + reciprocal(in[0]); },
         0.5,
         2.0},
        {"exp, log", {{5}}, [](auto& in) { return exp(in[0]) * log(in[0]); }, 0.5, 2.0},
        {"sin, cos, erf", {{5}}, [](auto& in) { return sin(in[0]) * cos(in[0]) + erf(in[0]); }},
        {"steps",
         {{5}},
         [](auto& in) { return (floor(in[0]) + ceil(in[0]) + round(in[0]) + sign(in[0])) * square(in[0]); }},
        {"where, clamp, masked_fill",
         {{6}, {6}},
         [](auto& in) {
             return square(where(in[0] > in[1], in[0] * in[1], in[1])) + square(clamp(in[0], -1, 1)) +
                    square(masked_fill(in[1], in[0] > 0, 2));
         }},
        {"relu", {{6}}, [](auto& in) { return square(relu(in[0])); }},
        {"gelu", {{6}}, [](auto& in) { return gelu(in[0]); }},
        {"gelu by tanh", {{6}}, [](auto& in) { return gelu(in[0], GeluKind::tanh); }},
        {"silu", {{6}}, [](auto& in) { return silu(in[0]); }},
        {"tanh, sigmoid", {{6}}, [](auto& in) { return tanh(in[0]) * sigmoid(in[0]); }},
        {"sum, mean",
         {{2, 3, 2}},
         [](auto& in) {
             return square(sum(in[0], {0, 2})) + square(mean(in[0], {0, 2}));
         }},
        {"max, min",
         {{3, 4}},
         [](auto& in) {
             return square(max(in[0], {1})) * min(in[0], {0, 1});
         }},
        {"var",
         {{3, 4}},
         [](auto& in) {
             return var(in[0], {0}) + var(in[0], {0, 1}, 0.0);
         }},
        {"stddev", {{3, 4}}, [](auto& in) { return stddev(in[0], {1}); }},
        {"norms",
         {{3, 4}},
         [infinity](auto& in) {
             return norm(in[0], 2, {1}) * norm(in[0], 1, {1}) + square(norm(in[0], infinity, {1}));
         }},
        {"logsumexp", {{3, 4}}, [](auto& in) { return logsumexp(in[0], {0}); }},
        {"matmul of batches", {{2, 1, 2, 3}, {3, 3, 2}}, [](auto& in) { return matmul(in[0], in[1]); }},
        {"matmul with one matrix",
         {{2, 2, 3}, {3, 2}},
         [](auto& in) { return square(matmul(in[0], in[1])); }},
        {"matmul of vectors",
         {{3}, {3}, {3, 2}},
         [](auto& in) { return matmul(in[0], in[1]) * matmul(in[0], in[2]); }},
        {"linear", {{2, 2, 3}, {4, 3}, {4}}, [](auto& in) { return square(linear(in[0], in[1], in[2])); }},
        {"softmax", {{3, 4}}, [](auto& in) { return softmax(in[0]) + softmax(in[0], 0); }},
        {"log_softmax", {{3, 4}}, [](auto& in) { return log_softmax(in[0], 0); }},
        {"cross_entropy",
         {{4, 3}},
         [](auto& in) {
             return cross_entropy(in[0], ids({0, -100, 2, 1}, {4}), {.label_smoothing = 0.1});
         }},
        {"cross_entropy by row",
         {{2, 2, 3}},
         [](auto& in) {
             return cross_entropy(in[0], ids({0, -100, 2, 1}, {2, 2}), {.reduction = Reduction::none});
         }},
        {"layer_norm", {{3, 4}, {4}, {4}}, [](auto& in) { return layer_norm(in[0], in[1], in[2]); }},
        {"rms_norm", {{3, 4}, {4}}, [](auto& in) { return rms_norm(in[0], in[1]); }},
        {"norms of one row", {{5}}, [](auto& in) { return layer_norm(in[0]) * rms_norm(in[0]); }},
        {"embedding",
         {{4, 2}},
         [](auto& in) {
             return square(embedding(in[0], ids({3, 1, 3}, {3})));
         }},
        {"gather, scatter_add",
         {{2, 3}},
         [](auto& in) {
             const Tensor index = ids({0, 0, 2, 1}, {2, 2});
             const Tensor taken = gather(in[0], 1, index);
             return square(scatter_add(in[0], 1, index, square(taken)));
         }},
        {"tril", {{3, 3}}, [](auto& in) { return square(tril(in[0], 1)); }},
        {"rotary",
         {{1, 2, 3, 4}},
         [](auto& in) {
             const auto [c, s] = rotary_tables(3, 4);
             return square(rotary(in[0], c, s));
         }},
        {"attention",
         {{1, 4, 3, 2}, {1, 2, 3, 2}, {1, 2, 3, 3}},
         [](auto& in) { return scaled_dot_product_attention(in[0], in[1], in[2], {.causal = true}); }},
        {"attention with one tensor for all",
         {{1, 1, 3, 2}},
         [](auto& in) {
             const Tensor q = in[0] * 2;
             return scaled_dot_product_attention(q, in[0], tanh(q));
         }},
        {"attention with a mask",
         {{1, 1, 2, 2}, {1, 1, 3, 2}, {2, 3}},
         [](auto& in) { return scaled_dot_product_attention(in[0], in[1], in[1], {.mask = in[2]}); }},
        {"views",
         {{2, 3, 2}},
         [](auto& in) {
             const Tensor x = in[0];
             const Tensor y = x.reshape({3, 4}).transpose(0, 1).narrow(0, 1, 2);  // (2, 3)
             return square(y) * square(x.select(2, 1)) + square(slice(x, 1, 0, 3, 2).sum()) +
                    x.permute({2, 0, 1})[0];
         }},
        {"cat, stack, split",
         {{2, 3}, {2, 2}},
         [](auto& in) {
             const Tensor joined = cat({in[0], in[1], in[0]}, 1);
             const auto parts = split(joined, 4, 1);
             return square(stack({parts[0], square(parts[1])}, 1));
         }},
        {"topk", {{2, 5}}, [](auto& in) { return square(topk(in[0], 2).first); }},
        {"mse_loss", {{5}, {5}}, [](auto& in) { return mse_loss(in[0], in[1]); }},
        {"copies", {{2, 3}}, [](auto& in) { return square(in[0].transpose(0, 1).contiguous().clone()); }},
        {"dropout",
         {{20}},
         [](auto& in) {
             Generator g(7);
             return square(dropout(in[0], 0.5, true, &g));
         }},
    };
}

}  // namespace

TEST_CASE("the gradient of every op can be differentiated again") {
    Generator generator(11);
    for (const Row& row : rows()) {
        CAPTURE(row.name);
        std::vector<Tensor> inputs;
        for (const Shape& shape : row.shapes) {
            const Tensor x = rand(shape, {DType::f64}, &generator) * (row.high - row.low) + row.low;
            inputs.push_back(x.detach().set_requires_grad());
        }
        CHECK(gradcheck(row.function, inputs) == "");
        // A combination of all first gradients, so that each of them is differentiated with respect to every input.
        const auto slope = [&](const std::vector<Tensor>& in) {
            const Tensor y = row.function(in);
            const Tensor weights = arange(1, y.count() + 1, 1, {DType::f64}).reshape(y.shape()) / 7.0;
            Tensor total = zeros({}, {DType::f64}) * sum(in[0]);
            for (const Tensor& gradient : gradients(sum(y * weights), in, {.create_graph = true}))
                if (gradient.defined()) total = total + sum(gradient * gradient * 0.5 + sin(gradient));
            return total;
        };
        CHECK(gradcheck(slope, inputs) == "");
    }
}

TEST_CASE("the gradient with a graph is the gradient without") {
    Generator generator(12);
    for (const Row& row : rows()) {
        CAPTURE(row.name);
        std::vector<Tensor> inputs;
        for (const Shape& shape : row.shapes) {
            const Tensor x = rand(shape, {DType::f64}, &generator) * (row.high - row.low) + row.low;
            inputs.push_back(x.detach().set_requires_grad());
        }
        const auto plain = gradients(sum(row.function(inputs)), inputs);
        const auto recorded = gradients(sum(row.function(inputs)), inputs, {.create_graph = true});
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            REQUIRE(plain[i].defined());
            CHECK(near(recorded[i], plain[i].to_vector(), 1e-9));
        }
    }
}

TEST_CASE("third derivatives") {
    const Tensor x = leaf({0.3, -0.7}, {2}, DType::f64);
    Tensor y = sum(power(x, 5.0));
    for (int order = 0; order < 3; ++order) y = sum(gradients(y, {x}, {.create_graph = true})[0]);
    CHECK(near(y, {60 * 0.09 + 60 * 0.49}, 1e-9));
}

TEST_CASE("create_graph leaves a gradient on the tape that adds up") {
    Tensor x = leaf({2}, {1});
    backward(sum(x * x * x), {.create_graph = true});
    CHECK(near(x.grad(), {12}));
    const Tensor second = gradients(sum(x.grad()), {x}, {.retain_graph = true})[0];
    CHECK(near(second, {12}));
    backward(sum(x * x), {.create_graph = true});
    CHECK(near(x.grad(), {16}));
    x.set_grad({});
}

TEST_CASE("an op that can only add in place refuses create_graph") {
    const Tensor x = leaf({1, 2}, {2});
    const Tensor y = record("fused", tensor({1, 2}), {x}, {},
                            [](const Saved&, const Tensor&, Gradients& dx) { dx.buffer(0); });
    CHECK(contains(error_of([&] { backward(sum(y), {.create_graph = true}); }), "create_graph"));
    sum(y).backward();
    CHECK(near(x.grad(), {0, 0}));
}
