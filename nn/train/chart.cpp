#include "nn/train/chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/format.h"

namespace potluck {
namespace {

// The coordinates of a drawing; a page scales it to its place.
constexpr double width = 640, height = 260;
constexpr double left = 62, right = 12, top = 34, bottom = 36;

struct Range {
    double low = std::numeric_limits<double>::infinity();
    double high = -std::numeric_limits<double>::infinity();

    void take(double value) {
        low = std::min(low, value);
        high = std::max(high, value);
    }
    bool empty() const { return low > high; }
    /// A range of one value, or of none at all, cannot be drawn.
    void widen() {
        if (empty()) low = high = 0.0;
        if (low < high && high - low > 1e-12 * std::max(std::abs(low), std::abs(high))) return;
        const double half = low == 0.0 ? 1.0 : 0.1 * std::abs(low);
        low -= half;
        high += half;
    }
};

/// Some five round numbers in a range.
std::vector<double> ticks(const Range& range, double smallest_distance) {
    const double rough = (range.high - range.low) / 5;
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    double distance = 10 * power;
    for (const double factor : {1.0, 2.0, 5.0})
        if (factor * power >= rough) {
            distance = factor * power;
            break;
        }
    distance = std::max(distance, smallest_distance);
    std::vector<double> places;
    for (double i = std::ceil(range.low / distance); i * distance <= range.high; ++i)
        places.push_back(i * distance);
    return places;
}

/// Where a step and a value stand in a drawing.
struct Axes {
    Range x, y;

    double at_x(double step) const {
        return left + (width - left - right) * (step - x.low) / (x.high - x.low);
    }
    double at_y(double value) const {
        return height - bottom - (height - top - bottom) * (value - y.low) / (y.high - y.low);
    }
    std::string at(double step, double value) const {
        return fmt::format("{:.1f},{:.1f}", at_x(step), at_y(value));
    }
};

std::string start_of(std::string_view title) {
    return fmt::format(
        R"(<svg viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title><text class="name" x="{}" y="16">{}</text>)",
        width, height, escaped(title), escaped(title), left, escaped(title));
}

std::string grid(const Axes& axes, bool percent) {
    std::string svg;
    for (const double value : ticks(axes.y, 0.0)) {
        const double y = axes.at_y(value);
        svg += fmt::format(R"(<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>)", left,
                           width - right, y, y);
        svg += fmt::format(R"(<text x="{}" y="{:.1f}" text-anchor="end">{}</text>)", left - 6, y + 4,
                           percent ? fmt::format("{:.0f} %", 100 * value) : short_number(value));
    }
    for (const double step : ticks(axes.x, 1.0))
        svg += fmt::format(R"(<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>)", axes.at_x(step),
                           height - bottom + 16, short_number(step));
    return svg +
           fmt::format(R"(<text x="{}" y="{}" text-anchor="end">step</text>)", width - right, height - 4);
}

std::string legend(std::span<const Line> lines) {
    std::string svg;
    double x = width - right;
    for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
        x -= 7.0 * static_cast<double>(line->name.size()) + 22;
        svg += fmt::format(R"(<rect x="{:.1f}" y="8" width="10" height="10" fill="{}"/>)", x, line->color);
        svg += fmt::format(R"(<text x="{:.1f}" y="17">{}</text>)", x + 14, escaped(line->name));
    }
    return svg;
}

std::string drawn(const Axes& axes, const Line& line) {
    const std::vector<Curve::Bucket>& buckets = line.curve->buckets();
    std::string means, upper, lower, svg;
    for (const Curve::Bucket& bucket : buckets) {
        means += axes.at(bucket.middle(), bucket.mean()) + " ";
        upper += axes.at(bucket.middle(), bucket.largest) + " ";
    }
    for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket)
        lower += axes.at(bucket->middle(), bucket->smallest) + " ";
    if (line.curve->width() > 1 && buckets.size() > 1)
        svg += fmt::format(R"(<polygon class="band" fill="{}" points="{}{}"/>)", line.color, upper, lower);
    if (buckets.size() > 1)
        svg += fmt::format(R"(<polyline class="line" stroke="{}" points="{}"/>)", line.color, means);
    if (line.with_dots || buckets.size() == 1)
        for (const Curve::Bucket& bucket : buckets)
            svg += fmt::format(
                R"(<circle r="3" cx="{:.1f}" cy="{:.1f}" fill="{}"><title>{} {} at step {}</title></circle>)",
                axes.at_x(bucket.middle()), axes.at_y(bucket.mean()), line.color, escaped(line.name),
                short_number(bucket.mean()), bucket.last_step);
    return svg;
}

/// How many bytes a character of UTF-8 takes that starts at `place`; 0 when none does.
std::size_t character_at(std::string_view text, std::size_t place) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char first = byte(place);
    const std::size_t length = first < 0x80   ? 1
                               : first < 0xc2 ? 0
                               : first < 0xe0 ? 2
                               : first < 0xf0 ? 3
                               : first < 0xf5 ? 4
                                              : 0;
    if (length == 0 || length > text.size() - place) return 0;
    for (std::size_t i = 1; i < length; ++i)
        if ((byte(place + i) & 0xc0) != 0x80) return 0;
    return length;
}

}  // namespace

std::string escaped(std::string_view text) {
    constexpr const char* replacement = "\xef\xbf\xbd";
    std::string result;
    for (std::size_t place = 0; place < text.size();) {
        const std::size_t length = character_at(text, place);
        const char one = text[place];
        if (length == 0 ||
            (length == 1 && static_cast<unsigned char>(one) < 0x20 && one != '\n' && one != '\t'))
            result += replacement;
        else if (one == '&')
            result += "&amp;";
        else if (one == '<')
            result += "&lt;";
        else if (one == '>')
            result += "&gt;";
        else if (one == '"')
            result += "&quot;";
        else if (one == '\'')
            result += "&#39;";
        else
            result += text.substr(place, length);
        place += std::max<std::size_t>(length, 1);
    }
    return result;
}

std::string short_number(double number) {
    const double size = std::abs(number);
    if (size != 0.0 && (size < 1e-3 || size >= 1e15)) return fmt::format("{:.2g}", number);
    for (const auto& [unit, name] : {std::pair{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e4, "k"}})
        if (size >= unit) return fmt::format("{:.4g}{}", number / (unit == 1e4 ? 1e3 : unit), name);
    return fmt::format("{:.4g}", number);
}

std::string line_chart(std::string_view title, std::span<const Line> lines,
                       std::span<const std::int64_t> marks) {
    std::string svg = start_of(title);
    Axes axes;
    for (const Line& line : lines) {
        for (const Curve::Bucket& bucket : line.curve->buckets()) {
            axes.x.take(bucket.middle());
            axes.y.take(bucket.smallest);
            axes.y.take(bucket.largest);
        }
    }
    if (axes.x.empty())
        return svg + fmt::format(R"(<text x="{}" y="{}" text-anchor="middle">no values yet</text></svg>)",
                                 width / 2, height / 2);
    axes.x.widen();
    axes.y.widen();
    svg += grid(axes, false);
    for (const std::int64_t step : marks) {
        const double x = axes.at_x(static_cast<double>(step));
        svg += fmt::format(
            R"(<line class="mark" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"><title>resumed at step {}</title></line>)",
            x, x, top, height - bottom, step);
    }
    for (const Line& line : lines) svg += drawn(axes, line);
    return svg + (lines.size() > 1 ? legend(lines) : std::string()) + "</svg>";
}

std::string share_chart(std::string_view title, std::span<const Line> lines) {
    std::string svg = start_of(title);
    if (lines.empty() || lines.front().curve->empty())
        return svg + fmt::format(R"(<text x="{}" y="{}" text-anchor="middle">no values yet</text></svg>)",
                                 width / 2, height / 2);
    const std::vector<Curve::Bucket>& first = lines.front().curve->buckets();
    Axes axes{{}, {0.0, 1.0}};
    std::vector<double> whole(first.size(), 0.0), below(first.size(), 0.0);
    for (std::size_t i = 0; i < first.size(); ++i) {
        axes.x.take(static_cast<double>(first[i].first_step) - 0.5);
        axes.x.take(static_cast<double>(first[i].last_step) + 0.5);
        for (const Line& line : lines) whole[i] += line.curve->buckets()[i].sum;
    }
    for (const Line& line : lines) {
        std::string upper, lower;
        for (std::size_t i = 0; i < first.size(); ++i) {
            const double start = below[i];
            if (whole[i] > 0.0) below[i] += line.curve->buckets()[i].sum / whole[i];
            const double from = static_cast<double>(first[i].first_step) - 0.5;
            const double to = static_cast<double>(first[i].last_step) + 0.5;
            upper += axes.at(from, below[i]) + " " + axes.at(to, below[i]) + " ";
            lower = axes.at(to, start) + " " + axes.at(from, start) + " " + lower;
        }
        svg += fmt::format(R"(<polygon fill="{}" points="{}{}"><title>{}</title></polygon>)", line.color,
                           upper, lower, escaped(line.name));
    }
    return svg + grid(axes, true) + "</svg>";
}

}  // namespace potluck
