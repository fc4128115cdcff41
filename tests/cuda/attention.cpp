// Attention on the CUDA device, beyond the rows of the op table: every size for which a kernel is compiled, the sizes
// at its borders, and those beyond. Compared with the CPU, which the op table compares with a reference in f64.

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/memory.h"
#include "core/random.h"
#include "cuda/options.h"
#include "tests/cuda/device.h"

#if POTLUCK_CUDA_EMULATED
#include "cuda/cudnn_graph.h"
#include "tests/cuda_emulator/cudnn_graph.h"
#include "tests/cuda_emulator/library_refusal.h"
#endif

namespace potluck::test {
namespace {

struct Sizes {
    std::int64_t batch, heads, kv_heads, queries, keys, head_size, value_size;
};

std::vector<Tensor> random_qkv(const Sizes& s, DType dtype) {
    Generator generator(3);
    std::vector<Tensor> x;
    for (const Shape& shape :
         {Shape{s.batch, s.heads, s.queries, s.head_size}, Shape{s.batch, s.kv_heads, s.keys, s.head_size},
          Shape{s.batch, s.kv_heads, s.keys, s.value_size}})
        x.push_back(to(randn(shape, {DType::f64}, &generator), dtype));
    return x;
}

/// The output, and the gradients of q, k, v and a floating mask, computed on `device`.
std::vector<Tensor> run(const std::vector<Tensor>& inputs, const Attention& options, Device device) {
    default_generator(device) = Generator(17);
    std::vector<Tensor> x;
    for (const Tensor& input : inputs) x.push_back(input.to(device).clone().set_requires_grad());
    Attention on_device = options;
    if (options.mask.defined()) {
        on_device.mask = options.mask.to(device).clone();
        if (is_floating(options.mask.dtype())) on_device.mask.set_requires_grad();
    }
    const Tensor y = scaled_dot_product_attention(x[0], x[1], x[2], on_device);
    Generator generator(9);
    const Tensor dy = to(randn(y.shape(), {}, &generator), DType::bf16);
    backward(y, {.gradient = to(dy, y.dtype()).to(device)});
    std::vector<Tensor> results{y.detach(), x[0].grad(), x[1].grad(), x[2].grad()};
    if (on_device.mask.defined() && on_device.mask.requires_grad()) results.push_back(on_device.mask.grad());
    return results;
}

/// Largest difference, relative to the largest correct value. Where the correct value is 0 up to rounding (a single key
/// has weight 1, whatever q and k are), the absolute difference: the inputs have magnitude 1.
double relative_error(const Tensor& got, const Tensor& right) {
    const std::vector<double> a = got.to_vector();
    const std::vector<double> b = right.to_vector();
    REQUIRE(a.size() == b.size());
    double distance = 0.0;
    double largest = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (!(std::fabs(a[i] - b[i]) <= distance)) distance = std::fabs(a[i] - b[i]);
        largest = std::max(largest, std::fabs(b[i]));
    }
    return largest < 1e-3 ? distance : distance / largest;
}

/// The tensor cores round weights and score gradients to the dtype between their products.
double limit_of(DType dtype) {
    switch (dtype) {
        case DType::f64:
            return 1e-12;
        case DType::f32:
            return 1e-5;
        case DType::f16:
            return 2e-3;
        default:
            return 1.6e-2;
    }
}

void check_against_cpu(const Sizes& s, const Attention& options, DType dtype) {
    INFO("sizes " << s.batch << " " << s.heads << " " << s.kv_heads << " " << s.queries << " " << s.keys
                  << " " << s.head_size << " " << s.value_size << " " << name_of(dtype)
                  << std::string(options.causal ? " causal" : "")
                  << std::string(options.dropout > 0.0 ? " dropout" : "")
                  << std::string(options.mask.defined() ? " mask" : ""));
    const std::vector<Tensor> inputs = random_qkv(s, dtype);
    const std::vector<Tensor> right = run(inputs, options, Device::cpu());
    const std::vector<Tensor> got = run(inputs, options, Device::cuda());
    REQUIRE(got.size() == right.size());
    for (std::size_t i = 0; i < right.size(); ++i) {
        INFO("result " << i << " of y dq dk dv dmask");
        CHECK(relative_error(got[i], right[i]) <= limit_of(dtype));
    }
}

}  // namespace

TEST_CASE("cuda: attention, sizes that each kernel is made for, the next ones, and those beyond all") {
    if (!has_cuda_device()) return;
    for (const std::int64_t size : {32, 40, 64, 72, 96, 104, 128, 136, 256, 264})
        for (const DType dtype : {DType::f16, DType::bf16}) {
            check_against_cpu({1, 2, 1, 40, 70, size, size}, {.causal = true}, dtype);
            check_against_cpu({1, 1, 1, 20, 33, size, size / 2}, {}, dtype);
        }
    for (const std::int64_t size : {128, 130, 300})
        for (const DType dtype : {DType::f32, DType::f64})
            check_against_cpu({1, 2, 1, 40, 70, size, size + 1}, {.causal = true}, dtype);
}

TEST_CASE(
    "cuda: attention, lengths around the tiles, causal and not, with more keys than queries and fewer") {
    if (!has_cuda_device()) return;
    for (const auto& [queries, keys] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                                        {1, 200},
                                        {200, 1},
                                        {16, 17},
                                        {63, 65},
                                        {65, 63},
                                        {64, 64},
                                        {127, 129},
                                        {130, 64},
                                        {129, 300}})
        for (const bool causal : {false, true})
            for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
                check_against_cpu({1, 1, 1, queries, keys, 64, 64}, {.causal = causal}, dtype);
}

TEST_CASE("cuda: attention, grouped heads, masks and dropout in every kernel") {
    if (!has_cuda_device()) return;
    Generator generator(5);
    const Tensor added = randn({1, 6, 35, 70}, {DType::f32}, &generator);
    const Tensor seen = randn({2, 1, 35, 70}, {DType::f32}, &generator) > 0.0;
    for (const std::int64_t size : {8, 64, 96, 128, 160})
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
            check_against_cpu({2, 6, 2, 35, 70, size, size}, {.causal = true, .mask = seen}, dtype);
            check_against_cpu({2, 6, 2, 35, 70, size, size}, {.mask = to(added, dtype), .dropout = 0.25},
                              dtype);
            check_against_cpu({1, 6, 1, 35, 70, size, size}, {.causal = true, .dropout = 0.25}, dtype);
        }
}

TEST_CASE("cuda: attention, half types with dropout of everything, and with nothing seen") {
    if (!has_cuda_device()) return;
    const std::vector<Tensor> inputs = random_qkv({1, 2, 1, 20, 40, 16, 16}, DType::bf16);
    for (const Tensor& x : run(inputs, {.dropout = 1.0}, Device::cuda()))
        CHECK(x.to_vector() == std::vector<double>(static_cast<std::size_t>(x.count()), 0.0));
    const Tensor nothing = zeros({40}, {DType::boolean});
    for (const Tensor& x : run(inputs, {.mask = nothing}, Device::cuda()))
        CHECK(x.to_vector() == std::vector<double>(static_cast<std::size_t>(x.count()), 0.0));
}

TEST_CASE("cuda: attention, half types keep large scores finite, and NaN stays NaN in its row") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f16, DType::bf16}) {
        const std::vector<Tensor> x = random_qkv({1, 1, 1, 33, 70, 64, 64}, dtype);
        const Tensor q = (x[0] * 10000.0).to(Device::cuda());
        const Tensor k = (x[1] * 10000.0).to(Device::cuda());
        const Tensor v = x[2].to(Device::cuda());
        CHECK(all(is_finite(scaled_dot_product_attention(q, k, v, {.scale = 1.0}))).item<bool>());
        CHECK(all(is_finite(scaled_dot_product_attention(q, k, v, {.scale = -1.0}))).item<bool>());
        const Tensor spoilt = x[0].clone();
        spoilt.select(2, 20).fill_(std::nan(""));
        const Tensor y = scaled_dot_product_attention(spoilt.to(Device::cuda()), x[1].to(Device::cuda()), v);
        CHECK(all(is_nan(y.select(2, 20))).item<bool>());
        CHECK(all(is_finite(y.narrow(2, 0, 20))).item<bool>());
        CHECK(all(is_finite(y.narrow(2, 21, 12))).item<bool>());
    }
}

TEST_CASE("cuda: attention, the same input gives the same bits") {
    if (!has_cuda_device()) return;
    for (const DType dtype : {DType::f32, DType::bf16}) {
        const std::vector<Tensor> inputs = random_qkv({1, 4, 2, 70, 90, 32, 32}, dtype);
        const std::vector<Tensor> once = run(inputs, {.causal = true, .dropout = 0.1}, Device::cuda());
        const std::vector<Tensor> again = run(inputs, {.causal = true, .dropout = 0.1}, Device::cuda());
        for (std::size_t i = 0; i < once.size(); ++i) CHECK(once[i].to_vector() == again[i].to_vector());
    }
}

TEST_CASE("cuda: attention, chunks through a cache equal one pass") {
    if (!has_cuda_device()) return;
    // T = 8, 2 heads, head size 16: queries i .. i + n see the keys up to their own position.
    const std::vector<Tensor> x = random_qkv({1, 2, 2, 8, 8, 16, 16}, DType::f32);
    std::vector<Tensor> there;
    for (const Tensor& input : x) there.push_back(input.to(Device::cuda()));
    const Tensor whole = scaled_dot_product_attention(there[0], there[1], there[2], {.causal = true});
    for (const std::vector<std::int64_t>& chunks :
         {std::vector<std::int64_t>{4, 4}, {3, 5}, {1, 1, 1, 1, 1, 1, 1, 1}}) {
        std::int64_t first = 0;
        for (const std::int64_t count : chunks) {
            const Tensor part = scaled_dot_product_attention(
                there[0].narrow(2, first, count), there[1].narrow(2, 0, first + count),
                there[2].narrow(2, 0, first + count), {.causal = true});
            CHECK(relative_error(part, whole.narrow(2, first, count)) <= 1e-5);
            first += count;
        }
    }
}

TEST_CASE("cuda: attention, dropout of uniform weights keeps their mean, in half types too") {
    if (!has_cuda_device()) return;
    // Uniform weights over 1000 keys of value 1: each output is the mean of 1000 factors 0 or 2.
    for (const DType dtype : {DType::f32, DType::f16}) {
        const TensorOptions options{dtype, Device::cuda()};
        manual_seed(4);
        const Tensor y =
            scaled_dot_product_attention(zeros({1, 1, 1000, 4}, options), ones({1, 1, 1000, 4}, options),
                                         ones({1, 1, 1000, 1}, options), {.dropout = 0.5});
        CHECK(std::fabs(to(y, DType::f32).mean().item() - 1.0) < 0.005);
    }
}

TEST_CASE(
    "cuda: attention, cuDNN's fused kernels give what ours give, where they fit and where they do not") {
    if (!has_cuda_device()) return;
    cuda::set_fused_attention(true);
    for (const DType dtype : {DType::f16, DType::bf16}) {
        for (const Sizes& sizes :
             {Sizes{2, 4, 4, 33, 33, 64, 64}, {1, 4, 2, 20, 20, 32, 16}, {1, 2, 1, 1, 1, 8, 8}})
            check_against_cpu(sizes, {.causal = true}, dtype);
        for (const Sizes& sizes : {Sizes{1, 2, 2, 7, 40, 16, 16}, {1, 4, 2, 40, 7, 16, 24}})
            check_against_cpu(sizes, {.scale = 0.3}, dtype);
        // These use our own kernels.
        check_against_cpu({1, 2, 2, 7, 40, 16, 16}, {.causal = true}, dtype);
        check_against_cpu({1, 2, 2, 9, 9, 20, 20}, {.causal = true}, dtype);
        check_against_cpu({1, 2, 2, 9, 9, 16, 16}, {.causal = true, .dropout = 0.5}, dtype);
    }
    cuda::set_fused_attention(false);
}

#if POTLUCK_CUDA_EMULATED
TEST_CASE(
    "cuda: attention, a fused plan is made once for each shape that fits, and never where the library has "
    "none") {
    cuda::set_fused_attention(true);
    const auto made_by = [](const Sizes& sizes, const Attention& options) {
        const std::int64_t before = emulator::live_library_objects();
        check_against_cpu(sizes, options, DType::bf16);
        return emulator::live_library_objects() - before;
    };
    const Sizes fits{1, 2, 2, 11, 11, 24, 24};
    CHECK(made_by(fits, {.causal = true}) > 0);
    CHECK(made_by(fits, {.causal = true}) == 0);
    CHECK(made_by(fits, {.causal = true, .dropout = 0.5}) == 0);
    CHECK(made_by({1, 2, 2, 11, 12, 24, 24}, {.causal = true}) == 0);
    CHECK(made_by({1, 2, 2, 11, 11, 20, 20}, {.causal = true}) == 0);
    emulator::refuse_graphs(true);
    check_against_cpu({1, 2, 2, 13, 13, 24, 24}, {.causal = true}, DType::bf16);
    emulator::refuse_graphs(false);
    cuda::set_fused_attention(false);
    CHECK(made_by({1, 2, 2, 14, 14, 24, 24}, {.causal = true}) == 0);
}

TEST_CASE("cuda: attention, the double of cuDNN's graphs refuses what cannot run") {
    const auto create = [](cudnnBackendDescriptorType_t kind) {
        cudnnBackendDescriptor_t made = nullptr;
        REQUIRE(cudnnBackendCreateDescriptor(kind, &made) == CUDNN_STATUS_SUCCESS);
        return made;
    };
    const auto told = [](cudnnStatus_t status, const char* text) {
        CHECK(CUDNN_STATUS_CATEGORY(status) != CUDNN_STATUS_SUCCESS);
        INFO(emulator::last_library_refusal());
        CHECK(emulator::last_library_refusal().find(text) != std::string::npos);
    };
    cudnnBackendDescriptor_t tensor = create(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    const std::int64_t number = 1;
    told(cudnnBackendFinalize(tensor), "missing attribute");
    told(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_FLOAT, 1, &number),
         "wrong type");
    told(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 2, &number),
         "wrong number");
    told(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_INT64, 1, &number),
         "has no attribute");
    cudnnBackendDescriptor_t product = create(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    told(cudnnBackendSetAttribute(product, CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                  1, &tensor),
         "not finalized");
    CHECK(cudnnBackendDestroyDescriptor(product) == CUDNN_STATUS_SUCCESS);
    CHECK(cudnnBackendDestroyDescriptor(tensor) == CUDNN_STATUS_SUCCESS);
    told(cudnnBackendDestroyDescriptor(tensor), "destroyed");

    // Unsupported sizes, and a result that is used before it is ready.
    cudnnHandle_t library = nullptr;
    REQUIRE(cudnnCreate(&library) == CUDNN_STATUS_SUCCESS);
    const auto plan_of = [&](bool fits) {
        cuda::OperationGraph graph;
        const auto a = graph.tensor(CUDNN_DATA_FLOAT, {1, 1, 2, 3}, {6, 6, 3, 1});
        const auto b = graph.tensor(CUDNN_DATA_FLOAT, {1, 1, fits ? 3 : 4, 2}, {8, 8, 2, 1});
        const auto y = graph.tensor(CUDNN_DATA_FLOAT, {1, 1, 2, 2}, {4, 4, 2, 1});
        graph.matmul(a, b, y);
        return graph.plan(library) != nullptr;
    };
    CHECK(plan_of(true));
    CHECK_THROWS_WITH_AS(plan_of(false), doctest::Contains("inner sizes of a product differ"), Error);
    const auto early = [&] {
        cuda::OperationGraph graph;
        const auto x = graph.intermediate({1, 1, 2, 2});
        const auto y = graph.tensor(CUDNN_DATA_FLOAT, {1, 1, 2, 2}, {4, 4, 2, 1});
        graph.pointwise(CUDNN_POINTWISE_EXP, x, y);
        graph.plan(library);
    };
    CHECK_THROWS_WITH_AS(early(), doctest::Contains("no operation before it makes"), Error);
    CHECK(cudnnDestroy(library) == CUDNN_STATUS_SUCCESS);
}
#endif

TEST_CASE("cuda: attention, long sequences need no matrix of scores" * doctest::test_suite("long")) {
    if (!has_cuda_device()) return;
    const std::vector<Tensor> x = random_qkv({1, 2, 1, 1500, 1500, 8, 8}, DType::bf16);
    std::vector<Tensor> there;
    for (const Tensor& input : x) there.push_back(input.to(Device::cuda()).clone().set_requires_grad());
    release_cached_memory();
    reset_peak_memory(Device::cuda());
    const std::int64_t before = memory_statistics(Device::cuda()).current;
    const Tensor y = scaled_dot_product_attention(there[0], there[1], there[2], {.causal = true});
    backward(y, {.gradient = ones(y.shape(), {DType::bf16, Device::cuda()})});
    // The scores alone would take 9 MB.
    CHECK(memory_statistics(Device::cuda()).peak - before < 1 << 20);
    CHECK(all(is_finite(there[0].grad())).item<bool>());
}

}  // namespace potluck::test
