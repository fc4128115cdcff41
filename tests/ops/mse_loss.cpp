#include "autograd/ops/mse_loss.h"

#include <doctest/doctest.h>

#include "core/factories.h"
#include "tests/ops/table.h"

namespace potluck::test {

std::vector<Row> mse_loss_rows() {
    Row row{.op = "mse_loss", .tolerance = 3.0};  // the difference is rounded, then its square
    for (const Shape& shape : usual_shapes())
        for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean})
            row.cases.push_back(
                {.inputs = {{.shape = shape}, {.shape = shape}},
                 .call = call(
                     [reduction](const Tensor& x, const Tensor& y) { return mse_loss(x, y, reduction); }),
                 .reference = reference([reduction](const Array& x, const Array& y) {
                     const Array squares = map(x, y, [](double a, double b) { return (a - b) * (a - b); });
                     if (reduction == Reduction::none) return squares;
                     return fold_slices(squares, {}, false, [reduction](const std::vector<double>& values) {
                         double total = 0.0;
                         for (const double value : values) total += value;
                         return reduction == Reduction::sum ? total
                                                            : total / static_cast<double>(values.size());
                     });
                 }),
                 .note =
                     reduction == Reduction::none ? "none" : (reduction == Reduction::sum ? "sum" : "mean")});
    row.refusals = {{[] { mse_loss(ones({3, 1}), ones({3})); }, {"[mse_loss]", "(3, 1)", "(3)"}}};
    return {row};
}
const RowsOfFamily mse_loss_family(mse_loss_rows);

}  // namespace potluck::test
