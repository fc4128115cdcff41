// The tests that run over the op table: see table.h.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "autograd/gradcheck.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/reduce.h"
#include "autograd/tape.h"
#include "core/copies.h"
#include "core/error.h"
#include "core/factories.h"
#include "tests/expect_error.h"
#include "tests/ops/table.h"

namespace potluck::test {
namespace {

// ---- inputs ----

std::uint64_t hash_of(const std::string& text) {
    std::uint64_t hash = 1469598103934665603ULL;
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
    return hash;
}

/// The inputs of a case, contiguous; always the same values.
std::vector<Tensor> make_inputs(const Row& row, const Case& sample, DType dtype, Device device) {
    Generator generator(hash_of(row.op));
    std::vector<Tensor> inputs;
    for (const Input& input : sample.inputs) {
        const DType wanted = input.dtype.value_or(dtype);
        std::vector<double> values = input.values;
        if (values.empty()) {
            const Tensor random = rand(input.shape, {DType::f64}, &generator);
            values = random.to_vector();
            for (double& value : values) {
                value = input.low + (input.high - input.low) * value;
                if (wanted == DType::boolean) value = value > 0.5 * (input.low + input.high) ? 1.0 : 0.0;
                if (is_integer(wanted) || input.whole) value = std::floor(value);
                if (wanted == DType::u8) value = std::fabs(value);
            }
        }
        inputs.push_back(to(to(tensor(values, input.shape, {DType::f64}), wanted), device));
    }
    return inputs;
}

std::vector<Array> as_arrays(const std::vector<Tensor>& tensors) {
    std::vector<Array> arrays;
    for (const Tensor& x : tensors) arrays.push_back({x.shape(), x.to_vector()});
    return arrays;
}

bool wants_gradient(const Case& sample, std::size_t input, const Tensor& x) {
    return sample.inputs[input].differentiable && !sample.inputs[input].dtype.has_value() &&
           is_floating(x.dtype());
}

/// Fixed weights that every floating dtype represents exactly: eighths in [-2, 2].
Tensor weights_like(const Tensor& y) {
    std::vector<double> values(static_cast<std::size_t>(y.count()));
    for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<double>(static_cast<std::int64_t>(i * 7 % 33) - 16) / 8.0;
    return to(to(tensor(values, y.shape(), {DType::f64}), y.dtype()), y.device());
}

struct Result {
    std::vector<Tensor> outputs;
    std::vector<Tensor> gradients;  // of each input; undefined where none is needed
    std::vector<bool>
        is_sum;  // whether the gradient came to lie in other memory, since another was added to it
};

/// Forward, and backward from fixed weights of all outputs. The inputs become leaves with their present strides.
Result run(const Row& row, const Case& sample, const std::vector<Tensor>& inputs, bool with_backward) {
    std::vector<Tensor> leaves;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        Tensor leaf = inputs[i].detach();
        if (with_backward && wants_gradient(sample, i, leaf)) leaf.set_requires_grad();
        leaves.push_back(leaf);
    }
    Result result;
    result.is_sum.resize(leaves.size());
    std::vector<const void*> places(leaves.size());  // of the gradients
    result.outputs = sample.call(leaves);
    if (with_backward && row.differentiable)
        for (const Tensor& y : result.outputs) {
            if (!y.requires_grad()) continue;
            backward(y, {.gradient = weights_like(y), .retain_graph = true});
            for (std::size_t i = 0; i < leaves.size(); ++i) {
                const Tensor gradient = leaves[i].grad();
                if (!gradient.defined()) continue;
                const void* place = gradient.storage().get();
                result.is_sum[i] = result.is_sum[i] || (places[i] != nullptr && places[i] != place);
                places[i] = place;
            }
        }
    for (const Tensor& leaf : leaves) result.gradients.push_back(leaf.grad());
    return result;
}

// ---- layouts ----

/// The same values with another memory layout; x itself if there is no other.
Tensor with_strides(const Tensor& x, const Strides& strides, std::int64_t elements, std::int64_t offset) {
    Tensor view = Tensor::empty({elements}, {x.dtype(), x.device()}).alias(x.shape(), strides, offset);
    detail::copy_into(x, view);
    return view;
}
Tensor transposed_layout(const Tensor& x) {
    Strides strides(x.shape().size());
    std::int64_t step = 1;
    for (std::size_t i = 0; i < strides.size(); ++i) {
        strides[i] = step;
        step *= std::max<std::int64_t>(1, x.shape()[i]);
    }
    return with_strides(x, strides, step, 0);
}
Tensor spaced_layout(const Tensor& x) {
    Strides strides = contiguous_strides(x.shape());
    for (std::int64_t& stride : strides) stride *= 2;
    return with_strides(x, strides, 2 * x.count() + 3, 3);
}
/// The first entry along the longest axis, repeated with stride 0. The values differ from those of x.
Tensor repeated_layout(const Tensor& x) {
    if (x.count() == 0 || x.ndim() == 0) return x;
    std::size_t axis = 0;
    for (std::size_t i = 1; i < x.shape().size(); ++i)
        if (x.shape()[i] > x.shape()[axis]) axis = i;
    Strides strides = x.strides();
    strides[axis] = 0;
    return x.alias(x.shape(), strides, x.offset());
}

struct Layout {
    const char* name;
    Tensor (*apply)(const Tensor&);
    bool changes_values;
};
constexpr Layout layouts[] = {{"transposed", transposed_layout, false},
                              {"spaced", spaced_layout, false},
                              {"repeated", repeated_layout, true}};

// ---- comparing ----

std::string describe(const Row& row, const Case& sample, DType dtype) {
    std::ostringstream text;
    text << row.op << " " << name_of(dtype);
    for (const Input& input : sample.inputs) text << " " << to_string(input.shape);
    if (!sample.note.empty()) text << " (" << sample.note << ")";
    return text.str();
}

std::int64_t elements_of(const Case& sample) {
    std::int64_t count = 0;
    for (const Input& input : sample.inputs) count += element_count(input.shape);
    return count;
}

Tolerance scaled(Tolerance tolerance, double factor) {
    return {tolerance.relative * factor, tolerance.absolute * factor};
}

/// Whether two tensors have the same bits.
bool same_bits(const Tensor& a, const Tensor& b) {
    if (a.defined() != b.defined()) return false;
    if (!a.defined()) return true;
    if (a.shape() != b.shape() || a.dtype() != b.dtype()) return false;
    const std::vector<double> left = a.to_vector();
    const std::vector<double> right = b.to_vector();
    for (std::size_t i = 0; i < left.size(); ++i)
        if (std::bit_cast<std::uint64_t>(left[i]) != std::bit_cast<std::uint64_t>(right[i]) &&
            !(std::isnan(left[i]) && std::isnan(right[i])))
            return false;
    return true;
}

/// Large inputs are meant for the threads. They need not be tested in every dtype.
bool is_worth_while(const Case& sample, DType dtype) {
    return elements_of(sample) < 5000 || dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::i64;
}

/// Calls test(row, sample, device, dtype) for the whole table, or for the op that POTLUCK_OP names.
template <class Test>
void for_each_case(const std::vector<DType>& dtypes, Test test) {
    const char* only = std::getenv("POTLUCK_OP");
    for (const Row& row : all_rows()) {
        if (only != nullptr && row.op != only) continue;
        for (const Device device : devices())
            for (const DType dtype : row.dtypes) {
                if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) continue;
                for (const Case& sample : row.cases) {
                    if (!is_worth_while(sample, dtype)) continue;
                    const std::string name = describe(row, sample, dtype) + " on " + name_of(device);
                    INFO(name);
                    const OnDevice here(device);
                    try {
                        test(row, sample, device, dtype);
                    } catch (const std::exception& error) {
                        FAIL_CHECK("threw: " << std::string(error.what()));
                    }
                }
            }
    }
}

/// The CPU's results for the inputs of a case.
std::vector<Array> on_the_cpu(const Row& row, const Case& sample, DType dtype) {
    const OnDevice here(Device::cpu());
    return as_arrays(run(row, sample, make_inputs(row, sample, dtype, Device::cpu()), false).outputs);
}

ResultDType result_of(const Row& row, std::size_t output) {
    return row.results[std::min(output, row.results.size() - 1)];
}

}  // namespace

TEST_CASE("ops: values, shapes and dtypes agree with a reference in f64") {
    for_each_case(all_dtypes(), [](const Row& row, const Case& sample, Device device, DType dtype) {
        const std::vector<Tensor> inputs = make_inputs(row, sample, dtype, device);
        const std::vector<Tensor> outputs = run(row, sample, inputs, false).outputs;
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            CHECK(name_of(outputs[i].dtype()) == name_of(result_of(row, i)(dtype)));
            CHECK(outputs[i].device() == device);
        }
        if (!sample.reference && device == Device::cpu()) return;
        // Random ops have no reference, but the same seed draws the same numbers on every device.
        const std::vector<Array> expected =
            sample.reference ? sample.reference(as_arrays(inputs)) : on_the_cpu(row, sample, dtype);
        REQUIRE(outputs.size() == expected.size());
        for (std::size_t i = 0; i < outputs.size(); ++i)
            CHECK(difference(outputs[i], expected[i],
                             scaled(tolerance_of(outputs[i].dtype()), row.tolerance)) == "");
    });
}

TEST_CASE("ops: gradients agree with differences in f64") {
    for_each_case({DType::f64}, [](const Row& row, const Case& sample, Device device, DType dtype) {
        if (!row.differentiable || !row.gradcheck || elements_of(sample) > 150) return;
        std::vector<Tensor> inputs = make_inputs(row, sample, dtype, device);
        bool any = false;
        for (std::size_t i = 0; i < inputs.size(); ++i)
            if (wants_gradient(sample, i, inputs[i])) {
                inputs[i].set_requires_grad();
                any = true;
            }
        if (!any) return;
        const std::vector<Tensor> outputs = sample.call(inputs);
        for (std::size_t k = 0; k < outputs.size(); ++k) {
            if (!outputs[k].requires_grad()) continue;
            const auto output = [&](const std::vector<Tensor>& x) { return sample.call(x)[k]; };
            CHECK(gradcheck(output, inputs) == "");
            if (!row.twice_differentiable || elements_of(sample) > 40) continue;
            const auto slope = [&](const std::vector<Tensor>& x) {
                const Tensor y = sample.call(x)[k];
                std::vector<Tensor> wanted;
                for (const Tensor& input : x)
                    if (input.requires_grad()) wanted.push_back(input);
                Tensor total = zeros({}, {DType::f64});
                for (const Tensor& gradient :
                     gradients(y, wanted, {.gradient = weights_like(y), .create_graph = true}))
                    if (gradient.defined()) total = total + sum(gradient * weights_like(gradient));
                return total;
            };
            if (!slope(inputs).requires_grad()) continue;  // constant slope
            INFO("the gradient of the gradient");
            CHECK(gradcheck(slope, inputs) == "");
        }
    });
}

TEST_CASE("ops: gradients in every floating dtype agree with those in f64") {
    for_each_case(floating_dtypes(), [](const Row& row, const Case& sample, Device device, DType dtype) {
        if (!row.differentiable || dtype == DType::f64) return;
        const std::vector<Tensor> inputs = make_inputs(row, sample, dtype, device);
        std::vector<Tensor> wide;
        for (std::size_t i = 0; i < inputs.size(); ++i)
            wide.push_back(sample.inputs[i].dtype.has_value() ? inputs[i] : to(inputs[i], DType::f64));
        const Result got = run(row, sample, inputs, true);
        const Result expected = run(row, sample, wide, true);
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            INFO("the gradient of input " << i);
            CHECK(got.gradients[i].defined() == expected.gradients[i].defined());
            if (!got.gradients[i].defined() || !expected.gradients[i].defined()) continue;
            // Half types are added up in f32, when each of several results had a backward of its own.
            CHECK(name_of(got.gradients[i].dtype()) ==
                  name_of(size_of(dtype) == 2 && got.is_sum[i] ? DType::f32 : dtype));
            const Tolerance tolerance = scaled(gradient_tolerance_of(dtype), row.gradient_tolerance);
            CHECK(difference(got.gradients[i], as_arrays({expected.gradients[i]})[0], tolerance) == "");
        }
    });
}

TEST_CASE("ops: strided inputs give what their contiguous copies give") {
    for_each_case({DType::f32, DType::f16, DType::i64}, [](const Row& row, const Case& sample, Device device,
                                                           DType dtype) {
        const std::vector<Tensor> inputs = make_inputs(row, sample, dtype, device);
        for (const Layout& layout : layouts) {
            INFO(layout.name);
            std::vector<Tensor> strided;
            std::vector<Tensor> copies;
            for (std::size_t i = 0; i < inputs.size(); ++i) {
                // Where the op forbids repeated indices, their values are kept.
                const bool keeps_values = !sample.inputs[i].values.empty() && layout.changes_values;
                strided.push_back(keeps_values ? inputs[i] : layout.apply(inputs[i]));
                copies.push_back(clone(strided.back()));
            }
            const bool with_backward = is_floating(dtype);
            const Result got = run(row, sample, strided, with_backward);
            const Result expected = run(row, sample, copies, with_backward);
            REQUIRE(got.outputs.size() == expected.outputs.size());
            for (std::size_t i = 0; i < got.outputs.size(); ++i) {
                const Tolerance tolerance = scaled(tolerance_of(got.outputs[i].dtype()), row.tolerance);
                CHECK(difference(got.outputs[i], as_arrays({expected.outputs[i]})[0], tolerance) == "");
            }
            for (std::size_t i = 0; i < inputs.size(); ++i) {
                INFO("the gradient of input " << i);
                CHECK(got.gradients[i].defined() == expected.gradients[i].defined());
                if (!got.gradients[i].defined() || !expected.gradients[i].defined()) continue;
                const Tolerance tolerance = scaled(gradient_tolerance_of(dtype), row.gradient_tolerance);
                CHECK(difference(got.gradients[i], as_arrays({expected.gradients[i]})[0], tolerance) == "");
            }
        }
    });
}

TEST_CASE("ops: one thread and two give the same bits, forward and backward") {
    for_each_case({DType::f32, DType::bf16},
                  [](const Row& row, const Case& sample, Device device, DType dtype) {
                      const std::vector<Tensor> inputs = make_inputs(row, sample, dtype, device);
                      set_threads(1);
                      const Result one = run(row, sample, inputs, true);
                      set_threads(2);
                      const Result two = run(row, sample, inputs, true);
                      set_threads(0);
                      REQUIRE(one.outputs.size() == two.outputs.size());
                      for (std::size_t i = 0; i < one.outputs.size(); ++i)
                          CHECK(same_bits(one.outputs[i], two.outputs[i]));
                      for (std::size_t i = 0; i < inputs.size(); ++i)
                          CHECK(same_bits(one.gradients[i], two.gradients[i]));
                  });
}

TEST_CASE("ops: bad input is refused with a message that names the values, the same on every device") {
    const auto messages = [] {
        std::vector<std::string> of_refusals;
        for (const Row& row : all_rows()) {
            for (std::size_t i = 0; i < row.refusals.size(); ++i) {
                INFO(row.op << ", refusal " << i);
                std::string& message = of_refusals.emplace_back();
                try {
                    row.refusals[i].call();
                    wait_for_devices();
                    FAIL_CHECK("was accepted");
                } catch (const Error& error) {
                    message = error.what();
                    for (const std::string& text : row.refusals[i].texts) {
                        INFO(message);
                        CHECK(message.find(text) != std::string::npos);
                    }
                }
            }
        }
        return of_refusals;
    };
    const std::vector<std::string> of_cpu = messages();  // outside of on_each_device() a test runs on the CPU
    on_each_device([&] {
        if (test_device() == Device::cpu()) return;
        const std::vector<std::string> here = messages();
        for (std::size_t i = 0; i < here.size(); ++i)
            if (here[i].find("out of memory") == std::string::npos)  // whose numbers differ between devices
                CHECK(here[i] == of_cpu[i]);
    });
}

TEST_CASE("ops: the comparison behind these tests sees what is wrong") {
    const Tensor x = tensor({1.0, 2.0, std::nan("")});
    const Tolerance tolerance = tolerance_of(DType::f32);
    CHECK(difference(x, {{3}, {1.0, 2.0, std::nan("")}}, tolerance) == "");
    CHECK(difference(x, {{3}, {1.0, 2.00001, std::nan("")}}, tolerance).find("(1)") != std::string::npos);
    CHECK(difference(x, {{3}, {1.0, 2.0, 3.0}}, tolerance) != "");
    CHECK(difference(x, {{3}, {1.0, std::nan(""), std::nan("")}}, tolerance) != "");
    CHECK(difference(x, {{3, 1}, {1.0, 2.0, std::nan("")}}, tolerance).find("(3, 1)") != std::string::npos);
    CHECK(!is_close(1.0, INFINITY, tolerance));
    CHECK(!is_close(-INFINITY, INFINITY, tolerance));
    CHECK(!same_bits(tensor({0.0}), tensor({-0.0})));
    CHECK(!same_bits(tensor({0.0}), Tensor()));
    for (const DType dtype : floating_dtypes()) {  // a wrong rounding or a missing term exceeds the tolerance
        CHECK(tolerance_of(dtype).relative < 0.01);
        CHECK(gradient_tolerance_of(dtype).relative < 0.05);
    }
}

TEST_CASE("ops: every public op has a row, and every row has an op") {
    std::set<std::string> declared;
    const std::regex declaration(
        R"(^(?:Tensor|std::vector<Tensor>|std::pair<[^>]*>) (operator[^\s(]+|\w+)\()");
    for (const auto& file : std::filesystem::directory_iterator("autograd/ops")) {
        const std::string name = file.path().filename().string();
        if (file.path().extension() != ".h") continue;
        std::ifstream stream(file.path());
        std::ostringstream whole;
        whole << stream.rdbuf();
        if (whole.str().find("namespace potluck::detail") != std::string::npos) continue;  // internal
        std::istringstream lines(whole.str());
        std::smatch match;
        for (std::string line; std::getline(lines, line);)
            if (std::regex_search(line, match, declaration)) declared.insert(match[1]);
    }
    CHECK(declared.size() > 80);
    std::set<std::string> tested;
    for (const Row& row : all_rows()) {
        tested.insert(row.op);
        INFO(row.op);
        CHECK(declared.count(row.op) == 1);
        CHECK(!row.cases.empty());
    }
    for (const std::string& name : declared) {
        INFO(name);
        CHECK(tested.count(name) == 1);
    }
}

}  // namespace potluck::test
