// Index arithmetic of kernels beyond the range of a 32-bit integer, without tables of gigabytes: the same templates
// with an index of 8 or 16 bits must behave at its limit like those with 32 bits at 2^31.

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>

#include "cuda/kernels/layout.h"
#include "cuda/kernels/table_offset.h"

namespace potluck::cuda {
namespace {

Layout<2> layout(std::initializer_list<std::int64_t> sizes,
                 std::initializer_list<std::initializer_list<std::int64_t>> strides) {
    Layout<2> made;
    for (const std::int64_t size : sizes) {
        made.sizes[made.axes++] = size;
        made.count *= size;
    }
    for (int operand = 0; operand < 2; ++operand)
        for (int axis = 0; axis < made.axes; ++axis)
            made.strides[operand][axis] = strides.begin()[operand].begin()[axis];
    return made;
}

}  // namespace

TEST_CASE("index arithmetic: a row of a table past 2^31 elements") {
    const TableStrides strides{8960, 1};
    CHECK(table_offset(std::int64_t{239'674}, std::int64_t{8959}, strides) == 2'147'487'999);
    CHECK(table_offset(std::int64_t{255'999}, std::int64_t{0}, strides) == 2'293'751'040);
    static_assert(std::is_same_v<decltype(TableStrides::row), std::int64_t>);
    // The same arithmetic in a type that is too small addresses another row, which the wider type above prevents.
    const StridesOf<std::int16_t> small{200, 1};
    CHECK(table_offset(std::int16_t{163}, std::int16_t{199}, small) == 32'799 - 65'536);
    CHECK(table_offset(std::int16_t{163}, std::int16_t{167}, small) == 32'767);
}

TEST_CASE("index arithmetic: positions that fit an index give offsets that need not") {
    // 255 positions, with offsets far beyond 255, in a transposed and in a broadcast operand.
    const Layout<2> whole = layout({5, 17, 3}, {{3, 15, 10'000'000'000}, {1000, 0, 77}});
    REQUIRE(whole.count == 255);
    CHECK(whole.fits<std::uint8_t>());
    for (std::int64_t i = 0; i < whole.count; ++i) {
        std::int64_t narrow[2];
        std::int64_t wide[2];
        whole.offsets(static_cast<std::uint8_t>(i), narrow);
        whole.offsets(static_cast<std::uint64_t>(i), wide);
        const std::int64_t a = i / 51, b = i / 3 % 17, c = i % 3;
        CHECK(wide[0] == 3 * a + 15 * b + 10'000'000'000 * c);
        CHECK(wide[1] == 1000 * a + 77 * c);
        CHECK(narrow[0] == wide[0]);
        CHECK(narrow[1] == wide[1]);
    }
}

TEST_CASE("index arithmetic: one position too many is not divided in the small index") {
    CHECK_FALSE(layout({256}, {{1}, {1}}).fits<std::uint8_t>());
    CHECK_FALSE(layout({2, 128}, {{1, 2}, {1, 2}}).fits<std::uint8_t>());
    const std::int64_t most = std::numeric_limits<std::uint32_t>::max();
    CHECK(layout({most}, {{1}, {1}}).fits<std::uint32_t>());
    CHECK_FALSE(layout({most + 1}, {{1}, {1}}).fits<std::uint32_t>());
    CHECK(layout({most + 1}, {{1}, {1}}).fits<std::uint64_t>());
    // Row 32768 of 32769 rows of 65536 elements: the last one, beyond 2^31.
    std::int64_t offset[2];
    layout({32'769, 65'536}, {{65'536, 1}, {65'536, 1}}).offsets(std::uint64_t{2'147'549'183}, offset);
    CHECK(offset[0] == 2'147'549'183);
}

}  // namespace potluck::cuda
