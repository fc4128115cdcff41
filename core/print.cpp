#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <ostream>
#include <string>

#include "core/format.h"
#include "core/tensor.h"

namespace potluck {
namespace {

constexpr std::int64_t summarised_from = 1001;  // elements; shorter tensors are printed in full
constexpr std::int64_t edge = 3;                // elements that a summary shows at either end of an axis
constexpr std::size_t line_width = 75;
constexpr int most_fraction_digits = 8;

// ---- which elements are shown ----

/// Positions along an axis that are shown: [0, leading) and [size - trailing, size).
struct Shown {
    std::int64_t leading, trailing;
    bool is_cut;
};

Shown shown_of(std::int64_t size, bool summarise) {
    if (summarise && size > 2 * edge) return {edge, edge, true};
    return {size, 0, false};
}

/// Appends the shown elements of `x` in row-major order.
template <class T>
void collect(const Tensor& x, bool summarise, std::vector<T>& values) {
    if (!summarise) {
        values = x.to_vector<T>();
        return;
    }
    if (x.ndim() == 0) {
        values.push_back(x.item<T>());
        return;
    }
    const Shown shown = shown_of(x.shape()[0], true);
    const auto part = [&](std::int64_t first, std::int64_t count) {
        if (x.ndim() == 1) {
            const auto some =
                x.alias({count}, x.strides(), x.offset() + first * x.strides()[0]).template to_vector<T>();
            values.insert(values.end(), some.begin(), some.end());
            return;
        }
        const Shape inner(x.shape().begin() + 1, x.shape().end());
        const Strides strides(x.strides().begin() + 1, x.strides().end());
        for (std::int64_t i = first; i < first + count; ++i)
            collect(x.alias(inner, strides, x.offset() + i * x.strides()[0]), true, values);
    };
    part(0, shown.leading);
    if (shown.trailing > 0) part(x.shape()[0] - shown.trailing, shown.trailing);
}

// ---- numbers as text ----

/// A finite number as the shortest decimal that converts back to it: 0.d1d2d3... * 10^exponent.
struct Decimal {
    bool negative = false;
    std::string digits;  // at least one; no trailing zeros (but "0" for zero)
    int exponent = 0;
};

/// Reads "d.ddde+xx".
Decimal parse_scientific(const std::string& text) {
    Decimal result;
    const std::size_t mark = text.find('e');
    for (const char c : text.substr(0, mark)) {
        if (c == '-') result.negative = true;
        if (c >= '0' && c <= '9') result.digits += c;
    }
    while (result.digits.size() > 1 && result.digits.back() == '0') result.digits.pop_back();
    result.exponent = std::atoi(text.c_str() + mark + 1) + 1;
    return result;
}

Decimal shortest_decimal(double value, DType dtype) {
    if (dtype == DType::f64 || dtype == DType::f32) {
        std::array<char, 64> text;
        const auto end = dtype == DType::f64
                             ? std::to_chars(text.begin(), text.end(), value, std::chars_format::scientific)
                             : std::to_chars(text.begin(), text.end(), static_cast<float>(value),
                                             std::chars_format::scientific);
        return parse_scientific({text.data(), end.ptr});
    }
    const auto rounds_back = [&](const std::string& text) {
        const auto again = static_cast<float>(std::atof(text.c_str()));
        const auto wanted = static_cast<float>(value);
        return dtype == DType::f16 ? float16(again) == float16(wanted) : bfloat16(again) == bfloat16(wanted);
    };
    int precision = 0;  // digits after the first; 5 in all distinguish any two half-type numbers
    while (precision < 5 && !rounds_back(fmt::format("{:.{}e}", value, precision))) ++precision;
    return parse_scientific(fmt::format("{:.{}e}", value, precision));
}

/// The digits before and after the decimal point; no trailing zeros after it.
struct Sides {
    std::string whole, fraction;
};

Sides positional(double value, DType dtype, int most_digits = most_fraction_digits) {
    const Decimal decimal = shortest_decimal(value, dtype);
    const auto digits = static_cast<int>(decimal.digits.size());
    Sides sides;
    if (digits - decimal.exponent > most_digits) {
        const std::string text = fmt::format("{:.{}f}", value, most_digits);
        const std::size_t point = text.find('.');
        sides = {text.substr(0, point), text.substr(point + 1)};
        while (!sides.fraction.empty() && sides.fraction.back() == '0') sides.fraction.pop_back();
        return sides;
    }
    if (decimal.negative) sides.whole = "-";
    if (decimal.digits == "0" || decimal.exponent <= 0) {
        sides.whole += "0";
        if (decimal.digits != "0")
            sides.fraction = std::string(static_cast<std::size_t>(-decimal.exponent), '0') + decimal.digits;
        return sides;
    }
    const auto before = static_cast<std::size_t>(decimal.exponent);
    if (decimal.digits.size() <= before) {
        sides.whole += decimal.digits + std::string(before - decimal.digits.size(), '0');
    } else {
        sides.whole += decimal.digits.substr(0, before);
        sides.fraction = decimal.digits.substr(before);
    }
    return sides;
}

/// "-1.250e-07", with `fraction_digits` digits after the point.
std::string scientific(double value, int fraction_digits) {
    return fmt::format("{:#.{}e}", value, fraction_digits);
}

int fraction_digits_of(double value, DType dtype) {
    return static_cast<int>(shortest_decimal(value, dtype).digits.size()) - 1;
}

std::string special(double value) {
    if (std::isnan(value)) return "nan";
    return value < 0 ? "-inf" : "inf";
}

/// From here on the digits before the point are no longer all significant.
double largest_true_digits(DType dtype) {
    if (dtype == DType::f64) return 1e16;
    return dtype == DType::f32 ? 1e6 : 1e3;
}

/// Whether an array with these numbers is easier to read as 1.5e+07.
bool needs_exponents(const std::vector<double>& values, DType dtype) {
    double largest = 0.0;
    double smallest = HUGE_VAL;
    for (const double value : values) {
        if (!std::isfinite(value) || value == 0.0) continue;
        largest = std::max(largest, std::fabs(value));
        smallest = std::min(smallest, std::fabs(value));
    }
    if (largest == 0.0) return false;
    return largest >= (dtype == DType::f64 ? 1e8 : largest_true_digits(dtype)) || smallest < 1e-4 ||
           largest / smallest > 1000.0;
}

/// The same number of digits after the point and in the exponent. Text for non-finite numbers stays empty.
std::vector<std::string> scientific_words(const std::vector<double>& values, DType dtype) {
    int digits = 0;
    for (const double value : values)
        if (std::isfinite(value)) digits = std::max(digits, fraction_digits_of(value, dtype));
    digits = std::min(digits, most_fraction_digits);
    std::vector<std::string> words(values.size());
    std::size_t exponent_digits = 2;
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i])) continue;
        words[i] = scientific(values[i], digits);
        exponent_digits = std::max(exponent_digits, words[i].size() - words[i].find('e') - 2);
    }
    for (std::string& word : words)
        if (!word.empty())
            word.insert(word.find('e') + 2, exponent_digits + word.find('e') + 2 - word.size(), '0');
    return words;
}

/// With aligned decimal points. Text for non-finite numbers stays empty.
std::vector<std::string> positional_words(const std::vector<double>& values, DType dtype) {
    std::size_t left = 0;
    std::size_t right = 0;
    std::vector<Sides> sides(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i])) continue;
        sides[i] = positional(values[i], dtype);
        left = std::max(left, sides[i].whole.size());
        right = std::max(right, sides[i].fraction.size());
    }
    std::vector<std::string> words(values.size());
    for (std::size_t i = 0; i < values.size(); ++i)
        if (std::isfinite(values[i]))
            words[i] = fmt::format("{:>{}}.{:<{}}", sides[i].whole, left, sides[i].fraction, right);
    return words;
}

void align_right(std::vector<std::string>& words) {
    std::size_t width = 0;
    for (const std::string& word : words) width = std::max(width, word.size());
    for (std::string& word : words) word.insert(0, width - word.size(), ' ');
}

std::vector<std::string> as_words(const std::vector<double>& values, DType dtype) {
    std::vector<std::string> words =
        needs_exponents(values, dtype) ? scientific_words(values, dtype) : positional_words(values, dtype);
    for (std::size_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values[i])) words[i] = special(values[i]);
    align_right(words);
    return words;
}

std::vector<std::string> as_words(const std::vector<std::int64_t>& values) {
    std::vector<std::string> words;
    for (const std::int64_t value : values) words.push_back(std::to_string(value));
    align_right(words);
    return words;
}

std::vector<std::string> as_words(const std::vector<bool>& values) {
    std::vector<std::string> words;
    for (const bool value : values) words.emplace_back(value ? " True" : "False");
    return words;
}

/// A single number: no padding, and at least one digit after the point.
std::string scalar_text(double value, DType dtype) {
    if (!std::isfinite(value)) return special(value);
    const double magnitude = std::fabs(value);
    if (magnitude != 0.0 && (magnitude < 1e-4 || magnitude >= largest_true_digits(dtype)))
        return fmt::format("{:.{}e}", value, fraction_digits_of(value, dtype));
    const Sides sides = positional(value, dtype, 24);
    return sides.whole + "." + (sides.fraction.empty() ? "0" : sides.fraction);
}

// ---- the layout: brackets, lines, gaps ----

class Layout {
public:
    Layout(const Shape& shape, bool summarise, std::vector<std::string> words)
        : shape_(shape), summarise_(summarise), words_(std::move(words)) {}

    std::string text() { return axis(0, " ", line_width); }

private:
    /// The text of one axis and everything inside it. `indent` precedes every line but the first.
    std::string axis(std::size_t depth, const std::string& indent, std::size_t width) {
        const Shown shown = shown_of(shape_[depth], summarise_);
        const std::size_t inside = shape_.size() - depth - 1;
        return "[" + (inside == 0 ? row(shown, indent, width) : block(shown, depth, indent, width)) + "]";
    }

    std::string row(const Shown& shown, const std::string& indent, std::size_t width) {
        std::string text;
        std::string line = indent;
        const auto add = [&](const std::string& word) {
            if (line.size() > indent.size() && line.size() + word.size() > width - 1) {
                while (line.back() == ' ') line.pop_back();
                text += line + "\n";
                line = indent;
            }
            line += word;
        };
        const std::int64_t count = shown.leading + shown.trailing;
        for (std::int64_t i = 0; i < count; ++i) {
            if (i == shown.leading) {
                add("...");
                line += ' ';
            }
            add(words_[next_++]);
            if (i + 1 < count) line += ' ';
        }
        return (text + line).substr(indent.size());
    }

    std::string block(const Shown& shown, std::size_t depth, const std::string& indent, std::size_t width) {
        const std::string separator(shape_.size() - depth - 1, '\n');
        std::string text;
        const std::int64_t count = shown.leading + shown.trailing;
        for (std::int64_t i = 0; i < count; ++i) {
            if (i > 0) text += separator + indent;
            if (i == shown.leading && shown.is_cut) text += "..." + separator + indent;
            text += axis(depth + 1, indent + " ", width - 1);
        }
        return text;
    }

    const Shape& shape_;
    bool summarise_;
    std::vector<std::string> words_;
    std::size_t next_ = 0;
};

/// " (f16, cuda:0)": only what differs from f32 on the CPU. For an empty tensor also its shape.
std::string suffix(const Tensor& x) {
    std::vector<std::string> parts;
    if (x.dtype() != DType::f32) parts.emplace_back(name_of(x.dtype()));
    if (x.device() != Device::cpu()) parts.push_back(name_of(x.device()));
    if (x.count() == 0) parts.push_back("shape " + pretty(x.shape()));
    return parts.empty() ? "" : fmt::format(" ({})", fmt::join(parts, ", "));
}

std::string elements(const Tensor& x) {
    if (x.count() == 0) return "[]";
    if (x.ndim() == 0) {
        if (is_floating(x.dtype())) return scalar_text(x.item<double>(), x.dtype());
        if (x.dtype() == DType::boolean) return x.item<bool>() ? "True" : "False";
        return std::to_string(x.item<std::int64_t>());
    }
    const bool summarise = x.count() >= summarised_from;
    std::vector<std::string> words;
    if (is_floating(x.dtype())) {
        std::vector<double> values;
        collect(x, summarise, values);
        words = as_words(values, x.dtype());
    } else if (x.dtype() == DType::boolean) {
        std::vector<bool> values;
        collect(x, summarise, values);
        words = as_words(values);
    } else {
        std::vector<std::int64_t> values;
        collect(x, summarise, values);
        words = as_words(values);
    }
    return Layout(x.shape(), summarise, std::move(words)).text();
}

}  // namespace

std::string to_string(const Tensor& tensor) {
    if (!tensor.defined()) return "undefined";
    return elements(tensor) + suffix(tensor);
}

std::ostream& operator<<(std::ostream& stream, const Tensor& tensor) { return stream << to_string(tensor); }

}  // namespace potluck
