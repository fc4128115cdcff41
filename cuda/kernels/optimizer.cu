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
#include "core/update_rule.h"
#include "cuda/kernel_device.h"
#include "cuda/kernels/any_element.h"
#include "cuda/kernels/block_reduce.h"
#include "cuda/kernels/random_words.h"

namespace potluck::cuda {
namespace {

constexpr int threads = 256;
constexpr int pack = 4;                     // elements that a thread takes at a time
constexpr std::int64_t chunk = 1 << 14;     // elements of a block: 16 packs a thread
constexpr int most_tensors = 44;            // of one launch
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
    std::int64_t rounding_first = 0;  // which element of the key's stretch decides element 0
    int first_block = 0;
    DType parameter_dtype = DType::f32, gradient_dtype = DType::f32, rounded_dtype = DType::f32;
    bool packs = false;  // every address, and the place of the random numbers, allows packs
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

/// How a kernel rounds bf16 parameters: stochastically, with keys that a replay moves on, or to nearest.
struct Rounding {
    bool stochastic;
    const std::uint64_t* advance;  // of recorded work, see KernelDevice::random_advance()
};

/// The new values of a parameter: rounded stochastically (bf16) or to nearest, and once more into its copy.
template <int N, class T>
__device__ void store_parameter(const Entry& entry, const Rounding& rounding, std::int64_t first,
                                const T (&values)[N]) {
    if constexpr (std::is_same_v<T, float>) {
        if (rounding.stochastic && entry.parameter_dtype == DType::bf16) {
            std::uint32_t words[N];
            random_words(MovingKey{entry.rounding_key, rounding.advance}, entry.rounding_first + first,
                         words);
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

/// The numbers of an update that a control on the device decides (see core/update_control.h), as one thread of each block
/// takes them for all. Without a control they are those of the host.
struct Decided {
    double learning_rate, gradient_scale, step;
    bool skip;
};
__device__ Decided decided(const UpdateNumbers* control, double learning_rate, double gradient_scale,
                           std::int64_t step) {
    const auto number = static_cast<double>(step);
    if (control == nullptr) return {learning_rate, gradient_scale, number, false};
    return {learning_rate * control->learning_rate, gradient_scale * control->gradient_scale,
            number + control->steps, control->skip != 0.0};
}

// ---- AdamW ----

/// What a launch is told: AdamWSpec without its tensor.
struct AdamWRule {
    double learning_rate, beta1, beta2, epsilon, weight_decay, gradient_scale;
    std::int64_t step;
    bool decoupled;
    Rounding rounding;
    const UpdateNumbers* control;
};

template <class T>
struct AdamWFactors {
    T beta1, beta2, rest1, rest2;
    T rate, root_correction;  // with the corrections of the bias
    T epsilon, scale, decay, gradient_decay;
    bool skip;
};

template <class T>
__device__ AdamWFactors<T> factors_of(const AdamWRule& rule) {
    const Decided now = decided(rule.control, rule.learning_rate, rule.gradient_scale, rule.step);
    AdamWFactors<T> f;
    f.beta1 = static_cast<T>(rule.beta1);
    f.beta2 = static_cast<T>(rule.beta2);
    f.rest1 = static_cast<T>(1.0 - rule.beta1);
    f.rest2 = static_cast<T>(1.0 - rule.beta2);
    f.rate = static_cast<T>(now.learning_rate / (1.0 - std::pow(rule.beta1, now.step)));
    f.root_correction = static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(rule.beta2, now.step)));
    f.epsilon = static_cast<T>(rule.epsilon);
    f.scale = static_cast<T>(now.gradient_scale);
    f.decay = static_cast<T>(rule.decoupled ? now.learning_rate * rule.weight_decay : 0.0);
    f.gradient_decay = static_cast<T>(rule.decoupled ? 0.0 : rule.weight_decay);
    f.skip = now.skip;
    return f;
}

/// Floor: for f32 with f32 gradients: reads 16 and writes 12 bytes an element, about 15 operations (a root and a division
/// among them).
template <class T>
__global__ void __launch_bounds__(threads)
    adamw_kernel(const __grid_constant__ Table table, const __grid_constant__ AdamWRule rule) {
    __shared__ AdamWFactors<T> f;
    if (threadIdx.x == 0) f = factors_of<T>(rule);
    __syncthreads();
    if (f.skip) return;
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
        store_parameter(entry, rule.rounding, first, p);
    });
}

// ---- SGD ----

/// What a launch is told: SgdSpec without its tensor.
struct SgdRule {
    double learning_rate, momentum, dampening, weight_decay, gradient_scale;
    std::int64_t step;
    bool nesterov;
    Rounding rounding;
    const UpdateNumbers* control;
};

template <class T>
struct SgdFactors {
    T rate, momentum, rest, decay, scale;
    bool first, skip;
};

template <class T>
__device__ SgdFactors<T> factors_of(const SgdRule& rule) {
    const Decided now = decided(rule.control, rule.learning_rate, rule.gradient_scale, rule.step);
    SgdFactors<T> f;
    f.rate = static_cast<T>(now.learning_rate);
    f.momentum = static_cast<T>(rule.momentum);
    f.rest = static_cast<T>(1.0 - rule.dampening);
    f.decay = static_cast<T>(rule.weight_decay);
    f.scale = static_cast<T>(now.gradient_scale);
    f.first = now.step == 1.0;
    f.skip = now.skip;
    return f;
}

/// Floor: for f32 with f32 gradients: reads 8 and writes 4 bytes an element (with momentum 12 and 8), 4 to 9 operations.
template <class T>
__global__ void __launch_bounds__(threads)
    sgd_kernel(const __grid_constant__ Table table, const __grid_constant__ SgdRule rule) {
    __shared__ SgdFactors<T> f;
    if (threadIdx.x == 0) f = factors_of<T>(rule);
    __syncthreads();
    if (f.skip) return;
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
                dp[i] = rule.nesterov ? dp[i] + f.momentum * m.values[i] : m.values[i];
            }
            *momenta = m;
        }
        for (int i = 0; i < n; ++i) p[i] -= f.rate * dp[i];
        store_parameter(entry, rule.rounding, first, p);
    });
}

// ---- norms ----

/// Squares of floats are summed in f64 as they are; those of doubles in the three parts of SquareSums.
struct SumOfSquares {
    using Result = SquareSums;
    __device__ static SquareSums with(const SquareSums& sums, float value) {
        const auto wide = static_cast<double>(value);
        return {sums.middle + wide * wide, sums.large, sums.small};
    }
    __device__ static SquareSums with(const SquareSums& sums, double value) {
        return with_square_of(sums, value);
    }
    __device__ static SquareSums join(const SquareSums& a, const SquareSums& b) { return a + b; }
    __device__ static SquareSums of_block(const SquareSums& own, double* scratch) {
        return {block_sum(own.middle, scratch), block_sum(own.large, scratch), block_sum(own.small, scratch)};
    }
};
/// NaN wins.
struct LargestMagnitude {
    using Result = double;
    __device__ static double join(double a, double b) { return b <= a || a != a ? a : b; }
    template <class T>
    __device__ static double with(double largest, T value) {
        return join(largest, std::fabs(static_cast<double>(value)));
    }
    __device__ static double of_block(double own, double* scratch) {
        return block_reduce(
            own, 0.0, [](double a, double b) { return join(a, b); }, scratch);
    }
};

/// The measure of each block's chunk of the gradients. Floor: reads every element once, two operations in f64.
template <class Measure>
__global__ void __launch_bounds__(threads)
    measure_kernel(const __grid_constant__ Table table, typename Measure::Result* results) {
    __shared__ double scratch[warp_size];
    const Chunk mine = chunk_of_block(table);
    const Entry& entry = table.entries[mine.tensor];
    typename Measure::Result result{};
    const auto measure = [&](auto zero) {
        using T = decltype(zero);
        for_each_pack(mine, [&](auto size, std::int64_t first) {
            T values[decltype(size)::value];
            load_any(values, entry.gradient, entry.gradient_dtype, first);
            for (const T value : values) result = Measure::with(result, value);
        });
    };
    if (entry.gradient_dtype == DType::f64)
        measure(double{});
    else
        measure(float{});
    result = Measure::of_block(result, scratch);
    if (threadIdx.x == 0) results[blockIdx.x] = result;
}

/// One block folds the results of all blocks. Floor: reads each once.
template <class Measure>
__global__ void __launch_bounds__(threads) fold_kernel(const typename Measure::Result* results,
                                                       std::int64_t count, typename Measure::Result* total) {
    __shared__ double scratch[warp_size];
    typename Measure::Result result{};
    for (auto i = static_cast<std::int64_t>(threadIdx.x); i < count; i += threads)
        result = Measure::join(result, results[i]);
    result = Measure::of_block(result, scratch);
    if (threadIdx.x == 0) *total = result;
}

// ---- the decision about an update ----

/// Decides an update (see core/update_rule.h). Floor: reads the slots where kernels reported bad elements.
__global__ void __launch_bounds__(threads)
    decide_update_kernel(UpdateNumbers* update, const FaultRanges faults) {
    __shared__ int scratch[warp_size];
    int reported = 0;
    for (int range = 0; range < faults.count; ++range)
        for (int i = static_cast<int>(threadIdx.x); i < faults.ranges[range].count; i += threads)
            reported |= faults.ranges[range].slots[i] != no_fault ? 1 : 0;
    reported = block_reduce(
        reported, 0, [](int a, int b) { return a | b; }, scratch);
    if (threadIdx.x != 0) return;
    UpdateNumbers numbers = *update;
    decide_update(numbers, reported != 0, [](double x) { return std::sqrt(x); });
    *update = numbers;
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
               const Tensor& second_moment_or_none, const Tensor& rounded_or_none, RandomKey rounding_key,
               std::int64_t rounding_first) {
    Entry entry;
    // The random numbers of a bf16 parameter's pack are one block of the key's stretch.
    entry.packs = !parameter.defined() || parameter.dtype() != DType::bf16 || rounding_first % pack == 0;
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
    entry.rounding_first = rounding_first;
    entry.gradient_dtype = gradient.dtype();
    if (parameter.defined()) entry.parameter_dtype = parameter.dtype();
    if (rounded_or_none.defined()) entry.rounded_dtype = rounded_or_none.dtype();
    return entry;
}

/// What stands in the control of an update; nullptr without one.
UpdateNumbers* numbers_of(const Tensor& control_or_none) {
    return control_or_none.defined() ? reinterpret_cast<UpdateNumbers*>(elements_of<double>(control_or_none))
                                     : nullptr;
}

AdamWRule rule_of(const AdamWSpec& step, const std::uint64_t* advance) {
    return {.learning_rate = step.learning_rate,
            .beta1 = step.beta1,
            .beta2 = step.beta2,
            .epsilon = step.epsilon,
            .weight_decay = step.weight_decay,
            .gradient_scale = step.gradient_scale,
            .step = step.step,
            .decoupled = step.decoupled,
            .rounding = {step.stochastic_rounding, advance},
            .control = numbers_of(step.control_or_none)};
}

SgdRule rule_of(const SgdSpec& step, const std::uint64_t* advance) {
    return {.learning_rate = step.learning_rate,
            .momentum = step.momentum,
            .dampening = step.dampening,
            .weight_decay = step.weight_decay,
            .gradient_scale = step.gradient_scale,
            .step = step.step,
            .nesterov = step.nesterov,
            .rounding = {step.stochastic_rounding, advance},
            .control = numbers_of(step.control_or_none)};
}

static_assert(sizeof(Table) + sizeof(AdamWRule) <= most_parameter_bytes &&
              sizeof(Table) + sizeof(SgdRule) <= most_parameter_bytes);

/// Starts a kernel on all tables of some entries.
template <class Rule>
void start(void (*kernel)(Table, Rule), const std::vector<Entry>& entries, const Rule& rule,
           cudaStream_t stream) {
    for (const Table& table : tables_of(entries))
        launch(kernel, static_cast<unsigned>(table.blocks), threads, 0, stream, table, rule);
}

template <class Measure>
void measure(KernelDevice& backend, std::span<const Tensor> tensors, Tensor& total) {
    using Result = typename Measure::Result;
    const cudaStream_t stream = backend.stream();
    std::vector<Tensor> copies;  // of those that are not contiguous
    std::vector<Entry> entries;
    for (const Tensor& x : tensors) {
        if (!x.is_contiguous() && x.count() > 0) {
            copies.push_back(Tensor::empty(x.shape(), {x.dtype(), x.device()}));
            backend.copy(x, copies.back());
            entries.push_back(entry_of({}, copies.back(), {}, {}, {}, {}, 0));
        } else {
            entries.push_back(entry_of({}, x, {}, {}, {}, {}, 0));
        }
    }
    const std::vector<Table> tables = tables_of(entries);
    std::int64_t blocks = 0;
    for (const Table& table : tables) blocks += table.blocks;
    const Tensor results = Tensor::empty(
        {blocks * static_cast<std::int64_t>(sizeof(Result) / sizeof(double))}, {DType::f64, total.device()});
    auto* place = static_cast<Result*>(results.raw_data());
    for (const Table& table : tables) {
        launch(&measure_kernel<Measure>, static_cast<unsigned>(table.blocks), threads, 0, stream, table,
               place);
        place += table.blocks;
    }
    launch(&fold_kernel<Measure>, 1, threads, 0, stream, static_cast<const Result*>(results.raw_data()),
           blocks, reinterpret_cast<Result*>(elements_of<double>(total)));
}

}  // namespace

void adamw(KernelDevice& device, const AdamWSpec& step, std::span<AdamWTensors> tensors) {
    Entries entries;
    for (const AdamWTensors& one : tensors)
        entries.add(entry_of(one.parameter, one.gradient, one.first_moment, one.second_moment,
                             one.rounded_or_none, one.rounding_key, one.rounding_first));
    const AdamWRule rule = rule_of(step, device.random_advance({}));
    start(&adamw_kernel<float>, entries.in_float, rule, device.stream());
    start(&adamw_kernel<double>, entries.in_double, rule, device.stream());
}

void sgd(KernelDevice& device, const SgdSpec& step, std::span<SgdTensors> tensors) {
    Entries entries;
    for (const SgdTensors& one : tensors)
        entries.add(entry_of(one.parameter, one.gradient, one.momentum_or_none, {}, one.rounded_or_none,
                             one.rounding_key, one.rounding_first));
    const SgdRule rule = rule_of(step, device.random_advance({}));
    start(&sgd_kernel<float>, entries.in_float, rule, device.stream());
    start(&sgd_kernel<double>, entries.in_double, rule, device.stream());
}

void sum_of_squares(KernelDevice& device, std::span<const Tensor> tensors, Tensor& sums) {
    measure<SumOfSquares>(device, tensors, sums);
}

void largest_magnitude(KernelDevice& device, std::span<const Tensor> tensors, Tensor& magnitude) {
    measure<LargestMagnitude>(device, tensors, magnitude);
}

void decide_update(KernelDevice& device, Tensor& control) {
    launch(&decide_update_kernel, 1, threads, 0, device.stream(), numbers_of(control), device.fault_ranges());
}

}  // namespace potluck::cuda
