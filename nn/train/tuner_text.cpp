// What a Tuner found, as text.

#include <algorithm>

#include "core/format.h"
#include "nn/train/choose_recompute.h"
#include "nn/train/tuner.h"

namespace potluck {
namespace {

std::string percent(const std::optional<double>& difference) {
    return difference ? fmt::format("{:+.2f} %", 100.0 * *difference) : "";
}

struct Cells {
    std::string step = {}, speed = {}, memory = {}, loss = {}, validation = {}, kept = {};
};

Cells cells_of(const TunerRow& row, bool is_base) {
    Cells cells{.step = row.step};
    if (row.trial && row.trial->samples_per_second > 0.0) {
        cells.speed = fmt::format("{:.1f}", row.trial->samples_per_second);
        cells.memory = fmt::format("{:.2f} MB", 1e-6 * static_cast<double>(row.trial->peak_bytes));
    }
    if (is_base) {
        cells.loss = fmt::format("{:.4f}", row.trial->loss);
        if (row.trial->validation_loss) cells.validation = fmt::format("{:.4f}", *row.trial->validation_loss);
        return cells;
    }
    cells.loss = percent(row.loss_difference);
    cells.validation = percent(row.validation_difference);
    cells.kept = fmt::format("{}: {}", row.kept ? "yes" : "no", row.why);
    return cells;
}

/// A word as a shell reads it back.
std::string quoted(const std::string& word) {
    const auto is_plain = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               std::string_view("-_./:=+,@%").find(c) != std::string_view::npos;
    };
    if (!word.empty() && std::all_of(word.begin(), word.end(), is_plain)) return word;
    std::string text = "'";
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return text + "'";
}

}  // namespace

std::string to_table(const TunerResult& result) {
    std::vector<Cells> lines = {{"step", "samples/s", "memory", "loss", "validation", "kept"}};
    for (std::size_t i = 0; i < result.rows.size(); ++i) lines.push_back(cells_of(result.rows[i], i == 0));
    std::size_t widest = 0;
    for (const Cells& line : lines) widest = std::max(widest, line.step.size());
    std::string table;
    for (const Cells& line : lines) {
        std::string text = fmt::format("{:<{}} {:>10} {:>12} {:>10} {:>11}  {}", line.step, widest,
                                       line.speed, line.memory, line.loss, line.validation, line.kept);
        text.erase(text.find_last_not_of(' ') + 1);
        table += text + "\n";
    }
    if (result.stopped) return table + "stopped before everything was tried\n";
    if (result.bottleneck)
        table += fmt::format("the limit is {} now: {}\n", name_of(result.bottleneck->kind),
                             result.bottleneck->reason);
    return table;
}

std::vector<std::pair<std::string, std::string>> tuned_options(const TunerResult& result,
                                                               std::int64_t steps) {
    const TunerSetting &base = result.base, &best = result.best;
    std::vector<std::pair<std::string, std::string>> options;
    const auto add = [&](bool changed, const char* name, const std::string& value) {
        if (changed) options.emplace_back(name, value);
    };
    add(best.precision != base.precision, "--precision", std::string(name_of(dtype_of(best.precision))));
    add(best.batch != base.batch, "--batch", fmt::format("{}", best.batch));
    add(best.accumulate != base.accumulate, "--accumulate", fmt::format("{}", best.accumulate));
    add(best.workers != base.workers, "--workers", fmt::format("{}", best.workers));
    add(name_of(best.recompute) != name_of(base.recompute), "--recompute", name_of(best.recompute));
    add(best.learning_rate != base.learning_rate, "--learning-rate",
        fmt::format("{:.4g}", best.learning_rate));
    const std::int64_t times = items_of_update(best) / items_of_update(base);
    add(steps > 0 && times > 1, "--steps", fmt::format("{}", std::max<std::int64_t>(steps / times, 1)));
    return options;
}

std::string command_line_of(const std::vector<std::string>& command,
                            const std::vector<std::pair<std::string, std::string>>& options,
                            const std::vector<std::pair<std::string, int>>& left_out) {
    std::vector<std::pair<std::string, int>> drop = left_out;
    for (const auto& [name, value] : options) drop.emplace_back(name, 1);
    std::string text;
    const auto add = [&](const std::string& word) { text += (text.empty() ? "" : " ") + quoted(word); };
    for (std::size_t i = 0; i < command.size(); ++i) {
        const std::string name = command[i].substr(0, command[i].find('='));
        const auto found =
            std::find_if(drop.begin(), drop.end(), [&](const auto& one) { return one.first == name; });
        if (i == 0 || found == drop.end())
            add(command[i]);
        else if (name == command[i])
            i += static_cast<std::size_t>(found->second);  // its value is a word of its own
    }
    for (const auto& [name, value] : options) {
        add(name);
        add(value);
    }
    return text;
}

}  // namespace potluck
