#include "nn/train/report.h"

#include <algorithm>
#include <cmath>

#include "core/format.h"
#include "core/version.h"
#include "data/image.h"
#include "nn/train/chart.h"
#include "nn/train/progress.h"

namespace potluck {
namespace {

constexpr const char* style = R"(
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --text: #1c2430; --faint: #667085; --rule: #d8dde5; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181f; --card: #1d232c; --text: #e6e9ee; --faint: #98a2b3; --rule: #364050; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1100px; background: var(--back); color: var(--text);
       font: 15px/1.45 system-ui, sans-serif; }
h1 { margin: 0; font-size: 24px; overflow-wrap: anywhere; }
h2 { margin: 32px 0 12px; font-size: 18px; }
p { margin: 4px 0; }
.faint { color: var(--faint); overflow-wrap: anywhere; }
.tiles, .charts, .pictures { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(115px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }
.tiles { margin-top: 20px; }
.tile, .charts > *, .limit { background: var(--card); border-radius: 8px; padding: 12px; }
.tile b { display: block; font-size: 22px; font-weight: 600; }
.limit { margin-top: 16px; border-left: 4px solid #2f6fdb; }
.limit.input { border-left-color: #d9480f; }
.pictures { grid-template-columns: repeat(auto-fill, minmax(110px, 1fr)); }
.pictures figure { margin: 0; background: var(--card); border-radius: 8px; padding: 8px; text-align: center; }
.pictures img { width: 96px; height: 96px; object-fit: contain; image-rendering: pixelated; }
.pictures .wrong { outline: 2px solid #d9480f; }
.pictures figcaption { font-size: 13px; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: 4px 10px 4px 0; border-bottom: 1px solid var(--rule); text-align: left; font-weight: 400;
         overflow-wrap: anywhere; vertical-align: top; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bar { width: 40%; } td.bar div { height: 12px; border-radius: 3px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .name { font-size: 14px; font-weight: 600; }
svg .grid { stroke: var(--rule); } svg .mark { stroke: var(--faint); stroke-dasharray: 4 4; }
svg .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } svg .band { opacity: 0.25; }
)";

/// Colours that the colour-blind tell apart too (Okabe and Ito's), one a phase.
constexpr std::array<const char*, phase_count> colors = {"#d55e00", "#cc79a7", "#0072b2", "#56b4e9",
                                                         "#009e73", "#e69f00", "#b8a800", "#98a2b3"};
const char* color_of(Phase phase) { return colors[static_cast<std::size_t>(phase)]; }

const char* words_for(Phase phase) {
    switch (phase) {
        case Phase::data:
            return "waiting for data";
        case Phase::copy:
            return "copying to the device";
        default:
            return name_of(phase);
    }
}

std::string bytes(std::int64_t count) {
    const auto size = static_cast<double>(count);
    for (const auto& [unit, name] : {std::pair{1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}})
        if (size >= unit) return fmt::format("{:.1f} {}", size / unit, name);
    return fmt::format("{} B", count);
}

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

// ---- the parts of the page ----

std::string tile(std::string_view name, const std::string& value) {
    return fmt::format("<div class=\"tile\"><b>{}</b>{}</div>\n", escaped(value), escaped(name));
}

std::string tiles(const RunHistory& history, const TrainingSummary& summary) {
    const auto loss = [](const std::optional<double>& value) {
        return value ? fmt::format("{:.4f}", *value) : std::string("–");
    };
    std::string html = "<div class=\"tiles\">\n";
    html += tile("steps", fmt::format("{}", history.steps));
    html += tile("training loss", loss(summary.final_train_loss));
    html += tile("validation loss", loss(summary.final_val_loss));
    html += tile("samples/s", readable_number(summary.samples_per_second));
    if (history.counts_tokens) html += tile("tokens/s", readable_number(summary.tokens_per_second));
    html += tile("MFU", summary.mfu ? percent(*summary.mfu) : std::string("–"));
    html += tile("peak memory", bytes(summary.peak_memory_bytes));
    html += tile("time", clock_time(history.total.total()));
    return html + "</div>\n";
}

std::string limit(const std::optional<Bottleneck>& bottleneck) {
    if (!bottleneck) return "";
    const char* name = name_of(bottleneck->kind);
    return fmt::format("<div class=\"limit {}\" id=\"limit\"><p><b>The limit is {}.</b></p><p>{}</p></div>\n",
                       name, name, escaped(bottleneck->reason));
}

struct Row {
    std::string name, value;
    double share = 0.0;
    const char* color = "#0072b2";
};

/// Names, values, and bars as long as the shares.
std::string bars(const std::vector<Row>& rows) {
    std::string html = "<table>\n";
    for (const Row& row : rows)
        html += fmt::format(
            "<tr><td>{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"bar\"><div "
            "style=\"width:{:.1f}%;background:{}\"></div></td></tr>\n",
            escaped(row.name), escaped(row.value), percent(row.share), 100 * std::clamp(row.share, 0.0, 1.0),
            row.color);
    return html + "</table>\n";
}

std::string charts(const RunHistory& history) {
    const auto chart = [&](std::string_view title, const Curve& curve) {
        const std::array<Line, 1> line = {Line{std::string(title), &curve, "#0072b2"}};
        return line_chart(title, line, history.resumed_at) + "\n";
    };
    const std::array<Line, 2> losses = {Line{"training", &history.loss, "#0072b2"},
                                        Line{"validation", &history.validation, "#d55e00", true}};
    std::string html = "<h2>Loss</h2>\n<div class=\"charts\">\n";
    html += line_chart("loss", losses, history.resumed_at) + "\n";
    html += chart("norm of the gradient", history.gradient_norm);
    html += chart("learning rate", history.learning_rate);
    html += "</div>\n";
    const std::int64_t left_out = history.validation.left_out() + history.gradient_norm.left_out();
    if (left_out > 0)
        html += fmt::format("<p class=\"faint\">{} values are not finite and not drawn.</p>\n", left_out);
    html += "<h2>Throughput</h2>\n<div class=\"charts\">\n";
    html += history.counts_tokens ? chart("tokens/s", history.tokens_per_second)
                                  : chart("samples/s", history.samples_per_second);
    html += chart("MFU", history.mfu);
    return html + "</div>\n";
}

std::string time_section(const RunHistory& history) {
    std::vector<Line> lines;
    std::vector<Row> rows;
    for (const Phase phase : phases) {
        lines.push_back({words_for(phase), &history.time[static_cast<std::size_t>(phase)], color_of(phase)});
        rows.push_back({words_for(phase), fmt::format("{:.2f} s", history.total[phase]),
                        history.total.share(phase), color_of(phase)});
    }
    return "<h2>Where the time goes</h2>\n<div class=\"charts\">\n" + share_chart("shares of time", lines) +
           "\n<div>" + bars(rows) + "</div>\n</div>\n";
}

std::string memory_section(const MemoryUse& memory) {
    const auto row = [&](std::string name, std::int64_t count) {
        const double whole = static_cast<double>(std::max<std::int64_t>(memory.peak, 1));
        return Row{std::move(name), bytes(count), static_cast<double>(count) / whole};
    };
    std::string html = "<h2>Memory at its peak</h2>\n<div class=\"charts\">\n<div>";
    html +=
        bars({row("parameters", memory.parameters), row("gradients, when all are there", memory.gradients),
              row("optimizer state", memory.optimizer_state), row("buffers", memory.buffers),
              row("held before the training", memory.before),
              row("activations and the rest", memory.activations)});
    std::vector<std::pair<std::string, std::int64_t>> ops(memory.by_op.begin(), memory.by_op.end());
    std::stable_sort(ops.begin(), ops.end(),
                     [](const auto& a, const auto& b) { return a.second > b.second; });
    constexpr std::size_t most = 12;
    std::vector<Row> rows;
    for (std::size_t i = 0; i < std::min(ops.size(), most); ++i)
        rows.push_back(row(ops[i].first, ops[i].second));
    html += "</div>\n<div><p class=\"faint\">by the op that allocated it</p>" + bars(rows);
    if (ops.size() > most) html += fmt::format("<p class=\"faint\">and {} more</p>", ops.size() - most);
    return html + "</div>\n</div>\n";
}

/// RFC 4648, as data URIs hold it.
std::string base64(const std::string& bytes) {
    constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        std::uint32_t three = 0;
        for (std::size_t j = 0; j < 3; ++j)
            three = three << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0U);
        for (std::size_t j = 0; j < 4; ++j)
            text += i + j > bytes.size() ? '=' : digits[three >> (18 - 6 * j) & 63];
    }
    return text;
}

std::string pictures_section(const std::vector<ReportPicture>& pictures) {
    if (pictures.empty()) return "";
    std::string html = "<h2>Pictures</h2>\n<div class=\"pictures\">\n";
    for (const ReportPicture& picture : pictures)
        html += fmt::format(
            "<figure{}><img alt=\"{}\" "
            "src=\"data:image/png;base64,{}\"><figcaption>{}</figcaption></figure>\n",
            picture.label == picture.predicted ? "" : " class=\"wrong\"", escaped(picture.label),
            base64(data::encode_png(picture.image)),
            picture.label == picture.predicted
                ? escaped(picture.label)
                : fmt::format("{}, not {}", escaped(picture.label), escaped(picture.predicted)));
    return html + "</div>\n";
}

std::string settings_section(const ReportFacts& facts) {
    std::string html = "<h2>Settings</h2>\n<table id=\"settings\">\n";
    for (const auto& [name, value] : facts.settings)
        html += fmt::format("<tr><td>{}</td><td>{}</td></tr>\n", escaped(name), escaped(value));
    return html + "</table>\n";
}

}  // namespace

void RunHistory::add(const StepMetrics& metrics) {
    const std::int64_t step = metrics.step;
    steps = step;
    if (metrics.resumed) resumed_at.push_back(step);
    loss.add(step, metrics.loss);
    learning_rate.add(step, metrics.learning_rate);
    gradient_norm.add(step, metrics.gradient_norm);
    if (metrics.validation_loss) validation.add(step, *metrics.validation_loss);
    if (metrics.seconds > 0.0) tokens_per_second.add(step, metrics.tokens_per_second);
    // Lines of older versions lack what follows.
    if (metrics.samples > 0) {
        samples_per_second.add(step, metrics.samples_per_second);
        counts_tokens |= metrics.samples != metrics.tokens;
    }
    if (metrics.mfu) mfu.add(step, *metrics.mfu);
    if (metrics.time.total() == 0.0) return;
    total += metrics.time;
    for (const Phase phase : phases) time[static_cast<std::size_t>(phase)].add(step, metrics.time[phase]);
}

std::string report_page(const RunHistory& history, const ReportFacts& facts) {
    const TrainingSummary& summary = facts.summary;
    std::string html = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
    html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
    html +=
        fmt::format("<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n", escaped(facts.title), style);
    html += fmt::format("<h1>{}</h1>\n<p class=\"faint\">{}. Potluck {}</p>\n", escaped(facts.title),
                        escaped(facts.status), version());
    html += tiles(history, summary) + limit(summary.bottleneck) + charts(history);
    if (!summary.mfu_formula.empty())
        html += fmt::format("<p class=\"faint\" id=\"mfu\">MFU = {}</p>\n", escaped(summary.mfu_formula));
    html += time_section(history) + memory_section(summary.memory) + pictures_section(facts.pictures) +
            settings_section(facts);
    return html + "</body>\n</html>\n";
}

}  // namespace potluck
