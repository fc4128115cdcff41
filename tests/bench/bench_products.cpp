// Matrix products of the CPU device in f32, bf16 and f16, at 2048 x 2048 and at the shapes of a GPT-2 training step, beside
// oneDNN's own product of bf16:
//
//     bench_products [--threads N] [--seconds S] [NAME]     only rows whose name holds NAME; S seconds for each (2)
//
// A row alternates between the four, so that what disturbs the machine disturbs all of them; the best of each counts.
// "time" is what bf16 and f16 take, in units of f32; "oneDNN" is how fast bf16 is, in units of oneDNN's product.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#if POTLUCK_ONEDNN
#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>
#endif

#include "core/backend.h"
#include "core/factories.h"

namespace {

using namespace potluck;

/// y (m, n) = a (m, k) b (k, n). A transposed operand is stored the other way round.
struct Product {
    std::string name;
    std::int64_t m, n, k;
    bool a_transposed, b_transposed;
    DType result = DType::bf16;  // of the half types: their own, or f32

    double operations() const {
        return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    }
};

Tensor matrix(std::int64_t rows, std::int64_t columns, bool transposed, DType dtype) {
    const Tensor x = randn({transposed ? columns : rows, transposed ? rows : columns}).to(dtype);
    return transposed ? x.transpose(0, 1) : x;
}

#if POTLUCK_ONEDNN
/// One product by oneDNN alone, ready to be run.
class Library {
public:
    Library(const Tensor& a, const Tensor& b, Tensor& y)
        : a_(of(a)), b_(of(b)), y_(of(y)), product_(description()) {}

    void run() {
        dnnl::matmul(product_).execute(stream_,
                                       {{DNNL_ARG_SRC, a_}, {DNNL_ARG_WEIGHTS, b_}, {DNNL_ARG_DST, y_}});
        stream_.wait();
    }
    static std::optional<Library> make(const Tensor& a, const Tensor& b, Tensor& y) {
        try {
            omp_set_num_threads(threads());
            return Library(a, b, y);
        } catch (const dnnl::error&) {
            return std::nullopt;  // no bf16 on this processor
        }
    }

private:
    dnnl::memory of(const Tensor& x) const {
        const auto type =
            x.dtype() == DType::f32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
        return {{{x.size(0), x.size(1)}, type, dnnl::memory::dims{x.strides()[0], x.strides()[1]}},
                engine_,
                const_cast<void*>(x.raw_data())};
    }
    dnnl::matmul::primitive_desc description() const {
#if DNNL_VERSION_MAJOR < 3
        return {{a_.get_desc(), b_.get_desc(), y_.get_desc()}, engine_};
#else
        return {engine_, a_.get_desc(), b_.get_desc(), y_.get_desc()};
#endif
    }

    dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream_{engine_};
    dnnl::memory a_, b_, y_;
    dnnl::matmul::primitive_desc product_;
};
#else
struct Library {
    void run() {}
    static std::optional<Library> make(const Tensor&, const Tensor&, Tensor&) { return std::nullopt; }
};
#endif

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

void measure(const Product& p, double seconds) {
    std::vector<std::function<void()>> runs;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        const Tensor a = matrix(p.m, p.k, p.a_transposed, dtype), b = matrix(p.k, p.n, p.b_transposed, dtype);
        const bool is_wide = dtype == DType::f32 || p.result == DType::f32;
        Tensor y = empty({p.m, p.n}, {is_wide ? DType::f32 : dtype});
        runs.push_back([a, b, y]() mutable { backend(Device::cpu()).matmul(a, b, y, false); });
        if (dtype == DType::bf16)
            if (std::optional<Library> library = Library::make(a, b, y))
                runs.push_back([a, b, y, library]() mutable { library->run(); });
    }
    std::vector<double> best(runs.size(), 1e30);
    for (const std::function<void()>& run : runs) run();
    const Clock::time_point start = Clock::now();
    do {
        for (std::size_t i = 0; i < runs.size(); ++i) {
            const Clock::time_point begin = Clock::now();
            runs[i]();
            best[i] = std::min(best[i], seconds_since(begin));
        }
    } while (seconds_since(start) < seconds);
    const double f32 = best.front(), bf16 = best[1], f16 = best.back();
    const auto rate = [&](double time) { return p.operations() / time * 1e-9; };
    fmt::print("{:<28} {:>7.1f} {:>7.1f} {:>7.1f}   {:>5.2f} {:>5.2f}", p.name, rate(f32), rate(bf16),
               rate(f16), bf16 / f32, f16 / f32);
    if (runs.size() == 4) fmt::print("   {:>7.1f} {:>5.2f}", rate(best[2]), best[2] / bf16);
    fmt::print("\n");
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    double seconds = 2.0;
    std::string wanted;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--threads" && i + 1 < argc) {
            set_threads(std::atoi(argv[++i]));
        } else if (argument == "--seconds" && i + 1 < argc) {
            seconds = std::atof(argv[++i]);
        } else if (argument.starts_with("-")) {
            fmt::print(stderr, "usage: bench_products [--threads N] [--seconds S] [part of a row's name]\n");
            return 2;
        } else {
            wanted = argument;
        }
    }
    // Weights are (out, in). y = x W^T, dx = dy W, dW = dy^T x.
    const std::int64_t tokens = 1024, width = 768, wide = 4 * width, vocabulary = 50257;
    std::vector<Product> products{{"2048 x 2048 x 2048", 2048, 2048, 2048, false, false},
                                  {"2048 x 2048, b transposed", 2048, 2048, 2048, false, true}};
    const auto layer = [&](const std::string& name, std::int64_t rows, std::int64_t in, std::int64_t out) {
        products.push_back({name, rows, out, in, false, true});
        products.push_back({name + ", dx", rows, in, out, false, false});
        products.push_back({name + ", dW", out, in, rows, true, false, DType::f32});
    };
    layer("q, k and v", tokens, width, 3 * width);
    layer("attention's output", tokens, width, width);
    layer("up", tokens, width, wide);
    layer("down", tokens, wide, width);
    layer("logits of 256", 256, width, vocabulary);
    products.push_back({"down of one token", 1, width, wide, false, true});
    fmt::print(
        "{} threads\n{:<28} {:>23}   {:>11}   {:>13}\n{:<28} {:>7} {:>7} {:>7}   {:>5} {:>5}   {:>7}\n",
        threads(), "", "GFLOP/s", "time", "oneDNN, bf16", "", "f32", "bf16", "f16", "bf16", "f16", "GFLOP/s");
    for (const Product& product : products)
        if (product.name.find(wanted) != std::string::npos) measure(product, seconds);
    return 0;
}
