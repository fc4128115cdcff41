// Updates without a wait of the host, and bad elements that are reported at the next wait.

#include <doctest/doctest.h>

#include <memory>
#include <thread>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "core/backend.h"
#include "core/capture.h"
#include "core/factories.h"
#include "core/moment.h"
#include "core/update_control.h"
#include "nn/layers/linear.h"
#include "nn/optim/adamw.h"
#include "nn/optim/sgd.h"
#include "nn/train/one_device.h"
#include "tests/cuda/device.h"
#include "tests/expect_error.h"
#if POTLUCK_CUDA_EMULATED
#include "tests/cuda_emulator/emulator.h"
#endif

namespace potluck::test {
namespace {

/// Counts how often the host waits while the object lives; does nothing where that cannot be measured.
class Waits {
public:
#if POTLUCK_CUDA_EMULATED
    void check(std::uint64_t expected) const { CHECK(emulator::host_waits() - before_ == expected); }

private:
    std::uint64_t before_ = emulator::host_waits();
#else
    void check(std::uint64_t) const {}
#endif
};

struct Net : nn::Module {
    Tensor table = nn::parameter(randn({11, 8}));
    nn::Linear up{8, 16}, down{16, 5};
    void members(nn::Members& m) override { m("table", table)("up", up)("down", down); }
    Tensor forward(const Tensor& ids) override { return down(gelu(up(embedding(table, ids)))); }
};

Net net_on(Device device) {
    manual_seed(4);
    Net net;
    net.to(device);
    return net;
}

/// One update, up to where its numbers are read.
class Updater {
public:
    Updater(Net& net, optim::Optimizer& optimizer, Device device)
        : net_(net), optimizer_(optimizer), control_(device, optimizer.steps()) {}

    void write(int step) {
        control_.write({.learning_rate = 0.01 * (1 + step % 3), .targets = 6, .max_norm = 0.5});
    }
    void start(const Tensor& ids, const Tensor& labels) {
        optimizer_.zero_grad();
        const Tensor loss = cross_entropy(net_.forward(ids), labels) * 6.0;
        loss.backward();
        control_.add_loss(loss.detach());
        control_.measure(optimizer_.gradients());
        control_.decide();
        optimizer_.step(control_);
    }
    UpdateNumbers finish() {
        const UpdateNumbers numbers = control_.read();
        optimizer_.finish_step(numbers.skip == 0.0);
        return numbers;
    }

private:
    Net& net_;
    optim::Optimizer& optimizer_;
    UpdateControl control_;
};

/// Six ids below 11, and the label for each of them.
Tensor ids_at(int step, Device device) {
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < 6; ++i) ids.push_back((3 * i + step) % 11);
    return tensor(ids, {6}).to(device);
}
Tensor labels_at(int step, Device device) {
    return remainder(ids_at(step, device), full({}, 5, {DType::i64, device}));
}

}  // namespace

TEST_CASE("cuda update: the host waits once for an update, and not at all for a recorded one") {
    if (!has_cuda_device()) return;
    const Device device = Device::cuda();
    for (const bool adamw : {true, false}) {
        const auto losses = [&](bool captured) {
            Net net = net_on(device);
            std::unique_ptr<optim::Optimizer> optimizer;
            if (adamw)
                optimizer = std::make_unique<optim::AdamW>(net);
            else
                optimizer = std::make_unique<optim::SGD>(net, optim::SGDOptions{.momentum = 0.9});
            Updater updater(net, *optimizer, device);
            const Tensor ids = ids_at(0, device), labels = labels_at(0, device);
            std::vector<double> values;
            std::unique_ptr<CapturedWork> graph;
            for (int step = 0; step < 20; ++step) {
                ids.copy_(ids_at(step, device));
                labels.copy_(labels_at(step, device));
                const Waits waits;
                if (captured && step == 1) graph = capture(device, [&] { updater.start(ids, labels); });
                updater.write(step);
                if (graph != nullptr)
                    graph->replay();
                else
                    updater.start(ids, labels);
                waits.check(0);
                const UpdateNumbers numbers = updater.finish();
                waits.check(1);
                CHECK(numbers.skip == 0.0);
                CHECK(numbers.gradient_norm > 0.0);
                values.push_back(numbers.loss_sum);
            }
            CHECK(optimizer->steps() == 20);
            CHECK(optimizer->state_dict().at("steps/table").item() == 20);
            return values;
        };
        const std::vector<double> plain = losses(false);
        CHECK(plain.back() < plain.front());
        CHECK(losses(true) == plain);
    }
}

TEST_CASE("cuda update: a state that does not exist yet is not recorded") {
    if (!has_cuda_device()) return;
    const Device device = Device::cuda();
    Net net = net_on(device);
    optim::AdamW optimizer(net);
    Updater updater(net, optimizer, device);
    const Tensor ids = ids_at(0, device), labels = labels_at(0, device);
    const std::string text = error_of([&] { (void)capture(device, [&] { updater.start(ids, labels); }); });
    CHECK(contains(text, "Run one update before recording one"));
}

TEST_CASE("cuda update: a bad element skips the update and is told with its numbers, plain and recorded") {
    if (!has_cuda_device()) return;
    const Device device = Device::cuda();
    Net net = net_on(device);
    optim::AdamW optimizer(net);
    Updater updater(net, optimizer, device);
    const Tensor ids = ids_at(0, device), labels = labels_at(0, device);
    updater.write(0);
    updater.start(ids, labels);
    (void)updater.finish();
    const auto graph = capture(device, [&] { updater.start(ids, labels); });
    const auto spoils = [&](const Tensor& what, std::int64_t value, const std::string& text) {
        for (const bool recorded : {false, true}) {
            const Tensor good = what.clone();
            what.narrow(0, 2, 1).fill_(value);
            const std::vector<double> table = net.table.to_vector(), bias = net.down.bias.to_vector();
            updater.write(1);
            if (recorded)
                graph->replay();
            else
                updater.start(ids, labels);
            CHECK(contains(error_of([&] { (void)updater.finish(); }), text));
            CHECK(net.table.to_vector() == table);
            CHECK(net.down.bias.to_vector() == bias);
            what.copy_(good);
            const std::int64_t steps = optimizer.steps();
            updater.write(1);
            if (recorded)
                graph->replay();
            else
                updater.start(ids, labels);
            CHECK(updater.finish().skip == 0.0);
            CHECK(optimizer.steps() == steps + 1);
        }
    };
    spoils(ids, 11, "[embedding] id 11 at position 2 is outside 0..10, the 11 rows of the weight.");
    spoils(labels, -3, "label -3 at position 2");
}

TEST_CASE("cuda update: moments between its parts are marked and read without a wait of their own") {
    if (!has_cuda_device()) return;
    const Device device = Device::cuda();
    const Tensor x = ones({64, 64}, {DType::f32, device});
    synchronize(device);
    const Waits waits;
    const auto start = mark_moment(device);
    const Tensor y = matmul(x, x);
    const auto end = mark_moment(device);
    waits.check(0);
    CHECK(y[0][0].item() == 64.0);
    waits.check(1);
    CHECK(end->seconds_since(*start) > 0.0);
    CHECK(end->seconds_since(*start) < 100.0);
    CHECK_THROWS_AS(end->seconds_since(*mark_moment(Device::cpu())), Error);
    waits.check(1);
}

TEST_CASE(
    "cuda update: the execution of one device waits once, and knows by then what the device spent in each "
    "phase") {
    if (!has_cuda_device()) return;
    const Device device = Device::cuda();
    Net net = net_on(device);
    optim::AdamW optimizer(net);
    OneDevice execution(net, optimizer, [&](const Tensor& ids, const Tensor& labels) {
        return cross_entropy(net(ids), labels);
    });
    for (int step = 0; step < 3; ++step) {
        const data::Batch batch{.inputs = ids_at(step, Device::cpu()),
                                .targets = labels_at(step, Device::cpu())};
        const std::vector<data::Batch> micro_batches = {batch, batch};
        synchronize(device);
        const Waits waits;
        const UpdateResult result = execution.update(micro_batches, {.number = step, .learning_rate = 0.01});
        waits.check(1);
        CHECK(result.outcome == UpdateResult::Outcome::applied);
        for (const Phase phase : {Phase::copy, Phase::forward, Phase::backward, Phase::optimizer}) {
            INFO(name_of(phase));
            CHECK(result.time[phase] > 0.0);
            CHECK(result.time[phase] < 100.0);
        }
    }
}

TEST_CASE("cuda faults: nothing waits for the elements, and the first bad one is told") {
    if (!has_cuda_device()) return;
    const Device device = Device::cuda();
    const Tensor table = ones({5, 4}, {DType::f32, device});
    const Tensor good = zeros({3}, {DType::i64, device}), bad = full({3}, 7, {DType::i64, device});
    const Tensor x = ones({2, 3}, {DType::f32, device});
    const Tensor index = zeros({2, 2}, {DType::i64, device}), far = full({2, 2}, 3, {DType::i64, device});
    const Tensor weights = tensor({1.0, -2.0, 3.0}).to(device);
    backend(device).synchronize();
    const Waits waits;
    const Tensor sums = zeros({5, 4}, {DType::f32, device});
    (void)embedding(table, good);
    (void)embedding(table, bad);
    (void)gather(x, 1, far);
    (void)scatter_add(x, 1, far, ones({2, 2}, {DType::f32, device}));
    (void)multinomial(weights, 2);
    (void)(good / 2);
    (void)remainder(good, good);
    Tensor into = sums;
    backend(device).embedding_backward(bad, ones({3, 4}, {DType::f32, device}), into);
    waits.check(0);
    CHECK(contains(error_of([&] { (void)sum(x).item(); }), "[embedding] id 7 at position 0"));
    // One Error reports all of them, and the device stays usable.
    CHECK(sum(x).item() == 6.0);
    CHECK(gather(x, 1, index).to_vector() == std::vector<double>(4, 1.0));
    CHECK(sums.to_vector() == std::vector<double>(20, 0.0));
    // If the element has changed before it is reported, the Error does not guess its value.
    const Tensor changing = full({3}, 9, {DType::i64, device});
    (void)embedding(table, changing);
    changing.fill_(1);
    CHECK(contains(error_of([] {}), "[embedding] the element at position 0 was bad"));
}

TEST_CASE("cuda faults: more ops than there are slots wait once, and each thread is told of its own") {
    if (!has_cuda_device()) return;
    const Device device = Device::cuda();
    const Tensor table = ones({5, 4}, {DType::f32, device});
    const Tensor good = zeros({3}, {DType::i64, device}), bad = full({3}, 7, {DType::i64, device});
    backend(device).synchronize();
    {
        const Waits waits;
        for (int i = 0; i < 300; ++i) (void)embedding(table, good);
        waits.check(1);
    }
    backend(device).synchronize();
    (void)embedding(table, bad);
    int told = 0;
    for (int i = 0; i < 300 && told == 0; ++i) {
        try {
            (void)embedding(table, good);
        } catch (const Error&) {
            told = i;
        }
    }
    CHECK(told > 200);
    // A thread that ends without a wait reports nothing, and leaves nothing behind for the next thread.
    std::thread([&] { (void)embedding(table, bad); }).join();
    std::thread([&] {
        (void)embedding(table, good);
        backend(device).synchronize();
    }).join();
    backend(device).synchronize();
}

}  // namespace potluck::test
