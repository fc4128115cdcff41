#include "core/kernel_errors.h"

#include "core/format.h"

namespace potluck {
namespace {

/// The indices of element `position` of `shape`: "(1, 0, 3)"; a plain number for rank 1.
std::string place_name(const Shape& shape, std::int64_t position) {
    if (shape.size() == 1) return fmt::format("{}", position);
    Shape place(shape.size());
    for (std::size_t i = shape.size(); i-- > 0; position /= shape[i]) place[i] = position % shape[i];
    return pretty(place);
}

}  // namespace

Error bad_index(std::string_view op, std::string_view what, const Shape& shape, std::int64_t position,
                std::int64_t value, std::int64_t size, std::string_view of_what) {
    const std::string place = place_name(shape, position);
    if (size == 0)
        return {op, fmt::format("{} {} at position {} chooses among {}, but there are none.", what, value,
                                place, of_what)};
    return {op,
            fmt::format("{} {} at position {} is outside 0..{}, {}.", what, value, place, size - 1, of_what)};
}

std::string entries_along(const Shape& shape, std::int64_t axis) {
    return fmt::format("the entries of {} along axis {}", pretty(shape), axis);
}

void check_index_shape(std::string_view op, const Tensor& x, std::int64_t axis, const Tensor& index) {
    bool fits = index.ndim() == x.ndim() && axis >= 0 && axis < x.ndim();
    for (std::int64_t i = 0; fits && i < x.ndim(); ++i) fits = i == axis || index.size(i) <= x.size(i);
    if (!fits)
        throw Error(
            op,
            fmt::format("an index of shape {} does not fit {} along axis {}: the ranks must be equal, and "
                        "no other axis may be longer.",
                        pretty(index.shape()), pretty(x.shape()), axis));
}

Error bad_label(std::int64_t label, std::int64_t position, std::int64_t classes, std::int64_t ignore_index) {
    return {"cross_entropy",
            fmt::format("label {} at position {} is neither a class (0..{}) nor ignore_index {}. "
                        "Correct it, or give the rows without a label the ignore_index.",
                        label, position, classes - 1, ignore_index)};
}

void check_topk(std::int64_t k, std::int64_t n) {
    if (k < 0 || k > n)
        throw Error("topk", fmt::format("cannot take {} of {} elements along the axis.", k, n));
}

Error no_weights() { return {"multinomial", "there are no weights to draw from."}; }

Error bad_weight(double weight, std::int64_t position, std::int64_t row) {
    return {"multinomial",
            fmt::format("weight {} at position {} of row {} is not a finite number that is at least 0.",
                        weight, position, row)};
}

Error too_few_weights(std::int64_t row, std::int64_t positive, std::int64_t needed) {
    if (positive == 0)
        return {"multinomial", fmt::format("all weights of row {} are 0: there is nothing to draw.", row)};
    return {"multinomial", fmt::format("row {} has {} weights above 0, too few for {} samples without "
                                       "replacement. Draw fewer, or with replacement.",
                                       row, positive, needed)};
}

}  // namespace potluck
