// Saving and loading weights and whole training states.

#include <doctest/doctest.h>

#include <filesystem>

#include "potluck.h"
#include "tests/nn/support.h"

using namespace potluck;
using test::check_error;
using test::same;
namespace fs = std::filesystem;

namespace {

const nn::GPT2Config tied{.vocabulary = 20, .context = 8, .width = 8, .heads = 2, .layers = 1};
const nn::GPT2Config untied{
    .vocabulary = 20, .context = 8, .width = 8, .heads = 2, .layers = 1, .tie_embeddings = false};

void train_one_step(nn::LanguageModel& model) {
    optim::SGD optimizer(model, {.learning_rate = 0.1});
    model.loss(randint(0, 20, {2, 8}), randint(0, 20, {2, 8})).backward();
    optimizer.step();
    optimizer.zero_grad();
}

struct Net : nn::Module {
    nn::Linear layer{3, 2};
    void members(nn::Members& m) override { m("layer", layer); }
    Tensor forward(const Tensor& x) override { return layer(x); }
};

std::string save_at(const std::string& folder, std::int64_t step, std::int64_t keep = 0) {
    Net net;
    optim::SGD optimizer(net);
    return save_checkpoint(folder, net, optimizer, {.step = step}, keep);
}

}  // namespace

TEST_CASE("checkpoint: a tied tensor is stored once and loads into tied and untied models") {
    const test::TemporaryFolder folder;
    nn::GPT2 model(tied);
    save(model, folder / "tied.safetensors");
    const TensorFile file = load_safetensors(folder / "tied.safetensors");
    CHECK(file.tensors.size() == model.named_parameters().size());
    CHECK_FALSE(file.tensors.contains("lm_head.weight"));
    CHECK(file.metadata.at("tied.lm_head.weight") == "transformer.wte.weight");

    SUBCASE("tied: still one tensor, also after a step") {
        nn::GPT2 other(tied);
        load(other, folder / "tied.safetensors");
        CHECK(same(other.lm_head.weight.detach(), model.lm_head.weight.detach()));
        train_one_step(other);
        CHECK(other.lm_head.weight.is_same(other.transformer.wte.weight));
        CHECK_FALSE(same(other.lm_head.weight.detach(), model.lm_head.weight.detach()));
    }
    SUBCASE("untied: both are filled, and go their own ways") {
        nn::GPT2 other(untied);
        load(other, folder / "tied.safetensors");
        CHECK(same(other.lm_head.weight.detach(), model.lm_head.weight.detach()));
        CHECK(same(other.transformer.wte.weight.detach(), model.lm_head.weight.detach()));
        train_one_step(other);
        CHECK_FALSE(same(other.lm_head.weight.detach(), other.transformer.wte.weight.detach()));
    }
    SUBCASE("a file of others that has one name only") {
        TensorFile foreign{model.state_dict(), {}};
        foreign.tensors.erase("transformer.wte.weight");
        save_safetensors(folder / "head.safetensors", foreign);
        nn::GPT2 other(tied);
        load(other, folder / "head.safetensors");
        CHECK(same(other.transformer.wte.weight.detach(), model.lm_head.weight.detach()));
        nn::GPT2 lacking(untied);
        check_error([&] { load(lacking, folder / "head.safetensors"); },
                    {"[load]", "head.safetensors", "Missing: transformer.wte.weight"});
    }
    SUBCASE("untied weights do not fit into a tied model") {
        const nn::GPT2 other(untied);
        save(other, folder / "untied.safetensors");
        check_error([&] { load(model, folder / "untied.safetensors"); }, {"lm_head.weight", "differ"});
    }
}

TEST_CASE("checkpoint: weights survive dtypes and are refused when they do not fit") {
    const test::TemporaryFolder folder;
    Net net;
    net.to(DType::bf16);
    save(net, folder / "net.safetensors");
    CHECK(load_safetensors(folder / "net.safetensors").tensors.at("layer.weight").dtype() == DType::bf16);
    Net wide;
    load(wide, folder / "net.safetensors");
    CHECK(wide.layer.weight.dtype() == DType::f32);
    CHECK(same(wide.layer.weight.detach(), net.layer.weight.detach().to(DType::f32)));

    nn::GPT2 model(tied);
    check_error([&] { load(model, folder / "net.safetensors"); },
                {"[load]", "net.safetensors", "Missing", "Unexpected"});
    check_error([&] { load(model, folder / "absent.safetensors"); }, {"absent.safetensors"});
    test::write_file(folder / "empty.safetensors", "");
    check_error([&] { load(net, folder / "empty.safetensors"); }, {"empty.safetensors"});
    const std::string content = test::read_file(folder / "net.safetensors");
    test::write_file(folder / "cut.safetensors", content.substr(0, content.size() - 2));
    check_error([&] { load(net, folder / "cut.safetensors"); }, {"cut.safetensors"});
    // A loaded model does not depend on the file any more.
    fs::remove(folder / "net.safetensors");
    CHECK(wide(ones({1, 3})).shape() == Shape{1, 2});
}

TEST_CASE("checkpoint: a training state comes back as it was") {
    const test::TemporaryFolder folder;
    manual_seed(9);
    Net net;
    optim::AdamW optimizer(net);
    net(ones({1, 3})).sum().backward();
    optimizer.step();
    default_generator().take(1000);
    const RandomKey generator = default_generator().state();
    const std::string path = save_checkpoint(
        folder.path(), net, optimizer,
        {.step = 7, .epochs = 2, .loader = {3, 2, 16, 64}, .generators = generator_states(net.parameters())});
    CHECK(path.ends_with("step_00000007"));
    CHECK(latest_checkpoint(folder.path()) == path);

    manual_seed(1);
    Net other;
    optim::AdamW resumed(other);
    const TrainingState state = load_checkpoint(path, other, resumed);
    CHECK(state.step == 7);
    CHECK(state.epochs == 2);
    CHECK(state.loader == data::LoaderState{3, 2, 16, 64});
    CHECK(default_generator().state().seed == generator.seed);
    CHECK(default_generator().state().offset == generator.offset);
    CHECK(same(other.layer.weight.detach(), net.layer.weight.detach()));
    CHECK(same(resumed.state_dict().at("first_moment/layer.weight"),
               optimizer.state_dict().at("first_moment/layer.weight")));
}

TEST_CASE("checkpoint: the newest complete one counts, cut ones do not") {
    const test::TemporaryFolder folder;
    CHECK_FALSE(latest_checkpoint(folder / "absent").has_value());
    CHECK_FALSE(latest_checkpoint(folder.path()).has_value());
    const std::string five = save_at(folder.path(), 5);
    const std::string ten = save_at(folder.path(), 10);
    const std::string hundred = save_at(folder.path(), 100);
    CHECK(latest_checkpoint(folder.path()) == hundred);
    Net net;
    optim::SGD optimizer(net);

    fs::remove(hundred + "/manifest.json");  // as if the program had been killed before writing it
    CHECK(latest_checkpoint(folder.path()) == ten);
    check_error([&] { load_checkpoint(hundred, net, optimizer); }, {"[load_checkpoint]", "not complete"});

    const std::string cut = ten + "/model-0.safetensors";
    fs::resize_file(cut, fs::file_size(cut) - 1);
    CHECK(latest_checkpoint(folder.path()) == five);
    check_error([&] { load_checkpoint(ten, net, optimizer); }, {cut.c_str(), "bytes"});
    fs::create_directories(folder / "step_00000200.partial");
    fs::create_directories(folder / "step_abc");
    test::write_file(folder / "step_00000300", "");
    CHECK(latest_checkpoint(folder.path()) == five);

    const Tensor before = net.layer.weight.clone();
    const std::string manifest = five + "/manifest.json";
    const std::string content = test::read_file(manifest);
    test::write_file(manifest, std::string(fs::file_size(manifest), '?'));
    check_error([&] { load_checkpoint(five, net, optimizer); }, {manifest.c_str(), "damaged"});
    CHECK_FALSE(latest_checkpoint(folder.path()).has_value());
    check_error([&] { load_latest_checkpoint(folder.path(), net, optimizer); },
                {"none of the checkpoints", manifest.c_str(), cut.c_str(), hundred.c_str()});
    CHECK(same(net.layer.weight.detach(), before.detach()));
    check_error([&] { load_checkpoint(folder / "none", net, optimizer); }, {"there is no checkpoint"});
    test::write_file(manifest, content);

    save_at(folder.path(), 100);  // replaces the damaged one, and removes unfinished ones
    CHECK(latest_checkpoint(folder.path()) == hundred);
    CHECK_FALSE(fs::exists(folder / "step_00000200.partial"));
    CHECK_FALSE(fs::exists(hundred + ".replaced"));
}

TEST_CASE("checkpoint: only the newest are kept") {
    const test::TemporaryFolder folder;
    for (const std::int64_t step : {1, 2, 3, 4}) save_at(folder.path(), step, 2);
    CHECK_FALSE(fs::exists(folder / "step_00000002"));
    CHECK(fs::exists(folder / "step_00000003"));
    CHECK(fs::exists(folder / "step_00000004"));
    save_at(folder.path(), 1, 2);  // the newest one is always kept
    CHECK(fs::exists(folder / "step_00000001"));
}

TEST_CASE("checkpoint: a folder that cannot be written gives one clear error") {
    const test::TemporaryFolder folder;
    test::write_file(folder / "file", "");
    check_error([&] { save_at(folder / "file/checkpoints", 1); }, {"[save_checkpoint]", "file/checkpoints"});
    check_error([&] { save_at(folder.path(), 1, -1); }, {"[save_checkpoint] keep is -1"});
    check_error([&] { save_at("", 1); }, {"[save_checkpoint] the folder is empty", "Give"});
}

TEST_CASE("checkpoint: saving removes what was never finished, and nothing of others") {
    const test::TemporaryFolder folder;
    fs::create_directories(folder / "step_00000003.partial");
    const std::vector<std::string> foreign = {"film.partial", "step_.partial", "step_3.partial",
                                              "step_00000004.partial.partial", "my_step_00000004.partial"};
    for (const std::string& name : foreign) test::write_file(folder / name, "mine");
    fs::create_directories(folder / "folder.partial");
    test::write_file(folder / "step_00000005.partial", "a file");
    test::write_file(folder / "folder.partial/file", "mine");
    fs::create_directory_symlink(folder / "folder.partial", folder / "step_00000006.partial");
    save_at(folder.path(), 8);
    CHECK_FALSE(fs::exists(folder / "step_00000003.partial"));
    for (const std::string& name : foreign) CHECK(fs::exists(folder / name));
    CHECK(fs::exists(folder / "folder.partial/file"));
    CHECK(fs::exists(folder / "step_00000005.partial"));
    CHECK(fs::exists(folder / "step_00000006.partial"));
}

TEST_CASE("checkpoint: one that does not fit is loaded in no part") {
    const test::TemporaryFolder folder;
    Net saved;
    optim::AdamW adam(saved);
    saved(ones({1, 3})).sum().backward();
    adam.step();
    manual_seed(1);
    const std::string path = save_checkpoint(
        folder.path(), saved, adam,
        {.step = 1, .loader = {0, 0, 0, 64}, .generators = generator_states(saved.parameters())});
    manual_seed(2);
    Net net;
    nn::Linear other(3, 2);
    const nn::StateDict before = nn::clone(net).state_dict();
    const RandomKey generator = default_generator().state();
    const auto check_unchanged = [&] {
        for (const auto& [name, tensor] : before) CHECK(same(tensor, net.state_dict().at(name).detach()));
        CHECK(default_generator().state().seed == generator.seed);
        CHECK(default_generator().state().offset == generator.offset);
    };
    SUBCASE("the optimizer is another") {
        optim::SGD sgd(net, {.learning_rate = 0.5, .momentum = 0.9});
        check_error([&] { load_checkpoint(path, net, sgd); }, {path, "Missing", "Nothing was loaded"});
        check_error([&] { load_latest_checkpoint(folder.path(), net, sgd); }, {path, "Nothing was loaded"});
        check_unchanged();
        CHECK(sgd.learning_rate() == 0.5);
    }
    SUBCASE("the module is another") {
        optim::AdamW own(net, {.learning_rate = 0.5});
        check_error([&] { load_checkpoint(path, other, own); }, {path, "Missing"});
        CHECK(own.learning_rate() == 0.5);
        CHECK(own.steps() == 0);
        check_unchanged();
    }
    SUBCASE("the loader of a resumed run has other data") {
        const std::string run = folder / "run";
        fs::create_directories(run + "/checkpoints");
        fs::rename(path, run + "/checkpoints/step_00000001");
        optim::AdamW own(net, {.learning_rate = 0.5});
        data::Loader loader(data::TensorDataset(ones({8, 3}), ones({8, 2})), {.batch = 4});
        const data::LoaderState state = loader.state();
        Trainer trainer(net, own, loader, {.steps = 2, .run_folder = run, .resume = true, .quiet = true});
        check_error([&] { trainer.fit(); }, {"step_00000001", "64 items", "this one has 8"});
        CHECK(own.learning_rate() == 0.5);
        CHECK(loader.state() == state);
        check_unchanged();
    }
}

TEST_CASE("checkpoint: generators of devices that are not here are left out, the others set") {
    const test::TemporaryFolder folder;
    Net net;
    optim::SGD optimizer(net);
    const std::string path =
        save_checkpoint(folder.path(), net, optimizer,
                        {.step = 1, .generators = {{"cpu", {5, 8}}, {"cpu:9", {6, 8}}, {"cuda:77", {7, 8}}}});
    manual_seed(1);
    CHECK(load_checkpoint(path, net, optimizer).generators.size() == 3);
    CHECK(default_generator().state().seed == 5);
    CHECK(default_generator().state().offset == 8);
}
