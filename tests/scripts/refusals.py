"""Code that the compiler must refuse: in how many lines, and that the lines say what to write instead.

    refusals.py

Every line that the compiler prints counts: the source that it quotes, "In function ..." and "In file included from ..."
too. An option more in a list with a mistyped one is a line more, since the compiler names each.
"""

import os
import pathlib
import shlex
import subprocess
import tempfile

from checks import add_case, require, root, run, succeed

compiler = shlex.split(os.environ.get("CXX", "g++")) + ["-std=c++20", "-I", str(root)]
temporary = tempfile.TemporaryDirectory(prefix="potluck_refusals_")
header = pathlib.Path(temporary.name) / "potluck.h.gch"  # compiled once for all cases, and found before the header

module = "struct Net : nn::Module { %s { return x; } };"
# name, code, words of the message
refused = [
    ("assignment to a row", "Tensor x = zeros({2, 3}); x[0] = ones({3});", ["copy_"]),
    ("assignment to a gradient", "Tensor p = zeros({2}); p.grad() = ones({2});", ["set_grad"]),
    ("assignment to what a function returns", "Tensor x = zeros({2, 3}); x.narrow(0, 0, 1) = x;", ["copy_"]),
    ("forward by value", module % "Tensor forward(Tensor x)", ["write Tensor forward(const Tensor& x) override"]),
    ("forward by const value", module % "Tensor forward(const Tensor x)", ["forward(const Tensor& x) override"]),
    ("forward by reference", module % "Tensor forward(Tensor& x)", ["forward(const Tensor& x) override"]),
    ("forward by rvalue", module % "Tensor forward(Tensor&& x)", ["forward(const Tensor& x) override"]),
    ("const forward", module % "Tensor forward(const Tensor& x) const", ["forward(const Tensor& x) override"]),
    ("const forward by value", module % "Tensor forward(Tensor x) const", ["forward(const Tensor& x) override"]),
    ("an option of SGD", "nn::Linear net(2, 2); optim::SGD o(net, {.momentun = 0.9});", ["momentun", "see SGDOptions"]),
    (
        "an option of AdamW",
        "nn::Linear net(2, 2); optim::AdamW o(net, {.learning_rat = 1});",
        ["learning_rat", "see AdamWOptions"],
    ),
    ("an option of Linear", "nn::Linear net(2, 2, {.bais = false});", ["bais", "see LinearOptions"]),
    ("an option of Conv1d", "nn::Conv1d net(2, 2, 3, {.pading = 1});", ["pading", "see Conv1dOptions"]),
    ("an option of Conv2d", "nn::Conv2d net(2, 2, 3, {.pading = 1});", ["pading", "see Conv2dOptions"]),
    ("an option of BatchNorm", "nn::BatchNorm net(2, {.eps = 1e-5});", ["eps", "see BatchNormOptions"]),
    ("an option of Attention", "nn::Attention net({.widht = 2});", ["widht", "see AttentionConfig"]),
    ("an option of GPT2", "nn::GPT2 net({.layer = 2});", ["layer", "see GPT2Config"]),
    ("an option of Llama", "nn::Llama net({.layer = 2});", ["layer", "see LlamaConfig"]),
    (
        "an option of Loader",
        "data::TensorDataset set(zeros({2, 2})); data::Loader loader(set, {.batch_size = 2});",
        ["batch_size", "see LoaderOptions"],
    ),
    (
        "an option of Trainer",
        "void f(nn::Module& m, optim::SGD& o, data::Loader& l) { Trainer trainer(m, o, l, {.epoch = 2}); }",
        ["epoch", "see TrainerOptions"],
    ),
    ("an option with its struct named", "optim::AdamWOptions o{.learning_rat = 1};", ["AdamWOptions", "learning_rat"]),
    ("an option of attention", "Tensor x; scaled_dot_product_attention(x, x, x, {.casual = true});", ["Attention"]),
    (
        "an activation of two arguments",
        "nn::MLP net(32, 64, 32, [](const Tensor& x, double p) { return x * p; });",
        ["[](const Tensor& x)"],
    ),
    ("a list of axes that is a bool", "(void)sum(zeros({2}), true);", ["place of the axes"]),
    ("a correction that is a bool", "(void)var(zeros({2}), 1, true);", ["correction comes before keep_axes"]),
    ("a correction of a deviation", "(void)stddev(zeros({2}), {0}, false);", ["correction comes before keep_axes"]),
    (
        "an option with a list of parameters",
        "void f(std::vector<nn::NamedTensor> p) { optim::AdamW o(p, {.lr = 1e-3}); }",
        ["lr", "see AdamWOptions"],
    ),
    (
        "an option with a list of slices",
        "void f(std::vector<optim::ParameterSlice> p) { optim::SGD o(p, {.lr = 1e-3}); }",
        ["lr", "see SGDOptions"],
    ),
    ("an option of the wrong type", "nn::Linear net(2, 2, {.bias = zeros({2})});", ["bias", "see LinearOptions"]),
    ("a number for a row", "Tensor x = zeros({2, 3}); x[0] = 3.0;", ["copy_"]),
]
# Warnings that the compiler gives by default.
warned = [
    ("a guard without a name", "NoGrad();", ["NoGrad"]),
    ("a mode without a name", "GradMode(false);", ["GradMode"]),
    ("a check without a name", "AnomalyCheck();", ["AnomalyCheck"]),
    ("evaluation without a name", "nn::Linear net(2, 2); nn::EvalMode{net};", ["EvalMode"]),
    ("a sum that nobody takes", "Tensor x = zeros({2}); x + x;", ["Tensor"]),
    ("a view that nobody takes", "Tensor x = zeros({2, 2}); x.transpose(0, 1);", ["Tensor"]),
    ("a conversion that nobody takes", "Tensor x = zeros({2}); x.to(DType::f16);", ["Tensor"]),
]
accepted = [
    "Tensor x; x = zeros({2}); x = x[0]; Tensor y = std::move(x); x = y; std::swap(x, y);",
    "std::vector<Tensor> v(3); v[0] = zeros({2}); std::rotate(v.begin(), v.begin() + 1, v.end()); v.erase(v.begin());",
    "Tensor a, b; std::tie(a, b) = std::pair(zeros({1}), zeros({2})); a = std::exchange(b, {});",
    "std::pair<Tensor, Tensor> p; p = {zeros({1}), ones({1})}; auto [first, second] = p; first = second;",
    "std::optional<Tensor> o; o = zeros({1}); *o = ones({1}); std::map<int, Tensor> m; m[1] = zeros({2});",
    "struct Pair { Tensor a, b; } p; p = Pair{}; p.a = zeros({1}); std::array<Tensor, 2> q; q = {}; q[1] = p.a;",
    "std::vector<Tensor> v(2); std::sort(v.begin(), v.end(), [](const Tensor&, const Tensor&) { return false; });",
    "static_assert(std::is_nothrow_move_assignable_v<Tensor> && std::copyable<Tensor> && std::swappable<Tensor>);",
    "nn::MLP a(32, 64, 32, gelu), b(2, 2, 2, relu), c(2, 2, 2, [](const Tensor& x) { return gelu(x, GeluKind::tanh); });",
    "std::cout << zeros({2}).strides() << Strides{1} << DType::f16 << Device::cpu() << zeros({2}).dtype();",
    "Strides s = zeros({2}).strides(); std::vector<std::int64_t> v = s; s = v; s = {1, 2}; (void)(s == Strides{1});",
    "Tensor a = tensor({{{1}, {2}}, {{3}, {4}}}), b = tensor(std::array<float, 3>{1, 2, 3}), c = tensor({}), d = tensor({{}});",
    "Tensor a = tensor({{1}, {2}}, {DType::i64}), b = tensor({1, 2.5, true}), c = tensor({1, 2}, {2, 1}), d = tensor(3);",
    "Tensor a = var(zeros({2}), 0, 1), b = var(zeros({2}), {0}, 0.0, true), c = stddev(zeros({2}), 0, 1, true);",
    "std::cout << zeros({2}).shape() << Shape{1, 2}; std::vector<std::int64_t> v = zeros({2}).shape(); v = zeros(v).shape();",
    "nn::Linear n(2, 2); optim::AdamW a(n, {.groups = {{.pattern = \"*\"}}}); optim::SGD s(n, {0.1}); optim::SGD t(n, {});",
    "nn::Linear a(2, 2, {}), b(2, 2, {.bias = false}), c(2, 2, {false}); nn::Conv2d d(1, 1, {2, 2}, {.padding = {1, 1}});",
    "nn::GPT2 g({.layers = 1}); nn::Attention a({.width = 4, .heads = 2}); nn::Llama l(nn::LlamaConfig{.layers = 1});",
]


def compiled(body):
    """The compiler's messages for a program."""
    if not header.exists():
        succeed(compiler + ["-x", "c++-header", root / "potluck.h", "-o", header])
    names = ("potluck.h", "algorithm", "array", "iostream", "map", "optional", "tuple", "utility", "vector")
    includes = "".join(f"#include <{name}>\n" for name in names)
    source = header.with_name("program.cpp")
    source.write_text(f"{includes}using namespace potluck;\n{body}\n")
    return subprocess.run(
        compiler[:-2] + ["-I", header.parent] + compiler[-2:] + ["-fsyntax-only", source],
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )


def most_lines(name):
    """Of an override the compiler quotes both functions, and the way to the first one through the headers: potluck.h, and
    the program."""
    return 8 if "forward" in name else 6


def try_case(code, words, refuses, most=6):
    result = compiled(code if code.startswith(("struct", "void")) else f"void f() {{ {code} }}")
    lines = [line for line in result.stderr.split("\n") if line.strip()]
    shown = f"\n{code}\n{result.stderr}"
    require((result.returncode != 0) == refuses, f"the compiler's exit status is {result.returncode}:{shown}")
    require(lines, f"the compiler says nothing:{shown}")
    require(not refuses or len(lines) <= most, f"the compiler says it in {len(lines)} lines:{shown}")
    for word in words:
        require(word in result.stderr, f'the message lacks "{word}":{shown}')


def try_accepted():
    result = compiled("\n".join(f"void f{i}() {{ {code} }}" for i, code in enumerate(accepted)))
    require(result.returncode == 0 and not result.stderr, result.stderr)


for cases, refuses in ((refused, True), (warned, False)):
    for name, code, words in cases:
        add_case(f"refusals: {name}", lambda c=code, w=words, r=refuses, m=most_lines(name): try_case(c, w, r, m))
add_case("refusals: what is right is accepted without a warning", try_accepted)
run()
