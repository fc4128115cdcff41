#pragma once

#include <utility>

#include "core/tensor.h"

namespace potluck {

/// Tables of cosine and sine, each (positions, head_size / 2) f32: angle = position / base^(2 i / head_size).
std::pair<Tensor, Tensor> rotary_tables(std::int64_t positions, std::int64_t head_size, double base = 10000.0,
                                        Device device = Device::cpu());
/// Rotary position embedding (Su et al., 2021) in the half-split layout of Llama: pairs (x[i], x[i + size / 2]).
/// x (batch, heads, time, head_size); cosine, sine (time, head_size / 2): the rows for the positions of x.
Tensor rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine);

}  // namespace potluck
