#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace potluck::data {

/// The tokenizer without a vocabulary to learn: token id = byte, 256 ids. It preserves every byte of any text.
class ByteTokenizer {
public:
    static constexpr std::int64_t vocabulary_size = 256;

    /// The ids of a text (bytes). `dtype` is i64 for a model's input, or u8 or i32 to store long texts in less memory.
    static Tensor encode(std::string_view text, DType dtype = DType::i64);
    /// The text of ids (any shape, any integer dtype). decode(encode(text)) is text, byte for byte.
    /// Throws Error that names position and value of an id outside 0..255.
    static std::string decode(const Tensor& ids);
    static std::string decode(std::span<const std::int64_t> ids);
};

/// Decodes one id at a time for display: a character of several bytes is output as a whole, when its last byte arrives.
/// Bytes that are not UTF-8 are output unchanged. Nothing is lost: all outputs joined are ByteTokenizer::decode().
class StreamingDecoder {
public:
    /// The text that can be shown after this id; often one character, empty in the middle of one.
    /// Throws Error for an id outside 0..255.
    std::string push(std::int64_t id);
    /// The bytes of a character that was never completed.
    std::string finish();

private:
    std::string held_;
};

/// The text in a form that is safe for a terminal: bytes that are not UTF-8, and control characters other than tabs and
/// line ends, are replaced by U+FFFD, so that no model can send escape sequences.
std::string printable(std::string_view text);

}  // namespace potluck::data
