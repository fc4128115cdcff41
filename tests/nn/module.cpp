// Modules: members are listed once, and everything else follows from that.

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <sstream>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

using namespace potluck;
using test::check_error;
using test::same;

namespace {

// A module as a user would write it.
struct Net : nn::Module {
    nn::Linear up{784, 256}, down{256, 10};
    void members(nn::Members& m) override { m("up", up)("down", down); }  // names, once
    Tensor forward(const Tensor& x) override { return down(relu(up(x))); }
};

struct Small : nn::Module {
    nn::Linear a{3, 4}, b{4, 2, {.bias = false}};
    Tensor count = zeros({1}, {DType::i64}), table = ones({2});
    void members(nn::Members& m) override {
        m("a", a)("b", b).buffer("count", count).buffer("table", table, false);
    }
    Tensor forward(const Tensor& x) override { return b(a(x)); }
};

/// An output layer that shares the embedding's weight.
struct Tied : nn::Module {
    nn::Embedding embedding{5, 3};
    nn::Linear head{embedding.weight};
    void members(nn::Members& m) override { m("embedding", embedding)("head", head); }
    Tensor forward(const Tensor& ids) override { return head(embedding(ids)); }
};
struct Untied : nn::Module {
    nn::Embedding embedding{5, 3};
    nn::Linear head{3, 5, {.bias = false}};
    void members(nn::Members& m) override { m("embedding", embedding)("head", head); }
};

struct Lists : nn::Module {
    std::vector<nn::Linear> h;
    std::vector<std::unique_ptr<nn::Module>> mixed;
    std::unique_ptr<nn::Linear> absent;
    std::vector<Tensor> scales;
    Lists() {
        for (int i = 0; i < 2; ++i) h.emplace_back(2, 2);
        mixed.push_back(std::make_unique<nn::LayerNorm>(2));
        mixed.push_back(std::make_unique<nn::RMSNorm>(2));
        scales.push_back(nn::parameter(ones({2})));
    }
    void members(nn::Members& m) override { m("h", h)("mixed", mixed)("absent", absent)("scale", scales); }
};

std::vector<std::string> names_of(const nn::Module& module) {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : module.named_parameters()) names.push_back(name);
    return names;
}

}  // namespace

TEST_CASE("module: the first program of the design trains and is saved") {
    const test::TemporaryFolder folder;
    const data::TensorDataset images(rand({128, 784}), randint(0, 10, {128}));

    manual_seed(42);
    Net net;
    net.to(best_device());
    optim::AdamW optimizer(net, {.learning_rate = 3e-4, .weight_decay = 0.1});
    std::vector<double> losses;
    for (int epoch = 0; epoch < 40; ++epoch) {
        for (auto [x, y] : data::Loader(images, {.batch = 64, .shuffle = true, .workers = 2})) {
            Tensor loss = cross_entropy(net(x), y);
            loss.backward();
            optimizer.step();
            optimizer.zero_grad();
            losses.push_back(loss.item());
        }
    }
    CHECK(losses.back() < 0.7 * losses.front());  // it memorises 128 random labels
    save(net, folder / "net.safetensors");

    Net other;
    CHECK_FALSE(same(other.up.weight, net.up.weight));
    load(other, folder / "net.safetensors");
    CHECK(same(other.up.weight, net.up.weight));
    CHECK(same(other.down.bias, net.down.bias));
}

TEST_CASE("module: names come from members(), in its order") {
    CHECK(names_of(Net()) == std::vector<std::string>{"up.weight", "up.bias", "down.weight", "down.bias"});
    CHECK(Net().parameter_count() == 784 * 256 + 256 + 256 * 10 + 10);
    CHECK(names_of(Lists()) == std::vector<std::string>{"h.0.weight", "h.0.bias", "h.1.weight", "h.1.bias",
                                                        "mixed.0.weight", "mixed.0.bias", "mixed.1.weight",
                                                        "scale.0"});
}

TEST_CASE("module: buffers are saved unless they say otherwise, and are no parameters") {
    const Small net;
    CHECK(net.parameters().size() == 3);
    const nn::StateDict state = net.state_dict();
    CHECK(state.contains("count"));
    CHECK_FALSE(state.contains("table"));
    CHECK(state.size() == 4);
}

TEST_CASE("module: a member without a name or with a name that is taken is refused") {
    struct Twice : nn::Module {
        nn::Linear a{1, 1}, b{1, 1};
        void members(nn::Members& m) override { m("a", a)("a", b); }
    };
    struct Empty : nn::Module {
        nn::Linear a{1, 1};
        void members(nn::Members& m) override { m("", a); }
    };
    struct Dotted : nn::Module {
        nn::Linear a{1, 1};
        Tensor b = nn::parameter(ones({1}));
        void members(nn::Members& m) override { m("a", a)("a.weight", b); }
    };
    struct Itself : nn::Module {
        void members(nn::Members& m) override { m("self", *this); }
    };
    check_error([] { Itself().parameters(); }, {"[module]", "circle", "Itself -> self: Itself"});
    check_error([] { nn::MLP(1, 1, 1, nullptr); }, {"[mlp]", "empty function"});
    check_error([] { Twice().parameters(); }, {"[module]", "\"a\""});
    check_error([] { Empty().parameters(); }, {"[module]", "empty name"});
    check_error([] { Dotted().parameters(); }, {"[module]", "\"a.weight\""});
}

TEST_CASE("module: without a forward it says so") {
    Lists lists;
    check_error([&] { lists(ones({1})); }, {"[module]", "Lists", "forward"});
}

TEST_CASE("module: copies share parameters, clones do not") {
    Small net;
    Small copy = net;
    Small twin = nn::clone(net);
    CHECK(copy.a.weight.is_same(net.a.weight));
    CHECK_FALSE(twin.a.weight.is_same(net.a.weight));
    CHECK(twin.a.weight.storage() != net.a.weight.storage());
    CHECK(same(twin.a.weight, net.a.weight));
    CHECK(twin.a.weight.requires_grad());
    CHECK_FALSE(twin.count.requires_grad());
    {
        const NoGrad guard;
        net.a.weight.fill_(7.0);
        net.count.fill_(7);
    }
    CHECK(copy.a.weight.to_vector<double>()[0] == 7.0);
    CHECK(twin.a.weight.to_vector<double>()[0] != 7.0);
    CHECK(twin.count.item<int>() == 0);
}

TEST_CASE("module: a tied tensor counts once and stays tied") {
    Tied net;
    CHECK(names_of(net) == std::vector<std::string>{"embedding.weight"});
    CHECK(net.parameter_count() == 15);
    CHECK(net.tied_names() == std::map<std::string, std::string>{{"head.weight", "embedding.weight"}});
    CHECK(net.state_dict().size() == 2);
    SUBCASE("through to()") {
        net.to(DType::f64);
        CHECK(net.embedding.weight.dtype() == DType::f64);
        CHECK(net.head.weight.is_same(net.embedding.weight));
    }
    SUBCASE("through clone()") {
        const Tied twin = nn::clone(net);
        CHECK(twin.head.weight.is_same(twin.embedding.weight));
        CHECK_FALSE(twin.head.weight.is_same(net.head.weight));
    }
    SUBCASE("and its gradient is the sum over both places") {
        const Tensor ids = tensor(std::vector<std::int64_t>{0, 1}, {1, 2});
        net(ids).sum().backward();
        const Tensor w = net.embedding.weight;
        // d/dw of sum_{i in ids, j} w_i . w_j: every row gets w_0 + w_1, rows 0 and 1 also get the sum of all rows
        const Tensor looked_up = w.detach()[0] + w.detach()[1];
        const Tensor all_rows = sum(w.detach(), {0});
        CHECK(test::relative_error(w.grad()[0], looked_up + all_rows) < 1e-6);
        CHECK(test::relative_error(w.grad()[4], looked_up) < 1e-6);
    }
}

TEST_CASE("module: load_state_dict lists everything that does not fit at once and changes nothing") {
    Small net;
    const Tensor before = net.a.weight.clone();
    nn::StateDict state = Small().state_dict();
    state.erase("a.bias");
    state["b.weight"] = zeros({3, 3});
    state["stranger"] = zeros({1});
    state["count"] = zeros({1});
    check_error([&] { net.load_state_dict(state); },
                {"Missing: a.bias.", "Unexpected: stranger.", "b.weight has shape (2, 4) here and (3, 3)",
                 "count is i64 here and f32"});
    CHECK(same(net.a.weight, before));

    state["b.weight"] = full({2, 4}, 5.0, {DType::f64});
    state["count"] = full({1}, 3, {DType::i32});
    check_error([&] { net.load_state_dict(state); }, {"Missing", "Unexpected"});
    const nn::LoadReport report = net.load_state_dict(state, false);
    CHECK(report.missing == std::vector<std::string>{"a.bias"});
    CHECK(report.unexpected == std::vector<std::string>{"stranger"});
    CHECK(net.b.weight.dtype() == DType::f32);
    CHECK(net.b.weight.to_vector<double>()[7] == 5.0);
    CHECK(net.count.item<int>() == 3);
    state["b.weight"] = zeros({1});
    check_error([&] { net.load_state_dict(state, false); }, {"Unfit: b.weight"});
}

TEST_CASE("module: loading keeps the tensors, so that an optimizer made before goes on with them") {
    Small net;
    const Tensor weight = net.a.weight;
    net.load_state_dict(Small().state_dict());
    CHECK(net.a.weight.is_same(weight));
    CHECK(net.a.weight.requires_grad());
}

TEST_CASE("module: one name of a tied tensor is enough, two that differ are an error") {
    Tied net;
    const Tensor values = full({5, 3}, 2.0);
    net.load_state_dict({{"head.weight", values}});
    CHECK(same(net.embedding.weight.detach(), values));
    net.load_state_dict({{"embedding.weight", ones({5, 3})}});
    CHECK(same(net.head.weight.detach(), ones({5, 3})));
    check_error(
        [&] {
            net.load_state_dict({{"head.weight", values}, {"embedding.weight", ones({5, 3})}});
        },
        {"embedding.weight and head.weight", "differ"});
    net.load_state_dict({{"head.weight", values}, {"embedding.weight", values.clone()}});
    CHECK(same(net.embedding.weight.detach(), values));
    check_error([&] { net.load_state_dict({}); }, {"Missing: embedding.weight or head.weight"});
    Untied untied;
    check_error([&] { untied.load_state_dict({{"head.weight", values}}); }, {"Missing: embedding.weight"});
}

TEST_CASE("module: to(dtype) converts parameters and their gradients, and leaves buffers alone") {
    Small net;
    net(ones({1, 3})).sum().backward();
    const Tensor gradient = net.a.weight.grad();
    net.to(DType::bf16);
    CHECK(net.a.weight.dtype() == DType::bf16);
    CHECK(net.a.weight.requires_grad());
    CHECK(net.a.weight.grad().dtype() == DType::bf16);
    CHECK(test::relative_error(net.a.weight.grad(), gradient) < 0.01);
    CHECK(net.table.dtype() == DType::f32);
    CHECK(net.count.dtype() == DType::i64);
    check_error([&] { net.to(DType::i32); }, {"[module.to]", "i32"});
}

TEST_CASE("module: tensors tied by their memory stay tied through to() and clone(), and train on") {
    struct Pair : nn::Module {
        Tensor a = nn::parameter(test::tensor({1.0, 2.0, 3.0, 4.0}));
        Tensor b = nn::parameter(a.detach().reshape({2, 2}));
        Tensor seen = a.detach();
        void members(nn::Members& m) override { m.buffer("seen", seen)("a", a)("b", b); }
        bool is_tied() const {
            return a.storage() == b.storage() && seen.storage() == a.storage() && b.offset() == a.offset();
        }
    } m;
    optim::SGD optimizer(m, {.learning_rate = 0.5});
    m.to(DType::f64);
    CHECK(m.is_tied());
    CHECK(m.seen.dtype() == DType::f64);
    m.to(DType::f32);
    CHECK(m.is_tied());
    for (int i = 0; i < 2; ++i) {
        optimizer.zero_grad();
        (m.a.sum() + 2.0 * m.b.sum()).backward();
        optimizer.step();
    }
    CHECK(m.a.detach().to_vector() == std::vector<double>{-2, -1, 0, 1});
    CHECK(m.b.detach().to_vector() == m.a.detach().to_vector());
    const Pair copy = nn::clone(m);
    CHECK(copy.is_tied());
    CHECK_FALSE(copy.a.storage() == m.a.storage());
    CHECK(copy.b.node()->depth == 0);
    CHECK(copy.b.requires_grad());
    CHECK(same(copy.b, m.b));
    // Disjoint parts of one block are converted separately.
    const Tensor block = test::tensor({1.0, 2.0, 3.0, 4.0});
    m.a = nn::parameter(block.narrow(0, 0, 2));
    m.b = nn::parameter(block.narrow(0, 2, 2));
    m.seen = block;
    m.to(DType::f64);
    CHECK(m.a.detach().to_vector() == std::vector<double>{1, 2});
    CHECK(m.b.detach().to_vector() == std::vector<double>{3, 4});
}

TEST_CASE("module: to(dtype) rounds no f32 gradient that may stay as it is") {
    struct One : nn::Module {
        Tensor a;
        void members(nn::Members& m) override { m("a", a); }
    };
    for (const DType from : {DType::f32, DType::bf16}) {
        One m;
        m.a = nn::parameter(ones({2}, {from}));
        const Tensor buffer = zeros({2});
        set_gradient_buffer(m.a, buffer);
        m.a.set_grad(test::tensor({1e6, 1e-9}));
        const std::vector<double> before = buffer.to_vector();
        m.to(DType::f16);
        CHECK(m.a.dtype() == DType::f16);
        CHECK(buffer.to_vector() == before);
        CHECK(m.a.grad().storage() == buffer.storage());
        m.to(DType::f64);  // it does not fit, and is removed
        CHECK(m.a.grad().dtype() == DType::f64);
        CHECK(m.a.grad().to_vector() == before);
    }
    One m;
    m.a = nn::parameter(ones({2}, {DType::bf16}));
    m.a.set_grad(test::tensor({1e6, 1e-9}));
    m.to(DType::f16);
    CHECK(m.a.grad().dtype() == DType::f32);
}

TEST_CASE("module: train() and eval() reach every module, and an evaluation leaves each as it was") {
    Lists lists;
    lists.eval();
    CHECK_FALSE(lists.h[1].is_training());
    CHECK_FALSE(lists.mixed[0]->is_training());
    lists.train();
    lists.h[0].eval();
    {
        const nn::EvalMode evaluating(lists);
        CHECK_FALSE(lists.is_training());
        CHECK_FALSE(lists.h[1].is_training());
    }
    CHECK(lists.is_training());
    CHECK(lists.h[1].is_training());
    CHECK_FALSE(lists.h[0].is_training());
}

TEST_CASE("module: gradients can be dropped, parameters frozen") {
    Small net;
    net.a.set_requires_grad(false);
    net(ones({1, 3})).sum().backward();
    CHECK_FALSE(net.a.weight.grad().defined());
    CHECK(net.b.weight.grad().defined());
    net.zero_grad();
    CHECK_FALSE(net.b.weight.grad().defined());
}

TEST_CASE("module: prints as a tree") {
    std::ostringstream stream;
    Small small;
    small.b.to(DType::bf16);
    stream << small;
    CHECK(stream.str() ==
          "Small: count (1) i64, table (2)\n"
          "  a: Linear(3, 4): weight (4, 3), bias (4)\n"
          "  b: Linear(4, 2, no bias): weight (2, 4) bf16\n"
          "24 parameters");
    CHECK(nn::to_string(Net()).ends_with("\n203,530 parameters"));
    const std::string lists = nn::to_string(Lists());
    CHECK(lists.find("Lists: scale.0 (2)\n") == 0);
    CHECK(lists.find("\n  mixed.1: RMSNorm(2): weight (2)\n") != std::string::npos);
    CHECK(nn::to_string(nn::Dropout(0.5)).find("Dropout(0.5") == 0);
}

namespace {

struct Inner : nn::Module {
    nn::Module* owner = nullptr;
    Tensor scale = nn::parameter(ones({1}));
    void members(nn::Members& m) override {
        m("scale", scale);
        if (owner != nullptr) m("owner", *owner);
    }
};
struct Outer : nn::Module {
    nn::Linear first{2, 2};
    Inner inner;
    void members(nn::Members& m) override { m("first", first)("inner", inner); }
    Tensor forward(const Tensor& x) override { return first(x); }
};

}  // namespace

TEST_CASE("module: modules that name each other are refused by everything that walks them, with the names") {
    Outer outer;
    outer.inner.owner = &outer;
    const std::vector<std::string> parts = {"[module]", "circle", "Outer -> inner: Inner -> owner: Outer"};
    check_error([&] { outer.parameters(); }, parts);
    check_error([&] { outer.named_parameters(); }, parts);
    check_error([&] { outer.parameter_count(); }, parts);
    check_error([&] { outer.tied_names(); }, parts);
    check_error([&] { outer.state_dict(); }, parts);
    check_error([&] { outer.load_state_dict({}); }, parts);
    check_error([&] { outer.to(DType::f64); }, parts);
    check_error([&] { outer.to(Device::cpu()); }, parts);
    check_error([&] { outer.train(); }, parts);
    check_error([&] { outer.assign_random_sites(); }, parts);
    check_error([&] { outer.zero_grad(); }, parts);
    check_error([&] { outer.set_requires_grad(false); }, parts);
    check_error([&] { nn::EvalMode evaluating(outer); }, parts);
    check_error([&] { nn::to_string(outer); }, parts);
    check_error([&] { nn::clone(outer); }, parts);
    check_error([&] { optim::SGD optimizer(outer); }, parts);
    check_error([&] { nn::unregistered_leaves(ones({1}), outer); }, parts);
    check_error([&] { outer.inner.parameters(); }, {"Inner -> owner: Outer -> inner: Inner"});
    outer.inner.owner = nullptr;
    CHECK(outer.parameters().size() == 3);
    // A module with two names is not a cycle.
    Inner shared, twice;
    twice.owner = &shared;
    struct Both : nn::Module {
        Inner *a, *b;
        void members(nn::Members& m) override { m("a", *a)("b", *b); }
    } both;
    both.a = &shared;
    both.b = &twice;
    CHECK(both.parameters().size() == 2);
}

namespace {

/// x a^T b^T, the product of two thin matrices, with b initially 0 (Hu et al., "LoRA", 2021).
struct Lora : nn::Module {
    Tensor a, b;
    Lora(std::int64_t in, std::int64_t out, std::int64_t rank)
        : a(nn::parameter(randn({rank, in}))), b(nn::parameter(zeros({out, rank}))) {}
    void members(nn::Members& m) override { m("a", a)("b", b); }
    Tensor forward(const Tensor& x) override { return linear(linear(x, a), b); }
};

void set_to(const Tensor& parameter, double value) {
    const NoGrad guard;
    parameter.fill_(value);
}

struct LoraLinear : nn::Linear {
    Tensor a = nn::parameter(ones({1, 3}));
    using Linear::Linear;
    void members(nn::Members& m) override {
        Linear::members(m);
        m("a", a);
    }
};

}  // namespace

TEST_CASE("module: what a derived type adds is never lost without a word") {
    nn::Linear plain(3, 4);
    LoraLinear lora(3, 4), other(3, 4);
    check_error([&] { plain = lora; }, {"[module]", "is assigned to", "Linear(3, 4)", "branch"});
    check_error([&] { plain = LoraLinear(3, 4); }, {"[module]"});
    CHECK(plain.parameters().size() == 2);
    nn::Module& as_base = plain;
    check_error([&] { as_base = lora; }, {"[module]"});
    const nn::Linear& seen_as = lora;
    check_error([&] { nn::clone(seen_as); }, {"[module]", "copied as a Linear", "Copy it as what it is"});
    // Assignment of the same type still works.
    lora = other;
    CHECK(same(lora.a, other.a));
    CHECK(LoraLinear(lora).parameters().size() == 3);
    LoraLinear moved = std::move(other);
    CHECK(moved.parameters().size() == 3);
    std::vector<LoraLinear> many(1, lora);
    for (int i = 0; i < 9; ++i) many.push_back(many.front());
    CHECK(many.back().parameters().size() == 3);
    plain = nn::Linear(3, 4);
    CHECK(nn::clone(plain).parameters().size() == 2);
}

TEST_CASE("module: a copy that lost what a derived type adds says so when it is used") {
    const LoraLinear lora(3, 4);
    const std::vector<std::string> words{"[module]", "Linear is a copy of a LoraLinear", "branch"};
    nn::Linear sliced = lora;
    check_error([&] { sliced(ones({2, 3})); }, words);
    check_error([&] { (void)sliced.parameters(); }, words);
    check_error([&] { (void)sliced.state_dict(); }, words);
    check_error([&] { optim::SGD optimizer(sliced); }, words);
    check_error([&] { (void)nn::to_string(sliced); }, words);
    // Also in a list, whatever the list does with it, and in copies of the copy.
    std::vector<nn::Linear> list;
    list.push_back(lora);
    for (int i = 0; i < 4; ++i) list.push_back(nn::Linear(3, 4));
    check_error([&] { list.front()(ones({2, 3})); }, words);
    nn::Linear assigned(3, 4);
    assigned = sliced;
    check_error([&] { assigned(ones({2, 3})); }, words);
    assigned = std::move(sliced);
    check_error([&] { assigned(ones({2, 3})); }, words);
    CHECK(list.back()(ones({2, 3})).shape() == Shape{2, 4});
    struct Owner : nn::Module {
        nn::Linear layer;
        explicit Owner(const nn::Linear& given) : layer(given) {}
        void members(nn::Members& m) override { m("layer", layer); }
    } owner(lora);
    check_error([&] { (void)owner.parameters(); }, words);
    // A derived type may be made of a plain one.
    struct Wrapped : nn::Linear {
        explicit Wrapped(const nn::Linear& plain) : nn::Linear(plain) {}
    };
    const nn::Linear plain(3, 4);
    Wrapped wrapped(plain);
    CHECK(wrapped(ones({2, 3})).shape() == Shape{2, 4});
    Wrapped copy = wrapped;
    CHECK(copy.parameters().size() == 2);
}

TEST_CASE("module: a branch adds to a layer, and belongs to it") {
    nn::Linear layer(3, 4);
    const Tensor x = randn({2, 3}), before = layer(x);
    const std::vector<std::string> names = names_of(layer);
    layer.set_requires_grad(false);
    Lora lora(3, 4, 2);
    layer.branch = lora;
    CHECK(same(layer(x), before));
    CHECK(names_of(layer) == std::vector<std::string>{"weight", "bias", "branch.a", "branch.b"});
    CHECK(nn::to_string(layer).find("\n  branch: Lora: a (2, 3), b (4, 2)\n") != std::string::npos);
    set_to(lora.b, 1.0);  // the branch shares it, like every copy of a module
    CHECK(test::relative_error(layer(x), before + linear(linear(x, lora.a), lora.b)) < 1e-6);
    layer(x).sum().backward();
    CHECK(lora.a.grad().defined());
    CHECK_FALSE(layer.weight.grad().defined());

    nn::Linear copy = layer;  // has its own branch, which shares the tensors
    CHECK(copy.state_dict()["branch.a"].is_same(lora.a));
    nn::Linear apart = nn::clone(layer);
    CHECK_FALSE(apart.state_dict()["branch.a"].is_same(lora.a));
    CHECK(same(apart(x), layer(x)));
    apart.to(DType::f64);
    CHECK(apart.state_dict()["branch.b"].dtype() == DType::f64);
    CHECK(lora.b.dtype() == DType::f32);
    apart.branch = {};
    CHECK(names_of(apart) == names);
    CHECK(names_of(layer).size() == 4);
    layer.eval();
    CHECK_FALSE((*layer.branch).is_training());
    check_error([&] { *apart.branch; }, {"[branch]", "there is none"});
    layer.branch = Lora(3, 5, 1);
    check_error([&] { layer(x); }, {"[branch]", "Lora", "(2, 5)", "(2, 4)"});
    nn::Linear taken = std::move(layer);
    CHECK(names_of(taken).size() == 4);
    layer = taken;
    CHECK(names_of(layer).size() == 4);
}

TEST_CASE("module: a branch takes over the mode of its layer, and must have its dtype") {
    nn::Linear layer(3, 4);
    layer.eval();
    layer.branch = Lora(3, 4, 2);
    layer(randn({2, 3}));
    CHECK_FALSE((*layer.branch).is_training());
    (*layer.branch).train();  // only once: after that it keeps the mode that it is given
    layer(randn({2, 3}));
    CHECK((*layer.branch).is_training());
    layer.branch = Lora(3, 4, 2);
    {
        nn::EvalMode evaluating(layer);
        layer(randn({2, 3}));
    }
    CHECK_FALSE((*layer.branch).is_training());
    layer.train();
    CHECK((*layer.branch).is_training());

    layer.to(DType::bf16);
    layer.branch = Lora(3, 4, 2);
    const Tensor x = randn({2, 3}).to(DType::bf16);
    check_error([&] { layer(x); }, {"[branch]", "Lora makes f32", "layer makes bf16", "to(DType::bf16)"});
    (*layer.branch).to(DType::bf16);
    CHECK(layer(x).dtype() == DType::bf16);
}

TEST_CASE("module: branches of the projections of GPT-2 and Llama take part") {
    const auto try_model = [](nn::LanguageModel& model, auto&& projections) {
        const Tensor ids = tensor(std::vector<std::int64_t>{1, 2, 3}, {1, 3});
        Tensor before = model(ids).detach();
        model.set_requires_grad(false);
        std::size_t count = 0;
        for (auto* projection : projections) {
            const Shape& shape = projection->weight.shape();
            const bool in_first = std::is_same_v<decltype(projection), nn::Conv1D*>;
            Lora lora(shape[in_first ? 0 : 1], shape[in_first ? 1 : 0], 2);
            projection->branch = lora;
            CHECK(same(model(ids), before));
            // Not all equal, because a norm after it would remove that.
            lora.b.detach().copy_(randn(lora.b.shape()));
            const Tensor after = model(ids).detach();
            CHECK(test::relative_error(after, before) > 1e-7);  // each of them has an effect
            before = after;
            count += 2;
        }
        cross_entropy(model(ids), ids).backward();
        std::size_t trained = 0;
        for (const Tensor& parameter : model.parameters()) trained += parameter.grad().defined() ? 1 : 0;
        CHECK(trained == count);
    };
    manual_seed(1);
    nn::GPT2 gpt2({.vocabulary = 11, .context = 8, .width = 8, .heads = 2, .layers = 1});
    nn::GPT2Block& block = gpt2.transformer.h[0];
    try_model(gpt2, std::vector<nn::Conv1D*>{&block.attn.c_attn, &block.attn.c_proj, &block.mlp.c_fc,
                                             &block.mlp.c_proj});
    CHECK(gpt2.state_dict().contains("transformer.h.0.attn.c_attn.branch.a"));
    nn::Llama llama({.vocabulary = 11, .context = 8, .width = 8, .hidden = 12, .heads = 2, .layers = 1});
    nn::LlamaBlock& one = llama.model.layers[0];
    try_model(llama, std::vector<nn::Linear*>{&one.self_attn.q_proj, &one.self_attn.k_proj,
                                              &one.self_attn.v_proj, &one.self_attn.o_proj,
                                              &one.mlp.gate_proj, &one.mlp.up_proj, &one.mlp.down_proj});
}

TEST_CASE("module: leaves that members() forgot are found, with the op that uses them") {
    struct Forgetful : nn::Module {
        nn::Linear known{2, 3}, forgotten{3, 4};
        Tensor scale = nn::parameter(ones({4}));
        void members(nn::Members& m) override { m("known", known); }
        Tensor forward(const Tensor& x) override { return forgotten(known(x)) * scale; }
    } net;
    const Tensor x = randn({5, 2});
    const auto forgotten = nn::unregistered_leaves(net(x).sum(), net);
    REQUIRE(forgotten.size() == 3);
    std::vector<std::string> found;
    for (const nn::UnregisteredLeaf& leaf : forgotten) found.push_back(leaf.op + " " + to_string(leaf.shape));
    std::sort(found.begin(), found.end());
    CHECK(found == std::vector<std::string>{"linear (4)", "linear (4, 3)", "multiply (4)"});
    CHECK(forgotten[0].dtype == DType::f32);

    Net whole;
    CHECK(nn::unregistered_leaves(whole(randn({1, 784})).sum(), whole).empty());
    // An input that requires a gradient is also one; a frozen one and a constant loss have none.
    Tensor input = randn({1, 784});
    input.set_requires_grad();
    CHECK(nn::unregistered_leaves(whole(input).sum(), whole).size() == 1);
    net.forgotten.set_requires_grad(false);
    net.scale.set_requires_grad(false);
    CHECK(nn::unregistered_leaves(net(x).sum(), net).empty());
    CHECK(nn::unregistered_leaves(ones({}), net).empty());
    // The loss itself may be the leaf.
    CHECK(nn::unregistered_leaves(nn::parameter(ones({})), net).size() == 1);
    // A deep graph needs no recursion.
    Tensor y = nn::parameter(ones({1}));
    for (int i = 0; i < 200000; ++i) y = y + 1.0;
    CHECK(nn::unregistered_leaves(y, net).size() == 1);
}

TEST_CASE("load_state_dict: a state that holds the module's own tensors, swapped or overlapping") {
    test::on_each_device([] {
        struct Pair : nn::Module {
            Tensor a = nn::parameter(test::tensor({1.0, 2.0, 3.0})),
                   b = nn::parameter(test::tensor({4.0, 5.0, 6.0}));
            Tensor c = nn::parameter(test::tensor({7.0, 8.0, 9.0}));
            void members(nn::Members& m) override { m("a", a)("b", b)("c", c); }
        };
        const auto values = [](const Tensor& tensor) {
            return tensor.detach().to(Device::cpu()).to_vector();
        };
        using Values = std::vector<double>;
        for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
            Pair pair;
            pair.to(dtype);
            pair.load_state_dict({{"a", pair.b}, {"b", pair.a}, {"c", pair.c}});
            CHECK(values(pair.a) == Values{4, 5, 6});
            CHECK(values(pair.b) == Values{1, 2, 3});
            CHECK(values(pair.c) == Values{7, 8, 9});
            pair.load_state_dict({{"a", pair.b}, {"b", pair.c}, {"c", pair.a}});  // in a cycle
            CHECK(values(pair.a) == Values{1, 2, 3});
            CHECK(values(pair.b) == Values{7, 8, 9});
            CHECK(values(pair.c) == Values{4, 5, 6});
            // One reversed in itself, and one filled with a value of the other.
            const Tensor a = pair.a.detach(), b = pair.b.detach();
            pair.load_state_dict(
                {{"a", a.alias({3}, {-1}, a.offset() + 2)}, {"b", a.alias({3}, {0}, a.offset())}, {"c", b}});
            CHECK(values(pair.a) == Values{3, 2, 1});
            CHECK(values(pair.b) == Values{1, 1, 1});
            CHECK(values(pair.c) == Values{7, 8, 9});
        }
        // Overlapping views of one block: every value is the previous one.
        Pair block;
        const Tensor whole = test::tensor({0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0});
        block.a = nn::parameter(whole.alias({3}, {1}, 0));
        block.b = nn::parameter(whole.alias({3}, {1}, 3));
        block.c = nn::parameter(whole.alias({3}, {1}, 6));
        block.load_state_dict({{"a", whole.alias({3}, {1}, 1)},
                               {"b", whole.alias({3}, {1}, 2)},
                               {"c", whole.alias({3}, {1}, 5)}});
        CHECK(values(block.a) == Values{1, 2, 3});
        CHECK(values(block.b) == Values{2, 3, 4});
        CHECK(values(block.c) == Values{5, 6, 7});
    });
}
