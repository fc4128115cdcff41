// What record() saves, how the tape is printed, and what the anomaly check detects.

#include "autograd/anomaly.h"
#include "core/capture.h"
#include "core/trace.h"
#include "tests/autograd/support.h"

using namespace potluck;
using namespace potluck::test;

TEST_CASE("the tape prints every op with shape, dtype, inputs and bytes saved") {
    const Tensor x = randn({4, 3}), weight = randn({2, 3}).set_requires_grad(),
                 bias = zeros({2}).set_requires_grad();
    const Tensor hidden = tanh(linear(x, weight, bias));
    const Tensor loss = sum(hidden * hidden);
    CHECK(tape_to_text(loss) ==
          "%0 = leaf (2, 3) f32\n"
          "%1 = leaf (2) f32\n"
          "%2 = linear(-, %0, %1) (4, 2) f32, saves 48 B\n"
          "%3 = tanh(%2) (4, 2) f32, saves 32 B\n"
          "%4 = multiply(%3, %3) (4, 2) f32, saves 32 B\n"
          "%5 = sum(%4) () f32\n"
          "6 nodes, 80 B saved\n");  // multiply and tanh save the same tensor
    const std::string drawing = tape_to_dot(loss);
    CHECK(contains(drawing, "digraph tape {"));
    CHECK(contains(drawing, "n3 [label=\"tanh\\n(4, 2) f32\\nsaves 32 B\"];"));
    CHECK(contains(drawing, "n2 -> n3;"));
    CHECK(contains(drawing, "n3 -> n4;"));
    loss.backward();
    CHECK(contains(tape_to_text(loss), "sum() () f32, freed"));
    CHECK(contains(error_of([] { tape_to_text(tensor({1})); }), "not on the tape"));
    CHECK_THROWS_AS(tape_to_dot({}), Error);
    CHECK(contains(error_of([&] { record("twice", tensor({1}), {weight}, {}, {}); }), "[twice] record()"));
}

TEST_CASE("ops save only what the gradients that are wanted need") {
    const Tensor x = randn({4, 3}), y = randn({4, 3}).set_requires_grad(), weight = randn({3, 3});
    CHECK((x * y).node()->saved.bytes() == x.bytes());  // y's gradient needs x
    CHECK(linear(y, weight).node()->saved.bytes() ==
          weight.bytes());  // no gradient for the weight: x is not saved
    CHECK((y + x).node()->saved.bytes() == 0);
    CHECK(relu(y).node()->saved.bytes() == y.bytes());
    CHECK(dropout(y, 0.5).node()->saved.bytes() == 0);
    CHECK(sum(y).node()->saved.bytes() == 0);
    CHECK(matmul(y, weight).node()->saved.bytes() == weight.bytes());
}

TEST_CASE("record() does nothing where no gradient is wanted") {
    const auto wrong = [](const Saved&, const Tensor&, Gradients&) {};
    const Tensor x = leaf({1}, {1});
    CHECK(!record("op", tensor({1}), {tensor({2})}, {}, wrong).requires_grad());
    CHECK(!record("op", arange(0, 1), {x}, {}, wrong).requires_grad());  // integers have no gradient
    CHECK(record("op", tensor({1}), {x, Tensor()}, {Tensor()}, wrong).requires_grad());
    CHECK(contains(error_of([&] { record("op", x, {x}, {}, wrong); }), "already on the tape"));
}

TEST_CASE("the anomaly check names the op that made the first NaN") {
    const AnomalyCheck guard;
    const Tensor x = leaf({-1, 2}, {2});
    SUBCASE("in the forward pass") {
        const std::string text = error_of([&] { exp(sqrt(x)); });
        CHECK(contains(text, "[sqrt]"));
        CHECK(contains(text, "NaN"));
        CHECK(contains(text, "input 0 (2) is finite"));
    }
    SUBCASE("inside a branch that where does not take") {
        const std::string text = error_of([&] { where(x > 0, log(x), x); });
        CHECK(contains(text, "[log]"));
    }
    SUBCASE("in the backward pass") {
        const Tensor y =
            sum(sqrt(x * 0.0) * tensor({0, 0}));  // sqrt has an infinite slope at 0; times 0 it is NaN
        const std::string text = error_of([&] { y.backward(); });
        CHECK(contains(text, "[sqrt]"));
        CHECK(contains(text, "gradient of input 0"));
    }
    SUBCASE("an infinity out of finite numbers") {
        CHECK(contains(error_of([&] { exp(x * 1000); }), "[exp]"));
        CHECK(contains(error_of([&] { x / 0; }), "[divide]"));
    }
    SUBCASE("masked scores are meant to be infinite") {
        const Tensor scores = x + tensor({0, -INFINITY});
        CHECK(near(softmax(scores), {1, 0}));
    }
    SUBCASE("and so are values that masked_fill and where put in, on their way through other ops") {
        const Tensor q = randn({2, 3, 4}).set_requires_grad();
        const Tensor hidden = tril(ones({3, 3})) == 0;
        const Tensor scores = matmul(q, transpose(q));
        const Tensor filled = masked_fill(scores, hidden, -INFINITY);
        const Tensor chosen = where(hidden, full({}, -INFINITY), scores);
        for (const Tensor& masked : {filled, chosen}) {
            const Tensor copies = cat({masked.clone(), masked.transpose(0, 1).transpose(0, 1)}, 0);
            backward(sum(matmul(softmax(copies), cat({q, q}, 0))), {.retain_graph = true});
            CHECK(near(sum(logsumexp(masked, {-1})) - sum(logsumexp(copies, {-1})) * 0.5, {0}, 1e-5));
            backward(sum(log_softmax(masked).narrow(-1, 0, 1)), {.retain_graph = true});
            (masked.to(DType::bf16).reshape({6, 3}) + 1.0).unsqueeze(0);
        }
        masked_fill(x, x > 0, INFINITY);
        CHECK(contains(error_of([&] { masked_fill(x, x > 0, NAN); }), "[masked_fill]"));
        const Tensor all = masked_fill(x, x < 9, -INFINITY);
        CHECK(contains(error_of([&] { all - all; }), "[subtract]"));
    }
    SUBCASE("a NaN behind the branch that where does not take is the user's, and named") {
        const Tensor zero = leaf({0, 4}, {2});
        const Tensor y = sum(where(zero > 0, sqrt(zero) * 0.0, zero));
        CHECK(contains(error_of([&] { y.backward(); }), "[sqrt]"));
        // The safe pattern: select the argument first.
        Tensor safe = leaf({0, 4}, {2});
        sum(where(safe > 0, sqrt(where(safe > 0, safe, full({}, 1.0))), safe)).backward();
        CHECK(near(safe.grad(), {1, 0.25}));
    }
}

TEST_CASE("without an anomaly check NaN passes, as IEEE arithmetic says") {
    const Tensor x = leaf({-1}, {1});
    CHECK(!AnomalyCheck::is_on());
    CHECK(std::isnan(sqrt(x).item()));
    {
        const AnomalyCheck outer;
        { const AnomalyCheck inner; }
        CHECK(AnomalyCheck::is_on());
    }
    CHECK(!AnomalyCheck::is_on());
}

TEST_CASE("anomaly check: in a replay on the CPU it says that it cannot look") {
    const Tensor x = ones({2}, {DType::f32, Device::cpu()});
    const auto work = capture(Device::cpu(), [&] { (void)(x * 2); });
    {
        const AnomalyCheck check;
        CHECK(contains(error_of([&] { work->replay(); }), "[multiply] the anomaly check reads every result"));
        CHECK((x * 2).to_vector() == std::vector<double>{2.0, 2.0});
    }
    work->replay();
}
