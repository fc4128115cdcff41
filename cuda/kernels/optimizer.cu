// Optimizer steps and gradient norms over many tensors in one launch. A table of tensors travels with the launch, by
// value in the kernel's parameters, so that no copy to the device comes before it. Each tensor is cut into chunks, each
// chunk is one block's: the block finds its tensor by a binary search in the table. In a chunk every thread takes packs
// of four neighbours, one pack of the whole block beside the other, so that a warp reads and writes straight stretches.
// Dtypes are looked up once for a pack (see any_element.h): one launch serves parameters of f32, f16 and bf16.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/stochastic_rounding.h"
#include "cuda/cuda_backend.h"
#include "cuda/kernels/any_element.h"
#include "cuda/kernels/block_reduce.h"
#include "cuda/kernels/random_words.h"

namespace potluck {

namespace cuda {
namespace {

constexpr int threads = 256;
constexpr int pack = 4;                     // elements that a thread takes at a time
constexpr std::int64_t chunk = 1 << 14;     // elements of a block: 16 packs a thread
constexpr int most_tensors = 52;            // of one launch
constexpr int most_parameter_bytes = 4096;  // of one launch, on every card

/// One tensor of a launch. What a kernel does not use is left empty.
struct Entry {
    void* parameter = nullptr;
    const void* gradient = nullptr;
    void* first_moment = nullptr;  // of SGD: the momentum
    void* second_moment = nullptr;
    void* rounded = nullptr;
    std::int64_t count = 0;
    RandomKey rounding_key{};
    int first_block = 0;
    DType parameter_dtype = DType::f32, gradient_dtype = DType::f32, rounded_dtype = DType::f32;
    bool packs = false;  // every address allows packs
};

struct Table {
    int tensors = 0;
    int blocks = 0;
    Entry entries[most_tensors];
};

/// The chunk of this block: elements [begin, end) of a tensor of the table. Those before `packs_end` come in packs.
struct Chunk {
    int tensor;
    std::int64_t begin, packs_end, end;
};
__device__ Chunk chunk_of_block(const Table& table) {
    const int block = static_cast<int>(blockIdx.x);
    int low = 0;
    int high = table.tensors;  // the tensor lies in [low, high)
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.entries[middle].first_block <= block)
            low = middle;
        else
            high = middle;
    }
    const Entry& entry = table.entries[low];
    const std::int64_t begin = (block - entry.first_block) * chunk;
    const std::int64_t end = begin + chunk < entry.count ? begin + chunk : entry.count;
    return {low, begin, entry.packs ? end - end % pack : begin, end};
}

/// Calls body(std::integral_constant<int, N>, first) for all packs of the chunk (N = 4) and for the elements left (N = 1).
template <class Body>
__device__ void for_each_pack(const Chunk& chunk_, Body body) {
    const auto thread = static_cast<std::int64_t>(threadIdx.x);
    for (std::int64_t i = chunk_.begin + thread * pack; i < chunk_.packs_end; i += threads * pack)
        body(std::integral_constant<int, pack>{}, i);
    for (std::int64_t i = chunk_.packs_end + thread; i < chunk_.end; i += threads)
        body(std::integral_constant<int, 1>{}, i);
}

/// The new values of a parameter: rounded stochastically (bf16) or to nearest, and once more into its copy.
template <int N, class T>
__device__ void store_parameter(const Entry& entry, bool stochastic, std::int64_t first,
                                const T (&values)[N]) {
    if constexpr (std::is_same_v<T, float>) {
        if (stochastic && entry.parameter_dtype == DType::bf16) {
            std::uint32_t words[N];
            random_words(entry.rounding_key, first, words);
            Pack<__nv_bfloat16, N> rounded;
            for (int i = 0; i < N; ++i)
                rounded.values[i] = __ushort_as_bfloat16(
                    round_stochastically(std::bit_cast<std::uint32_t>(values[i]), words[i]));
            *reinterpret_cast<Pack<__nv_bfloat16, N>*>(static_cast<__nv_bfloat16*>(entry.parameter) + first) =
                rounded;
            return;
        }
    }
    store_any(entry.parameter, entry.parameter_dtype, first, values);
    if (entry.rounded != nullptr) store_any(entry.rounded, entry.rounded_dtype, first, values);
}

// ---- AdamW ----

template <class T>
struct AdamWFactors {
    T beta1, beta2, rest1, rest2;
    T rate, root_correction;  // with the corrections of the bias
    T epsilon, scale, decay, gradient_decay;
    bool stochastic_rounding;
};

/// Floor: for f32 with f32 gradients: reads 16 and writes 12 bytes an element, about 15 operations (a root and a division
/// among them).
template <class T>
__global__ void __launch_bounds__(threads)
    adamw_kernel(const __grid_constant__ Table table, const AdamWFactors<T> f) {
    const Chunk mine = chunk_of_block(table);
    const Entry& entry = table.entries[mine.tensor];
    for_each_pack(mine, [&](auto size, std::int64_t first) {
        constexpr int n = decltype(size)::value;
        const auto moments1 = reinterpret_cast<Pack<T, n>*>(static_cast<T*>(entry.first_moment) + first);
        const auto moments2 = reinterpret_cast<Pack<T, n>*>(static_cast<T*>(entry.second_moment) + first);
        T p[n];
        T dp[n];
        load_any(p, entry.parameter, entry.parameter_dtype, first);
        load_any(dp, entry.gradient, entry.gradient_dtype, first);
        Pack<T, n> m = *moments1;
        Pack<T, n> v = *moments2;
        for (int i = 0; i < n; ++i) {
            const T g = dp[i] * f.scale + f.gradient_decay * p[i];
            m.values[i] = f.beta1 * m.values[i] + f.rest1 * g;
            v.values[i] = f.beta2 * v.values[i] + f.rest2 * (g * g);
            p[i] -= f.decay * p[i] +
                    f.rate * m.values[i] / (std::sqrt(v.values[i]) * f.root_correction + f.epsilon);
        }
        *moments1 = m;
        *moments2 = v;
        store_parameter(entry, f.stochastic_rounding, first, p);
    });
}

// ---- SGD ----

template <class T>
struct SgdFactors {
    T rate, momentum, rest, decay, scale;
    bool nesterov, first, stochastic_rounding;
};

/// Floor: for f32 with f32 gradients: reads 8 and writes 4 bytes an element (with momentum 12 and 8), 4 to 9 operations.
template <class T>
__global__ void __launch_bounds__(threads)
    sgd_kernel(const __grid_constant__ Table table, const SgdFactors<T> f) {
    const Chunk mine = chunk_of_block(table);
    const Entry& entry = table.entries[mine.tensor];
    for_each_pack(mine, [&](auto size, std::int64_t first) {
        constexpr int n = decltype(size)::value;
        T p[n];
        T dp[n];
        load_any(p, entry.parameter, entry.parameter_dtype, first);
        load_any(dp, entry.gradient, entry.gradient_dtype, first);
        for (int i = 0; i < n; ++i) dp[i] = dp[i] * f.scale + f.decay * p[i];
        if (entry.first_moment != nullptr) {
            const auto momenta = reinterpret_cast<Pack<T, n>*>(static_cast<T*>(entry.first_moment) + first);
            Pack<T, n> m{};
            if (!f.first) m = *momenta;
            for (int i = 0; i < n; ++i) {
                m.values[i] = f.first ? dp[i] : f.momentum * m.values[i] + f.rest * dp[i];
                dp[i] = f.nesterov ? dp[i] + f.momentum * m.values[i] : m.values[i];
            }
            *momenta = m;
        }
        for (int i = 0; i < n; ++i) p[i] -= f.rate * dp[i];
        store_parameter(entry, f.stochastic_rounding, first, p);
    });
}

// ---- norms ----

/// Squares are summed in f64, which no finite f32 overflows.
struct SumOfSquares {
    __device__ static double of(double value) { return value * value; }
    __device__ double operator()(double a, double b) const { return a + b; }
};
/// NaN wins.
struct LargestMagnitude {
    __device__ static double of(double value) { return std::fabs(value); }
    __device__ double operator()(double a, double b) const { return b <= a || a != a ? a : b; }
};

/// The measure of each block's chunk of the gradients. Floor: reads every element once, two operations in f64.
template <class Measure>
__global__ void __launch_bounds__(threads)
    measure_kernel(const __grid_constant__ Table table, double* results) {
    __shared__ double scratch[warp_size];
    const Chunk mine = chunk_of_block(table);
    const Entry& entry = table.entries[mine.tensor];
    double result = 0.0;
    const auto measure = [&](auto zero) {
        using T = decltype(zero);
        for_each_pack(mine, [&](auto size, std::int64_t first) {
            T values[decltype(size)::value];
            load_any(values, entry.gradient, entry.gradient_dtype, first);
            for (const T value : values) result = Measure{}(result, Measure::of(static_cast<double>(value)));
        });
    };
    if (entry.gradient_dtype == DType::f64)
        measure(double{});
    else
        measure(float{});
    result = block_reduce(result, 0.0, Measure{}, scratch);
    if (threadIdx.x == 0) results[blockIdx.x] = result;
}

/// One block folds the results of all blocks into the first place. Floor: reads each once.
template <class Measure>
__global__ void __launch_bounds__(threads) fold_kernel(double* results, std::int64_t count) {
    __shared__ double scratch[warp_size];
    double result = 0.0;
    for (auto i = static_cast<std::int64_t>(threadIdx.x); i < count; i += threads)
        result = Measure{}(result, results[i]);
    result = block_reduce(result, 0.0, Measure{}, scratch);
    if (threadIdx.x == 0) results[0] = result;
}

// ---- tables ----

/// Cuts a list of tensors into tables of what one launch takes. Empty tensors are left out.
std::vector<Table> tables_of(const std::vector<Entry>& entries) {
    std::vector<Table> tables;
    for (Entry entry : entries) {
        if (entry.count == 0) continue;
        if (tables.empty() || tables.back().tensors == most_tensors) tables.emplace_back();
        Table& table = tables.back();
        entry.first_block = table.blocks;
        table.blocks += static_cast<int>(blocks_for(entry.count, chunk));
        table.entries[table.tensors++] = entry;
    }
    return tables;
}

/// Entries of tensors computed in float, and those computed in double.
struct Entries {
    std::vector<Entry> in_float, in_double;

    void add(const Entry& entry) {
        (entry.parameter_dtype == DType::f64 ? in_double : in_float).push_back(entry);
    }
};

Entry entry_of(const Tensor& parameter, const Tensor& gradient, const Tensor& first_moment_or_none,
               const Tensor& second_moment_or_none, const Tensor& rounded_or_none, RandomKey rounding_key) {
    Entry entry;
    entry.packs = true;
    const auto address = [&](const Tensor& x) -> void* {
        if (!x.defined()) return nullptr;
        entry.packs = entry.packs && is_aligned_for_any<pack>(x.raw_data(), x.dtype());
        return x.raw_data();
    };
    entry.parameter = address(parameter);
    entry.gradient = address(gradient);
    entry.first_moment = address(first_moment_or_none);
    entry.second_moment = address(second_moment_or_none);
    entry.rounded = address(rounded_or_none);
    entry.count = gradient.count();
    entry.rounding_key = rounding_key;
    entry.gradient_dtype = gradient.dtype();
    if (parameter.defined()) entry.parameter_dtype = parameter.dtype();
    if (rounded_or_none.defined()) entry.rounded_dtype = rounded_or_none.dtype();
    return entry;
}

template <class T>
AdamWFactors<T> factors_of(const AdamWSpec& step) {
    const auto t = static_cast<double>(step.step);
    return {.beta1 = static_cast<T>(step.beta1),
            .beta2 = static_cast<T>(step.beta2),
            .rest1 = static_cast<T>(1.0 - step.beta1),
            .rest2 = static_cast<T>(1.0 - step.beta2),
            .rate = static_cast<T>(step.learning_rate / (1.0 - std::pow(step.beta1, t))),
            .root_correction = static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(step.beta2, t))),
            .epsilon = static_cast<T>(step.epsilon),
            .scale = static_cast<T>(step.gradient_scale),
            .decay = static_cast<T>(step.decoupled ? step.learning_rate * step.weight_decay : 0.0),
            .gradient_decay = static_cast<T>(step.decoupled ? 0.0 : step.weight_decay),
            .stochastic_rounding = step.stochastic_rounding};
}

template <class T>
SgdFactors<T> factors_of(const SgdSpec& step) {
    return {.rate = static_cast<T>(step.learning_rate),
            .momentum = static_cast<T>(step.momentum),
            .rest = static_cast<T>(1.0 - step.dampening),
            .decay = static_cast<T>(step.weight_decay),
            .scale = static_cast<T>(step.gradient_scale),
            .nesterov = step.nesterov,
            .first = step.first,
            .stochastic_rounding = step.stochastic_rounding};
}

template <class T>
void adamw(const std::vector<Entry>& entries, const AdamWSpec& step, cudaStream_t stream) {
    static_assert(sizeof(Table) + sizeof(AdamWFactors<T>) <= most_parameter_bytes);
    for (const Table& table : tables_of(entries))
        launch(&adamw_kernel<T>, static_cast<unsigned>(table.blocks), threads, 0, stream, table,
               factors_of<T>(step));
}

template <class T>
void sgd(const std::vector<Entry>& entries, const SgdSpec& step, cudaStream_t stream) {
    static_assert(sizeof(Table) + sizeof(SgdFactors<T>) <= most_parameter_bytes);
    for (const Table& table : tables_of(entries))
        launch(&sgd_kernel<T>, static_cast<unsigned>(table.blocks), threads, 0, stream, table,
               factors_of<T>(step));
}

template <class Measure>
double measure(CudaBackend& backend, std::span<const Tensor> tensors) {
    const cudaStream_t stream = backend.stream();
    std::vector<Tensor> copies;  // of those that are not contiguous
    std::vector<Entry> entries;
    for (const Tensor& x : tensors) {
        if (!x.is_contiguous() && x.count() > 0) {
            copies.push_back(Tensor::empty(x.shape(), {x.dtype(), x.device()}));
            backend.copy(x, copies.back());
            entries.push_back(entry_of({}, copies.back(), {}, {}, {}, {}));
        } else {
            entries.push_back(entry_of({}, x, {}, {}, {}, {}));
        }
    }
    const std::vector<Table> tables = tables_of(entries);
    if (tables.empty()) return 0.0;
    std::int64_t blocks = 0;
    for (const Table& table : tables) blocks += table.blocks;
    const Tensor results = Tensor::empty({blocks}, {DType::f64, tensors.front().device()});
    auto* place = elements_of<double>(results);
    for (const Table& table : tables) {
        launch(&measure_kernel<Measure>, static_cast<unsigned>(table.blocks), threads, 0, stream, table,
               place);
        place += table.blocks;
    }
    if (blocks > 1)
        launch(&fold_kernel<Measure>, 1, threads, 0, stream, elements_of<double>(results), blocks);
    double result = 0.0;
    backend.copy_to_host(&result, results.raw_data(), sizeof(result));
    return result;
}

/// Throws Error when work is being recorded: a replay would repeat the very same step.
void refuse_recording(const CudaBackend& backend, const char* op) {
    if (backend.is_capturing())
        throw Error(op,
                    "a step cannot be recorded, because learning rate and step number would stay the same in "
                    "each replay. Call it after replay().");
}

}  // namespace
}  // namespace cuda

void CudaBackend::adamw(const AdamWSpec& step, std::span<AdamWTensors> tensors) {
    cuda::refuse_recording(*this, "adamw");
    cuda::Entries entries;
    for (const AdamWTensors& one : tensors)
        entries.add(cuda::entry_of(one.parameter, one.gradient, one.first_moment, one.second_moment,
                                   one.rounded_or_none, one.rounding_key));
    cuda::adamw<float>(entries.in_float, step, stream());
    cuda::adamw<double>(entries.in_double, step, stream());
}

void CudaBackend::sgd(const SgdSpec& step, std::span<SgdTensors> tensors) {
    cuda::refuse_recording(*this, "sgd");
    cuda::Entries entries;
    for (const SgdTensors& one : tensors)
        entries.add(cuda::entry_of(one.parameter, one.gradient, one.momentum_or_none, {}, one.rounded_or_none,
                                   one.rounding_key));
    cuda::sgd<float>(entries.in_float, step, stream());
    cuda::sgd<double>(entries.in_double, step, stream());
}

double CudaBackend::sum_of_squares(std::span<const Tensor> tensors) {
    return cuda::measure<cuda::SumOfSquares>(*this, tensors);
}

double CudaBackend::largest_magnitude(std::span<const Tensor> tensors) {
    return cuda::measure<cuda::LargestMagnitude>(*this, tensors);
}

}  // namespace potluck
