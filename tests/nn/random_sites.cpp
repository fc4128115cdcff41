// Dropout in a RandomUpdateScope: the masks of the whole global batch, however it is divided and in whatever order.

#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/capture.h"
#include "core/random_scope.h"
#include "nn/layers/dropout.h"
#include "nn/models/gpt2.h"
#include "tests/on_device.h"

namespace potluck::test {
namespace {

constexpr std::int64_t batch = 8, heads = 4, time = 5, width = 6;

/// Three layers that output their masks: of a tensor (batch, time, width), of attention weights, and of rows (batch *
/// time).
struct Masks : nn::Module {
    struct Weights : nn::Module {
        Tensor forward(const Tensor& x) override {
            // Equal weights and values that are the identity: the output is the mask.
            const Shape shape{x.size(0), heads, time, 2};
            const Tensor q = zeros(shape, {x.dtype()});
            Tensor v = zeros({x.size(0), heads, time, time}, {x.dtype()});
            for (std::int64_t i = 0; i < time; ++i) v.narrow(2, i, 1).narrow(3, i, 1).fill_(1.0);
            return scaled_dot_product_attention(q, q, v, {.dropout = 0.4});
        }
    };
    nn::Dropout embedding{0.4}, output{0.4};
    Weights weights;

    void members(nn::Members& m) override { m("embedding", embedding)("weights", weights)("output", output); }

    /// The output of one layer for an input of ones.
    std::vector<double> layer(int which, std::int64_t items, DType dtype) {
        const Tensor x = ones({items, time, width}, {dtype});
        if (which == 0) return embedding(x).to_vector();
        if (which == 1) return weights(x).to_vector();
        std::vector<double> both;  // one layer that is used twice
        for (int turn = 0; turn < 2; ++turn)
            for (const double value : output(reshape(x, {items * time, width})).to_vector())
                both.push_back(value);
        return both;
    }
};

using Cut = std::vector<std::int64_t>;  // items of the micro-batches

/// The masks of all layers over the global batch, concatenated; the outer loop is over layers, or over micro-batches.
std::vector<std::vector<double>> masks_of(Masks& model, const Cut& cut, bool layers_first,
                                          std::int64_t update, DType dtype) {
    std::vector<std::vector<double>> found(4);  // the last layer has two halves
    const RandomUpdateScope scope(update);
    const auto visit = [&](int layer, std::int64_t items) {
        const std::vector<double> part = model.layer(layer, items, dtype);
        const std::size_t halves = layer == 2 ? 2 : 1;
        for (std::size_t half = 0; half < halves; ++half) {
            auto& to = found[static_cast<std::size_t>(layer) + half];
            const auto begin = part.begin() + static_cast<std::ptrdiff_t>(half * part.size() / halves);
            to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(part.size() / halves));
        }
    };
    for (int outer = 0; outer < (layers_first ? 3 : 1); ++outer) {
        std::int64_t first = 0;
        for (const std::int64_t items : cut) {
            const RandomItemsScope part(first, items);
            if (layers_first)
                visit(outer, items);
            else
                for (int layer = 0; layer < 3; ++layer) visit(layer, items);
            first += items;
        }
    }
    return found;
}

double norm(const std::vector<double>& x) {
    double sum = 0.0;
    for (const double value : x) sum += value * value;
    return std::sqrt(sum);
}

}  // namespace

TEST_CASE("random sites: every cut into micro-batches and every order of layers draws the same masks") {
    std::vector<std::vector<double>> on_first_device;
    on_each_device([&] {
        for (const DType dtype : {DType::f32, DType::f64, DType::f16}) {
            manual_seed(5);
            Masks model;
            model.assign_random_sites();
            const auto whole = masks_of(model, {batch}, false, 3, dtype);
            for (const Cut& cut :
                 {Cut{4, 4}, Cut{2, 2, 2, 2}, Cut{1, 1, 1, 1, 1, 1, 1, 1}, Cut{3, 5}, Cut{7, 0, 1}})
                for (const bool layers_first : {false, true})
                    CHECK(masks_of(model, cut, layers_first, 3, dtype) == whole);
            // Each layer, use of a layer, and update has its own mask.
            CHECK(whole[2] != whole[3]);
            CHECK(whole[0] != whole[2]);
            const auto next = masks_of(model, {batch}, false, 4, dtype);
            for (std::size_t i = 0; i < whole.size(); ++i) CHECK(next[i] != whole[i]);
            CHECK(default_generator(test_device()).state().offset == 0);
            if (dtype != DType::f32) continue;
            if (on_first_device.empty()) on_first_device = whole;
            CHECK(whole == on_first_device);
        }
    });
}

TEST_CASE("random sites: a layer that is computed again, and one in another thread, draws the same mask") {
    manual_seed(5);
    Masks model;
    model.assign_random_sites();
    std::vector<double> first, again, there;
    RandomContext then;
    {
        const RandomUpdateScope update(2);
        const RandomItemsScope items(4, 2);
        model.layer(2, 2, DType::f32);
        then = RandomContext::current();
        first = model.layer(2, 2, DType::f32);
    }
    {
        const RandomContextScope scope(then);
        again = model.layer(2, 2, DType::f32);
    }
    std::thread([&] {
        CHECK(!RandomContext::current().is_in_update);
        const RandomContextScope scope(then);
        there = model.layer(2, 2, DType::f32);
    }).join();
    CHECK(again == first);
    CHECK(there == first);
    CHECK(!RandomContext::current().is_in_update);
}

TEST_CASE("random sites: parts of the heads and of the features have the masks of the whole") {
    on_each_device([] {
        manual_seed(6);
        const Tensor x = ones({3, time, width});
        const RandomUpdateScope update(0);
        const auto dropped = [&](std::int64_t first, std::int64_t count) {
            const RandomItemsScope items(2, 3);
            const RandomSiteScope site(9, 2, first, width);
            return dropout(x.narrow(2, first, count), 0.5);
        };
        const Tensor whole = dropped(0, width);
        for (const std::int64_t first : {0, 1, 3, 5})
            CHECK(dropped(first, width - first).to_vector() ==
                  whole.narrow(2, first, width - first).contiguous().to_vector());

        Generator generator(3);
        const Tensor q = randn({2, heads, time, 8}, {DType::f32, test_device()}, &generator);
        const auto attended = [&](std::int64_t first, std::int64_t count) {
            const RandomItemsScope items(1, 2);
            const RandomSiteScope site(10, 1, first, heads);
            const Tensor part = q.narrow(1, first, count);
            return scaled_dot_product_attention(part, part, part, {.causal = true, .dropout = 0.5});
        };
        const Tensor all = attended(0, heads);
        CHECK(attended(1, 2).to_vector() == all.narrow(1, 1, 2).contiguous().to_vector());
        const RandomSiteScope outside(9, 2, 4, width);
        CHECK_THROWS_WITH_AS(dropout(x, 0.5), doctest::Contains("inside the whole"), Error);
    });
}

TEST_CASE("random sites: places that cannot be are refused, and leave the scopes as they were") {
    const auto refused = [](auto&& function, const char* part) {
        std::string text;
        try {
            function();
        } catch (const Error& error) {
            text = error.what();
        }
        INFO(text);
        CHECK(text.find(part) != std::string::npos);
        CHECK(RandomContext::current().site == 0);
        CHECK(RandomContext::current().items == -1);
    };
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    refused([] { const RandomSiteScope site(3, -1, 0, 4); }, "[random_site] axis -1 is negative");
    refused([] { const RandomItemsScope items(most, 1); }, "[random_items]");
    refused([] { const RandomItemsScope items(-1, 1); }, "[random_items]");
    refused(
        [] {
            const RandomUpdateScope update(0);
            const RandomItemsScope items(most / 2, 1);
            dropout(ones({4, 2}), 0.5);
        },
        "[random_items] the rows of (4, 2)");
}

TEST_CASE("random sites: recorded work has the masks of the update around its replay") {
    on_each_device([] {
        manual_seed(5);
        Masks model;
        model.assign_random_sites();
        const Tensor x = ones({4, width});
        const Tensor y = ones({4, width});
        const auto work = [&model, x, y] {
            Tensor to = y;
            const RandomItemsScope items(2, 4);
            to.copy_(model.output(x) + dropout(x, 0.5));
        };
        const auto at = [&](std::int64_t update, const auto& function) {
            const RandomUpdateScope scope(update);
            function();
            return y.to_vector();
        };
        const std::vector<double> third = at(3, work), fourth = at(4, work);
        CHECK(third != fourth);
        std::unique_ptr<CapturedWork> recorded;
        {
            const RandomUpdateScope scope(2);
            recorded = capture(test_device(), work);
        }
        const auto replay = [&] { recorded->replay(); };
        CHECK(at(4, replay) == fourth);
        default_generator(test_device()).take(100);  // has no effect
        CHECK(at(3, replay) == third);
        if (test_device().kind == DeviceKind::cpu) return;
        CHECK_THROWS_WITH_AS(recorded->replay(), doctest::Contains("RandomUpdateScope"), Error);
        CHECK_THROWS_WITH_AS(capture(test_device(),
                                     [&] {
                                         const RandomUpdateScope scope(2);
                                         work();
                                     }),
                             doctest::Contains("RandomUpdateScope"), Error);
    });
}

TEST_CASE("random sites: without a scope, and with a generator given, dropout draws stretch after stretch") {
    manual_seed(1);
    const Tensor x = potluck::ones({40});
    Generator mine(7), other(7);
    const std::vector<double> right = dropout(x, 0.5, true, &other).to_vector();
    {
        const RandomUpdateScope update(1);
        CHECK(dropout(x, 0.5, true, &mine).to_vector() == right);
        CHECK(mine.state().offset == 10);
    }
    dropout(x, 0.5);
    CHECK(default_generator().state().offset == 10);
    {
        const RandomItemsScope alone(0, 4);
        dropout(x, 0.5);
        CHECK(default_generator().state().offset == 20);
    }
    CHECK_THROWS_WITH_AS(RandomUpdateScope(-1), doctest::Contains("-1"), Error);
    CHECK_THROWS_WITH_AS(RandomItemsScope(0, -2), doctest::Contains("-2"), Error);
}

TEST_CASE("random sites: gradients summed over micro-batches are those of the whole batch") {
    on_each_device([] {
        manual_seed(11);
        nn::GPT2 model(
            {.vocabulary = 20, .context = 8, .width = 16, .heads = 2, .layers = 2, .dropout = 0.3});
        model.to(test_device());
        model.assign_random_sites();
        Generator generator(2);
        const Tensor ids = randint(0, 20, {8, 8}, {DType::i64, test_device()}, &generator);
        const Tensor targets = randint(0, 20, {8, 8}, {DType::i64, test_device()}, &generator);
        const auto gradients_of = [&](std::int64_t micro_batches) {
            model.zero_grad();
            const RandomUpdateScope update(6);
            const std::int64_t items = 8 / micro_batches;
            for (std::int64_t first = 0; first < 8; first += items) {
                const RandomItemsScope part(first, items);
                const Tensor loss = model.loss(ids.narrow(0, first, items), targets.narrow(0, first, items));
                (loss * (1.0 / static_cast<double>(micro_batches))).backward();
            }
            std::vector<std::vector<double>> all;
            for (const Tensor& parameter : model.parameters()) all.push_back(parameter.grad().to_vector());
            return all;
        };
        const auto whole = gradients_of(1);
        double of_all = 0.0;
        for (const auto& one : whole) of_all = std::hypot(of_all, norm(one));
        for (const std::int64_t micro_batches : {2, 4, 8}) {
            const auto parts = gradients_of(micro_batches);
            for (std::size_t i = 0; i < whole.size(); ++i) {
                std::vector<double> distance = parts[i];
                for (std::size_t j = 0; j < distance.size(); ++j) distance[j] -= whole[i][j];
                const double size = norm(whole[i]) < 1e-6 * of_all ? of_all : norm(whole[i]);
                CHECK(norm(distance) <= 5e-6 * size);
            }
        }
    });
}

}  // namespace potluck::test
