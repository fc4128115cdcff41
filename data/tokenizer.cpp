#include "data/tokenizer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/format.h"

namespace potluck::data {

namespace {

bool is_byte(std::int64_t id) { return id >= 0 && id < ByteTokenizer::vocabulary_size; }

/// Number of bytes of the character that starts with `lead`; 1 for a byte that starts no character.
std::size_t character_length(unsigned char lead) {
    if (lead >= 0xC2 && lead <= 0xDF) return 2;
    if (lead >= 0xE0 && lead <= 0xEF) return 3;
    if (lead >= 0xF0 && lead <= 0xF4) return 4;
    return 1;
}

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

}  // namespace

Tensor ByteTokenizer::encode(std::string_view text, DType dtype) {
    if (dtype != DType::i64 && dtype != DType::i32 && dtype != DType::u8)
        throw Error("encode", fmt::format("ids cannot have the dtype {}. Use i64, i32 or u8.", dtype));
    Tensor ids = Tensor::empty({static_cast<std::int64_t>(text.size())}, {dtype});
    visit(dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
            std::transform(text.begin(), text.end(), ids.data<T>(),
                           [](char byte) { return static_cast<T>(static_cast<unsigned char>(byte)); });
    });
    return ids;
}

std::string ByteTokenizer::decode(const Tensor& ids) {
    if (!ids.defined() || !is_integer(ids.dtype()))
        throw Error(
            "decode",
            ids.defined()
                ? fmt::format("ids have the dtype {}. Use an integer dtype, i64 for instance.", ids.dtype())
                : "ids is undefined.");
    const std::vector<std::int64_t> values = ids.to_vector<std::int64_t>();
    return decode(std::span<const std::int64_t>(values));
}

std::string ByteTokenizer::decode(std::span<const std::int64_t> ids) {
    std::string text;
    text.reserve(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (!is_byte(ids[i]))
            throw Error(
                "decode",
                fmt::format("id {} at position {} is no byte. Ids of the byte tokenizer are 0 to 255.",
                            ids[i], i));
        text.push_back(static_cast<char>(ids[i]));
    }
    return text;
}

std::string StreamingDecoder::push(std::int64_t id) {
    if (!is_byte(id))
        throw Error("StreamingDecoder",
                    fmt::format("id {} is no byte. Ids of the byte tokenizer are 0 to 255.", id));
    const char byte = static_cast<char>(id);
    std::string ready;
    // A character that is interrupted by another one will never be complete: output its bytes.
    if (!held_.empty() && !is_continuation(byte)) ready.swap(held_);
    held_.push_back(byte);
    if (held_.size() >= character_length(static_cast<unsigned char>(held_.front()))) {
        ready += held_;
        held_.clear();
    }
    return ready;
}

std::string printable(std::string_view text) {
    std::string shown;
    for (std::size_t i = 0; i < text.size();) {
        const auto lead = static_cast<unsigned char>(text[i]);
        const std::size_t length = character_length(lead);
        const std::string_view character = text.substr(i, length);
        const bool is_ascii = lead >= 0x20 && lead < 0x7F;
        const bool is_control =
            character.size() > 1 && lead == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;
        const bool is_whole = length > 1 && !is_control && character.size() == length &&
                              std::all_of(character.begin() + 1, character.end(), is_continuation);
        if (is_ascii || lead == '\n' || lead == '\t' || is_whole) {
            shown += character;
            i += length;
        } else {
            shown += "\xEF\xBF\xBD";
            ++i;
        }
    }
    return shown;
}

std::string StreamingDecoder::finish() { return std::exchange(held_, {}); }

}  // namespace potluck::data
