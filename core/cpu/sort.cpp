#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/cpu/blocks.h"
#include "core/kernel_errors.h"
#include "core/random.h"

namespace potluck::cpu {

namespace {

// ---- topk ----

template <class T>
struct Candidate {
    T value;
    std::int64_t index;
};

/// Whether a is ordered before b: by value (NaN is the largest), among equals by index.
template <class T, bool largest>
bool comes_before(const Candidate<T>& a, const Candidate<T>& b) {
    const bool a_is_nan = a.value != a.value;
    const bool b_is_nan = b.value != b.value;
    if (a_is_nan != b_is_nan) return largest ? a_is_nan : b_is_nan;
    if (!a_is_nan && a.value != b.value) return largest ? a.value > b.value : a.value < b.value;
    return a.index < b.index;
}

template <class T, bool largest>
void topk_rows(const Tensor& x, std::int64_t k, Tensor& values, Tensor& indices) {
    const std::int64_t rows = x.size(0);
    const std::int64_t n = x.size(1);
    parallel_for(rows, std::max<std::int64_t>(1, piece_size / n), [&](std::int64_t begin, std::int64_t end) {
        BlockReader<T> reader(x);
        BlockWriter<T> value_writer(values);
        BlockWriter<std::int64_t> index_writer(indices);
        std::vector<Candidate<T>> best;  // a heap with the last of the chosen on top
        best.reserve(static_cast<std::size_t>(k));
        for (std::int64_t row = begin; row < end; ++row) {
            best.clear();
            for (std::int64_t first = 0; first < n; first += block_size) {
                const std::int64_t length = std::min(block_size, n - first);
                const T* block = reader.read(row * n + first, length);
                for (std::int64_t i = 0; i < length; ++i) {
                    const bool full = static_cast<std::int64_t>(best.size()) == k;
                    // Most elements are rejected here. NaN fails the comparison; an equal element has a higher index.
                    if (full && (largest ? block[i] <= best.front().value : block[i] >= best.front().value))
                        continue;
                    const Candidate<T> candidate{block[i], first + i};
                    if (full) {
                        if (!comes_before<T, largest>(candidate, best.front())) continue;
                        std::pop_heap(best.begin(), best.end(), comes_before<T, largest>);
                        best.back() = candidate;
                    } else {
                        best.push_back(candidate);
                    }
                    std::push_heap(best.begin(), best.end(), comes_before<T, largest>);
                }
            }
            std::sort_heap(best.begin(), best.end(), comes_before<T, largest>);
            for (std::int64_t first = 0; first < k; first += block_size) {
                const std::int64_t length = std::min(block_size, k - first);
                T* value = value_writer.begin(row * k + first, length);
                std::int64_t* index = index_writer.begin(row * k + first, length);
                for (std::int64_t i = 0; i < length; ++i) {
                    value[i] = best[static_cast<std::size_t>(first + i)].value;
                    index[i] = best[static_cast<std::size_t>(first + i)].index;
                }
                value_writer.end();
                index_writer.end();
            }
        }
    });
}

// ---- multinomial ----

/// Weights at the leaves of a binary tree whose inner nodes hold the sums below them. Removing a weight recomputes the
/// sums above it, so that rounding errors do not accumulate and a removed weight is exactly 0.
class WeightTree {
public:
    void assign(const std::vector<double>& weights) {
        leaves_ = 1;
        while (leaves_ < weights.size()) leaves_ *= 2;
        sums_.assign(2 * leaves_, 0.0);
        std::copy(weights.begin(), weights.end(), sums_.begin() + static_cast<std::ptrdiff_t>(leaves_));
        for (std::size_t node = leaves_ - 1; node > 0; --node) add_children(node);
    }
    /// The leaf at which the running sum of weights exceeds share * total, share in (0, 1). Never one with weight 0.
    std::int64_t find(double share) const {
        double rest = share * sums_[1];
        std::size_t node = 1;
        while (node < leaves_) {
            const double left = sums_[2 * node];
            // Rounding may leave a remainder after the last weight: never descend into an empty subtree.
            const bool go_left = rest < left || sums_[2 * node + 1] == 0.0;
            node = 2 * node + (go_left ? 0 : 1);
            if (!go_left) rest -= left;
        }
        return static_cast<std::int64_t>(node - leaves_);
    }
    void remove(std::int64_t leaf) {
        std::size_t node = leaves_ + static_cast<std::size_t>(leaf);
        sums_[node] = 0.0;
        while (node > 1) add_children(node /= 2);
    }

private:
    void add_children(std::size_t node) { sums_[node] = sums_[2 * node] + sums_[2 * node + 1]; }

    std::size_t leaves_ = 1;
    std::vector<double> sums_;  // [1] is the root; the children of node i are 2 i and 2 i + 1
};

/// Reads a row of weights, scaled so that no sum overflows, and checks it.
void read_weights(BlockReader<double>& reader, std::int64_t row, std::int64_t needed,
                  std::vector<double>& weights) {
    const auto n = static_cast<std::int64_t>(weights.size());
    std::int64_t positive = 0;
    double largest = 0.0;
    for (std::int64_t first = 0; first < n; first += block_size) {
        const std::int64_t length = std::min(block_size, n - first);
        const double* block = reader.read(row * n + first, length);
        for (std::int64_t i = 0; i < length; ++i) {
            if (!(block[i] >= 0.0) || !std::isfinite(block[i])) throw bad_weight(block[i], first + i, row);
            weights[static_cast<std::size_t>(first + i)] = block[i];
            positive += block[i] > 0.0 ? 1 : 0;
            largest = std::max(largest, block[i]);
        }
    }
    if (positive < needed) throw too_few_weights(row, positive, needed);
    int exponent = 0;
    std::frexp(largest, &exponent);
    const double scale = std::ldexp(1.0, std::min(1000, -exponent));  // exact: a power of two
    for (double& weight : weights) weight *= scale;
}

/// A number in (0, 1) from random number `element` of the sequence at `key`.
double uniform_at(RandomKey key, std::int64_t element) {
    const auto block = philox(key, static_cast<std::uint64_t>(element / 4));
    return (block[static_cast<std::size_t>(element % 4)] + 0.5) * 0x1p-32;
}

}  // namespace

void topk(const Tensor& x, std::int64_t k, bool largest, Tensor& values, Tensor& indices) {
    check_topk(k, x.size(1));
    if (k == 0 || x.count() == 0) return;
    visit_compute(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        largest ? topk_rows<T, true>(x, k, values, indices) : topk_rows<T, false>(x, k, values, indices);
    });
}

void multinomial(RandomKey key, const Tensor& weights, bool replacement, Tensor& y) {
    const std::int64_t rows = weights.size(0);
    const std::int64_t n = weights.size(1);
    const std::int64_t samples = y.size(1);
    if (y.count() == 0) return;
    if (n == 0) throw no_weights();
    parallel_for(rows, 1, [&](std::int64_t row, std::int64_t) {
        BlockReader<double> reader(weights);
        std::vector<double> row_weights(static_cast<std::size_t>(n));
        read_weights(reader, row, replacement ? 1 : samples, row_weights);
        WeightTree tree;
        tree.assign(row_weights);
        auto* to = y.data<std::int64_t>() + row * samples;
        for (std::int64_t i = 0; i < samples; ++i) {
            to[i] = tree.find(uniform_at(key, row * samples + i));
            if (!replacement) tree.remove(to[i]);
        }
    });
}

}  // namespace potluck::cpu
