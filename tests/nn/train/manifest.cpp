// The manifest of a checkpoint: several files, checksums, mixed and damaged files, other versions.

#include "nn/train/manifest.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/checksum.h"
#include "potluck.h"
#include "tests/nn/support.h"

using namespace potluck;
using nlohmann::json;
using test::check_error;
using test::same;
namespace fs = std::filesystem;

namespace {

struct Net : nn::Module {
    nn::Linear up{3, 2}, down{2, 3};
    Tensor tied = up.weight;
    void members(nn::Members& m) override { m("up", up)("down", down)("tied", tied); }
    Tensor forward(const Tensor& x) override { return down(up(x)); }
};

/// A net and its optimizer after several steps.
struct Trained {
    explicit Trained(std::uint64_t seed, int steps = 1) {
        manual_seed(seed);
        net = Net();
        optimizer.emplace(net, optim::AdamWOptions{.learning_rate = 0.25});
        for (int i = 0; i < steps; ++i) {
            net(ones({1, 3})).sum().backward();
            optimizer->step();
            optimizer->zero_grad();
        }
    }
    Net net;
    std::optional<optim::AdamW> optimizer;
};

void check_same(const nn::StateDict& a, const nn::StateDict& b) {
    REQUIRE(a.size() == b.size());
    for (const auto& [name, tensor] : a) {
        INFO(name);
        REQUIRE(b.contains(name));
        CHECK(same(tensor.detach(), b.at(name).detach()));
    }
}

void check_same(const Trained& a, const Trained& b) {
    check_same(a.net.state_dict(), b.net.state_dict());
    check_same(a.optimizer->state_dict(), b.optimizer->state_dict());
}

std::string save_at(const std::string& folder, Trained& trained, std::int64_t step) {
    return save_checkpoint(folder, trained.net, *trained.optimizer,
                           {.step = step, .generators = generator_states(trained.net.parameters())});
}

void flip(const std::string& file, std::size_t byte) {
    std::string content = test::read_file(file);
    REQUIRE(byte < content.size());
    content[byte] = static_cast<char>(content[byte] ^ 1);
    test::write_file(file, content);
}

/// The elements between a/c and b/c of every tensor, as one axis.
TensorParts pieces(const nn::StateDict& tensors, std::int64_t a, std::int64_t b, std::int64_t c) {
    TensorParts parts;
    for (const auto& [name, tensor] : tensors) {
        const std::int64_t begin = tensor.count() * a / c, end = tensor.count() * b / c;
        if (begin < end)
            parts[name] = {tensor.detach().reshape({-1}).narrow(0, begin, end - begin), tensor.shape(),
                           begin};
    }
    return parts;
}

}  // namespace

TEST_CASE("checksum: that of XXH3 with 64 bits, in whatever pieces the bytes come") {
    const auto checksum_of = [](const std::string& text, std::size_t piece) {
        Checksum checksum;
        for (std::size_t i = 0; i < text.size(); i += piece)
            checksum.add(text.data() + i, static_cast<std::int64_t>(std::min(piece, text.size() - i)));
        return checksum.text();
    };
    CHECK(checksum_of("", 1) == "2d06800538d394c2");  // as printed by xxhsum -H3
    CHECK(checksum_of("a", 1) == "e6c632b61e964e1f");
    CHECK(checksum_of("abc", 1) == "78af5f94892f3950");
    const std::string text(100'000, 'x');
    for (const std::size_t piece : {7, 4096, 99'999})
        CHECK(checksum_of(text, piece) == checksum_of(text, 100'000));
    const test::TemporaryFolder folder;
    test::write_file(folder / "x", text);
    CHECK(checksum_of_file("test", folder / "x") == checksum_of(text, 100'000));
    const WrittenFile written = save_safetensors(folder / "y", {{{"x", ones({1000})}}, {}});
    CHECK(written.bytes == static_cast<std::int64_t>(fs::file_size(folder / "y")));
    CHECK(written.xxh3 == checksum_of_file("test", folder / "y"));
    check_error([&] { checksum_of_file("test", folder / "absent"); }, {"[test]", "absent"});
}

TEST_CASE("manifest: it says what the files hold") {
    const test::TemporaryFolder folder;
    Trained trained(4);
    const std::string path = save_at(folder.path(), trained, 12);
    const json manifest = json::parse(test::read_file(path + "/manifest.json"));
    CHECK(manifest["version"] == 2);
    CHECK(manifest["step"] == 12);
    CHECK(manifest["seed"] == 4);
    CHECK(manifest["generators"]["cpu"]["seed"] == 4);
    CHECK(manifest["tied"] == json{{"tied", "up.weight"}});
    CHECK(manifest["tensors"]["up.weight"] == json::parse(R"({"shape": [2, 3], "dtype": "float32",
                          "parts": [{"file": "model-0.safetensors", "begin": 0, "end": 6}]})"));
    CHECK(manifest["tensors"]["optimizer/first_moment/up.weight"]["parts"][0]["file"] ==
          "optimizer-0.safetensors");
    CHECK(manifest["files"].size() == 2);
    for (const json& file : manifest["files"]) {
        const std::string name = path + "/" + file["name"].get<std::string>();
        CHECK(file["bytes"] == fs::file_size(name));
        CHECK(file["xxh3"] == checksum_of_file("test", name));
    }
    save(trained.net, folder / "net.safetensors");
    CHECK(test::read_file(folder / "net.safetensors") == test::read_file(path + "/model-0.safetensors"));
}

TEST_CASE("checkpoint: written in three files with parts of tensors in different ones, it loads whole") {
    const test::TemporaryFolder folder;
    Trained trained(5, 3);
    const nn::StateDict state = trained.optimizer->state_dict();
    nn::StateDict model = trained.net.state_dict();
    model.erase("tied");
    const std::string partial = begin_checkpoint(folder.path(), 3);
    Manifest manifest;
    // The last rank has no part of the small tensors, and the first two write out of order.
    for (const auto& [rank, a, b] : std::vector<std::array<std::int64_t, 3>>{{1, 2, 5}, {0, 0, 2}, {2, 5, 6}})
        manifest.add(write_checkpoint_parts(partial, rank, pieces(model, a, b, 6), pieces(state, a, b, 6),
                                            {{"tied", "up.weight"}}));
    manifest.state = {.step = 3, .epochs = 1, .loader = {1, 1, 5, 9}};
    const std::string path = finish_checkpoint(folder.path(), manifest, 0);
    CHECK(manifest.files.size() == 6);
    CHECK(fs::exists(path + "/model-2.safetensors"));

    Trained other(6);
    const TrainingState loaded = load_checkpoint(path, other.net, *other.optimizer);
    check_same(other, trained);
    CHECK(loaded.loader == data::LoaderState{1, 1, 5, 9});
    CHECK(other.net.tied.is_same(other.net.up.weight));

    // If one process writes it again, it equals what that process alone would have written.
    const std::string whole = save_at(folder.path(), other, 4);
    Trained again(7);
    load_checkpoint(whole, again.net, *again.optimizer);
    check_same(again, trained);
}

TEST_CASE("checkpoint: parts that leave holes, overlap or do not agree are refused") {
    const test::TemporaryFolder folder;
    const Tensor six = ones({2, 3});
    const auto finish = [&](const std::vector<TensorParts>& ranks) {
        const std::string partial = begin_checkpoint(folder.path(), 1);
        Manifest manifest;
        for (std::size_t rank = 0; rank < ranks.size(); ++rank)
            manifest.add(
                write_checkpoint_parts(partial, static_cast<std::int64_t>(rank), ranks[rank], {}, {}));
        manifest.state.step = 1;
        finish_checkpoint(folder.path(), manifest, 0);
    };
    const auto part = [](std::int64_t begin, std::int64_t count, Shape shape = {2, 3},
                         DType dtype = DType::f32) {
        return TensorParts{{"w", {ones({count}, {dtype}), std::move(shape), begin}}};
    };
    finish({part(0, 2), part(2, 4)});
    finish({part(2, 4), part(0, 2)});
    finish({part(0, 0, {0, 3})});
    check_error([&] { finish({part(0, 2), part(3, 3)}); }, {"parts of w", "(0, 2), (3, 6)"});
    check_error([&] { finish({part(0, 4), part(3, 3)}); }, {"parts of w"});
    check_error([&] { finish({part(0, 6), part(0, 6)}); }, {"parts of w"});
    check_error([&] { finish({part(0, 5)}); }, {"parts of w", "6 elements"});
    check_error([&] { finish({part(4, 3)}); }, {"3 elements from 4", "w"});
    check_error([&] { finish({part(-1, 3)}); }, {"3 elements from -1"});
    check_error([&] { finish({part(0, 2), part(2, 4, {6})}); }, {"(2, 3)", "(6)"});
    check_error([&] { finish({part(0, 2), part(2, 4, {2, 3}, DType::f64)}); }, {"f32", "f64"});
    check_error([&] { finish({{{"w", {{}, {2}, 0}}}}); }, {"w"});
    check_error([&] { finish({{{"optimizer/w", {ones({2}), {2}, 0}}}}); }, {"optimizer/w"});
    const std::string partial = begin_checkpoint(folder.path(), 1);
    Manifest manifest = write_checkpoint_parts(partial, 0, part(0, 2), {}, {});
    check_error([&] { manifest.add(write_checkpoint_parts(partial, 0, part(2, 4), {}, {})); },
                {"two ranks wrote model-0.safetensors"});
}

TEST_CASE(
    "checkpoint: files of different steps in one folder, and a flipped bit, are errors that name the file") {
    const test::TemporaryFolder folder;
    Trained trained(8);
    const std::string first = save_at(folder.path(), trained, 1);
    trained.net(ones({1, 3})).sum().backward();
    trained.optimizer->step();
    const std::string second = save_at(folder.path(), trained, 2);
    Trained other(9);
    const nn::StateDict before = nn::clone(other.net).state_dict();
    for (const std::string name : {"model-0.safetensors", "optimizer-0.safetensors"}) {
        const std::string file = second + "/" + name;
        const std::string content = test::read_file(file);
        CHECK(content.size() == fs::file_size(first + "/" + name));  // the size alone does not reveal it
        test::write_file(file, test::read_file(first + "/" + name));
        CHECK(latest_checkpoint(folder.path()) == second);
        check_error([&] { load_checkpoint(second, other.net, *other.optimizer); },
                    {"[load_checkpoint]", file, "another checkpoint"});
        test::write_file(file, content);
        for (std::size_t byte : {std::size_t{0}, content.size() / 2, content.size() - 1}) {
            flip(file, byte);
            check_error([&] { load_checkpoint(second, other.net, *other.optimizer); },
                        {"[load_checkpoint]", file, "damaged"});
            flip(file, byte);
        }
    }
    check_same(other.net.state_dict(), before);

    // A resumed run gets the previous checkpoint, and the reason.
    Trained expected(9);
    load_checkpoint(first, expected.net, *expected.optimizer);
    flip(second + "/optimizer-0.safetensors", 200);
    const ResumedCheckpoint resumed = load_latest_checkpoint(folder.path(), other.net, *other.optimizer);
    CHECK(resumed.path == first);
    CHECK(resumed.state.step == 1);
    REQUIRE(resumed.damaged.size() == 1);
    CHECK(resumed.damaged[0].find(second + "/optimizer-0.safetensors") != std::string::npos);
    check_same(other, expected);
    flip(second + "/optimizer-0.safetensors", 200);
    CHECK(load_latest_checkpoint(folder.path(), other.net, *other.optimizer).path == second);
    check_same(other, trained);
    // A checkpoint that does not fit is not damaged: the previous one is not used instead.
    nn::Linear foreign(3, 2);
    optim::SGD sgd(foreign);
    check_error([&] { load_latest_checkpoint(folder.path(), foreign, sgd); }, {second, "Missing"});
}

TEST_CASE("manifest: unknown fields are left alone, other versions and damage are refused") {
    const test::TemporaryFolder folder;
    Trained trained(3);
    const std::string path = save_at(folder.path(), trained, 1);
    const std::string file = path + "/manifest.json";
    const json good = json::parse(test::read_file(file));
    const auto load_changed = [&](const std::function<void(json&)>& change) {
        json content = good;
        change(content);
        test::write_file(file, content.dump());
        Trained other(4);
        load_checkpoint(path, other.net, *other.optimizer);
        check_same(other, trained);
    };
    load_changed([](json& m) {
        m["colour"] = "blue";
        m["files"][0]["compression"] = nullptr;
        m["tensors"]["up.weight"]["parts"][0]["rank"] = 0;
        m["tensors"]["up.weight"]["dtype"] = "f32";
        m.erase("seed");
    });
    const auto refused = [&](const std::function<void(json&)>& change,
                             const std::vector<std::string>& parts) {
        check_error([&] { load_changed(change); }, parts);
        check_error([&] { load_changed(change); }, {"manifest.json"});
    };
    refused([](json& m) { m["version"] = 3; }, {"version 3", "version 2"});
    refused([](json& m) { m["version"] = 3, m.erase("files"); }, {"version 3"});
    refused([](json& m) { m.erase("version"); }, {"damaged", "version"});
    refused([](json& m) { m = json::array(); }, {"damaged"});
    refused([](json& m) { m = 5; }, {"damaged"});
    for (const char* field : {"step", "epochs", "files", "tensors", "generators", "loader"}) {
        refused([&](json& m) { m.erase(field); }, {"damaged", field});
        refused([&](json& m) { m[field] = "soup"; }, {"damaged"});
        refused([&](json& m) { m[field] = nullptr; }, {"damaged"});
        refused([&](json& m) { m[field] = -3; }, {"damaged"});
    }
    refused([](json& m) { m["step"] = 1.5; }, {"damaged", "1.5"});
    refused([](json& m) { m["step"] = UINT64_MAX; }, {"damaged"});
    refused([](json& m) { m["files"][0]["name"] = "../model-0.safetensors"; }, {"no name"});
    refused([](json& m) { m["files"][0]["name"] = "other.safetensors"; }, {"none of the files"});
    refused([](json& m) { m["tensors"]["up.weight"]["dtype"] = "float8"; }, {"float8"});
    refused([](json& m) { m["tensors"]["up.weight"]["shape"] = {2, -3}; }, {"no shape"});
    refused([](json& m) { m["tensors"]["up.weight"]["shape"] = {INT64_MAX, INT64_MAX}; }, {"no shape"});
    refused([](json& m) { m["tensors"]["up.weight"]["parts"][0]["end"] = 5; }, {"parts of up.weight"});
    refused([](json& m) { m["tensors"]["up.weight"]["parts"] = json::array(); }, {"parts of up.weight"});
    refused([](json& m) { m["files"][0]["xxh3"] = ""; }, {"damaged", "xxh3", "16"});
    refused([](json& m) { m["files"][0]["xxh3"] = "2d06800538d394cX"; }, {"damaged", "xxh3"});
    refused([](json& m) { m["files"][0]["xxh3"] = 5; }, {"damaged", "xxh3"});
    for (const json& size : {json(2.9), json("2"), json(true), json(nullptr)})
        refused([&](json& m) { m["tensors"]["up.weight"]["shape"][0] = size; }, {"shape", "no integer"});
    refused([](json& m) { m["tensors"]["up.weight"]["shape"] = {0, INT64_MAX, INT64_MAX}; }, {"no shape"});
    refused([](json& m) { m["tensors"]["up.weight"]["parts"][0]["end"] = 5.5; }, {"damaged", "5.5"});
    refused([](json& m) { m["step"] = 2; }, {"\"step\" is 2", "step 1"});
    refused([](json& m) { m["loader"]["item"] = 1; }, {"item 1 of 0"});
    refused([](json& m) { m["generators"] = {{"soup", m["generators"]["cpu"]}}; }, {"names no device"});
    refused([](json& m) { m.erase("step"); },
            {"[load_checkpoint] " + file + " is damaged: key 'step' not found. Use an older checkpoint."});
    // Manifests that are valid in themselves but do not match the files.
    check_error(
        [&] {
            load_changed([](json& m) {
                const std::int64_t half = std::int64_t{1} << 59;
                m["tensors"]["up.weight"]["shape"] = {2 * half};
                json& parts = m["tensors"]["up.weight"]["parts"];
                parts.push_back(parts[0]);
                parts[0]["end"] = parts[1]["begin"] = half;
                parts[1]["end"] = 2 * half;
            });
        },
        {"model-0.safetensors", "up.weight"});
    check_error([&] { load_changed([](json& m) { m["tensors"]["up.weight"]["dtype"] = "float64"; }); },
                {"model-0.safetensors", "up.weight"});
    check_error([&] { load_changed([](json& m) { m["tensors"]["ghost"] = m["tensors"]["up.weight"]; }); },
                {"model-0.safetensors", "ghost"});
    check_error([&] { load_changed([](json& m) { m["files"][0]["bytes"] = 7; }); },
                {"model-0.safetensors", "7"});
    const std::string text = good.dump();
    for (std::size_t length = 0; length < text.size(); length += 37) {
        test::write_file(file, text.substr(0, length));
        Trained other(4);
        check_error([&] { load_checkpoint(path, other.net, *other.optimizer); },
                    {"manifest.json", "damaged"});
    }
}

TEST_CASE("checkpoint: a manifest that is at odds with its files is damage, and the one before is taken") {
    const test::TemporaryFolder folder;
    Trained trained(3);
    const std::string first = save_at(folder.path(), trained, 1);
    const std::string second = save_at(folder.path(), trained, 2);
    const std::string file = second + "/manifest.json";
    const json good = json::parse(test::read_file(file));
    const std::vector<std::function<void(json&)>> changes = {
        [](json& m) { m["tensors"]["up.weight"]["dtype"] = "float64"; },
        [](json& m) { m["tensors"]["up.weight"]["parts"][0]["file"] = "optimizer-0.safetensors"; },
        [](json& m) {
            m["tensors"]["ghost"] = m["tensors"]["up.weight"];
            m["tensors"].erase("up.weight");
        },
        [](json& m) { m["step"] = 1; },
    };
    for (const auto& change : changes) {
        json content = good;
        change(content);
        test::write_file(file, content.dump());
        Trained other(4);
        const ResumedCheckpoint resumed = load_latest_checkpoint(folder.path(), other.net, *other.optimizer);
        CHECK(resumed.path == first);
        REQUIRE(resumed.damaged.size() == 1);
        CHECK(resumed.damaged[0].starts_with(second));
        check_same(other, trained);
    }
}

TEST_CASE("checkpoint: a folder of version 1, which ends with DONE, still loads") {
    const test::TemporaryFolder folder;
    const std::string path = folder / "step_00000007";
    fs::copy("tests/golden/checkpoint_version_1/step_00000007", path);
    CHECK(latest_checkpoint(folder.path()) == path);
    Trained trained(1, 0);
    const TrainingState state = load_checkpoint(path, trained.net, *trained.optimizer);
    CHECK(state.step == 7);
    CHECK(state.epochs == 2);
    CHECK(state.loader == data::LoaderState{3, 2, 16, 64});
    CHECK(default_generator().state().seed == 9);
    CHECK(default_generator().state().offset == 256);
    CHECK(same(trained.net.up.weight.detach(),
               tensor(std::vector<double>{0.747500002, 1.745, 2.74250007, 4.23999977, 5.23750019, 6.23500013},
                      {2, 3})));
    CHECK(trained.net.tied.is_same(trained.net.up.weight));
    CHECK(trained.optimizer->learning_rate() == 0.25);
    CHECK(trained.optimizer->state_dict().at("first_moment/down.bias").defined());
    // Continuing from it writes the new version, and may remove the old checkpoint.
    save_checkpoint(folder.path(), trained.net, *trained.optimizer, {.step = 8}, 1);
    CHECK_FALSE(fs::exists(path));

    fs::copy("tests/golden/checkpoint_version_1/step_00000007", path);
    fs::resize_file(path + "/model.safetensors", 100);
    check_error([&] { load_checkpoint(path, trained.net, *trained.optimizer); },
                {"model.safetensors", "100 bytes"});
    fs::remove(path + "/model.safetensors");
    check_error([&] { load_checkpoint(path, trained.net, *trained.optimizer); },
                {"model.safetensors", "missing"});
    const std::string done = test::read_file(path + "/DONE");
    for (const char* name : {"../secret", "/etc/hostname", "model-0.safetensors"}) {
        test::write_file(path + "/DONE", name + done.substr(done.find(' ')));
        check_error([&] { load_checkpoint(path, trained.net, *trained.optimizer); },
                    {"DONE", "damaged", name});
    }
    test::write_file(path + "/DONE", "");
    check_error([&] { load_checkpoint(path, trained.net, *trained.optimizer); }, {"DONE", "damaged"});
    CHECK(latest_checkpoint(folder.path()).value().ends_with("8"));
}
