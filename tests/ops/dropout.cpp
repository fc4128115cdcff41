#include "autograd/ops/dropout.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/random.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

constexpr std::uint64_t seed = 5;

/// Element i is kept when number i of the sequence is p 2^32 or more.
Array dropped(const Array& x, double p) {
    Array y = x;
    for (std::size_t i = 0; i < y.values.size(); ++i) {
        const std::uint32_t number = philox({seed, 0}, i / 4)[i % 4];
        const bool is_kept = static_cast<double>(number) >= std::round(p * 0x1p32);
        y.values[i] = is_kept ? y.values[i] / (1.0 - p) : 0.0;
    }
    return y;
}

Tensor dropout_with_seed(const Tensor& x, double p, bool training) {
    Generator generator(seed);
    return dropout(x, p, training, &generator);
}

}  // namespace

std::vector<Row> dropout_rows() {
    Row row{.op = "dropout"};
    for (const Shape& shape : usual_shapes()) {
        for (const double p : {0.0, 0.1, 0.5, 1.0})
            row.cases.push_back({.inputs = {{.shape = shape}},
                                 .call = call([p](const Tensor& x) { return dropout_with_seed(x, p, true); }),
                                 .reference = reference([p](const Array& x) { return dropped(x, p); }),
                                 .note = "p " + std::to_string(p)});
        row.cases.push_back({.inputs = {{.shape = shape}},
                             .call = call([](const Tensor& x) { return dropout_with_seed(x, 0.5, false); }),
                             .reference = reference([](const Array& x) { return x; }),
                             .note = "evaluation"});
    }
    row.refusals = {
        {[] { dropout(ones({3}), -0.1); }, {"[dropout]", "-0.1"}},
        {[] { dropout(ones({3}), 1.5); }, {"[dropout]", "1.5"}},
        {[] { dropout(ones({3}), std::nan("")); }, {"[dropout]", "nan"}},
        {[] { dropout(ones({3}), 1.5, false); }, {"[dropout]", "1.5"}},
        {[] { dropout(ones({3}, {DType::i64}), 0.5); }, {"[dropout]", "i64"}},
        {[] { dropout(Tensor(), 0.5); }, {"[dropout]"}},
    };
    return {row};
}
const RowsOfFamily dropout_family(dropout_rows);

TEST_CASE("dropout: p = 1 gives zeros and zero gradients, also of infinity") {
    on_each_device([] {
        Tensor x = tensor({1, -2, std::numeric_limits<double>::infinity()});
        x.set_requires_grad();
        const Tensor y = dropout(x, 1.0);
        CHECK(y.to_vector() == std::vector<double>{0, 0, 0});
        backward(y, {.gradient = ones({3})});
        CHECK(x.grad().to_vector() == std::vector<double>{0, 0, 0});
    });
}

TEST_CASE("dropout: infinity stays infinity where it is kept, and is 0 where it is dropped") {
    on_each_device([] {
        const double infinity = std::numeric_limits<double>::infinity();
        Generator generator(2);
        double kept = 0.0;
        for (const double value : dropout(full({1000}, infinity), 0.1, true, &generator).to_vector()) {
            REQUIRE((value == 0.0 || value == infinity));
            kept += value == infinity ? 1.0 : 0.0;
        }
        CHECK(std::fabs(kept - 900.0) < 5.0 * std::sqrt(90.0));
    });
}

TEST_CASE("dropout: as many are kept as p says, scaled so that the mean stays") {
    on_each_device([] {
        Generator generator(11);
        for (const double p : {0.1, 0.5, 0.9}) {
            double total = 0.0;
            std::int64_t kept = 0;
            const float scale = static_cast<float>(1.0 / (1.0 - p));
            for (const float value : dropout(ones({1000000}), p, true, &generator).to_vector<float>()) {
                REQUIRE((value == 0.0F || value == scale));
                total += static_cast<double>(value);
                kept += value != 0.0F;
            }
            // Five standard deviations.
            CHECK(std::fabs(static_cast<double>(kept) - 1e6 * (1.0 - p)) <
                  5.0 * std::sqrt(1e6 * p * (1.0 - p)));
            CHECK(std::fabs(total / 1e6 - 1.0) < 5.0 * std::sqrt(p / (1.0 - p) / 1e6));
        }
    });
}

TEST_CASE("dropout: a part of a tensor has the part of its mask") {
    on_each_device([] {
        struct Box {
            Shape whole, first, size;
        };
        const Box boxes[] = {
            {{40, 33}, {7, 0}, {20, 33}},  // rows: one run, at any position
            {{40, 32}, {0, 8}, {40, 16}},  // columns, in whole packs
            {{40, 33}, {3, 5}, {9, 27}},   // both
            {{3, 4, 5, 6}, {1, 1, 2, 1}, {2, 3, 2, 4}},
            {{3, 4, 5, 6}, {0, 2, 0, 0}, {3, 2, 5, 6}},
            {{9}, {4}, {5}},
            {{4, 6}, {2, 6}, {2, 0}},
        };
        const RandomKey key{seed, 3, 2};
        for (const DType dtype : floating_dtypes())
            for (const Box& box : boxes) {
                Tensor whole = ones(box.whole, {dtype}), part = ones(box.size, {dtype});
                backend(test_device()).dropout(key, {}, 0.3, whole, whole);
                backend(test_device()).dropout(key, {box.whole, box.first}, 0.3, part, part);
                Tensor right = whole;
                for (std::size_t axis = 0; axis < box.whole.size(); ++axis)
                    right = right.narrow(static_cast<std::int64_t>(axis), box.first[axis], box.size[axis]);
                CHECK(part.to_vector() == right.contiguous().to_vector());
            }
        Tensor x = ones({4});
        CHECK_THROWS_WITH_AS(backend(test_device()).dropout(key, {{5}, {2}}, 0.3, x, x),
                             doctest::Contains("inside the whole"), Error);
        CHECK_THROWS_WITH_AS(backend(test_device()).dropout(key, {{5, 5}, {0, 0}}, 0.3, x, x),
                             doctest::Contains("different axes"), Error);
    });
}

TEST_CASE("dropout: backward draws the same mask again, and the generator moves on") {
    on_each_device([] {
        Generator generator(1);
        Tensor x = ones({50});
        x.set_requires_grad();
        const Tensor y = dropout(x, 0.5, true, &generator);
        const Tensor z = dropout(x, 0.5, true, &generator);
        CHECK(y.to_vector() != z.to_vector());
        backward(y, {.gradient = ones({50})});
        CHECK(x.grad().to_vector() == y.to_vector());
    });
}

}  // namespace potluck::test
