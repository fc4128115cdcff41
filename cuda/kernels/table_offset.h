#pragma once

#include <cstdint>

namespace potluck::cuda {

/// Distances between the rows and between the columns of a table.
template <class Offset>
struct StridesOf {
    Offset row, column;
};
/// For kernels: a table of 262144 rows of 8960 has elements beyond 2^31.
using TableStrides = StridesOf<std::int64_t>;

/// Memory offset of (row, column) from the first element. Computed entirely in Offset, which must be able to represent
/// the number of elements: a product in a smaller type would wrap around and address another row.
template <class Offset>
constexpr Offset table_offset(Offset row, Offset column, StridesOf<Offset> strides) {
    return static_cast<Offset>(row * strides.row + column * strides.column);
}

}  // namespace potluck::cuda
