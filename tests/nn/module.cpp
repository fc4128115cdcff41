// Modules: names given once, and everything that follows from them.

#include <doctest/doctest.h>

#include <memory>
#include <sstream>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"

using namespace potluck;
using test::check_error;
using test::same;

namespace {

// As a user writes it.
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

/// An output layer that is the embedding.
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
    CHECK(losses.back() < 0.7 * losses.front());  // it learns 128 random labels by heart
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
    check_error([] { Itself().parameters(); }, {"[module]", "names itself", "\"self\""});
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
        // d/dw of sum_{i in ids, j} w_i . w_j: every row gets w_0 + w_1, rows 0 and 1 get the sum of all rows besides
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
    stream << Small();
    CHECK(stream.str() == "Small\n  a: Linear(3, 4)\n  b: Linear(4, 2, no bias)\n24 parameters");
    CHECK(nn::to_string(Net()).ends_with("\n203,530 parameters"));
    CHECK(nn::to_string(Lists()).find("\n  mixed.1: RMSNorm(2)\n") != std::string::npos);
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
            pair.load_state_dict({{"a", pair.b}, {"b", pair.c}, {"c", pair.a}});  // in a circle
            CHECK(values(pair.a) == Values{1, 2, 3});
            CHECK(values(pair.b) == Values{7, 8, 9});
            CHECK(values(pair.c) == Values{4, 5, 6});
            // Reversed in itself, and one value of another for all.
            const Tensor a = pair.a.detach(), b = pair.b.detach();
            pair.load_state_dict(
                {{"a", a.alias({3}, {-1}, a.offset() + 2)}, {"b", a.alias({3}, {0}, a.offset())}, {"c", b}});
            CHECK(values(pair.a) == Values{3, 2, 1});
            CHECK(values(pair.b) == Values{1, 1, 1});
            CHECK(values(pair.c) == Values{7, 8, 9});
        }
        // Views of one block that overlap: every value is the one from before.
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
