// A moved-from object may be destroyed or assigned to; any other use is an Error or still correct, never a crash. The
// tests for loaders are in tests/data/loader_share.cpp.

#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "potluck.h"
#include "tests/expect_error.h"
#include "tests/nn/support.h"

using namespace potluck;

namespace {

/// The text of the Error that `use` throws, or "".
template <class Use>
std::string text_of(Use&& use) {
    try {
        use();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

template <class T>
using Uses = std::vector<std::function<void(T&)>>;

/// Every use of a moved-from T is an Error, but not after it was assigned to.
template <class T>
void check_moved(T object, const Uses<T>& uses) {
    for (std::size_t i = 0; i < uses.size(); ++i) {
        INFO("use ", i, " of ", std::string(typeid(T).name()));
        T heir = std::move(object);
        CHECK_FALSE(text_of([&] { uses[i](object); }).empty());
        object = std::move(heir);
        CHECK(text_of([&] { uses[i](object); }) == "");
    }
    T last = std::move(object);
}

/// For modules that compute with `x`: functions that need no tensor (listing, printing to a stream) may still work.
template <class M>
void check_moved_module(M module, const Tensor& x) {
    check_moved<M>(std::move(module), {
                                          [x](M& m) { (void)m.forward(x); },
                                          [x](M& m) { (void)m(x); },
                                          [x](M& m) { m.forward(x).sum().backward(); },
                                      });
}

/// Modules that contain only numbers are unchanged by a move.
template <class M>
void check_unharmed(M module, const Tensor& x) {
    module.eval();
    const Tensor before = module(x);
    M heir = std::move(module);
    CHECK(test::same(heir(x), before));
    module = std::move(heir);
    CHECK(test::same(module(x), before));
}

template <class M>
void check_listing(M module) {
    M heir = std::move(module);
    (void)module.parameters();
    (void)module.state_dict();
    module.train();
    module.zero_grad();
    module.to(DType::f64);
    text_of([&] { (void)nn::to_string(module); });  // an Error or a text
    module = std::move(heir);
    CHECK_FALSE(module.parameters().empty());
}

}  // namespace

TEST_CASE("moved from: tensors and what holds them") {
    check_moved<Tensor>(nn::parameter(ones({2, 2})), {
                                                         [](Tensor& x) { (void)x.shape(); },
                                                         [](Tensor& x) { (void)x.dtype(); },
                                                         [](Tensor& x) { (void)x.device(); },
                                                         [](Tensor& x) { (void)x.count(); },
                                                         [](Tensor& x) { (void)x[0]; },
                                                         [](Tensor& x) { (void)x.to_vector(); },
                                                         [](Tensor& x) { (void)(x + 1); },
                                                         [](Tensor& x) { (void)matmul(x, x); },
                                                         [](Tensor& x) { (void)x.sum().item(); },
                                                         [](Tensor& x) { (void)x.reshape({4}); },
                                                         [](Tensor& x) { (void)x.to(DType::f64); },
                                                         [](Tensor& x) { (void)x.clone(); },
                                                         [](Tensor& x) { (void)x.detach(); },
                                                         [](Tensor& x) { x.sum().backward(); },
                                                         [](Tensor& x) { (void)x.raw_data(); },
                                                     });
    TensorFile file{{{"x", ones({2})}}, {{"format", "pt"}}};
    const TensorFile heir = std::move(file);  // maps are empty after a move
    CHECK(file.tensors.empty());
    CHECK(heir.tensors.size() == 1);
}

TEST_CASE("moved from: datasets, decoders, generators") {
    check_moved<data::TensorDataset>(data::TensorDataset(ones({2, 2}), ones({2})),
                                     {[](auto& d) { (void)d.size(); }, [](auto& d) { (void)d.get(0, {}); }});
    check_moved<data::TokenWindows>(data::TokenWindows(arange(0, 9), 2),
                                    {[](auto& d) { (void)d.size(); }, [](auto& d) { (void)d.get(0, {}); }});
    check_moved<data::FunctionDataset>(data::FunctionDataset(3,
                                                             [](auto, auto) {
                                                                 return data::Example{ones({1}), {}};
                                                             }),
                                       {[](auto& d) { (void)d.get(0, {}); }});
    data::StreamingDecoder decoder;
    (void)decoder.push(0xC3);
    data::StreamingDecoder heir = std::move(decoder);
    CHECK(heir.push(0xA9) == "\xC3\xA9");
    (void)decoder.finish();
    CHECK(decoder.push('x') == "x");
    Generator generator;
    generator.take(8);
    Generator other = std::move(generator);
    CHECK(generator.state().offset == other.state().offset);
}

TEST_CASE("moved from: layers and models") {
    const Tensor row = ones({2, 4}), text = ones({2, 3, 4});
    check_moved_module(nn::Linear(4, 3), row);
    check_moved_module(nn::Conv1D(4, 3), row);
    check_moved_module(nn::LayerNorm(4), row);
    check_moved_module(nn::RMSNorm(4), row);
    check_moved_module(nn::BatchNorm(4), row);
    check_moved_module(nn::MLP(4, 8, 2), row);
    check_moved_module(nn::SwiGLU(4, 8), row);
    check_moved_module(nn::Embedding(5, 3), zeros({2}, {DType::i64}));
    check_moved_module(nn::Conv1d(4, 2, 1), text.transpose(1, 2));
    check_moved_module(nn::Conv2d(3, 2, 1), ones({1, 3, 4, 4}));
    check_moved_module(nn::Attention({.width = 4, .heads = 2}), text);
    const nn::GPT2Config gpt2{.vocabulary = 9, .context = 4, .width = 4, .heads = 2, .layers = 1};
    const nn::LlamaConfig llama{
        .vocabulary = 9, .context = 4, .width = 4, .hidden = 6, .heads = 2, .layers = 1};
    const Tensor ids = zeros({1, 3}, {DType::i64});
    check_moved_module(nn::GPT2(gpt2), ids);
    check_moved_module(nn::Llama(llama), ids);
    check_moved<nn::GPT2>(nn::GPT2(gpt2), {[](auto& m) { (void)m.make_cache(1); }});
    check_moved<nn::Llama>(nn::Llama(llama), {[](auto& m) { (void)m.make_cache(1); }});
    check_unharmed(nn::Dropout(0.5), row);
    check_unharmed(nn::MaxPool1d(2), text);
    check_unharmed(nn::AvgPool1d(2), text);
    check_unharmed(nn::MaxPool2d(2), ones({1, 1, 4, 4}));
    check_unharmed(nn::AvgPool2d(2), ones({1, 1, 4, 4}));
    check_listing(nn::Linear(4, 3));
    check_listing(nn::Conv2d(3, 2, 1));
    check_listing(nn::BatchNorm(4));
    check_listing(nn::Attention({.width = 4, .heads = 2}));
    check_listing(nn::GPT2(gpt2));
    check_listing(nn::Llama(llama));

    nn::KeyValueCache cache(1, 1, 1, 4, 2);
    nn::KeyValueCache heir = std::move(cache);
    const NoGrad guard;
    const Tensor keys = ones({1, 1, 1, 2});
    CHECK(test::contains(test::error_of([&] { cache.append(0, keys, keys); }), "no layer"));
    cache = std::move(heir);
    CHECK(cache.append(0, keys, keys).first.shape() == Shape{1, 1, 1, 2});
}

TEST_CASE("moved from: a module that has no tensors any more is not saved") {
    const test::TemporaryFolder folder;
    nn::Linear layer(4, 3);
    const nn::Linear heir = std::move(layer);
    save(heir, folder / "layer.safetensors");
    const std::string before = test::read_file(folder / "layer.safetensors");
    CHECK(test::contains(test::error_of([&] { save(layer, folder / "layer.safetensors"); }),
                         "has no tensors to be saved"));
    CHECK(test::read_file(folder / "layer.safetensors") == before);
}

TEST_CASE("moved from: optimizers and trainers stay where they are, a run folder can be moved") {
    static_assert(!std::is_move_constructible_v<optim::SGD> && !std::is_move_assignable_v<optim::SGD>);
    static_assert(!std::is_move_constructible_v<optim::AdamW> && !std::is_move_assignable_v<optim::AdamW>);
    const test::TemporaryFolder folder;
    check_moved<RunFolder>(RunFolder(folder / "run", false),
                           {
                               [](RunFolder& run) { run.append({}); },
                               [](RunFolder& run) { (void)run.rewind(1); },
                               [](RunFolder& run) { run.write({}); },
                               [](RunFolder& run) { (void)run.checkpoints(); },
                           });
    CHECK(test::contains(test::error_of([] { RunFolder("", false); }), "empty"));
}

TEST_CASE("run folder: lines that are damaged, or lack fields, do not end a resume") {
    const test::TemporaryFolder folder;
    const std::string path = folder / "run";
    { const RunFolder run(path, false); }
    const std::string lines =
        "{\"step\":1,\"loss\":2.5,\"val_loss\":1.5}\n"
        "{\"step\":2,\"loss\":null,\"val_loss\":null,\"tokens\":\"many\"}\n"
        "{\"step\":3}\n";
    test::write_file(path + "/metrics.jsonl",
                     lines +
                         "[]\n5\nnull\n\n{\"loss\":1}\n{\"step\":\"3\"}\n{\"step\":1.5}\n{\"step\":null}\n" +
                         "{\"step\":4,\"loss\":9}\n\xff\xfe\n{\"step\":3,\"lo");
    RunFolder run(path, true);
    const std::optional<StepMetrics> last = run.rewind(3);
    REQUIRE(last.has_value());
    CHECK(last->step == 1);
    CHECK(last->loss == 2.5);
    CHECK(last->validation_loss == 1.5);
    CHECK(last->tokens == 0);
    CHECK(test::read_file(path + "/metrics.jsonl") == lines);
}
