#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "core/random.h"
#include "core/tensor.h"

namespace potluck::data {

/// One item of a dataset. `target` is undefined where there is nothing to predict.
struct Example {
    Tensor input, target;
};

/// A numbered set of examples. Loader workers call get() from several threads at once, so it must not change the
/// dataset; all randomness of an item must come from `key`.
class Dataset {
public:
    virtual ~Dataset() = default;

    /// Number of items, constant over the life of the dataset.
    virtual std::int64_t size() const = 0;
    /// Item `index` of 0 .. size()-1. `key` is a pure function of the loader's seed, the epoch and the index: the same
    /// item gets different random numbers in every epoch, and the same ones whichever thread computes it. Draw from it
    /// with
    /// `Generator generator = generator_of(key); rand({2}, {}, &generator);`
    virtual Example get(std::int64_t index, RandomKey key) const = 0;
};

/// A generator that starts at `key`.
Generator generator_of(RandomKey key);

/// The random numbers of item `index` in epoch `epoch` of a loader with this seed.
RandomKey item_key(std::uint64_t seed, std::int64_t epoch, std::int64_t index);

/// Row i of `inputs` with row i of `targets` (undefined targets: inputs alone). Items are views: nothing is copied.
class TensorDataset final : public Dataset {
public:
    /// Throws Error when the first axes differ, or when `inputs` is undefined or a scalar.
    explicit TensorDataset(Tensor inputs, Tensor targets = {});

    std::int64_t size() const override { return inputs_.size(0); }
    Example get(std::int64_t index, RandomKey key) const override;

private:
    Tensor inputs_, targets_;
};

/// Items that are computed by a function: FunctionDataset(100, [](std::int64_t index, RandomKey key) { return
/// Example{...}; }).
/// The function is called from several threads at once.
class FunctionDataset final : public Dataset {
public:
    using Function = std::function<Example(std::int64_t index, RandomKey key)>;

    /// Throws Error for a negative size or an empty function.
    FunctionDataset(std::int64_t size, Function function);

    std::int64_t size() const override { return size_; }
    Example get(std::int64_t index, RandomKey key) const override;

private:
    std::int64_t size_;
    Function function_;
};

/// The items of another dataset with inputs that a function makes of theirs, such as an ImageTransform:
/// TransformedDataset(photos, ImageTransform({.crop = 32, .random_crop = true})). The function gets the input and a key for
/// what is random in it, and is called from several threads at once; targets stay as they are.
class TransformedDataset final : public Dataset {
public:
    using Transform = std::function<Tensor(const Tensor& input, RandomKey key)>;

    /// Keeps a copy of the dataset (cheap: datasets hold handles). Throws Error for an empty function.
    template <std::derived_from<Dataset> AnyDataset>
    TransformedDataset(AnyDataset dataset, Transform transform)
        : TransformedDataset(std::make_shared<const AnyDataset>(std::move(dataset)), std::move(transform)) {}
    /// Shares the dataset.
    TransformedDataset(std::shared_ptr<const Dataset> dataset, Transform transform);

    std::int64_t size() const override { return dataset().size(); }
    Example get(std::int64_t index, RandomKey key) const override;

private:
    const Dataset& dataset() const;  // throws Error when this was moved from

    std::shared_ptr<const Dataset> dataset_;
    Transform transform_;
};

}  // namespace potluck::data
