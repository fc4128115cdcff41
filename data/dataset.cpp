#include "data/dataset.h"

#include "core/format.h"

namespace potluck::data {

namespace {

std::uint64_t first_64_bits(RandomKey key, std::uint64_t block) {
    const auto numbers = philox(key, block);
    return (static_cast<std::uint64_t>(numbers[0]) << 32) | numbers[1];
}

/// Row `index` of the first axis as a view.
Tensor row(const Tensor& tensor, std::int64_t index) {
    const Shape shape(tensor.shape().begin() + 1, tensor.shape().end());
    const Strides strides(tensor.strides().begin() + 1, tensor.strides().end());
    // A tensor without elements has no memory offset.
    const std::int64_t offset = tensor.count() == 0 ? 0 : index * tensor.strides()[0];
    return tensor.alias(shape, strides, tensor.offset() + offset);
}

}  // namespace

Generator generator_of(RandomKey key) {
    Generator generator;
    generator.set_state(key);
    return generator;
}

RandomKey item_key(std::uint64_t seed, std::int64_t epoch, std::int64_t index) {
    // Every item has its own seed, so that an item may draw any number of random numbers.
    constexpr std::uint64_t items = 0x6974656d73ULL;  // distinct from other uses of the same seed
    const std::uint64_t epoch_seed = first_64_bits({seed ^ items, 0}, static_cast<std::uint64_t>(epoch));
    return {first_64_bits({epoch_seed, 0}, static_cast<std::uint64_t>(index)), 0};
}

TensorDataset::TensorDataset(Tensor inputs, Tensor targets)
    : inputs_(std::move(inputs)), targets_(std::move(targets)) {
    if (!inputs_.defined()) throw Error("TensorDataset", "inputs is undefined. Give a tensor (items, ...).");
    if (inputs_.ndim() == 0)
        throw Error("TensorDataset", "inputs is a scalar. Give a tensor whose first axis numbers the items.");
    if (targets_.defined() && (targets_.ndim() == 0 || targets_.size(0) != inputs_.size(0)))
        throw Error("TensorDataset",
                    fmt::format("inputs {} and targets {} do not have the same number of items: "
                                "their first axes must be equal.",
                                pretty(inputs_.shape()), pretty(targets_.shape())));
    inputs_ = inputs_.detach();
    if (targets_.defined()) targets_ = targets_.detach();
}

Example TensorDataset::get(std::int64_t index, RandomKey) const {
    if (index < 0 || index >= size())
        throw Error("TensorDataset", fmt::format("item {} of {} does not exist.", index, size()));
    return {row(inputs_, index), targets_.defined() ? row(targets_, index) : Tensor()};
}

FunctionDataset::FunctionDataset(std::int64_t size, Function function)
    : size_(size), function_(std::move(function)) {
    if (size < 0)
        throw Error("FunctionDataset", fmt::format("the size is {}. It must not be negative.", size));
    if (!function_)
        throw Error("FunctionDataset", "the function is empty. Give one that makes item `index`.");
}

Example FunctionDataset::get(std::int64_t index, RandomKey key) const {
    if (!function_)
        throw Error("FunctionDataset", "this dataset was moved from. Use the one that it was moved to.");
    return function_(index, key);
}

TransformedDataset::TransformedDataset(std::shared_ptr<const Dataset> dataset, Transform transform)
    : dataset_(std::move(dataset)), transform_(std::move(transform)) {
    if (!dataset_) throw Error("TransformedDataset", "there is no dataset.");
    if (!transform_)
        throw Error("TransformedDataset", "the function is empty. Give one that makes the new input.");
}

const Dataset& TransformedDataset::dataset() const {
    if (!dataset_)
        throw Error("TransformedDataset", "this dataset was moved from. Use the one that it was moved to.");
    return *dataset_;
}

Example TransformedDataset::get(std::int64_t index, RandomKey key) const {
    // The dataset draws from another key, so that no number is used twice.
    Example example = dataset().get(index, {first_64_bits(key, ~std::uint64_t{0}), 0});
    example.input = transform_(example.input, key);
    return example;
}

}  // namespace potluck::data
