// The traversal of element-wise kernels (cuda/kernels/element_map.h) where it changes its strategy: the ends of packs,
// addresses and strides that allow none, and positions beyond the range of an index. An index of 8 or 16 bits behaves
// here like one of 32 bits at 2^32 elements.

#include <doctest/doctest.h>

#include <vector>

#include "autograd/ops/view.h"
#include "core/factories.h"
#include "cuda/cuda_backend.h"
#include "cuda/kernels/element_map.h"
#include "tests/cuda/device.h"

namespace potluck::test {
namespace {

/// y = 1000 x + the position that was passed to the body.
struct Mark {
    template <int N>
    __device__ void operator()(std::int64_t first, cuda::Pack<std::int64_t, N>& y,
                               const cuda::Pack<std::int32_t, N>& x) const {
        for (int i = 0; i < N; ++i) y.values[i] = 1000 * static_cast<std::int64_t>(x.values[i]) + first + i;
    }
};

template <class Index>
void check_marks(const Tensor& x) {
    const Tensor y = full(x.shape(), -1, {DType::i64, Device::cuda()});
    Tensor target = y;
    auto& device = static_cast<CudaBackend&>(backend(Device::cuda()));
    cuda::ElementMap<std::int64_t, std::int32_t>::run<Index>(device.stream(), Mark{}, target, x);
    const std::vector<std::int64_t> values = x.to_vector<std::int64_t>(), got = y.to_vector<std::int64_t>();
    INFO(to_string(x.shape()));
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < got.size(); ++i)
        wrong += got[i] == 1000 * values[i] + static_cast<std::int64_t>(i) ? 0 : 1;
    CHECK(wrong == 0);
}

Tensor numbers(const Shape& shape) {
    const std::int64_t count = element_count(shape);
    return arange(0, count).reshape(shape).to(DType::i32).to(Device::cuda());
}

struct Sum {
    template <int N, class T>
    __device__ void operator()(std::int64_t, cuda::Pack<T, N>& y, const cuda::Pack<T, N>& a,
                               const cuda::Pack<T, N>& b) const {
        for (int i = 0; i < N; ++i) y.values[i] = static_cast<T>(a.values[i] + b.values[i]);
    }
};

/// a + b into `y`, which may be a or b.
template <class T>
void add_into(Tensor& y, const Tensor& a, const Tensor& b) {
    auto& device = static_cast<CudaBackend&>(backend(Device::cuda()));
    cuda::ElementMap<T, T, T>::run(device.stream(), Sum{}, y, a, b);
}

}  // namespace

TEST_CASE("element map: positions past the range of an index take a wider one") {
    if (!has_cuda_device()) return;
    // Contiguous: the steps are packs of 2 (because of the i64 of y), and the tail is one element.
    for (const std::int64_t count : {1, 2, 253, 254, 255, 256, 257, 508, 509, 510, 511, 512, 513, 1000}) {
        check_marks<std::int8_t>(numbers({count}));
        check_marks<std::uint8_t>(numbers({count}));
    }
    // Strided: the steps are elements, and positions are divided by every axis.
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 127},
                                        {127, 1},
                                        {9, 14},
                                        {7, 18},
                                        {8, 16},
                                        {3, 43},
                                        {15, 17},
                                        {16, 16},
                                        {5, 51},
                                        {2, 128},
                                        {181, 181},
                                        {182, 181},
                                        {256, 257}}) {
        const Tensor x = transpose(numbers({columns, rows}), 0, 1);
        check_marks<std::int8_t>(x);
        check_marks<std::uint8_t>(x);
        check_marks<std::int16_t>(x);
        check_marks<std::uint16_t>(x);
    }
    check_marks<std::int8_t>(permute(numbers({3, 5, 7}), {2, 0, 1}));
    check_marks<std::int8_t>(permute(numbers({4, 4, 8}), {1, 2, 0}));
}

TEST_CASE("element map: a layout says itself where an index ends") {
    cuda::Layout<1> layout;
    for (const std::int64_t count : {std::int64_t{127}, std::int64_t{128}}) {
        layout.count = count;
        CHECK(layout.fits<std::int8_t>() == (count == 127));
        CHECK(layout.fits<std::uint8_t>());
    }
    layout.count = (std::int64_t{1} << 32) - 1;
    CHECK(layout.fits<std::uint32_t>());
    layout.count = std::int64_t{1} << 32;
    CHECK(!layout.fits<std::uint32_t>());
}

TEST_CASE("element map: tails, addresses between packs, repeated operands, and results over an operand") {
    if (!has_cuda_device()) return;
    for (const std::int64_t count : {1, 3, 4, 5, 7, 8, 15, 16, 17, 1021, 1024, 4099})
        for (const std::int64_t offset : {0, 1, 3, 4}) {
            INFO(count << " elements from " << offset);
            const Tensor around = numbers({count + offset});
            const Tensor a = narrow(around, 0, offset, count);
            const Tensor b = full({1}, 100, {DType::i32, Device::cuda()}).expand({count});
            std::vector<std::int64_t> expected = a.to_vector<std::int64_t>();
            Tensor y = Tensor::empty({count}, {DType::i32, Device::cuda()});
            add_into<std::int32_t>(y, a, a);
            const std::vector<std::int64_t> twice = y.to_vector<std::int64_t>();
            for (std::size_t i = 0; i < expected.size(); ++i) REQUIRE(twice[i] == 2 * expected[i]);
            Tensor over = a;
            add_into<std::int32_t>(over, a, b);
            const std::vector<std::int64_t> got = a.to_vector<std::int64_t>();
            for (std::size_t i = 0; i < expected.size(); ++i) REQUIRE(got[i] == expected[i] + 100);
            if (offset > 0) CHECK(around[offset - 1].item<std::int64_t>() == offset - 1);
        }
}

TEST_CASE("element map: rows and columns that are broadcast, in packs and without") {
    if (!has_cuda_device()) return;
    for (const std::int64_t columns : {3, 4, 8, 16, 18, 64}) {
        INFO(columns);
        const Tensor x = numbers({5, columns});
        const Tensor row = numbers({columns}).expand({5, columns});
        const Tensor column = numbers({5, 1}).expand({5, columns});
        Tensor y = Tensor::empty({5, columns}, {DType::i32, Device::cuda()});
        add_into<std::int32_t>(y, row, column);
        const std::vector<std::int64_t> got = y.to_vector<std::int64_t>();
        for (std::int64_t i = 0; i < 5 * columns; ++i)
            REQUIRE(got[static_cast<std::size_t>(i)] == i % columns + i / columns);
        add_into<std::int32_t>(y, column, x);
        const std::vector<std::int64_t> other = y.to_vector<std::int64_t>();
        for (std::int64_t i = 0; i < 5 * columns; ++i)
            REQUIRE(other[static_cast<std::size_t>(i)] == i / columns + i);
        // Half of a wider tensor: rows in packs, with a gap between them.
        const Tensor wide = numbers({5, 2 * columns});
        Tensor half = narrow(wide, 1, columns, columns);
        add_into<std::int32_t>(half, half, x);
        const std::vector<std::int64_t> all = wide.to_vector<std::int64_t>();
        for (std::int64_t i = 0; i < 10 * columns; ++i) {
            const std::int64_t at = i % (2 * columns) - columns;
            REQUIRE(all[static_cast<std::size_t>(i)] == i + (at < 0 ? 0 : i / (2 * columns) * columns + at));
        }
    }
}

}  // namespace potluck::test
