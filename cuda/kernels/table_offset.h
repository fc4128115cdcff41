#pragma once

#include <cstdint>

namespace potluck::cuda {

/// Steps between the rows and between the columns of a table.
template <class Offset>
struct StridesOf {
    Offset row, column;
};
/// What kernels use: a table of 262144 rows of 8960 has elements past 2^31.
using TableStrides = StridesOf<std::int64_t>;

/// Distance of (row, column) from the first element. Computed in Offset throughout, which must hold the number of
/// elements: a product in a smaller type would wrap around and name another row.
template <class Offset>
constexpr Offset table_offset(Offset row, Offset column, StridesOf<Offset> strides) {
    return static_cast<Offset>(row * strides.row + column * strides.column);
}

}  // namespace potluck::cuda
