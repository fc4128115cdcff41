#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace potluck::cpu {

/// Bytes from which on a copy is too long for the caches, so that they need not see it.
inline constexpr std::int64_t streamed_from = std::int64_t{16} << 20;

/// memcpy() for a piece of a long copy. Ordinary stores first read the line that they overwrite, a third of all traffic;
/// these do not. memcpy() does the same for whole copies that are long, but not for their pieces.
inline void copy_past_caches(const std::byte* from, std::byte* to, std::int64_t bytes) {
#ifdef __SSE2__
    constexpr std::int64_t line = 64;
    const auto past_line = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % line);
    const std::int64_t head = std::min(past_line == 0 ? 0 : line - past_line, bytes);
    std::memcpy(to, from, static_cast<std::size_t>(head));
    std::int64_t done = head;
    for (; done + line <= bytes; done += line) {
#ifdef __AVX512F__
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done), _mm512_loadu_si512(from + done));
#else
        const auto* source = reinterpret_cast<const __m128i*>(from + done);
        auto* target = reinterpret_cast<__m128i*>(to + done);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
#endif
    }
    _mm_sfence();
    from += done;
    to += done;
    bytes -= done;
#endif
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace potluck::cpu
