#pragma once

#include <cstdint>
#include <map>

#include "core/random.h"
#include "core/random_part.h"
#include "core/tensor.h"

namespace potluck {

// Dropout that does not depend on how a batch is cut.
//
// Outside of these scopes dropout takes its numbers from a generator, one stretch after another: another cut into
// micro-batches, or another order of layers, gives other masks. Within a RandomUpdateScope an element's number depends on
//
//     the seed           of default_generator(device), which is not moved on
//     the update         its number in the training
//     the site           which layer draws, and how many times it has drawn before in this micro-batch
//     the element        its place in the tensor that the whole global batch would have
//
// so micro-batches of any sizes, in any order, on any device or rank, and a forward pass that is computed again, draw the
// same masks. Who trains says what is going on:
//
//     model.assign_random_sites();                             // once: sites by names, see nn/module.h
//     RandomUpdateScope update(step);                          // around a whole update
//     for (each micro-batch) {
//         RandomItemsScope items(first_item, count);           // its items [first, first + count) of the global batch
//         loss_of(micro_batch)...
//     }
//
// Layers may also go through the micro-batches in turn (all micro-batches through block 0, then through block 1): each
// visit opens the micro-batch's RandomItemsScope again. Work that was recorded by capture() is captured and replayed
// inside of a RandomUpdateScope, and its RandomItemsScopes are inside of the work: each replay then has the masks of the
// update around it. The scopes belong to their thread. A generator that is given to dropout() is used as ever.

/// What the scopes of this thread say. A copy, taken while a layer runs, lets it draw the same masks when it is computed
/// again: `RandomContextScope again(copy);`.
struct RandomContext {
    static const RandomContext& current();

    bool is_in_update = false;
    std::int64_t update = 0;
    std::int64_t first_item = 0;
    std::int64_t items = -1;  // of the micro-batch; -1: tensors are whole
    std::uint64_t site = 0;
    std::int64_t axis = -1;  // of which tensors hold a part, beside the batch; -1: none
    std::int64_t axis_first = 0, axis_whole = 0;
    std::map<std::uint64_t, std::uint32_t> draws;  // by site, in this micro-batch
};

/// Puts a context in the place of the current one while it lives.
class RandomContextScope {
public:
    explicit RandomContextScope(RandomContext context);
    ~RandomContextScope();
    RandomContextScope(const RandomContextScope&) = delete;
    RandomContextScope& operator=(const RandomContextScope&) = delete;

private:
    RandomContext outer_;
};

/// Update number `update` (0 or more) runs in this thread while this lives. Throws Error for a negative number.
class RandomUpdateScope : RandomContextScope {
public:
    explicit RandomUpdateScope(std::int64_t update);
};

/// The tensors that this thread makes while this lives belong to items [first, first + count) of the global batch: axis 0 of
/// what is dropped from is the batch. Where its size is a multiple of `count`, as in (batch * time, width), each item has
/// that many rows; where it is no multiple, the tensor is taken for a whole one, the same for every micro-batch. All other
/// axes have the same sizes in all micro-batches. Without a RandomUpdateScope outside it changes nothing. Throws Error for
/// negative numbers, and where an i64 does not count so far.
class RandomItemsScope : RandomContextScope {
public:
    RandomItemsScope(std::int64_t first, std::int64_t count);
};

/// Names the layer that draws. Site 0 is no site of its own: that of the scope outside goes on. Modules open this scope
/// themselves when they are called; draws at one site are told apart by their order within the micro-batch.
class RandomSiteScope {
public:
    explicit RandomSiteScope(std::uint64_t site);
    /// The same where this rank holds a part of another axis: indices [first, first + size of x) of `whole`. Of attention
    /// weights (batch, heads, queries, keys) axis 1 are the heads. Throws Error for a negative axis.
    RandomSiteScope(std::uint64_t site, std::int64_t axis, std::int64_t first, std::int64_t whole);
    ~RandomSiteScope();
    RandomSiteScope(const RandomSiteScope&) = delete;
    RandomSiteScope& operator=(const RandomSiteScope&) = delete;

private:
    std::uint64_t site_;
    std::int64_t axis_, axis_first_, axis_whole_;
};

/// The random numbers of one mask: element i of a tensor of `shape` is decided by the number that `part` gives it (see
/// core/random_part.h) of the stretch `key`.
struct MaskNumbers {
    RandomKey key;
    RandomPart part;
};
/// By the scopes of this thread; outside of them, or with a generator, the next stretch of that (or of the device's own).
MaskNumbers take_mask_numbers(const Shape& shape, Device device, Generator* generator_or_none = nullptr);

}  // namespace potluck
