#include "core/cpu/attention_tiles.h"

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

#include "core/cpu/dropout_rule.h"

namespace potluck::cpu {
namespace {

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

/// The bits of the exponent, all set in infinity and NaN alone.
template <class T>
constexpr BitsOf<T> exponent_bits = std::bit_cast<BitsOf<T>>(std::numeric_limits<T>::infinity());

/// Whether the numbers of all rows are finite. As vectors as wide as the padding of a tile, so that what they find is
/// put together once and not for each row.
template <class T>
bool are_finite(TileView<T> rows, std::int64_t count, std::int64_t columns) {
    constexpr auto lanes = static_cast<std::size_t>(padded<T>(1));
    std::array<BitsOf<T>, lanes> largest{};
    for (std::int64_t p = 0; p < count; ++p)
        for (const T* at = rows.data + p * rows.width; at != rows.data + p * rows.width + columns;
             at += lanes)
            for (std::size_t i = 0; i < lanes; ++i)
                largest[i] = std::max(largest[i], std::bit_cast<BitsOf<T>>(at[i]) & exponent_bits<T>);
    return *std::max_element(largest.begin(), largest.end()) < exponent_bits<T>;
}

}  // namespace

template <class T>
void FactorTile<T>::search() {
    was_searched_ = true;
    if (are_finite(rows_, count_, columns_)) return;
    for (std::int64_t p = 0; p < count_; ++p)
        if (!are_finite<T>({rows_.data + p * rows_.width, rows_.width}, 1, columns_)) bad_rows_.push_back(p);
    finite_rows_ = TileBuffer<T>(count_ * columns_);
    for (std::int64_t p = 0; p < count_; ++p)
        std::copy_n(rows_.data + p * rows_.width, columns_, finite_rows_.data() + p * columns_);
    for (const std::int64_t p : bad_rows_) std::fill_n(finite_rows_.data() + p * columns_, columns_, T{0});
}

template <class T>
void FactorTile<T>::add_bad_rows(std::int64_t rows, LeftTile<T> left, T* sums,
                                 std::int64_t sums_width) const {
    for (const std::int64_t p : bad_rows_)
        for (std::int64_t i = 0; i < rows; ++i) {
            const T factor = left.data[i * left.row_stride + p * left.column_stride];
            if (factor == 0) continue;
            for (std::int64_t j = 0; j < columns_; ++j)
                sums[i * sums_width + j] += factor * rows_.data[p * rows_.width + j];
        }
}

template class FactorTile<float>;
template class FactorTile<double>;

template <class T>
AttentionTiles<T>::AttentionTiles(const AttentionSizes& attention_sizes, const Tensor& mask_or_none,
                                  const AttentionSpec& options)
    : sizes(attention_sizes),
      head_width(padded<T>(sizes.head_size)),
      value_width(padded<T>(sizes.value_size)),
      scale(static_cast<T>(options.scale)),
      options_(options),
      numbers_(element_numbers({sizes.batch, sizes.heads, sizes.queries, sizes.keys}, options.dropout_part)) {
    if (mask_or_none.defined())
        mask_ =
            mask_or_none.broadcast_alias("attention", {sizes.batch, sizes.heads, sizes.queries, sizes.keys});
}

template <class T>
void AttentionTiles<T>::scores(const QueryTile& tile, const KeyTile& keys, const T* q, const T* k_transposed,
                               T* scores) const {
    const std::int64_t width = padded<T>(keys.count);
    tile_product<T>(tile.count, width, sizes.head_size, {q, head_width, 1}, k_transposed, tile_keys, scores,
                    tile_keys, false);
    for (std::int64_t i = 0; i < tile.count; ++i) {
        T* row = scores + i * tile_keys;
        const std::int64_t count = seen(tile, i, keys);
        if (mask_.defined()) apply_mask(tile, i, keys, count, row);
        std::fill(row + count, row + width, -std::numeric_limits<T>::infinity());
    }
}

template <class T>
void AttentionTiles<T>::apply_mask(const QueryTile& tile, std::int64_t row, const KeyTile& keys,
                                   std::int64_t count, T* scores) const {
    const std::int64_t stride = mask_.strides()[3];
    const std::byte* from = row_address(mask_, tile.batch, tile.head, tile.first + row) +
                            keys.first * stride * size_of(mask_.dtype());
    if (is_floating(mask_.dtype())) {
        T added[tile_keys];
        convert_to(added, from, mask_.dtype(), stride, count);
        constexpr T hidden = -std::numeric_limits<T>::infinity();
        for (std::int64_t j = 0; j < count; ++j)
            scores[j] = added[j] == hidden ? hidden : scores[j] + added[j];
    } else {
        bool is_seen[tile_keys];
        convert_to(is_seen, from, mask_.dtype(), stride, count);
        for (std::int64_t j = 0; j < count; ++j)
            scores[j] = is_seen[j] ? scores[j] : -std::numeric_limits<T>::infinity();
    }
}

template <class T>
void AttentionTiles<T>::dropout_factors(const QueryTile& tile, const KeyTile& keys, T* factors) const {
    const std::int64_t first = numbers_.first + tile.batch * numbers_.strides[0] +
                               tile.head * numbers_.strides[1] + tile.first * numbers_.strides[2] +
                               keys.first;
    for (std::int64_t i = 0; i < tile.count; ++i)
        write_dropout_factors(options_.dropout_key, options_.dropout, first + i * numbers_.strides[2],
                              keys.count, factors + i * tile_keys);
}

template <class T>
void AttentionTiles<T>::store_dmask(const QueryTile& tile, const KeyTile& keys, const T* gradients,
                                    Tensor& dmask) const {
    const std::int64_t stride = dmask.strides()[3];
    for (std::int64_t i = 0; i < tile.count; ++i) {
        std::byte* to = const_cast<std::byte*>(row_address(dmask, tile.batch, tile.head, tile.first + i)) +
                        keys.first * stride * size_of(dmask.dtype());
        convert_from(gradients + i * tile_keys, to, dmask.dtype(), stride, keys.count);
    }
}

template class AttentionTiles<float>;
template class AttentionTiles<double>;

}  // namespace potluck::cpu
