#pragma once

namespace potluck {

/// Whether ops of this thread record themselves on the tape (the default).
bool is_grad_enabled() noexcept;

/// Sets recording for this thread while it lives.
class GradMode {
public:
    [[nodiscard]] explicit GradMode(bool enabled) noexcept;
    ~GradMode();
    GradMode(const GradMode&) = delete;
    GradMode& operator=(const GradMode&) = delete;

private:
    bool outer_;
};

/// `NoGrad guard;` turns recording off in this thread until the end of the block.
class NoGrad : public GradMode {
public:
    [[nodiscard]] NoGrad() noexcept : GradMode(false) {}
};

}  // namespace potluck
