// A training goes on while its checkpoints are written by another thread.

#include "nn/train/checkpoint_writer.h"

#include <doctest/doctest.h>

#include <filesystem>

#include "autograd/ops.h"
#include "core/factories.h"
#include "nn/models/gpt2.h"
#include "nn/optim/adamw.h"
#include "tests/core/temporary_folder.h"
#include "tests/expect_error.h"

using namespace potluck;

namespace {

struct Training {
    nn::GPT2 model{{.vocabulary = 40, .context = 16, .width = 64, .heads = 2, .layers = 2, .dropout = 0.1}};
    optim::AdamW optimizer{model, {.learning_rate = 1e-2}};
    Tensor ids = randint(0, 40, {2, 16}, {DType::i64});

    void step() {
        model.loss(ids, ids).backward();
        optimizer.step();
        optimizer.zero_grad();
    }
    TrainingState state(std::int64_t step) const {
        return {.step = step, .generators = generator_states(model.parameters())};
    }
};

}  // namespace

TEST_CASE("threads: a training goes on, with the same bits, while its checkpoints are written") {
    const test::TemporaryFolder folder;
    std::vector<double> losses;
    for (const bool with_checkpoints : {false, true}) {
        manual_seed(3);
        Training training;
        {
            CheckpointWriter writer(folder / "checkpoints", 2);
            for (std::int64_t step = 1; step <= 12; ++step) {
                training.step();
                if (with_checkpoints && step % 3 != 0)  // in a row, and with an update between
                    writer.save(training.model, training.optimizer, training.state(step));
                writer.poll();
            }
        }  // while the last one is being written
        losses.push_back(training.model.loss(training.ids, training.ids).item());
    }
    CHECK(losses[0] == losses[1]);
    manual_seed(4);
    Training resumed;
    const std::string newest = latest_checkpoint(folder / "checkpoints").value();
    CHECK(newest == folder / "checkpoints/step_00000011");
    resumed.ids = Tensor();
    load_checkpoint(newest, resumed.model, resumed.optimizer);
    CHECK(resumed.optimizer.steps() == 11);
}

TEST_CASE("threads: what fails in the thread that writes is thrown where the training runs") {
    const test::TemporaryFolder folder;
    test::write_file(folder / "file", "");
    manual_seed(3);
    Training training;
    CheckpointWriter writer(folder / "file/below");
    for (int i = 0; i < 3; ++i) {
        training.step();
        writer.save(training.model, training.optimizer, training.state(1));
        training.step();
        CHECK(test::contains(test::error_of([&] { writer.wait(); }), "[save_checkpoint] cannot write"));
    }
}
