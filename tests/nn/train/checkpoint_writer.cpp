// Checkpoints that are written while the training goes on.

#include "nn/train/checkpoint_writer.h"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <thread>

#include "potluck.h"
#include "tests/nn/support.h"
#include "tests/on_device.h"
#include "tests/skip.h"

using namespace potluck;
using test::check_error;
namespace fs = std::filesystem;

namespace {

/// A model with tied and with small tensors, and its optimizer after some steps.
struct Training {
    explicit Training(Device device, DType dtype = DType::f32) {
        model.to(device);
        model.to(dtype);
        optimizer.emplace(model, optim::AdamWOptions{.learning_rate = 0.01});
        for (int i = 0; i < 3; ++i) step();
    }
    void step() {
        Generator generator(5);
        const Tensor ids = randint(0, 60, {2, 8}, {DType::i64}, &generator).to(device());
        model.loss(ids, ids).backward();
        optimizer->step();
        optimizer->zero_grad();
    }
    Device device() const { return model.lm_head.weight.device(); }
    TrainingState state(std::int64_t step) const {
        return {.step = step,
                .epochs = 1,
                .loader = {1, 1, 5, 9},
                .generators = generator_states(model.parameters())};
    }

    nn::GPT2 model = [] {
        manual_seed(11);
        return nn::GPT2({.vocabulary = 60, .context = 8, .width = 32, .heads = 2, .layers = 2});
    }();
    std::optional<optim::AdamW> optimizer;
};

/// The files of a checkpoint, by name.
std::map<std::string, std::string> files_of(const std::string& checkpoint) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(checkpoint))
        files[entry.path().filename().string()] = test::read_file(entry.path().string());
    return files;
}

std::ptrdiff_t entries_of(const std::string& folder) {
    return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
}

void wait_until_written(const CheckpointWriter& writer) {
    while (writer.is_writing()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// Files cannot grow past some bytes while it lives.
class FileSizeLimit {
public:
    explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
        REQUIRE(getrlimit(RLIMIT_FSIZE, &before_) == 0);
        const rlimit limit{bytes, before_.rlim_max};
        REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    }
    ~FileSizeLimit() {
        setrlimit(RLIMIT_FSIZE, &before_);
        std::signal(SIGXFSZ, handler_);
    }
    FileSizeLimit(const FileSizeLimit&) = delete;
    FileSizeLimit& operator=(const FileSizeLimit&) = delete;

private:
    rlimit before_{};
    void (*handler_)(int);
};

struct MemoryCap {
    explicit MemoryCap(std::int64_t bytes) { set_memory_cap(bytes); }
    ~MemoryCap() { set_memory_cap(0); }
    MemoryCap(const MemoryCap&) = delete;
    MemoryCap& operator=(const MemoryCap&) = delete;
};

std::int64_t booked() {
    const auto by_op = memory_statistics().current_by_op;
    const auto found = by_op.find("checkpoint_writer");
    return found == by_op.end() ? 0 : found->second;
}

}  // namespace

TEST_CASE("checkpoint writer: the files are those of save_checkpoint(), whatever is changed meanwhile") {
    test::on_each_device([] {
        for (const DType dtype : {DType::f32, DType::bf16}) {
            const test::TemporaryFolder folder;
            Training training(test::test_device(), dtype);
            const auto expected = files_of(
                save_checkpoint(folder / "whole", training.model, *training.optimizer, training.state(3)));
            CheckpointWriter writer(folder / "beside");
            CHECK(writer.wait().empty());
            writer.save(training.model, *training.optimizer, training.state(3));
            {
                const NoGrad guard;
                for (const Tensor& parameter : training.model.parameters()) parameter.fill_(7);
            }
            default_generator().take(100);
            const std::string path = writer.wait();
            CHECK(path == folder / "beside/step_00000003");
            CHECK(files_of(path) == expected);
            CHECK(expected.size() == 3);
        }
    });
}

TEST_CASE("checkpoint writer: what it wrote is resumed with the same bits") {
    test::on_each_device([] {
        const test::TemporaryFolder folder;
        Training training(test::test_device());
        CheckpointWriter writer(folder.path());
        writer.save(training.model, *training.optimizer, training.state(3));
        for (int i = 0; i < 3; ++i) training.step();
        const std::string path = writer.wait();
        Training resumed(test::test_device());
        load_checkpoint(path, resumed.model, *resumed.optimizer);
        for (int i = 0; i < 3; ++i) resumed.step();
        for (const auto& [name, tensor] : training.model.state_dict())
            CHECK(test::same(tensor.detach(), resumed.model.state_dict().at(name).detach()));
        for (const auto& [name, tensor] : training.optimizer->state_dict())
            CHECK(test::same(tensor, resumed.optimizer->state_dict().at(name)));
    });
}

TEST_CASE("checkpoint writer: saves in a row use the same memory, and the newest stay") {
    const test::TemporaryFolder folder;
    Training training(Device::cpu());
    const std::int64_t before = booked();
    {
        CheckpointWriter writer(folder.path(), 2);
        CHECK(booked() == before);
        writer.save(training.model, *training.optimizer, training.state(1));
        const std::int64_t held = booked() - before;
        CHECK(held > 3 * 4 * training.model.parameter_count());
        CHECK(held < 4 * 4 * training.model.parameter_count());
        for (const std::int64_t step : {2, 3, 4}) {
            training.step();
            writer.save(training.model, *training.optimizer, training.state(step));
            CHECK(booked() - before == held);
            // The one before was waited for.
            CHECK(latest_checkpoint(folder.path()).value() >= folder / fmt::format("step_{:08}", step - 1));
        }
        training.step();
        CHECK(writer.save_and_wait(training.model, *training.optimizer, training.state(5)) ==
              folder / "step_00000005");
        CHECK_FALSE(writer.is_writing());
        CHECK(booked() - before == held);
        CHECK(writer.wait() == folder / "step_00000005");
    }
    CHECK(booked() == before);
    CHECK(entries_of(folder.path()) == 2);
    CHECK(fs::exists(folder / "step_00000004/manifest.json"));
    CHECK(fs::exists(folder / "step_00000005/manifest.json"));
    check_error([&] { CheckpointWriter(folder.path(), -1); }, {"[save_checkpoint] keep is -1"});
}

TEST_CASE("checkpoint writer: its end waits for what is being written") {
    const test::TemporaryFolder folder;
    Training training(Device::cpu());
    std::vector<std::string> warnings;
    const auto warn = [&](const std::string& sentence) { warnings.push_back(sentence); };
    {
        CheckpointWriter writer(folder.path(), 0, warn);
        writer.save(training.model, *training.optimizer, training.state(1));
    }
    CHECK(entries_of(folder.path()) == 1);
    CHECK(latest_checkpoint(folder.path()) == folder / "step_00000001");
    CHECK(warnings.empty());
    {
        test::write_file(folder / "file", "");
        CheckpointWriter writer(folder / "file/below", 0, warn);
        writer.save(training.model, *training.optimizer, training.state(1));
    }
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].find("the last checkpoint was not saved: [save_checkpoint]") == 0);
    CHECK(warnings[0].find(folder / "file/below") != std::string::npos);
}

TEST_CASE("checkpoint writer: a checkpoint that fails is told once, and those before it stay") {
    const test::TemporaryFolder folder;
    Training training(Device::cpu());
    CheckpointWriter writer(folder.path(), 1);
    writer.save(training.model, *training.optimizer, training.state(1));
    writer.wait();
    for (const int reported_by : {0, 1, 2}) {
        CAPTURE(reported_by);
        {
            const FileSizeLimit limit(50'000);
            writer.save(training.model, *training.optimizer, training.state(2));
            wait_until_written(writer);
        }
        CHECK(latest_checkpoint(folder.path()) == folder / "step_00000001");
        CHECK(entries_of(folder.path()) == 1);
        check_error(
            [&] {
                if (reported_by == 0) writer.poll();
                if (reported_by == 1) writer.wait();
                if (reported_by == 2) writer.save(training.model, *training.optimizer, training.state(3));
            },
            {"[save_safetensors]", "step_00000002", "model-0.safetensors", "Free some space"});
        writer.poll();
        CHECK(writer.wait() == folder / "step_00000001");
    }
    writer.save(training.model, *training.optimizer, training.state(4));
    CHECK(writer.wait() == folder / "step_00000004");

    // The folder is gone, which is no harm, or something else has taken its place.
    fs::remove_all(folder.path());
    writer.save(training.model, *training.optimizer, training.state(5));
    CHECK(writer.wait() == folder / "step_00000005");
    fs::remove_all(folder.path());
    test::write_file(folder.path(), "");
    writer.save(training.model, *training.optimizer, training.state(6));
    check_error([&] { writer.wait(); }, {"[save_checkpoint]", folder.path()});
    fs::remove(folder.path());
}

TEST_CASE("checkpoint writer: a full disk leaves the checkpoint before") {
    const test::TemporaryFolder folder;
    if (mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
        test::skip("no right to mount a small file system");
        return;
    }
    {
        Training training(Device::cpu());
        CheckpointWriter writer(folder.path());
        bool is_full = false;
        std::int64_t step = 0;
        while (!is_full && step < 20) {  // each takes about 0.4 MB
            try {
                writer.save(training.model, *training.optimizer, training.state(++step));
                writer.wait();
            } catch (const Error& error) {
                is_full = std::string(error.what()).find("No space left") != std::string::npos;
            }
        }
        CHECK(is_full);
        REQUIRE(step > 1);
        CHECK(entries_of(folder.path()) == step - 1);
        Training resumed(Device::cpu());
        CHECK(load_latest_checkpoint(folder.path(), resumed.model, *resumed.optimizer).state.step ==
              step - 1);
        fs::remove_all(folder / "step_00000001");
        writer.save(training.model, *training.optimizer, training.state(step));
        CHECK(writer.wait() == folder / fmt::format("step_{:08}", step));
    }
    umount(folder.path().c_str());
}

TEST_CASE("checkpoint writer: without memory for the copy it writes at once, and says so once") {
    const test::TemporaryFolder folder;
    Training training(Device::cpu());
    std::vector<std::string> warnings;
    CheckpointWriter writer(folder.path(), 0,
                            [&](const std::string& sentence) { warnings.push_back(sentence); });
    {
        // The copy would fit now, and not beside the next update.
        const MemoryCap cap(memory_statistics().peak + 1000);
        for (const std::int64_t step : {1, 2}) {
            writer.save(training.model, *training.optimizer, training.state(step));
            CHECK_FALSE(writer.is_writing());
            CHECK(fs::exists(folder / fmt::format("step_{:08}/manifest.json", step)));
        }
        training.step();
    }
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].find("pass the cap") != std::string::npos);
    CHECK(warnings[0].find("training waits") != std::string::npos);
    CHECK(booked() == 0);
    writer.save(training.model, *training.optimizer, training.state(3));
    CHECK(booked() > 0);
    CHECK(writer.wait() == folder / "step_00000003");
}

TEST_CASE("trainer: a disk that is full is told at the update after the save, and costs no checkpoint") {
    const test::TemporaryFolder folder;
    const std::string run = folder / "run";
    manual_seed(1);
    nn::Linear model(200, 200);
    optim::AdamW optimizer(model);
    data::Loader loader(data::TensorDataset(ones({4, 200}), zeros({4}, {DType::i64})));
    std::optional<FileSizeLimit> limit;
    const auto on_step = [&](const StepMetrics& metrics) {
        if (metrics.step == 39) {
            while (!latest_checkpoint(run + "/checkpoints"))
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            limit.emplace(100'000);
        }
        if (metrics.step > 40) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    };
    check_error(
        [&] {
            Trainer(model, optimizer, loader,
                    {.steps = 100,
                     .run_folder = run,
                     .checkpoint_every = 20,
                     .keep_checkpoints = 1,
                     .quiet = true,
                     .on_step = on_step})
                .fit();
        },
        {"[save_safetensors]", "step_00000040", "Free some space"});
    limit.reset();
    const auto lines = test::read_lines(run + "/metrics.jsonl");
    CHECK(lines.size() >= 40);
    CHECK(lines.size() < 60);  // not as late as the next save
    CHECK(entries_of(run + "/checkpoints") == 1);
    CHECK(latest_checkpoint(run + "/checkpoints").value().ends_with("step_00000020"));
}

TEST_CASE("trainer: checkpoints written beside the training are those of a training that waits") {
    const test::TemporaryFolder folder;
    for (const std::int64_t stop_at : {9, 10, 100}) {
        std::map<bool, TrainingSummary> summaries;
        for (const bool beside : {false, true}) {
            Training training(Device::cpu());
            data::Loader loader(data::TokenWindows(arange(0, 60), 8), {.batch = 4, .shuffle = true});
            std::int64_t step = 0;
            const std::string run = folder / fmt::format("{}-{}", stop_at, beside);
            summaries[beside] = Trainer(training.model, *training.optimizer, loader,
                                        {.steps = 20,
                                         .run_folder = run,
                                         .checkpoint_every = 2,
                                         .keep_checkpoints = 3,
                                         .async_checkpoints = beside,
                                         .quiet = true,
                                         .should_stop = [&] { return step == stop_at; },
                                         .on_step = [&](const StepMetrics& metrics) { step = metrics.step; }})
                                    .fit();
            CHECK(summaries[beside].checkpoint == latest_checkpoint(run + "/checkpoints").value());
            CHECK(entries_of(run + "/checkpoints") == 3);
            CHECK(booked() == 0);
        }
        CHECK(summaries[true].steps == std::min<std::int64_t>(stop_at, 20));
        CHECK(files_of(summaries[true].checkpoint) == files_of(summaries[false].checkpoint));
    }
}
