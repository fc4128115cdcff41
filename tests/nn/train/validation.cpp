// The frequency of validation, and its loader, never change a training run.

#include <doctest/doctest.h>

#include <vector>

#include "core/factories.h"
#include "nn/layers/linear.h"
#include "nn/optim/adamw.h"
#include "nn/train/trainer.h"
#include "tests/on_device.h"

using namespace potluck;

namespace {

struct Run {
    std::vector<double> losses;
    std::vector<double> weights;
    data::LoaderState state;
};

/// 3 epochs of 4 batches, two batches per update.
Run train(std::int64_t validate_every, bool with_itself, int workers) {
    manual_seed(3);
    nn::Linear net(2, 3);
    net.to(test::test_device());
    optim::AdamW optimizer(net, {.learning_rate = 0.05});
    Generator numbers;
    numbers.set_state({8, 0});
    const data::TensorDataset data(randn({8, 2}, {}, &numbers), randint(0, 3, {8}, {DType::i64}, &numbers));
    data::Loader loader(data, {.batch = 2, .shuffle = true, .workers = workers, .seed = 1});
    data::Loader other(data, {.batch = 3, .shuffle = true, .workers = workers});
    Run run;
    TrainerOptions options{.epochs = 3, .accumulate = 2};
    if (validate_every > 0) options.validation = with_itself ? &loader : &other;
    options.validate_every = validate_every;
    options.quiet = true;
    options.on_step = [&](const StepMetrics& metrics) { run.losses.push_back(metrics.loss); };
    Trainer(net, optimizer, loader, options).fit();
    run.weights = net.weight.to(Device::cpu()).to_vector();
    run.state = loader.state();
    return run;
}

}  // namespace

TEST_CASE("trainer: validation changes nothing of the run, also with the training loader itself") {
    test::on_each_device([] {
        for (const int workers : {0, 2}) {
            const Run never = train(0, false, workers);
            CHECK(never.losses.size() == 6);
            CHECK(never.state == data::LoaderState{1, 3, 0, 8});
            for (const bool with_itself : {false, true})
                for (const std::int64_t every : {1, 4}) {
                    const Run run = train(every, with_itself, workers);
                    CHECK(run.losses == never.losses);
                    CHECK(run.weights == never.weights);
                    CHECK(run.state == never.state);
                }
        }
    });
}
