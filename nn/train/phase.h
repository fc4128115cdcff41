#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/device.h"
#include "core/moment.h"

namespace potluck {

/// What the time of a training run goes to.
enum class Phase : std::uint8_t {
    data,        // the trainer waits for the loader's next batch
    copy,        // the batch goes to the device
    forward,     // the loss included
    backward,    //
    optimizer,   // the norm of the gradient, clipping, the step
    validation,  //
    saving,      // checkpoints and reports
    other,       // the rest: metrics, callbacks, what the host does between the phases
};
inline constexpr std::size_t phase_count = 8;
inline constexpr std::array<Phase, phase_count> phases = {
    Phase::data,      Phase::copy,       Phase::forward, Phase::backward,
    Phase::optimizer, Phase::validation, Phase::saving,  Phase::other};

/// "data", "copy", ...
const char* name_of(Phase phase);

/// Seconds of each phase.
class PhaseSeconds {
public:
    double& operator[](Phase phase) { return seconds_[static_cast<std::size_t>(phase)]; }
    double operator[](Phase phase) const { return seconds_[static_cast<std::size_t>(phase)]; }
    PhaseSeconds& operator+=(const PhaseSeconds& more);

    double total() const;
    /// 0 to 1 of the total; 0 when that is 0.
    double share(Phase phase) const;

private:
    std::array<double, phase_count> seconds_ = {};
};

/// Tells the phases of an update apart by the clock of its device (core/moment.h): on the CPU the host's, on a
/// GPU the time that its compute stream spent, in which the host may be far ahead. The host waits for nothing. While a trace
/// is recorded (core/trace.h), the phases show in it as the host went through them.
class PhaseTimer {
public:
    explicit PhaseTimer(Device device) : device_(device) {}

    /// What is started from now on belongs to `phase`, and no longer to the one before.
    void begin(Phase phase);
    /// Ends the last phase.
    void end();
    /// After end(), when the host has waited for the device. Throws Error when the device is not done.
    PhaseSeconds seconds() const;

private:
    struct Border {
        std::unique_ptr<const Moment> moment;
        Phase phase;  // that begins here
        std::int64_t host_ns;
    };

    void mark(Phase phase);

    Device device_;
    std::vector<Border> borders_;
};

/// Adds the host's seconds while it lives to a phase, and shows them in a trace.
class PhaseScope {
public:
    PhaseScope(PhaseSeconds& seconds, Phase phase);
    ~PhaseScope();
    PhaseScope(const PhaseScope&) = delete;
    PhaseScope& operator=(const PhaseScope&) = delete;

private:
    PhaseSeconds& seconds_;
    Phase phase_;
    std::int64_t start_ns_;
};

}  // namespace potluck
