#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>

namespace potluck::detail {

/// Converts from any type.
struct AnyValue {
    template <class T>
    AnyValue(const T&) {}
    AnyValue(std::initializer_list<AnyValue>) {}
};

/// A text among the parameters of a template.
template <std::size_t N>
struct Text {
    char letters[N];
    consteval Text(const char (&text)[N]) { std::copy_n(text, N, letters); }
};

}  // namespace potluck::detail

namespace potluck {

/// The last parameter, with the default {}, of an overload that takes what is wrong, and says what is right. It has no
/// constant value, and needs one: the compiler names it, text and all, at the line of the caller. (A deleted overload would
/// name itself, and the way to it through the headers.) `dependent` must name a parameter of the overload's template.
template <detail::Text text, auto dependent>
struct Refused {
    consteval Refused() {}  // NOLINT(*-member-init,modernize-use-equals-default): on purpose
    int without_value;
};

/// The parameter of an overload that takes a braced list only when it does not fit the option struct of its neighbour,
/// so that a mistyped option is told in one message instead of a list of candidates. Beside it stands a Refused.
template <std::size_t N>
using MistypedOptions = const detail::AnyValue (&)[N];

}  // namespace potluck
