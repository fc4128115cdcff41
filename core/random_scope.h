#pragma once

#include <cstdint>
#include <map>

#include "core/random.h"
#include "core/random_part.h"
#include "core/tensor.h"

namespace potluck {

// Dropout that does not depend on how a batch is divided into micro-batches.
//
// Outside of these scopes dropout takes consecutive numbers from a generator: a different division into micro-batches,
// or a different order of layers, gives different masks. Within a RandomUpdateScope an element's number depends on
//
//     the seed           of default_generator(device), whose position does not change
//     the update         its number in the training
//     the site           which layer draws, and how often it has drawn before in this micro-batch
//     the element        its position in the tensor that the whole global batch would have
//
// so that micro-batches of any size, in any order, on any device or rank, and a recomputed forward pass draw the same
// masks. The training loop declares what is running:
//
//     model.assign_random_sites();                             // once: sites by names, see nn/module.h
//     RandomUpdateScope update(step);                          // around a whole update
//     for (each micro-batch) {
//         RandomItemsScope items(first_item, count);           // its items [first, first + count) of the global batch
//         loss_of(micro_batch)...
//     }
//
// The layers may also process the micro-batches one after another (all micro-batches through block 0, then all through
// block 1): each visit opens the RandomItemsScope of its micro-batch again. Work recorded by capture() must be captured
// and replayed inside a RandomUpdateScope, with its RandomItemsScopes inside the work: each replay then draws the masks
// of the surrounding update. The scopes apply to their thread. A generator that is passed to dropout() is used as
// usual.

/// The state of this thread's scopes. A copy that is taken while a layer runs lets the layer draw the same masks when
/// it is recomputed: `RandomContextScope again(copy);`.
struct RandomContext {
    static const RandomContext& current();

    bool is_in_update = false;
    std::int64_t update = 0;
    std::int64_t first_item = 0;
    std::int64_t items = -1;  // in the micro-batch; -1: tensors are whole
    std::uint64_t site = 0;
    std::int64_t axis = -1;  // the axis, beside the batch, along which tensors are partial; -1: none
    std::int64_t axis_first = 0, axis_whole = 0;
    std::map<std::uint64_t, std::uint32_t> draws;  // so far in this micro-batch, by site
};

/// Replaces the current context while the scope lives.
class RandomContextScope {
public:
    explicit RandomContextScope(RandomContext context);
    ~RandomContextScope();
    RandomContextScope(const RandomContextScope&) = delete;
    RandomContextScope& operator=(const RandomContextScope&) = delete;

private:
    RandomContext outer_;
};

/// Declares that update number `update` (0 or more) runs in this thread. Throws Error for a negative number.
class RandomUpdateScope : RandomContextScope {
public:
    explicit RandomUpdateScope(std::int64_t update);
};

/// Declares that the tensors of this thread belong to items [first, first + count) of the global batch, where axis 0 of
/// dropout's input is the batch. If the size of axis 0 is a multiple of `count`, as in (batch * time, width), each item
/// has that many rows; if not, the tensor is treated as a whole, the same for every micro-batch. All other axes must
/// have the same sizes in all micro-batches. Has no effect without an enclosing RandomUpdateScope. Throws Error for
/// negative numbers, and when first + count overflows an i64.
class RandomItemsScope : RandomContextScope {
public:
    RandomItemsScope(std::int64_t first, std::int64_t count);
};

/// Names the layer that draws. Site 0 means no site: the enclosing one stays in effect. Modules open this scope
/// themselves when they are called; draws at one site are distinguished by their order within the micro-batch.
class RandomSiteScope {
public:
    explicit RandomSiteScope(std::uint64_t site);
    /// The same when this rank holds a part along another axis: indices [first, first + size of x) of `whole`. For
    /// attention weights (batch, heads, queries, keys), axis 1 is the heads. Throws Error for a negative axis.
    RandomSiteScope(std::uint64_t site, std::int64_t axis, std::int64_t first, std::int64_t whole);
    ~RandomSiteScope();
    RandomSiteScope(const RandomSiteScope&) = delete;
    RandomSiteScope& operator=(const RandomSiteScope&) = delete;

private:
    std::uint64_t site_;
    std::int64_t axis_, axis_first_, axis_whole_;
};

/// The random numbers of one mask: `part` gives each element of a tensor an index (see core/random_part.h) into the
/// sequence at `key`.
struct MaskNumbers {
    RandomKey key;
    RandomPart part;
};
/// Chosen by this thread's scopes. Without scopes, or with a generator: the next numbers of that generator (or the
/// device's).
MaskNumbers take_mask_numbers(const Shape& shape, Device device, Generator* generator_or_none = nullptr);

}  // namespace potluck
