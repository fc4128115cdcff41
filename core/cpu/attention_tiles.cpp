#include "core/cpu/attention_tiles.h"

#include "core/cpu/dropout_rule.h"

namespace potluck::cpu {

template <class T>
AttentionTiles<T>::AttentionTiles(const AttentionSizes& attention_sizes, const Tensor& mask_or_none,
                                  const AttentionSpec& options)
    : sizes(attention_sizes),
      head_width(padded<T>(sizes.head_size)),
      value_width(padded<T>(sizes.value_size)),
      scale(static_cast<T>(options.scale)),
      options_(options) {
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
        for (std::int64_t j = 0; j < count; ++j) scores[j] += added[j];
    } else {
        bool is_seen[tile_keys];
        convert_to(is_seen, from, mask_.dtype(), stride, count);
        for (std::int64_t j = 0; j < count; ++j)
            scores[j] = is_seen[j] ? scores[j] : -std::numeric_limits<T>::infinity();
    }
}

template <class T>
void AttentionTiles<T>::dropout_factors(const QueryTile& tile, const KeyTile& keys, T* factors) const {
    for (std::int64_t i = 0; i < tile.count; ++i)
        write_dropout_factors(options_.dropout_key, options_.dropout,
                              row_index(tile, i) * sizes.keys + keys.first, keys.count,
                              factors + i * tile_keys);
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
