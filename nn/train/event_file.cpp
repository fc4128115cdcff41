#include "nn/train/event_file.h"

#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/format.h"

namespace potluck {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little);  // the files are, and so is all that we build for

template <class Number>
std::string bytes_of(Number number) {
    std::string bytes(sizeof(Number), '\0');
    std::memcpy(bytes.data(), &number, sizeof(Number));
    return bytes;
}

template <class Number>
Number number_at(std::string_view bytes, std::size_t place) {
    Number number;
    std::memcpy(&number, bytes.data() + place, sizeof(Number));
    return number;
}

// ---- TFRecord ----

/// Checksums of content that itself holds checksums are weak, so TFRecord stores them changed.
std::uint32_t masked(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8U; }

constexpr std::size_t length_bytes = 8, checksum_bytes = 4;

std::string record_of(std::string_view content) {
    const std::string length = bytes_of(static_cast<std::uint64_t>(content.size()));
    std::string record = length + bytes_of(masked(crc32c(length)));
    record += content;
    return record + bytes_of(masked(crc32c(content)));
}

/// The content of the record at `place`, which moves behind it; none at the end and where the file is damaged.
std::optional<std::string_view> next_record(std::string_view file, std::size_t& place) {
    const std::size_t left = file.size() - place;
    if (left < length_bytes + 2 * checksum_bytes) return std::nullopt;
    const auto length = number_at<std::uint64_t>(file, place);
    if (number_at<std::uint32_t>(file, place + length_bytes) !=
            masked(crc32c(file.substr(place, length_bytes))) ||
        length > left - length_bytes - 2 * checksum_bytes)
        return std::nullopt;
    const std::string_view content = file.substr(place + length_bytes + checksum_bytes, length);
    const std::size_t end = place + length_bytes + checksum_bytes + content.size();
    if (number_at<std::uint32_t>(file, end) != masked(crc32c(content))) return std::nullopt;
    place = end + checksum_bytes;
    return content;
}

// ---- protocol buffers ----

enum class WireType : std::uint8_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

std::string varint(std::uint64_t number) {
    std::string bytes;
    for (; number >= 0x80; number >>= 7) bytes += static_cast<char>((number & 0x7f) | 0x80);
    return bytes + static_cast<char>(number);
}

std::string key(std::uint64_t field, WireType type) {
    return varint(field << 3 | static_cast<std::uint64_t>(type));
}

/// A text, or a message in a message.
std::string bytes_field(std::uint64_t field, std::string_view content) {
    std::string result = key(field, WireType::bytes) + varint(content.size());
    return result += content;
}

std::string event(double wall_time, std::int64_t step, const std::string& what) {
    std::string result = key(1, WireType::fixed64) + bytes_of(wall_time);
    if (step != 0) result += key(2, WireType::varint) + varint(static_cast<std::uint64_t>(step));
    return result + what;
}

/// A number of one to ten bytes at `place`, which moves behind it.
std::optional<std::uint64_t> read_varint(std::string_view message, std::size_t& place) {
    std::uint64_t number = 0;
    for (int shift = 0; shift < 64 && place < message.size(); shift += 7) {
        const auto byte = static_cast<unsigned char>(message[place++]);
        number |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
        if ((byte & 0x80) == 0) return number;
    }
    return std::nullopt;
}

/// The step of an Event with a summary; 0 for others, and when it says none, which protocol buffers leave out.
std::int64_t step_of(std::string_view message) {
    std::int64_t step = 0;
    bool has_summary = false;
    for (std::size_t place = 0; place < message.size();) {
        const std::optional<std::uint64_t> field = read_varint(message, place);
        if (!field) return 0;
        std::optional<std::uint64_t> length = 0;
        switch (static_cast<WireType>(*field & 7)) {
            case WireType::varint: {
                const std::optional<std::uint64_t> number = read_varint(message, place);
                if (*field >> 3 == 2 && number) step = static_cast<std::int64_t>(*number);
                break;
            }
            case WireType::fixed64:
                length = 8;
                break;
            case WireType::bytes:
                has_summary |= *field >> 3 == 5;
                length = read_varint(message, place);
                break;
            case WireType::fixed32:
                length = 4;
                break;
        }
        if (!length || *length > message.size() - place) return 0;
        place += *length;
    }
    return has_summary ? step : 0;
}

// ---- the folder ----

constexpr const char* name_start = "events.out.tfevents.";
constexpr const char* name_end = ".potluck";

/// Our event files in the order in which they were written.
std::set<std::string> event_files(const fs::path& folder) {
    std::set<std::string> names;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with(name_start) && name.ends_with(name_end)) names.insert(name);
    }
    return names;
}

/// How much of an event file is whole and of steps up to `last_step`. Steps grow from event to event.
std::size_t bytes_until(std::string_view file, std::int64_t last_step) {
    std::size_t place = 0;
    for (;;) {
        const std::size_t start = place;
        const std::optional<std::string_view> content = next_record(file, place);
        if (!content || step_of(*content) > last_step) return start;
    }
}

void cut_off(const fs::path& path, std::int64_t last_step) {
    std::ostringstream content;
    content << std::ifstream(path, std::ios::binary).rdbuf();
    const std::string file = content.str();
    const std::size_t kept = bytes_until(file, last_step);
    if (kept < file.size()) fs::resize_file(path, kept);
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
    static const auto table = [] {
        std::array<std::uint32_t, 256> remainders{};
        for (std::uint32_t i = 0; i < remainders.size(); ++i) {
            std::uint32_t value = i;
            for (int bit = 0; bit < 8; ++bit)
                value = (value & 1) != 0 ? value >> 1 ^ 0x82f63b78U : value >> 1;  // the polynomial, mirrored
            remainders[i] = value;
        }
        return remainders;
    }();
    std::uint32_t crc = ~0U;
    for (const char byte : bytes) crc = table[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ crc >> 8;
    return ~crc;
}

EventFile::EventFile(const std::string& folder, std::int64_t last_step, double wall_time) try {
    fs::create_directories(folder);
    const std::set<std::string> names = event_files(folder);
    for (const std::string& name : names) cut_off(fs::path(folder) / name, last_step);
    const int number = names.empty() ? 0 : 1 + std::atoi(names.rbegin()->c_str() + std::strlen(name_start));
    path_ = (fs::path(folder) / fmt::format("{}{:05}{}", name_start, number, name_end)).string();
    stream_.open(path_, std::ios::binary | std::ios::trunc);
    write(event(wall_time, 0, bytes_field(3, "brain.Event:2")));
    // From the second one on, the start of a session makes void what was said of its step and later ones.
    constexpr std::uint64_t session_start = 1;
    write(event(wall_time, last_step + 1, bytes_field(7, key(1, WireType::varint) + varint(session_start))));
} catch (const fs::filesystem_error& error) {
    throw Error("event_file", fmt::format("cannot write event files: {}.", error.what()));
}

void EventFile::append(std::int64_t step, double wall_time, std::span<const EventScalar> scalars) {
    std::string summary;
    for (const EventScalar& scalar : scalars) {
        const std::string value = bytes_field(1, scalar.tag) + key(2, WireType::fixed32) +
                                  bytes_of(static_cast<float>(scalar.value));
        summary += bytes_field(1, value);
    }
    write(event(wall_time, step, bytes_field(5, summary)));
}

void EventFile::write(const std::string& event) {
    stream_ << record_of(event) << std::flush;
    if (!stream_) throw Error("event_file", fmt::format("cannot write to {}. Is the disk full?", path_));
}

}  // namespace potluck
