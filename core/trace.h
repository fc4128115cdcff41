#pragma once

#include <cstdint>
#include <string>

namespace potluck {

/// Starts recording each op's start, end and thread. Throws Error when a trace is already running.
void start_trace();
/// Ends the recording and writes it in Chrome's trace format (open it in chrome://tracing or Perfetto). The file is
/// written completely or not at all. Throws Error when nothing was recording or the file cannot be written.
void write_trace(const std::string& path);
bool is_tracing() noexcept;

namespace trace {
/// Records one finished event; `name` is copied. Used by OpScope and any other code that measures a time span.
void record(const char* name, std::int64_t start_ns, std::int64_t end_ns);
/// The value of something that changes, such as "tokens/s", from now on: a curve above the events. `name` is copied; values
/// that are not finite are left out.
void count(const char* name, double value);
/// The current time of the steady clock, in nanoseconds.
std::int64_t now_ns() noexcept;
}  // namespace trace

}  // namespace potluck
