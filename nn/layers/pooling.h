#pragma once

#include <cstdint>

#include "autograd/ops/pooling.h"
#include "nn/module.h"

namespace potluck::nn {

/// max_pool1d() as a module: (batch, channels, length) to (batch, channels, windows).
class MaxPool1d : public Module {
public:
    std::int64_t kernel;
    Pooling1d options;

    explicit MaxPool1d(std::int64_t kernel, Pooling1d options = {}) : kernel(kernel), options(options) {}
    Tensor forward(const Tensor& x) override { return max_pool1d(x, kernel, options); }
};

/// max_pool2d() as a module: (batch, channels, height, width) to (batch, channels, height', width').
class MaxPool2d : public Module {
public:
    HeightWidth kernel;
    Pooling2d options;

    explicit MaxPool2d(HeightWidth kernel, Pooling2d options = {}) : kernel(kernel), options(options) {}
    Tensor forward(const Tensor& x) override { return max_pool2d(x, kernel, options); }
};

/// average_pool1d() as a module.
class AvgPool1d : public Module {
public:
    std::int64_t kernel;
    Pooling1d options;

    explicit AvgPool1d(std::int64_t kernel, Pooling1d options = {}) : kernel(kernel), options(options) {}
    Tensor forward(const Tensor& x) override { return average_pool1d(x, kernel, options); }
};

/// average_pool2d() as a module.
class AvgPool2d : public Module {
public:
    HeightWidth kernel;
    Pooling2d options;

    explicit AvgPool2d(HeightWidth kernel, Pooling2d options = {}) : kernel(kernel), options(options) {}
    Tensor forward(const Tensor& x) override { return average_pool2d(x, kernel, options); }
};

}  // namespace potluck::nn
