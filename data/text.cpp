#include "data/text.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/format.h"

namespace potluck::data {

namespace {

namespace files = std::filesystem;

std::string read_file(const files::path& path) {
    errno = 0;
    std::ifstream file(path, std::ios::binary);
    std::string content;
    if (file) {
        std::error_code failure;
        const std::uintmax_t size = files::file_size(path, failure);
        if (!failure) content.reserve(static_cast<std::size_t>(size));
        std::array<char, 1 << 16> piece{};
        while (file.read(piece.data(), piece.size()) || file.gcount() > 0)
            content.append(piece.data(), static_cast<std::size_t>(file.gcount()));
    }
    if (!file.is_open() || file.bad())
        throw Error("read_text",
                    fmt::format("cannot read {}: {}.", path.string(),
                                errno != 0 ? std::strerror(errno) : "the system gave no reason"));
    return content;
}

bool is_binary(const std::string& content) {
    constexpr std::size_t looked_at = 8000;
    return std::string_view(content).substr(0, looked_at).find('\0') != std::string_view::npos;
}

bool is_left_out_folder(const files::path& folder) {
    static const std::array<std::string_view, 3> names{"build", "node_modules", "__pycache__"};
    const std::string name = folder.filename().string();
    if (std::find(names.begin(), names.end(), name) != names.end()) return true;
    std::error_code ignored;
    return files::exists(folder / "build.ninja", ignored) ||
           files::exists(folder / "CMakeCache.txt", ignored);
}

/// The result of scanning a folder.
struct ScannedFolder {
    std::vector<TextFile> texts;
    std::int64_t empty = 0, binary = 0;
};

void scan(const files::path& folder, ScannedFolder& found) {
    std::error_code failure;
    std::vector<files::directory_entry> entries;
    for (files::directory_iterator entry(folder, failure), end; !failure && entry != end;
         entry.increment(failure))
        entries.push_back(*entry);
    if (failure)
        throw Error("read_text",
                    fmt::format("cannot read the folder {}: {}.", folder.string(), failure.message()));
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
        return a.path().filename().native() < b.path().filename().native();
    });
    for (const files::directory_entry& entry : entries) {
        const files::path& path = entry.path();
        if (path.filename().native().starts_with('.') || entry.is_symlink(failure)) continue;
        if (entry.is_directory(failure)) {
            if (!is_left_out_folder(path)) scan(path, found);
        } else if (entry.is_regular_file(failure)) {
            std::string content = read_file(path);
            if (content.empty())
                ++found.empty;
            else if (is_binary(content))
                ++found.binary;
            else
                found.texts.push_back({path.string(), std::move(content)});
        }
    }
}

/// Where the validation part of a file starts: see split_text().
std::size_t cut_of(const std::string& content, double validation_fraction) {
    const std::size_t validation =
        static_cast<std::size_t>(static_cast<double>(content.size()) * validation_fraction);
    std::size_t cut = content.size() - std::min(validation, content.size());
    if (cut == content.size()) return cut;
    const std::size_t line_end = content.find('\n', cut == 0 ? 0 : cut - 1);
    if (line_end != std::string::npos && line_end + 1 < content.size()) return line_end + 1;
    const auto is_continuation = [&](std::size_t i) {
        return (static_cast<unsigned char>(content[i]) & 0xC0) == 0x80;
    };
    for (int back = 0; back < 3 && cut > 0 && is_continuation(cut); ++back) --cut;
    return cut;
}

}  // namespace

std::vector<TextFile> read_text(const std::string& path) {
    if (path.empty()) throw Error("read_text", "the path is empty. Give an existing text file or folder.");
    std::error_code failure;
    const files::file_status status = files::status(path, failure);
    if (status.type() == files::file_type::not_found)
        throw Error("read_text",
                    fmt::format("{} does not exist. Give an existing text file or folder.", path));
    if (failure) throw Error("read_text", fmt::format("cannot read {}: {}.", path, failure.message()));

    if (files::is_directory(status)) {
        ScannedFolder found;
        scan(path, found);
        if (found.texts.empty())
            throw Error("read_text",
                        fmt::format("the folder {} has no text file in it ({} empty and {} binary files "
                                    "were left out). Give a folder with text.",
                                    path, found.empty, found.binary));
        return std::move(found.texts);
    }
    if (!files::is_regular_file(status))
        throw Error("read_text", fmt::format("{} is neither a file nor a folder.", path));
    std::string content = read_file(path);
    if (content.empty())
        throw Error("read_text", fmt::format("the file {} is empty. Give a file with text.", path));
    if (is_binary(content))
        throw Error("read_text",
                    fmt::format("the file {} is binary: it has a zero byte at position {}. Give a text file.",
                                path, content.find('\0')));
    std::vector<TextFile> only;
    only.push_back({path, std::move(content)});
    return only;
}

std::vector<TextFile> read_text(const std::vector<std::string>& paths) {
    if (paths.empty()) throw Error("read_text", "there is no path. Give at least one text file or folder.");
    std::vector<TextFile> all;
    for (const std::string& path : paths)
        for (TextFile& file : read_text(path)) all.push_back(std::move(file));
    return all;
}

TextSplit split_text(const std::vector<TextFile>& files, double validation_fraction) {
    if (!(validation_fraction >= 0 && validation_fraction < 1))
        throw Error("split_text",
                    fmt::format("the validation fraction is {}. It must be at least 0 and below 1.",
                                validation_fraction));
    TextSplit split;
    for (const TextFile& file : files) {
        const std::size_t cut = cut_of(file.content, validation_fraction);
        split.train.append(file.content, 0, cut);
        split.validation.append(file.content, cut);
    }
    return split;
}

TokenWindows::TokenWindows(Tensor tokens, std::int64_t window, std::int64_t stride)
    : tokens_(std::move(tokens)), window_(window), stride_(stride) {
    if (!tokens_.defined() || tokens_.ndim() != 1 || !is_integer(tokens_.dtype()))
        throw Error("TokenWindows",
                    tokens_.defined()
                        ? fmt::format("tokens are {} of {}. They must have one axis and an integer dtype.",
                                      pretty(tokens_.shape()), tokens_.dtype())
                        : "tokens is undefined.");
    if (window < 1)
        throw Error("TokenWindows", fmt::format("the window is {}. It must be at least 1.", window));
    if (stride < 1)
        throw Error("TokenWindows", fmt::format("the stride is {}. It must be at least 1.", stride));
    if (tokens_.count() <= window)
        throw Error(
            "TokenWindows",
            fmt::format("{} tokens are too few for a window of {}: at least {} are needed (the target is the "
                        "window moved on by one). Give more text or a shorter window.",
                        tokens_.count(), window, window + 1));
    if (!tokens_.device().is_cpu())
        throw Error("TokenWindows",
                    fmt::format("tokens are on {}. Keep them on a CPU device.", tokens_.device()));
    tokens_ = tokens_.detach();
}

std::int64_t TokenWindows::size() const { return (tokens_.count() - window_ - 1) / stride_ + 1; }

Example TokenWindows::get(std::int64_t index, RandomKey) const {
    if (index < 0 || index >= size())
        throw Error("TokenWindows", fmt::format("window {} of {} does not exist.", index, size()));
    Example example{Tensor::empty({window_}, {DType::i64}), Tensor::empty({window_}, {DType::i64})};
    const std::int64_t step = tokens_.strides()[0];
    visit(tokens_.dtype(), [&](auto zero) {
        using T = decltype(zero);
        if constexpr (std::is_integral_v<T>) {
            const T* from = tokens_.data<T>() + index * stride_ * step;
            std::int64_t* input = example.input.data<std::int64_t>();
            std::int64_t* target = example.target.data<std::int64_t>();
            for (std::int64_t i = 0; i < window_; ++i) {
                input[i] = static_cast<std::int64_t>(from[i * step]);
                target[i] = static_cast<std::int64_t>(from[(i + 1) * step]);
            }
        }
    });
    return example;
}

}  // namespace potluck::data
