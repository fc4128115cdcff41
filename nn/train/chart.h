#pragma once

// Internal: drawings of curves as SVG, to stand in an HTML page.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/train/curve.h"

namespace potluck {

/// Text as HTML and SVG show it: & < > " ' are written as entities, control characters and what is no UTF-8 as the
/// replacement character.
std::string escaped(std::string_view text);

/// "0", "0.25", "48.2k", "1.5M", "3e-04": at most four significant digits.
std::string short_number(double number);

struct Line {
    std::string name;
    const Curve* curve = nullptr;
    std::string color = {};  // of CSS
    bool with_dots = false;  // a dot at each value: for the few of a validation
};

/// Lines over steps with axes and a legend: the means of the buckets, and a band from the smallest to the largest value
/// where a bucket has several. `marks` are steps that get a dashed vertical line. "no values yet" when all are empty.
std::string line_chart(std::string_view title, std::span<const Line> lines,
                       std::span<const std::int64_t> marks = {});

/// The shares of the lines' values in their sum, stacked to the whole, bucket by bucket. The curves must have their values
/// at the same steps, none negative.
std::string share_chart(std::string_view title, std::span<const Line> lines);

}  // namespace potluck
