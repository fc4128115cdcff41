// Measures the options of the CUDA device that affect only speed, or trade exactness for speed, on the four products of
// a GPT-2 block: the bias added inside the product against an output initialised with it, the gelu inside the product
// against a separate kernel, and TF32 against f32.
//
//     bench_linear [rows] [width]      (default 8192 768: 8 sequences of 1024 tokens, GPT-2 124M)
//
// Prints a table with the best of 5 runs of 20 calls each. Runs on any CUDA device, including the emulated one (whose
// times are meaningless).

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>

#include "autograd/ops/matmul.h"
#include "core/backend.h"
#include "core/factories.h"
#include "core/format.h"
#include "cuda/options.h"

namespace {

using namespace potluck;

/// Milliseconds of one call, the best of several runs.
double best_milliseconds(const std::function<void()>& call) {
    using Clock = std::chrono::steady_clock;
    constexpr int runs = 5, calls = 20;
    call();
    double best = 1e30;
    for (int run = 0; run < runs; ++run) {
        backend(Device::cuda()).synchronize();
        const auto start = Clock::now();
        for (int i = 0; i < calls; ++i) call();
        backend(Device::cuda()).synchronize();
        best =
            std::min(best, std::chrono::duration<double, std::milli>(Clock::now() - start).count() / calls);
    }
    return best;
}

void measure(std::int64_t rows, std::int64_t in, std::int64_t out, DType dtype) {
    const TensorOptions options{dtype, Device::cuda()};
    const Tensor x = ones({rows, in}, options), weight = ones({out, in}, options),
                 bias = ones({out}, options);
    const auto call = [&] { (void)linear(x, weight, bias); };
    const double operations =
        2.0 * static_cast<double>(rows) * static_cast<double>(in) * static_cast<double>(out);
    const auto print = [&](const char* way, double milliseconds) {
        fmt::print("| linear ({}, {}) x {} {} | {} | {:.3f} | {:.1f} |\n", rows, in, out, dtype, way,
                   milliseconds, operations / milliseconds * 1e-9);
    };
    cuda::set_bias_epilogue(false);
    print("bias first, then the product", best_milliseconds(call));
    cuda::set_bias_epilogue(true);
    print("bias inside the product", best_milliseconds(call));
    const auto call_gelu = [&] { (void)linear_gelu(x, weight, bias); };
    print("and its gelu by a second kernel", best_milliseconds(call_gelu));
    cuda::set_gelu_epilogue(true);
    print("and its gelu inside the product", best_milliseconds(call_gelu));
    cuda::set_gelu_epilogue(false);
    if (dtype != DType::f32) return;
    cuda::set_tf32(true);
    print("bias inside the product, TF32", best_milliseconds(call));
    cuda::set_tf32(false);
}

}  // namespace

int main(int count, char** arguments) {
    const std::int64_t rows = count > 1 ? std::atoll(arguments[1]) : 8192;
    const std::int64_t width = count > 2 ? std::atoll(arguments[2]) : 768;
    if (rows < 1 || width < 1) {
        fmt::print(stderr, "bench_linear: rows and width are whole numbers of at least 1.\n");
        return 1;
    }
    try {
        fmt::print("| product | way | ms | TFLOP/s |\n|---|---|---|---|\n");
        for (const DType dtype : {DType::bf16, DType::f32})
            for (const auto& [in, out] :
                 {std::pair{width, 3 * width}, {width, width}, {width, 4 * width}, {4 * width, width}})
                measure(rows, in, out, dtype);
    } catch (const std::exception& error) {
        fmt::print(stderr, "bench_linear: {}\n", error.what());
        return 1;
    }
    return 0;
}
