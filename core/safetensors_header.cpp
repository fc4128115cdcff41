#include "core/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "core/format.h"

namespace potluck {
namespace {

constexpr std::array<std::pair<std::string_view, DType>, 8> dtype_names{{{"F64", DType::f64},
                                                                         {"F32", DType::f32},
                                                                         {"F16", DType::f16},
                                                                         {"BF16", DType::bf16},
                                                                         {"I64", DType::i64},
                                                                         {"I32", DType::i32},
                                                                         {"U8", DType::u8},
                                                                         {"BOOL", DType::boolean}}};
constexpr std::size_t most_axes = 256;  // so that a header full of "1,1,1,..." cannot fill the memory

/// A name from a file, shortened and cleaned for use in a message.
std::string shown(std::string_view name) {
    constexpr std::size_t longest = 80;
    std::string text(name.substr(0, longest));
    for (char& c : text)
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
    return fmt::format("\"{}{}\"", text, name.size() > longest ? "..." : "");
}

/// Position of the first byte that is not part of well-formed UTF-8.
std::optional<std::size_t> find_invalid_utf8(std::string_view text) {
    for (std::size_t i = 0; i < text.size();) {
        const auto first = static_cast<unsigned char>(text[i]);
        std::size_t length = 0;
        std::uint32_t point = 0;
        if (first < 0x80) {
            ++i;
            continue;
        }
        if ((first & 0xe0) == 0xc0) length = 2, point = first & 0x1fU;
        if ((first & 0xf0) == 0xe0) length = 3, point = first & 0x0fU;
        if ((first & 0xf8) == 0xf0) length = 4, point = first & 0x07U;
        if (length == 0 || i + length > text.size()) return i;
        for (std::size_t k = 1; k < length; ++k) {
            const auto next = static_cast<unsigned char>(text[i + k]);
            if ((next & 0xc0) != 0x80) return i;
            point = point << 6 | (next & 0x3fU);
        }
        const std::uint32_t least = length == 2 ? 0x80 : length == 3 ? 0x800 : 0x10000;
        if (point < least || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff)) return i;
        i += length;
    }
    return std::nullopt;
}

/// Receives the JSON text piece by piece and keeps only what a header may contain.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
public:
    explicit HeaderReader(const std::string& path) : path_(path) {}

    Header take() { return std::move(header_); }

    bool null() override { unexpected("null"); }
    bool boolean(bool) override { unexpected("true or false"); }
    bool number_integer(number_integer_t value) override {
        if (state_ == State::shape)
            refuse(fmt::format("tensor {} has a negative size ({}).", shown(entry_.name), value));
        if (state_ == State::offsets)
            refuse(fmt::format("tensor {} has a negative offset ({}).", shown(entry_.name), value));
        unexpected("a number");
    }
    bool number_float(number_float_t, const string_t& text) override {
        if (state_ == State::shape || state_ == State::offsets)
            refuse(fmt::format("tensor {} has {} where a whole number below 2^64 must stand.",
                               shown(entry_.name), text));
        unexpected("a fraction");
    }
    bool number_unsigned(number_unsigned_t value) override {
        if (state_ != State::shape && state_ != State::offsets) unexpected("a number");
        if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max()))
            refuse(fmt::format("tensor {} has the {} {}, which no tensor of 2^63 - 1 bytes can have.",
                               shown(entry_.name), state_ == State::shape ? "size" : "offset", value));
        if (state_ == State::shape) {
            if (entry_.shape.size() == most_axes)
                refuse(fmt::format("tensor {} has more than {} axes.", shown(entry_.name), most_axes));
            entry_.shape.push_back(static_cast<std::int64_t>(value));
        } else {
            if (offsets_ == 2)
                refuse(fmt::format("tensor {} has more than two data_offsets.", shown(entry_.name)));
            (offsets_ == 0 ? entry_.begin : entry_.end) = static_cast<std::int64_t>(value);
            ++offsets_;
        }
        return true;
    }
    bool string(string_t& value) override {
        if (state_ == State::metadata_value) {
            if (!header_.metadata.emplace(key_, value).second)
                refuse(fmt::format("the metadata has {} twice.", shown(key_)));
            state_ = State::metadata;
            return true;
        }
        if (state_ != State::dtype) unexpected("a text");
        const auto* found = std::find_if(dtype_names.begin(), dtype_names.end(),
                                         [&](const auto& pair) { return pair.first == value; });
        if (found == dtype_names.end())
            refuse(
                fmt::format("tensor {} has the unknown dtype {}. Known are F64 F32 F16 BF16 I64 I32 U8 BOOL.",
                            shown(entry_.name), shown(value)));
        entry_.dtype = found->second;
        state_ = State::entry;
        return true;
    }
    bool binary(binary_t&) override { unexpected("bytes"); }

    bool start_object(std::size_t) override {
        if (state_ == State::start) {
            state_ = State::top;
        } else if (state_ == State::entry_value) {
            state_ = State::entry;
        } else if (state_ == State::metadata_start) {
            state_ = State::metadata;
        } else {
            unexpected("an object");
        }
        return true;
    }
    bool end_object() override {
        if (state_ == State::entry) finish_entry();
        state_ = state_ == State::top ? State::end : State::top;
        return true;
    }
    bool start_array(std::size_t) override {
        if (state_ == State::shape_start) {
            state_ = State::shape;
        } else if (state_ == State::offsets_start) {
            state_ = State::offsets;
        } else {
            unexpected("an array");
        }
        return true;
    }
    bool end_array() override {
        if (state_ == State::offsets && offsets_ != 2)
            refuse(fmt::format("tensor {} needs two data_offsets and has {}.", shown(entry_.name), offsets_));
        state_ = State::entry;
        return true;
    }
    bool key(string_t& name) override {
        if (state_ == State::top) {
            if (name == "__metadata__") {
                if (std::exchange(has_metadata_, true)) refuse("the header has __metadata__ twice.");
                state_ = State::metadata_start;
            } else {
                entry_ = HeaderEntry{};
                entry_.name = name;
                has_dtype_ = has_shape_ = has_offsets_ = false;
                offsets_ = 0;
                state_ = State::entry_value;
            }
        } else if (state_ == State::metadata) {
            key_ = name;
            state_ = State::metadata_value;
        } else {
            start_field(name);
        }
        return true;
    }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
        refuse(fmt::format("the header is not valid JSON at byte {} of it.", position));
    }

private:
    // The state of the reader. `..._start` and `..._value`: after the key, before its value.
    enum class State {
        start,
        top,
        entry_value,
        entry,
        dtype,
        shape_start,
        shape,
        offsets_start,
        offsets,
        metadata_start,
        metadata,
        metadata_value,
        end
    };

    void start_field(const std::string& name) {
        bool* seen = name == "dtype"          ? &has_dtype_
                     : name == "shape"        ? &has_shape_
                     : name == "data_offsets" ? &has_offsets_
                                              : nullptr;
        if (seen == nullptr)
            refuse(fmt::format("tensor {} has the unknown field {}.", shown(entry_.name), shown(name)));
        if (std::exchange(*seen, true))
            refuse(fmt::format("tensor {} has the field {} twice.", shown(entry_.name), shown(name)));
        state_ = name == "dtype" ? State::dtype : name == "shape" ? State::shape_start : State::offsets_start;
    }

    void finish_entry() {
        if (!has_dtype_ || !has_shape_ || !has_offsets_)
            refuse(fmt::format("tensor {} has no {}.", shown(entry_.name),
                               !has_dtype_   ? "dtype"
                               : !has_shape_ ? "shape"
                                             : "data_offsets"));
        entry_.shape.shrink_to_fit();
        header_.entries.push_back(std::move(entry_));
    }

    [[noreturn]] void refuse(const std::string& what) const {
        throw Error("load_safetensors", fmt::format("{}: {}", path_, what));
    }
    [[noreturn]] void unexpected(const char* what) const {
        std::string where = "at its top";
        if (state_ == State::metadata_value || state_ == State::metadata_start)
            where = "in __metadata__, which holds texts only";
        else if (state_ != State::start && state_ != State::top)
            where = fmt::format("in tensor {}", shown(entry_.name));
        refuse(fmt::format("the header has {} {}, where the format allows none.", what, where));
    }

    const std::string& path_;
    Header header_;
    HeaderEntry entry_;
    std::string key_;
    State state_ = State::start;
    bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false, has_metadata_ = false;
    int offsets_ = 0;
};

/// Number of elements times their size, or nothing when that exceeds 63 bits.
std::optional<std::int64_t> byte_count(const HeaderEntry& entry) {
    std::int64_t product = size_of(entry.dtype);
    bool is_empty = false;
    for (const std::int64_t size : entry.shape) {
        if (size == 0)
            is_empty = true;
        else if (__builtin_mul_overflow(product, size, &product))
            return std::nullopt;
    }
    return is_empty ? 0 : product;
}

void check_size(const std::string& path, const HeaderEntry& entry, std::int64_t data_bytes) {
    const auto refuse = [&](const std::string& what) {
        throw Error("load_safetensors", fmt::format("{}: tensor {} {}", path, shown(entry.name), what));
    };
    const std::string described =
        fmt::format("of shape {} and dtype {}", pretty(entry.shape), safetensors_name(entry.dtype));
    if (entry.begin > entry.end)
        refuse(fmt::format("begins at byte {} and ends before, at {}.", entry.begin, entry.end));
    const auto wanted = byte_count(entry);
    if (!wanted) refuse(fmt::format("{} has more than 2^63 - 1 bytes.", described));
    if (*wanted != entry.end - entry.begin)
        refuse(fmt::format("{}: size mismatch: {} bytes expected, {} given by data_offsets [{}, {}].",
                           described, *wanted, entry.end - entry.begin, entry.begin, entry.end));
    if (entry.end > data_bytes)
        refuse(fmt::format("ends at byte {} of the data, and the file has {} bytes of it: it is cut short.",
                           entry.end, data_bytes));
}

/// The ranges, in order, must cover the data without holes or overlap.
void check_coverage(const std::string& path, const std::vector<HeaderEntry>& entries,
                    std::int64_t data_bytes) {
    std::vector<std::uint32_t> order(entries.size());
    std::iota(order.begin(), order.end(), 0U);
    std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        return std::pair(entries[a].begin, entries[a].end) < std::pair(entries[b].begin, entries[b].end);
    });
    std::int64_t covered = 0;
    for (const std::uint32_t index : order) {
        const HeaderEntry& entry = entries[index];
        if (entry.begin != covered)
            throw Error("load_safetensors",
                        fmt::format("{}: tensor {} lies at bytes [{}, {}) of the data, {}.", path,
                                    shown(entry.name), entry.begin, entry.end,
                                    entry.begin < covered
                                        ? fmt::format("which overlaps another one that ends at {}", covered)
                                        : fmt::format("which leaves a hole after {}", covered)));
        covered = entry.end;
    }
    if (covered != data_bytes)
        throw Error("load_safetensors",
                    fmt::format("{}: the tensors cover {} bytes of data, and the file has {}.", path, covered,
                                data_bytes));
}

void check_names(const std::string& path, const std::vector<HeaderEntry>& entries) {
    std::vector<std::string_view> names;
    names.reserve(entries.size());
    for (const HeaderEntry& entry : entries) names.push_back(entry.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end())
        throw Error("load_safetensors",
                    fmt::format("{}: the header has tensor {} twice.", path, shown(*twice)));
}

}  // namespace

std::string_view safetensors_name(DType dtype) {
    for (const auto& [name, known] : dtype_names)
        if (known == dtype) return name;
    return "?";
}

Header parse_safetensors_header(const std::string& path, std::string_view text, std::int64_t data_bytes) {
    const auto refuse = [&](const std::string& what) {
        throw Error("load_safetensors", fmt::format("{}: {}", path, what));
    };
    if (const auto position = find_invalid_utf8(text))
        refuse(fmt::format("the header is not UTF-8 at byte {} of it.", *position));
    if (text.empty() || text.front() != '{') refuse("the header is no JSON object: it must begin with '{'.");
    if (text.find('\0') != std::string_view::npos) refuse("the header has a zero byte; it is no JSON.");
    HeaderReader reader(path);
    nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
    Header header = reader.take();
    check_names(path, header.entries);
    for (const HeaderEntry& entry : header.entries) check_size(path, entry, data_bytes);
    check_coverage(path, header.entries, data_bytes);
    return header;
}

}  // namespace potluck
