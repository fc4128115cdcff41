// The largest elements of rows, and random selection by weight.
//
// topk: elements are converted to unsigned keys whose order is the wanted one; each row is processed by one block. The
// elements of a row of up to 1024 are sorted by counting for each how many are ordered before it. In a longer row the
// block first finds the key of the k-th element digit by digit (a histogram of the highest 8 bits, then of the next 8
// among the elements that share them, ...), so that the row is read only a few times however large k is. Then it
// collects the first k elements in the order of their indices, and sorts these by counting, or by radix sort
// (radix_sort.h) if there are more than 1024.
//
// multinomial: as on the CPU, a binary tree of sums in f64 over the weights of each row: the same sums in the same
// order, so the same key gives the same samples. With replacement all samples of a row descend the tree in parallel;
// without, one thread draws them in turn and updates the sums above each.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/kernel_errors.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/any_element.h"
#include "cuda/kernels/block_scan.h"
#include "cuda/kernels/contiguous.h"
#include "cuda/kernels/numbers.h"
#include "cuda/kernels/radix_sort.h"
#include "cuda/kernels/random_words.h"

namespace potluck::cuda {
namespace {

constexpr int threads = 256;
constexpr int most_row_threads = 512;  // of the block that processes a row

// ---- topk ----

/// The key type for elements of T: 32 bits for floats and half types, else 64.
template <class T>
using KeyOf = std::conditional_t<std::is_same_v<compute_type<T>, float>, std::uint32_t, std::uint64_t>;

/// A key that is smaller for elements that are ordered first: NaN is the largest, and -0 equals 0.
template <class T>
__device__ KeyOf<T> key_of(T element, bool largest) {
    using Key = KeyOf<T>;
    constexpr Key sign = Key{1} << (8 * sizeof(Key) - 1);
    const auto value = to_compute(element);
    Key ascending = 0;
    if constexpr (std::is_integral_v<T>) {
        ascending = std::bit_cast<Key>(value) ^ sign;
    } else if (value != value) {
        ascending = ~Key{0};
    } else {
        const Key bits = value == 0 ? Key{0} : std::bit_cast<Key>(value);
        ascending = (bits & sign) != 0 ? ~bits : bits | sign;
    }
    return largest ? ~ascending : ascending;
}

constexpr int select_bits = 8;
constexpr int select_bins = 1 << select_bits;
constexpr int most_ranked = 1024;  // the most elements that are sorted by counting

/// Rows of any strides.
template <class T>
struct Rows {
    const T* elements;
    std::int64_t n, row_stride, stride;

    __device__ T at(std::int64_t row, std::int64_t i) const {
        return elements[row * row_stride + i * stride];
    }
};

/// The key of the k-th element of a row (k from 1), and how many elements with this key are among the first k.
template <class Key>
struct Threshold {
    Key key;
    std::int64_t equal;
};
template <class T>
__device__ Threshold<KeyOf<T>> find_threshold(const Rows<T>& x, std::int64_t row, std::int64_t k,
                                              bool largest) {
    using Key = KeyOf<T>;
    __shared__ unsigned long long bins[select_bins];
    __shared__ unsigned long long scratch[warp_size];
    __shared__ int chosen_bin;
    __shared__ unsigned long long before_bin;
    Key prefix = 0;
    Key mask = 0;
    auto wanted = static_cast<unsigned long long>(k);  // the rank among the elements that share the prefix
    for (int shift = 8 * static_cast<int>(sizeof(Key)) - select_bits; shift >= 0; shift -= select_bits) {
        if (threadIdx.x < select_bins) bins[threadIdx.x] = 0;
        __syncthreads();
        for (std::int64_t i = threadIdx.x; i < x.n; i += blockDim.x) {
            const Key key = key_of(x.at(row, i), largest);
            if ((key & mask) == prefix)
                atomicAdd(&bins[static_cast<int>(key >> shift) & (select_bins - 1)], 1ULL);
        }
        __syncthreads();
        unsigned long long total = 0;
        const unsigned long long here = threadIdx.x < select_bins ? bins[threadIdx.x] : 0;
        const unsigned long long before = block_sum_before(here, scratch, total);
        if (before < wanted && wanted <= before + here) {
            chosen_bin = static_cast<int>(threadIdx.x);
            before_bin = before;
        }
        __syncthreads();
        prefix |= static_cast<Key>(chosen_bin) << shift;
        mask |= static_cast<Key>(select_bins - 1) << shift;
        wanted -= before_bin;
        __syncthreads();
    }
    return {prefix, static_cast<std::int64_t>(wanted)};
}

/// Calls take(place, key, i) for the first k elements of a row, in the order of their indices i; place counts from 0.
template <class T, class Take>
__device__ void collect(const Rows<T>& x, std::int64_t row, std::int64_t k, bool largest, Take take) {
    __shared__ unsigned scratch[warp_size];
    const auto threshold = find_threshold(x, row, k, largest);
    std::int64_t equal_before = 0;
    std::int64_t taken_before = 0;
    for (std::int64_t first = 0; first < x.n && taken_before < k; first += blockDim.x) {
        const std::int64_t i = first + threadIdx.x;
        const KeyOf<T> key = i < x.n ? key_of(x.at(row, i), largest) : KeyOf<T>{0};
        const bool equal = i < x.n && key == threshold.key;
        unsigned total = 0;
        const std::int64_t rank = equal_before + block_sum_before(equal ? 1U : 0U, scratch, total);
        equal_before += total;
        const bool takes = i < x.n && (key < threshold.key || (equal && rank < threshold.equal));
        const std::int64_t place = taken_before + block_sum_before(takes ? 1U : 0U, scratch, total);
        taken_before += total;
        if (takes) take(place, key, i);
    }
}

/// values and indices (rows, k) for k up to most_ranked: the candidates, which are all elements of a short row and the
/// first k of a long one, are put in order by counting. Floor: reads a short row once, a long one once for each 8 bits of
/// a key and once more; writes the results.
template <class T>
__global__ void __launch_bounds__(most_row_threads)
    topk_kernel(const Rows<T> x, std::int64_t k, bool largest, T* values, std::int64_t* indices) {
    __shared__ KeyOf<T> keys[most_ranked];
    __shared__ std::int64_t places[most_ranked];
    const auto row = static_cast<std::int64_t>(blockIdx.x);
    const auto step = static_cast<int>(blockDim.x);
    const auto put = [&](std::int64_t place, KeyOf<T> key, std::int64_t i) {
        keys[place] = key;
        places[place] = i;
    };
    const bool is_short = x.n <= most_ranked;
    const auto candidates = static_cast<int>(is_short ? x.n : k);
    if (is_short) {
        for (auto i = static_cast<int>(threadIdx.x); i < candidates; i += step)
            put(i, key_of(x.at(row, i), largest), i);
    } else {
        collect(x, row, k, largest, put);
    }
    __syncthreads();
    for (auto i = static_cast<int>(threadIdx.x); i < candidates; i += step) {
        const KeyOf<T> key = keys[i];
        int rank = 0;
        for (int j = 0; j < candidates; ++j) rank += keys[j] < key || (keys[j] == key && j < i) ? 1 : 0;
        if (rank >= k) continue;
        values[row * k + rank] = x.at(row, places[i]);
        indices[row * k + rank] = places[i];
    }
}

/// The keys and indices (rows, k) of the chosen elements, in the order of their indices. Floor: reads x once for each 8
/// bits of a key and once more; writes the results.
template <class T>
__global__ void __launch_bounds__(most_row_threads)
    collect_kernel(const Rows<T> x, std::int64_t k, bool largest, KeyOf<T>* keys, std::int64_t* indices) {
    const auto row = static_cast<std::int64_t>(blockIdx.x);
    collect(x, row, k, largest, [&](std::int64_t place, KeyOf<T> key, std::int64_t i) {
        keys[row * k + place] = key;
        indices[row * k + place] = i;
    });
}

/// values and indices (rows, k) from the order that sorting gave. Floor: reads order, places and elements once, writes the
/// results.
template <class T>
__global__ void __launch_bounds__(threads)
    write_kernel(const Rows<T> x, std::int64_t rows, std::int64_t k, const std::int64_t* collected,
                 const std::int64_t* order, T* values, std::int64_t* indices) {
    for (std::int64_t i = global_thread(); i < rows * k; i += global_threads()) {
        const std::int64_t row = i / k;
        const std::int64_t index = collected[row * k + order[i]];
        values[i] = x.at(row, index);
        indices[i] = index;
    }
}

template <class T>
void topk(KernelDevice& backend, const Tensor& x, std::int64_t k, bool largest, Tensor& values,
          Tensor& indices) {
    const cudaStream_t stream = backend.stream();
    const std::int64_t row_count = x.size(0);
    const unsigned blocks = blocks_for(row_count, 1);
    const dim3 block(x.size(1) > most_ranked
                         ? most_row_threads
                         : warp_size * blocks_for(x.size(1), warp_size, threads / warp_size));
    const Rows<T> rows{elements_of<T>(x), x.size(1), x.strides()[0], x.strides()[1]};
    auto* to = elements_of<T>(values);
    auto* places = elements_of<std::int64_t>(indices);
    if (k <= most_ranked) {
        launch(&topk_kernel<T>, blocks, block, 0, stream, rows, k, largest, to, places);
        return;
    }
    using Key = KeyOf<T>;
    const Tensor keys = empty_keys<Key>({row_count, k}, x.device());
    const Tensor collected = Tensor::empty({row_count, k}, {DType::i64, x.device()});
    launch(&collect_kernel<T>, blocks, block, 0, stream, rows, k, largest, elements_of<Key>(keys),
           elements_of<std::int64_t>(collected));
    const SortedRows sorted = sort_rows<Key>(keys, 8 * static_cast<int>(sizeof(Key)), stream);
    launch(&write_kernel<T>, blocks_for(row_count * k, threads, 32 * backend.multiprocessors()), threads, 0,
           stream, rows, row_count, k, elements_of<std::int64_t>(collected),
           elements_of<std::int64_t>(sorted.positions), to, places);
}

// ---- multinomial ----

/// Sums of weights: [1] is the root, the children of node i are 2 i and 2 i + 1, the weights are at [leaves, 2 leaves).
struct Tree {
    double* sums;
    std::int64_t leaves;

    __device__ void add_children(std::int64_t node) const {
        sums[node] = sums[2 * node] + sums[2 * node + 1];
    }
    /// The leaf at which the running sum of weights exceeds share * total, share in (0, 1). Never one with weight 0.
    __device__ std::int64_t find(double share) const {
        // In f64 without fused operations, as on the CPU: another rounding might select another leaf.
        double rest = __dmul_rn(share, sums[1]);
        std::int64_t node = 1;
        while (node < leaves) {
            const double left = sums[2 * node];
            // Rounding may leave a remainder after the last weight: never descend into an empty subtree.
            const bool go_left = rest < left || sums[2 * node + 1] == 0.0;
            node = 2 * node + (go_left ? 0 : 1);
            if (!go_left) rest = __dsub_rn(rest, left);
        }
        return node - leaves;
    }
    __device__ void remove(std::int64_t leaf) const {
        std::int64_t node = leaves + leaf;
        sums[node] = 0.0;
        while (node > 1) add_children(node /= 2);
    }
};

/// A number in (0, 1) from random number `element` of the sequence at `key`.
__device__ double uniform_at(RandomKey key, std::int64_t element) {
    return (random_word(key, element) + 0.5) * 0x1p-32;
}

struct Draw {
    MovingKey key;
    const void* weights;  // (rows, n), contiguous
    DType dtype;
    std::int64_t n, samples, leaves;
    std::int64_t first_row;  // the row of block 0
    bool replacement;
};

/// A block a row: checks and scales the weights, adds them up in its tree (2 * leaves of `sums`) and draws. A bad weight
/// i of a row is reported as row * (n + 1) + i, too few positive ones as row * (n + 1) + n. Floor: reads the weights
/// twice, writes and reads the tree, log2(n) dependent reads for each sample.
__global__ void __launch_bounds__(most_row_threads)
    multinomial_kernel(const Draw draw, double* sums, std::int64_t* y, unsigned long long* fault_slot) {
    __shared__ double scratch[warp_size];
    __shared__ std::int64_t count_scratch[warp_size];
    const std::int64_t row = draw.first_row + blockIdx.x;
    const Tree tree{sums + static_cast<std::int64_t>(blockIdx.x) * 2 * draw.leaves, draw.leaves};

    std::int64_t first_bad = draw.n;
    std::int64_t positive = 0;
    double largest = 0.0;
    for (std::int64_t i = threadIdx.x; i < draw.n; i += blockDim.x) {
        double weight[1];
        load_any(weight, draw.weights, draw.dtype, row * draw.n + i);
        if (!(weight[0] >= 0.0) || std::isinf(weight[0])) {
            if (first_bad == draw.n) first_bad = i;
            continue;
        }
        positive += weight[0] > 0.0 ? 1 : 0;
        largest = weight[0] > largest ? weight[0] : largest;
    }
    const auto larger = [](auto a, auto b) { return a < b ? b : a; };
    const auto smaller = [](auto a, auto b) { return a < b ? a : b; };
    first_bad = block_reduce(first_bad, draw.n, smaller, count_scratch);
    positive = block_sum(positive, count_scratch);
    largest = block_reduce(largest, 0.0, larger, scratch);
    if (first_bad < draw.n || positive < (draw.replacement ? 1 : draw.samples)) {
        if (threadIdx.x == 0)
            atomicMin(fault_slot, static_cast<unsigned long long>(row * (draw.n + 1) + first_bad));
        for (std::int64_t i = threadIdx.x; i < draw.samples; i += blockDim.x) y[row * draw.samples + i] = 0;
        return;
    }

    int exponent = 0;
    std::frexp(largest, &exponent);
    const double scale = std::ldexp(1.0, exponent < -1000 ? 1000 : -exponent);  // exact: a power of two
    for (std::int64_t i = threadIdx.x; i < draw.leaves; i += blockDim.x) {
        double weight[1] = {0.0};
        if (i < draw.n) load_any(weight, draw.weights, draw.dtype, row * draw.n + i);
        tree.sums[draw.leaves + i] = weight[0] * scale;
    }
    for (std::int64_t level = draw.leaves / 2; level > 0; level /= 2) {
        __syncthreads();
        for (std::int64_t i = threadIdx.x; i < level; i += blockDim.x) tree.add_children(level + i);
    }
    __syncthreads();

    const RandomKey key = draw.key;
    std::int64_t* to = y + row * draw.samples;
    if (draw.replacement) {
        for (std::int64_t i = threadIdx.x; i < draw.samples; i += blockDim.x)
            to[i] = tree.find(uniform_at(key, row * draw.samples + i));
    } else if (threadIdx.x == 0) {
        for (std::int64_t i = 0; i < draw.samples; ++i) {
            to[i] = tree.find(uniform_at(key, row * draw.samples + i));
            tree.remove(to[i]);
        }
    }
}

/// Throws the Error for what the kernel reported.
void tell(const Tensor& weights, std::int64_t fault, std::int64_t needed) {
    const std::int64_t n = weights.size(1);
    const std::int64_t row = fault / (n + 1);
    const std::int64_t position = fault % (n + 1);
    const std::vector<double> values =
        weights.alias({n}, {weights.strides()[1]}, weights.offset() + row * weights.strides()[0]).to_vector();
    if (position < n) {
        const double weight = values[static_cast<std::size_t>(position)];
        if (!(weight >= 0.0) || std::isinf(weight)) throw bad_weight(weight, position, row);
        return;
    }
    std::int64_t positive = 0;
    for (const double value : values) positive += value > 0.0 ? 1 : 0;
    if (positive < needed) throw too_few_weights(row, positive, needed);
}

}  // namespace

void topk(KernelDevice& device, const Tensor& x, std::int64_t k, bool largest, Tensor& values,
          Tensor& indices) {
    check_topk(k, x.size(1));
    if (k == 0 || x.count() == 0) return;
    visit_device(x.dtype(), [&](auto zero) { topk<decltype(zero)>(device, x, k, largest, values, indices); });
}

void multinomial(KernelDevice& device, RandomKey key, const Tensor& weights, bool replacement, Tensor& y) {
    constexpr std::int64_t most_tree_bytes = std::int64_t{64} << 20;
    const std::int64_t rows = weights.size(0);
    const std::int64_t n = weights.size(1);
    const std::int64_t samples = y.size(1);
    if (y.count() == 0) return;
    if (n == 0) throw no_weights();
    const Tensor dense = contiguous(device, weights);
    const auto leaves = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
    const std::int64_t tree_bytes = 2 * leaves * static_cast<std::int64_t>(sizeof(double));
    const std::int64_t rows_at_once = std::clamp<std::int64_t>(most_tree_bytes / tree_bytes, 1, rows);
    const Tensor sums = Tensor::empty({rows_at_once, 2 * leaves}, {DType::f64, weights.device()});
    const auto threads = static_cast<unsigned>(std::clamp<std::int64_t>(leaves, warp_size, most_row_threads));
    unsigned long long* slot = device.fault_slot(
        [weights, needed = replacement ? 1 : samples](std::int64_t fault) { tell(weights, fault, needed); });
    for (std::int64_t first = 0; first < rows; first += rows_at_once) {
        const Draw draw{{key, device.random_advance(key)},
                        dense.raw_data(),
                        dense.dtype(),
                        n,
                        samples,
                        leaves,
                        first,
                        replacement};
        launch(&multinomial_kernel, blocks_for(std::min(rows_at_once, rows - first), 1), threads, 0,
               device.stream(), draw, elements_of<double>(sums), elements_of<std::int64_t>(y), slot);
    }
}

}  // namespace potluck::cuda
