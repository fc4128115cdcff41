#include "nn/optim/same_elements.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "autograd/ops/elementwise.h"

namespace potluck::optim {
namespace {

/// The address range of the elements in memory: [first, last), in bytes.
std::pair<std::int64_t, std::int64_t> stretch_of(const Tensor& x) {
    std::int64_t low = x.offset(), high = x.offset();
    for (std::size_t axis = 0; axis < x.shape().size(); ++axis) {
        const std::int64_t step = (x.shape()[axis] - 1) * x.strides()[axis];
        (step < 0 ? low : high) += step;
    }
    const std::int64_t size = size_of(x.dtype());
    return {low * size, (high + 1) * size};
}

/// Calls visit(address) with the address of every element, in bytes.
template <class Visit>
void for_each_place(const Tensor& x, Visit visit) {
    std::vector<std::int64_t> index(x.shape().size());
    std::int64_t place = x.offset();
    for (std::int64_t i = 0; i < x.count(); ++i) {
        visit(place * size_of(x.dtype()));
        for (std::size_t axis = index.size(); axis-- > 0;) {
            place += x.strides()[axis];
            if (++index[axis] < x.shape()[axis]) break;
            place -= x.shape()[axis] * x.strides()[axis];
            index[axis] = 0;
        }
    }
}

}  // namespace

Sharing sharing_of(const Tensor& a, const Tensor& b) {
    if (a.is_same(b)) return Sharing::all;
    if (a.storage() != b.storage() || a.count() == 0 || b.count() == 0) return Sharing::none;
    if (a.dtype() == b.dtype() && a.offset() == b.offset() && a.count() == b.count() &&
        ((a.shape() == b.shape() && a.strides() == b.strides()) || (a.is_contiguous() && b.is_contiguous())))
        return Sharing::all;
    const auto [low_a, high_a] = stretch_of(a);
    const auto [low_b, high_b] = stretch_of(b);
    if (high_a <= low_b || high_b <= low_a) return Sharing::none;
    if (a.is_contiguous() && b.is_contiguous()) return Sharing::some;
    // Views may interleave, like the columns of a matrix.
    const std::int64_t low = std::min(low_a, low_b);
    std::vector<bool> taken(static_cast<std::size_t>(std::max(high_a, high_b) - low));
    const auto bytes_at = [&](std::int64_t place, const Tensor& x, auto body) {
        for (std::int64_t i = 0; i < size_of(x.dtype()); ++i) body(static_cast<std::size_t>(place - low + i));
    };
    for_each_place(
        a, [&](std::int64_t place) { bytes_at(place, a, [&](std::size_t byte) { taken[byte] = true; }); });
    bool shared = false;
    for_each_place(b, [&](std::int64_t place) {
        bytes_at(place, b, [&](std::size_t byte) { shared = shared || taken[byte]; });
    });
    return shared ? Sharing::some : Sharing::none;
}

Tensor gradient_of(const Tensor& parameter, const std::vector<Tensor>& aliases) {
    Tensor gradient = parameter.grad();
    if (gradient.defined()) gradient = gradient.detach();
    for (const Tensor& alias : aliases) {
        if (!alias.grad().defined()) continue;
        const Tensor more = alias.grad().detach().reshape(parameter.shape());
        gradient = gradient.defined() ? gradient + more : more;
    }
    return gradient;
}

}  // namespace potluck::optim
