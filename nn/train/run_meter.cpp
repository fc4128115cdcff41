#include "nn/train/run_meter.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "core/memory.h"
#include "core/trace.h"
#include "nn/train/bottleneck.h"

namespace potluck {
namespace {

Device device_of(const nn::Module& module) { return module.parameters().front().device(); }

template <class Tensors, class TensorOf>
std::int64_t bytes_on(Device device, const Tensors& tensors, TensorOf&& tensor_of) {
    std::int64_t bytes = 0;
    for (const auto& entry : tensors)
        if (const Tensor& tensor = tensor_of(entry); tensor.defined() && tensor.device() == device)
            bytes += tensor.bytes();
    return bytes;
}

/// Parameters, buffers, optimizer state and gradients.
MemoryUse held_by(const nn::Module& module, const optim::Optimizer& optimizer) {
    const Device device = device_of(module);
    MemoryUse use;
    for (const Tensor& parameter : module.parameters()) {
        use.parameters += parameter.bytes();
        const std::int64_t size =
            is_half(parameter.dtype()) ? size_of(DType::f32) : size_of(parameter.dtype());
        if (parameter.requires_grad()) use.gradients += size * parameter.count();
    }
    use.buffers = bytes_on(device, module.named_buffers(), [](const auto& entry) { return entry.tensor; });
    use.optimizer_state =
        bytes_on(device, optimizer.state_dict(), [](const auto& entry) { return entry.second; });
    return use;
}

double per_second(std::int64_t count, double seconds) {
    return seconds > 0.0 ? static_cast<double>(count) / seconds : 0.0;
}

std::int64_t samples_of(std::span<const data::Batch> micro_batches) {
    std::int64_t samples = 0;
    for (const data::Batch& batch : micro_batches) {
        const bool is_whole = batch.global_count == 0 && batch.inputs.defined();  // no loader made it
        samples += is_whole ? batch.inputs.size(0) : batch.global_count;
    }
    return samples;
}

}  // namespace

RunMeter::RunMeter(const nn::Module& module, const optim::Optimizer& optimizer, const data::Loader& loader,
                   double flops_per_token, DType half_type)
    : module_(module),
      optimizer_(optimizer),
      loader_(loader),
      given_flops_(flops_per_token),
      half_type_(half_type) {
    const MemoryUse use = held_by(module, optimizer);
    const std::int64_t known = use.parameters + use.buffers + use.optimizer_state;
    held_before_ = std::max<std::int64_t>(memory_statistics(device_of(module)).current - known, 0);
}

void RunMeter::measure_rates() {
    const Device device = device_of(module_);
    const PausedPeak not_needed(device);
    try {
        matmul_ = measure_matmul_rate(
            half_type_ != DType::f32 ? half_type_ : dtype_of_most_parameters(module_), device);
        copy_ = measure_copy_rate(device);
    } catch (const OutOfMemory&) {  // the training may still have enough
    }
    release_cached_memory(device);
}

void RunMeter::start() {
    update_start_ = line_start_ = Clock::now();
    waited_ = loader_.waiting_seconds();
}

void RunMeter::end_waiting() {
    const double waited = loader_.waiting_seconds() - waited_;
    time_[Phase::data] += waited;
    if (!std::exchange(has_begun_, true)) first_wait_ = waited;
}

void RunMeter::measure(StepMetrics& metrics, std::span<const data::Batch> micro_batches) {
    metrics.samples = samples_of(micro_batches);
    metrics.seconds = std::chrono::duration<double>(Clock::now() - update_start_).count();
    metrics.tokens_per_second = per_second(metrics.tokens, metrics.seconds);
    metrics.samples_per_second = per_second(metrics.samples, metrics.seconds);
    metrics.mfu = mfu(metrics.tokens_per_second);
    metrics.memory_bytes = memory_statistics(device_of(module_)).peak;
    ++updates_;
    micro_batches_ += static_cast<std::int64_t>(micro_batches.size());
    tokens_ += metrics.tokens;
    samples_ += metrics.samples;
    seconds_ += metrics.seconds;
}

void RunMeter::close(StepMetrics& metrics) {
    const Clock::time_point now = Clock::now();
    const double whole = std::chrono::duration<double>(now - line_start_).count();
    time_[Phase::other] += std::max(whole - time_.total(), 0.0);
    line_start_ = now;
    total_ += time_;
    metrics.time = time_;
    time_ = {};
    if (!is_tracing()) return;
    trace::count("tokens/s", metrics.tokens_per_second);
    trace::count("samples/s", metrics.samples_per_second);
    if (metrics.mfu) trace::count("mfu", *metrics.mfu);
    trace::count("peak memory, bytes", static_cast<double>(metrics.memory_bytes));
    for (const Phase phase : phases)
        trace::count(fmt::format("share of {}", name_of(phase)).c_str(), metrics.time.share(phase));
}

void RunMeter::end_update() {
    update_start_ = Clock::now();
    waited_ = loader_.waiting_seconds();
}

double RunMeter::flops_per_token() const {
    return given_flops_ > 0.0 ? given_flops_ : 6.0 * static_cast<double>(module_.parameter_count());
}

std::optional<double> RunMeter::mfu(double tokens_per_second) const {
    if (!matmul_) return std::nullopt;
    return flops_per_token() * tokens_per_second / matmul_->flops_per_second;
}

MemoryUse RunMeter::memory() const {
    MemoryUse use = held_by(module_, optimizer_);
    const MemoryStatistics statistics = memory_statistics(device_of(module_));
    use.before = held_before_;
    use.peak = statistics.peak;
    use.by_op = statistics.peak_by_op;
    use.activations = std::max<std::int64_t>(
        use.peak - use.before - use.parameters - use.buffers - use.optimizer_state - use.gradients, 0);
    return use;
}

PhaseSeconds RunMeter::running_time() const {
    PhaseSeconds running = total_;
    running += time_;
    running[Phase::data] = std::max(running[Phase::data] - first_wait_, 0.0);
    return running;
}

void RunMeter::summarize(TrainingSummary& summary) const {
    summary.tokens_per_second = per_second(tokens_, seconds_);
    summary.samples_per_second = per_second(samples_, seconds_);
    summary.time = total_;
    summary.time += time_;
    summary.memory = memory();
    summary.peak_memory_bytes = summary.memory.peak;
    if (updates_ == 0) return;
    summary.bottleneck =
        find_bottleneck({.time = running_time(),
                         .updates = updates_,
                         .micro_batches = static_cast<double>(micro_batches_) / static_cast<double>(updates_),
                         .flops = flops_per_token() * static_cast<double>(tokens_),
                         .flops_per_second = matmul_ ? matmul_->flops_per_second : 0.0,
                         .bytes_per_second = copy_ ? copy_->bytes_per_second : 0.0,
                         .memory = summary.memory});
    if (!matmul_) return;
    summary.mfu = mfu(summary.tokens_per_second);
    summary.peak_flops_per_second = matmul_->flops_per_second;
    summary.peak_name = fmt::format("a product of two {} matrices of {} x {}, measured on {} before the run",
                                    matmul_->dtype, matmul_->size, matmul_->size, device_of(module_));
    summary.mfu_formula =
        fmt::format("flops_per_token * tokens_per_second / peak: {:.6g} {} * {:.6g} / {:.6g} FLOP/s of {}",
                    flops_per_token(), given_flops_ > 0.0 ? "as given" : "(6 * parameters)",
                    summary.tokens_per_second, matmul_->flops_per_second, summary.peak_name);
}

}  // namespace potluck
