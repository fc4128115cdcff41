#pragma once

#include <cstddef>
#include <initializer_list>

namespace potluck::detail {

/// Made of anything.
struct AnyValue {
    template <class T>
    AnyValue(const T&) {}
    AnyValue(std::initializer_list<AnyValue>) {}
};

}  // namespace potluck::detail

namespace potluck {

/// The parameter of a deleted overload that takes a braced list only when it does not fit the option struct of its
/// neighbour, so that a mistyped option is told in one message instead of a list of candidates.
template <std::size_t N>
using MistypedOptions = const detail::AnyValue (&)[N];

}  // namespace potluck
