#pragma once

#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "core/error.h"

namespace potluck::test {

/// The text of the Error that `function` throws; empty (and a failed check) when it throws none.
template <class Function>
std::string error_of(Function&& function) {
    try {
        function();
    } catch (const Error& error) {
        return error.what();
    }
    FAIL_CHECK("no Error was thrown");
    return {};
}

inline bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string_view::npos;
}

}  // namespace potluck::test
