#pragma once

#include <cstdint>

namespace potluck {

/// Names what runs in this thread while it lives: memory is booked under the name, and when a trace is being
/// recorded (core/trace.h) its start and end become one event. Scopes nest; the innermost names the memory.
/// `name` must outlive all tensors (a string literal).
class OpScope {
public:
    [[nodiscard]] explicit OpScope(const char* name) noexcept;
    ~OpScope();
    OpScope(const OpScope&) = delete;
    OpScope& operator=(const OpScope&) = delete;

    /// The innermost running op, or "tensor" outside any.
    static const char* current() noexcept;

private:
    const char* name_;
    const char* outer_;
    std::int64_t start_ns_;
};

}  // namespace potluck
