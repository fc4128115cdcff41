#pragma once

#include <cstdint>

namespace potluck {

/// Names the op that runs in this thread while the scope lives: memory is counted under the name, and while a trace is
/// recorded (core/trace.h) start and end become one event. Scopes nest; memory belongs to the innermost.
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
