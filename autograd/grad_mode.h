#pragma once

namespace potluck {

/// Whether ops of this thread are recorded on the tape (the default).
bool is_grad_enabled() noexcept;

/// Turns recording on or off in this thread while the object lives.
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
