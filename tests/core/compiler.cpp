// Compiler behaviour beyond the language standard that we rely on: see the flags in meson.build.

#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <vector>

TEST_CASE("compiler: constants that begin with equal words and end with zeros are copied whole") {
    const std::vector<std::int64_t> words{3, 3, 0, 0};
    const std::vector<std::int64_t> three{3, 3, 3, 0};
    const std::vector<double> numbers{0.5, 0.5, 0, 0};
    const std::vector<int> halves{3, 3, 3, 3, 0, 0, 0, 0};
    CHECK(std::accumulate(words.begin(), words.end(), std::int64_t{0}) == 6);
    CHECK(std::accumulate(three.begin(), three.end(), std::int64_t{0}) == 9);
    CHECK(std::accumulate(numbers.begin(), numbers.end(), 0.0) == 1.0);
    CHECK(std::accumulate(halves.begin(), halves.end(), 0) == 12);
}
