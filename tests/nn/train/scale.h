#pragma once

// A model with a single weight, for tests of the trainer.

#include "autograd/ops.h"
#include "core/factories.h"
#include "data/dataset.h"
#include "nn/module.h"
#include "tests/on_device.h"

namespace potluck::test {

inline constexpr std::int64_t ignored = -100;

/// One weight w, on the device under test. The loss is w times the mean of the inputs with valid targets.
struct Scale : nn::Module {
    Tensor w;
    explicit Scale(double start) : w(nn::parameter(full({1}, start))) {}
    void members(nn::Members& m) override { m("w", w); }
    Tensor loss(const Tensor& inputs, const Tensor& targets) override {
        const Tensor counts = (targets != ignored).to(DType::f32);
        return w * sum(inputs * counts) / sum(counts);
    }
    double value() const { return w.to_vector<double>()[0]; }
};

/// `count` rows (1) of 1 with valid targets.
inline data::TensorDataset ones_dataset(std::int64_t count) {
    return data::TensorDataset(potluck::ones({count, 1}), potluck::zeros({count, 1}, {DType::i64}));
}

}  // namespace potluck::test
