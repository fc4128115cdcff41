#include "core/random_scope.h"

#include <limits>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "core/philox.h"

namespace potluck {
namespace {

thread_local RandomContext context;

/// A seed for one site and one of its draws, from a counter value that no element uses.
std::uint64_t seed_of_draw(std::uint64_t seed, std::uint64_t site, std::uint32_t draw) {
    const auto words =
        philox4x32({static_cast<std::uint32_t>(site), static_cast<std::uint32_t>(site >> 32), draw, ~0U},
                   {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
    return std::uint64_t{words[1]} << 32 | words[0];
}

RandomContext of_update(std::int64_t update) {
    if (update < 0) throw Error("random_update", fmt::format("update {} is negative. Count from 0.", update));
    RandomContext made;
    made.is_in_update = true;
    made.update = update;
    return made;
}

RandomContext of_items(std::int64_t first, std::int64_t count) {
    if (first < 0 || count < 0)
        throw Error(
            "random_items",
            fmt::format("{} items from {} on cannot belong to a batch. Give 0 or more.", count, first));
    if (first > std::numeric_limits<std::int64_t>::max() - count)
        throw Error("random_items",
                    fmt::format("{} items from {} on exceed an i64. Count the items within one batch.", count,
                                first));
    RandomContext made = context;
    made.first_item = first;
    made.items = count;
    made.draws.clear();
    return made;
}

/// The part of the whole that a tensor of `shape` is in the current context.
RandomPart part_of_whole(const Shape& shape) {
    RandomPart part{shape, Shape(shape.size(), 0)};
    if (!shape.empty() && context.items > 0 && shape[0] % context.items == 0) {
        // The sizes of later axes do not affect the numbers.
        if (__builtin_mul_overflow(context.first_item, shape[0] / context.items, &part.first[0]) ||
            __builtin_add_overflow(part.whole[0], part.first[0], &part.whole[0]))
            throw Error(
                "random_items",
                fmt::format(
                    "the rows of {} from item {} on are more than an i64 counts. Give the place in one "
                    "batch.",
                    pretty(shape), context.first_item));
    }
    if (context.axis >= 0) {
        const auto axis = static_cast<std::size_t>(context.axis);
        if (axis >= shape.size() || (axis == 0 && context.items >= 0))
            throw Error("random_site", fmt::format("axis {} of {} cannot be the one that is split.",
                                                   context.axis, pretty(shape)));
        part.first[axis] = context.axis_first;
        part.whole[axis] = context.axis_whole;
    }
    return part;
}

}  // namespace

const RandomContext& RandomContext::current() { return context; }

RandomContextScope::RandomContextScope(RandomContext made)
    : outer_(std::exchange(context, std::move(made))) {}
RandomContextScope::~RandomContextScope() { context = std::move(outer_); }

RandomUpdateScope::RandomUpdateScope(std::int64_t update) : RandomContextScope(of_update(update)) {}

RandomItemsScope::RandomItemsScope(std::int64_t first, std::int64_t count)
    : RandomContextScope(of_items(first, count)) {}

RandomSiteScope::RandomSiteScope(std::uint64_t site)
    : site_(context.site),
      axis_(context.axis),
      axis_first_(context.axis_first),
      axis_whole_(context.axis_whole) {
    if (site == 0) return;
    context.site = site;
    context.axis = -1;
}

RandomSiteScope::RandomSiteScope(std::uint64_t site, std::int64_t axis, std::int64_t first,
                                 std::int64_t whole)
    : RandomSiteScope(site) {
    if (axis < 0)
        throw Error("random_site", fmt::format("axis {} is negative. Count from 0, or leave it out.", axis));
    context.axis = axis;
    context.axis_first = first;
    context.axis_whole = whole;
}

RandomSiteScope::~RandomSiteScope() {
    context.site = site_;
    context.axis = axis_;
    context.axis_first = axis_first_;
    context.axis_whole = axis_whole_;
}

MaskNumbers take_mask_numbers(const Shape& shape, Device device, Generator* generator_or_none) {
    Generator& numbers = generator_or_none != nullptr ? *generator_or_none : default_generator(device);
    if (!context.is_in_update || generator_or_none != nullptr)
        return {numbers.take(element_count(shape)), {}};
    const std::uint64_t seed =
        seed_of_draw(numbers.state().seed, context.site, context.draws[context.site]++);
    return {{seed, 0, static_cast<std::uint64_t>(context.update)}, part_of_whole(shape)};
}

}  // namespace potluck
