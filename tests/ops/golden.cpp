// Values and gradients that PyTorch computed in f64: tests/golden/README.md says how. The op table compares each op
// with our own reference; this test detects what both might have misunderstood in the same way.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/factories.h"
#include "core/safetensors.h"
#include "tests/on_device.h"

using namespace potluck;

namespace {

using Inputs = std::map<std::string, Tensor>;
using Function = std::function<Tensor(Inputs&)>;

Function attention_with(bool causal,
                        Tensor (*op)(const Tensor&, const Tensor&, const Tensor&, const Attention&)) {
    return [=](Inputs& x) {
        return op(x["q"], x["k"], x["v"],
                  {.causal = causal, .mask = x.contains("mask") ? x["mask"] : Tensor()});
    };
}

Function cross_entropy_with(const CrossEntropy& options) {
    return [=](Inputs& x) { return cross_entropy(x["logits"], x["labels"], options); };
}

/// Our call for each case of the file; several calls if there are several ways.
const std::multimap<std::string, Function>& calls() {
    static const std::multimap<std::string, Function> calls{
        {"gelu_erf", [](Inputs& x) { return gelu(x["x"]); }},
        {"gelu_tanh", [](Inputs& x) { return gelu(x["x"], GeluKind::tanh); }},
        {"silu", [](Inputs& x) { return silu(x["x"]); }},
        {"layer_norm", [](Inputs& x) { return layer_norm(x["x"], x["weight"], x["bias"], 1e-5); }},
        {"rms_norm", [](Inputs& x) { return rms_norm(x["x"], x["weight"], 1e-6); }},
        {"cross_entropy_none", cross_entropy_with({.ignore_index = -1, .reduction = Reduction::none})},
        {"cross_entropy_sum", cross_entropy_with({.ignore_index = -1, .reduction = Reduction::sum})},
        {"cross_entropy_mean", cross_entropy_with({.ignore_index = -1})},
        {"cross_entropy_smoothed", cross_entropy_with({.ignore_index = -1, .label_smoothing = 0.2})},
        {"attention", attention_with(false, scaled_dot_product_attention)},
        {"attention", attention_with(false, attention_composed)},
        {"attention_causal", attention_with(true, scaled_dot_product_attention)},
        {"attention_causal", attention_with(true, attention_composed)},
        {"attention_causal_unseen", attention_with(true, scaled_dot_product_attention)},
        {"attention_causal_unseen", attention_with(true, attention_composed)},
        {"attention_mask", attention_with(false, scaled_dot_product_attention)},
        {"attention_mask", attention_with(false, attention_composed)},
        {"rotary",
         [](Inputs& x) { return rotary(x["x"], to(x["cosine"], DType::f32), to(x["sine"], DType::f32)); }},
        {"rotary",
         [](Inputs& x) {
             const auto [cosine, sine] =
                 rotary_tables(x["x"].size(2), x["x"].size(3), 10000.0, x["x"].device());
             return rotary(x["x"], cosine, sine);
         }},
        {"topk_largest", [](Inputs& x) { return topk(x["x"], 3, 1).first; }},
        {"topk_smallest", [](Inputs& x) { return topk(x["x"], 2, 0, false).first; }},
        {"logsumexp", [](Inputs& x) { return logsumexp(x["x"], {1}); }},
        {"softmax", [](Inputs& x) { return softmax(x["x"], 1); }},
        {"log_softmax", [](Inputs& x) { return log_softmax(x["x"]); }},
        {"var", [](Inputs& x) { return var(x["x"], {1}); }},
        {"var_population",
         [](Inputs& x) {
             return var(x["x"], {0, 2}, 0.0);
         }},
        {"linear", [](Inputs& x) { return linear(x["x"], x["weight"], x["bias"]); }},
        {"matmul_broadcast", [](Inputs& x) { return matmul(x["a"], x["b"]); }},
    };
    return calls;
}

void check_close(const Tensor& actual, const Tensor& expected, double tolerance) {
    REQUIRE(actual.defined());
    REQUIRE(actual.shape() == expected.shape());
    const std::vector<double> a = actual.to_vector<double>(), b = expected.to_vector<double>();
    double largest = 1e-3;  // below this, differences are absolute
    for (const double value : b) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < b.size(); ++i) {
        INFO("element ", i, ": ", a[i], " instead of ", b[i]);
        REQUIRE(std::abs(a[i] - b[i]) <= tolerance * largest);
    }
}

Function batch_norm_with(bool training) {
    return [=](Inputs& x) {
        const Tensor mean = clone(x["running_mean"]), variance = clone(x["running_var"]);
        const Tensor y = batch_norm(x["x"], x["weight"], x["bias"], mean, variance, {.training = training});
        check_close(mean, x["updated_mean"], 1e-11);
        check_close(variance, x["updated_var"], 1e-11);
        return y;
    };
}

/// The same for convolution.safetensors.
const std::multimap<std::string, Function>& convolution_calls() {
    static const std::multimap<std::string, Function> calls{
        {"conv1d", [](Inputs& x) { return conv1d(x["x"], x["weight"], x["bias"]); }},
        {"conv1d_options",
         [](Inputs& x) {
             return conv1d(x["x"], x["weight"], x["bias"],
                           {.stride = 2, .padding = 2, .dilation = 2, .groups = 2});
         }},
        {"conv2d", [](Inputs& x) { return conv2d(x["x"], x["weight"], x["bias"]); }},
        {"conv2d_options",
         [](Inputs& x) {
             return conv2d(x["x"], x["weight"], {},
                           {.stride = {2, 1}, .padding = {1, 2}, .dilation = {1, 2}, .groups = 2});
         }},
        {"conv2d_depthwise",
         [](Inputs& x) { return conv2d(x["x"], x["weight"], x["bias"], {.padding = 1, .groups = 3}); }},
        {"max_pool1d", [](Inputs& x) { return max_pool1d(x["x"], 3, {.stride = 2, .padding = 1}); }},
        {"max_pool2d", [](Inputs& x) { return max_pool2d(x["x"], 2); }},
        {"max_pool2d_options",
         [](Inputs& x) {
             return max_pool2d(x["x"], {3, 2},
                               {.stride = 2, .padding = 1, .dilation = {1, 2}, .ceil_mode = true});
         }},
        {"average_pool1d",
         [](Inputs& x) { return average_pool1d(x["x"], 3, {.stride = 2, .padding = 1, .ceil_mode = true}); }},
        {"average_pool2d", [](Inputs& x) { return average_pool2d(x["x"], 2); }},
        {"average_pool2d_options",
         [](Inputs& x) {
             return average_pool2d(x["x"], {3, 4}, {.stride = {2, 3}, .padding = 1, .ceil_mode = true});
         }},
        {"average_pool2d_without_padding",
         [](Inputs& x) {
             return average_pool2d(
                 x["x"], {3, 4}, {.stride = {2, 3}, .padding = 1, .ceil_mode = true, .count_padding = false});
         }},
        {"batch_norm", batch_norm_with(true)},
        {"batch_norm_evaluation", batch_norm_with(false)},
    };
    return calls;
}

struct GoldenFile {
    const char* path;
    const std::multimap<std::string, Function>& calls;
    std::size_t cases;
};

std::vector<GoldenFile> golden_files() {
    return {{"tests/golden/ops.safetensors", calls(), 23},
            {"tests/golden/convolution.safetensors", convolution_calls(), 14}};
}

/// Rotary tables are f32, whatever x is.
double tolerance_of(const std::string& name) { return name == "rotary" ? 1e-6 : 1e-11; }

}  // namespace

TEST_CASE("golden: ops and their gradients agree with PyTorch in f64") {
    test::on_each_device([] {
        for (const GoldenFile& golden : golden_files()) {
            const TensorFile file = load_safetensors(golden.path);
            for (const auto& [name, call] : golden.calls) {
                INFO(name);
                Inputs inputs;
                std::map<std::string, Tensor> expected;
                for (const auto& [full_name, tensor] : file.tensors) {
                    if (!full_name.starts_with(name + ".")) continue;
                    const std::string part = full_name.substr(name.size() + 1);
                    const bool is_result =
                        part == "y" || part == "dy" ||
                        (part.front() == 'd' && file.tensors.contains(name + "." + part.substr(1)));
                    (is_result ? expected : inputs)[part] = to(tensor, test::test_device());
                }
                REQUIRE(expected.contains("y"));
                for (auto& [part, tensor] : inputs) {
                    if (expected.contains("d" + part)) tensor = tensor.clone().set_requires_grad();
                }
                const Tensor y = call(inputs);
                check_close(y, expected["y"], tolerance_of(name));
                sum(y * expected["dy"]).backward();
                for (const auto& [part, tensor] : inputs) {
                    if (!expected.contains("d" + part)) continue;
                    INFO("gradient of ", part);
                    check_close(tensor.grad(), expected["d" + part], tolerance_of(name));
                }
            }
        }
    });
}

TEST_CASE("golden: every case of the files is compared") {
    for (const GoldenFile& golden : golden_files()) {
        std::set<std::string> cases;
        for (const auto& [full_name, tensor] : load_safetensors(golden.path).tensors)
            cases.insert(full_name.substr(0, full_name.find('.')));
        CHECK(cases.size() == golden.cases);
        for (const std::string& name : cases) {
            INFO(name);
            CHECK(golden.calls.contains(name));
        }
    }
}
