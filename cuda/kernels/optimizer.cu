// Optimizer steps over many tensors in one launch: see tensor_list.h.

#include <bit>
#include <cmath>
#include <vector>

#include "core/stochastic_rounding.h"
#include "cuda/kernels/random_words.h"
#include "cuda/kernels/tensor_list.h"

namespace potluck::cuda {
namespace {

using namespace tensor_list;

/// What a launch is told besides a rule.
struct Told {
    const std::uint64_t* advance;  // for recorded work, see KernelDevice::random_advance()
    const UpdateNumbers* control;  // nullptr: the rule's own numbers count
};

/// Stores the new values of a parameter: rounded stochastically (bf16) or to nearest, and also rounded into its copy.
template <int N, class T>
__device__ void store_parameter(const Entry& entry, bool stochastic_rounding, const std::uint64_t* advance,
                                std::int64_t first, const T (&values)[N]) {
    if constexpr (std::is_same_v<T, float>) {
        if (stochastic_rounding && entry.parameter_dtype == DType::bf16) {
            std::uint32_t words[N];
            random_words(MovingKey{entry.rounding_key, advance}, entry.rounding_first + first, words);
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

/// N neighbours of a moment.
template <int N, class T>
__device__ Pack<T, N>& moments_at(void* moment, std::int64_t first) {
    return *reinterpret_cast<Pack<T, N>*>(static_cast<T*>(moment) + first);
}

/// What one thread of each block takes from a rule for all. The numbers that a control on the device decides (see
/// core/update_control.h) are in it.
template <class Spec, class T>
struct Factors;

template <class T>
struct Factors<AdamWSpec, T> {
    T beta1, beta2, rest1, rest2;
    T rate, root_correction;  // with the bias corrections
    T epsilon, scale, decay, gradient_decay;

    __device__ void take(const AdamWSpec& spec, double learning_rate, double gradient_scale, double step) {
        beta1 = static_cast<T>(spec.beta1);
        beta2 = static_cast<T>(spec.beta2);
        rest1 = static_cast<T>(1.0 - spec.beta1);
        rest2 = static_cast<T>(1.0 - spec.beta2);
        rate = static_cast<T>(learning_rate / (1.0 - std::pow(spec.beta1, step)));
        root_correction = static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(spec.beta2, step)));
        epsilon = static_cast<T>(spec.epsilon);
        scale = static_cast<T>(gradient_scale);
        decay = static_cast<T>(spec.decoupled ? learning_rate * spec.weight_decay : 0.0);
        gradient_decay = static_cast<T>(spec.decoupled ? 0.0 : spec.weight_decay);
    }

    /// Changes the parameters p by their gradients dp, and the moments of the entry from element `first` on.
    template <int N>
    __device__ void change(const Entry& entry, std::int64_t first, T (&p)[N], const T (&dp)[N]) const {
        Pack<T, N> m = moments_at<N, T>(entry.first_moment, first);
        Pack<T, N> v = moments_at<N, T>(entry.second_moment, first);
        for (int i = 0; i < N; ++i) {
            const T g = dp[i] * scale + gradient_decay * p[i];
            m.values[i] = beta1 * m.values[i] + rest1 * g;
            v.values[i] = beta2 * v.values[i] + rest2 * (g * g);
            p[i] -= decay * p[i] + rate * m.values[i] / (std::sqrt(v.values[i]) * root_correction + epsilon);
        }
        moments_at<N, T>(entry.first_moment, first) = m;
        moments_at<N, T>(entry.second_moment, first) = v;
    }
};

template <class T>
struct Factors<SgdSpec, T> {
    T rate, momentum, rest, decay, scale;
    bool first_update, nesterov;

    __device__ void take(const SgdSpec& spec, double learning_rate, double gradient_scale, double step) {
        rate = static_cast<T>(learning_rate);
        momentum = static_cast<T>(spec.momentum);
        rest = static_cast<T>(1.0 - spec.dampening);
        decay = static_cast<T>(spec.weight_decay);
        scale = static_cast<T>(gradient_scale);
        first_update = step == 1.0;
        nesterov = spec.nesterov;
    }

    template <int N>
    __device__ void change(const Entry& entry, std::int64_t first, T (&p)[N], const T (&dp)[N]) const {
        T velocity[N];
        for (int i = 0; i < N; ++i) velocity[i] = dp[i] * scale + decay * p[i];
        if (entry.first_moment != nullptr) {
            Pack<T, N> m{};
            if (!first_update) m = moments_at<N, T>(entry.first_moment, first);
            for (int i = 0; i < N; ++i) {
                m.values[i] = first_update ? velocity[i] : momentum * m.values[i] + rest * velocity[i];
                velocity[i] = nesterov ? velocity[i] + momentum * m.values[i] : m.values[i];
            }
            moments_at<N, T>(entry.first_moment, first) = m;
        }
        for (int i = 0; i < N; ++i) p[i] -= rate * velocity[i];
    }
};

/// The update of this block's chunk.
template <class T, class Spec>
__device__ void update(const Table& table, const Spec& spec, const Told& told) {
    __shared__ Factors<Spec, T> factors;
    if (told.control != nullptr && told.control->skip != 0.0) return;
    if (threadIdx.x == 0) {
        const UpdateNumbers* control = told.control;
        const auto step = static_cast<double>(spec.step);
        if (control == nullptr)
            factors.take(spec, spec.learning_rate, spec.gradient_scale, step);
        else
            factors.take(spec, spec.learning_rate * control->learning_rate,
                         spec.gradient_scale * control->gradient_scale, step + control->steps);
    }
    __syncthreads();
    const Chunk mine = chunk_of_block(table);
    const Entry& entry = table.entries[mine.tensor];
    for_each_pack(mine, [&](auto size, std::int64_t first) {
        constexpr int n = decltype(size)::value;
        T p[n];
        T dp[n];
        load_any(p, entry.parameter, entry.parameter_dtype, first);
        load_any(dp, entry.gradient, entry.gradient_dtype, first);
        factors.change(entry, first, p, dp);
        store_parameter(entry, spec.stochastic_rounding, told.advance, first, p);
    });
}

/// Floor: for f32 with f32 gradients: reads 16 and writes 12 bytes an element, about 15 operations (a root and a division
/// among them).
template <class T>
__global__ void __launch_bounds__(threads)
    adamw_kernel(const __grid_constant__ Table table, const __grid_constant__ AdamWSpec spec,
                 const __grid_constant__ Told told) {
    update<T>(table, spec, told);
}

/// Floor: for f32 with f32 gradients: reads 8 and writes 4 bytes an element (with momentum 12 and 8), 4 to 9 operations.
template <class T>
__global__ void __launch_bounds__(threads)
    sgd_kernel(const __grid_constant__ Table table, const __grid_constant__ SgdSpec spec,
               const __grid_constant__ Told told) {
    update<T>(table, spec, told);
}

static_assert(sizeof(Table) + sizeof(AdamWSpec) + sizeof(Told) <= most_parameter_bytes &&
              sizeof(Table) + sizeof(SgdSpec) + sizeof(Told) <= most_parameter_bytes);

template <class Spec>
using UpdateKernel = void (*)(Table, Spec, Told);

/// Starts the kernel for tensors computed in float, and that for those computed in double.
template <class Spec>
void start(KernelDevice& device, UpdateKernel<Spec> in_float, UpdateKernel<Spec> in_double, const Spec& spec,
           std::span<const UpdateTensors> tensors, const Tensor& control_or_none) {
    std::vector<Entry> floats, doubles;
    for (const UpdateTensors& one : tensors)
        (one.parameter.dtype() == DType::f64 ? doubles : floats).push_back(entry_of(one));
    const Told told{device.random_advance({}), numbers_of(control_or_none)};
    const auto launch_all = [&](UpdateKernel<Spec> kernel, const std::vector<Entry>& entries) {
        for (const Table& table : tables_of(entries))
            launch(kernel, static_cast<unsigned>(table.blocks), threads, 0, device.stream(), table, spec,
                   told);
    };
    launch_all(in_float, floats);
    launch_all(in_double, doubles);
}

}  // namespace

void adamw(KernelDevice& device, const AdamWSpec& step, std::span<UpdateTensors> tensors,
           const Tensor& control_or_none) {
    start(device, &adamw_kernel<float>, &adamw_kernel<double>, step, tensors, control_or_none);
}

void sgd(KernelDevice& device, const SgdSpec& step, std::span<UpdateTensors> tensors,
         const Tensor& control_or_none) {
    start(device, &sgd_kernel<float>, &sgd_kernel<double>, step, tensors, control_or_none);
}

}  // namespace potluck::cuda
