#pragma once

// Internal: sums of squares that neither overflow nor underflow, whatever the values (Blue, "A Portable Fortran Program
// to Find the Euclidean Norm of a Vector", 1978). CUDA kernels call these functions, too.

namespace potluck {

/// Squares of values of ordinary size are summed in one member; very large and very small values are scaled by a power
/// of two before squaring and summed separately. Two SquareSums are added member by member, so that the sums of
/// tensors, blocks or processes combine.
struct SquareSums {
    double middle = 0.0;
    double large = 0.0;  // of values above 2^486, scaled by 2^-538
    double small = 0.0;  // of values below 2^-511, scaled by 2^537
};

constexpr SquareSums operator+(const SquareSums& a, const SquareSums& b) {
    return {a.middle + b.middle, a.large + b.large, a.small + b.small};
}

/// Adds the square of one value. NaN goes to `middle`, infinity to `large`.
constexpr SquareSums with_square_of(SquareSums sums, double value) {
    const double magnitude = value < 0.0 ? -value : value;
    if (magnitude > 0x1p486)
        sums.large += (value * 0x1p-538) * (value * 0x1p-538);
    else if (magnitude < 0x1p-511)
        sums.small += (value * 0x1p537) * (value * 0x1p537);
    else
        sums.middle += value * value;
    return sums;
}

/// The square root of the total: finite wherever an f64 can represent it. `root` is a square-root function.
template <class Root>
constexpr double norm_of(const SquareSums& sums, Root root) {
    // Small squares are negligible beside large ones.
    if (sums.large > 0.0) return root(sums.large + (sums.middle * 0x1p-538) * 0x1p-538) * 0x1p538;
    const double middle = root(sums.middle);
    if (!(sums.small > 0.0)) return middle;
    const double small = root(sums.small) * 0x1p-537;
    if (!(middle > small))
        return middle == middle ? small * root(1.0 + middle / small * (middle / small)) : middle;
    return middle * root(1.0 + small / middle * (small / middle));
}

}  // namespace potluck
