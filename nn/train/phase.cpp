#include "nn/train/phase.h"

#include <numeric>
#include <string>

#include "core/trace.h"

namespace potluck {
namespace {

void show_in_trace(Phase phase, std::int64_t start_ns, std::int64_t end_ns) {
    if (is_tracing()) trace::record((std::string("phase: ") + name_of(phase)).c_str(), start_ns, end_ns);
}

}  // namespace

const char* name_of(Phase phase) {
    switch (phase) {
        case Phase::data:
            return "data";
        case Phase::copy:
            return "copy";
        case Phase::forward:
            return "forward";
        case Phase::backward:
            return "backward";
        case Phase::optimizer:
            return "optimizer";
        case Phase::validation:
            return "validation";
        case Phase::saving:
            return "saving";
        default:
            return "other";
    }
}

PhaseSeconds& PhaseSeconds::operator+=(const PhaseSeconds& more) {
    for (std::size_t i = 0; i < phase_count; ++i) seconds_[i] += more.seconds_[i];
    return *this;
}

double PhaseSeconds::total() const { return std::accumulate(seconds_.begin(), seconds_.end(), 0.0); }

double PhaseSeconds::share(Phase phase) const {
    const double whole = total();
    return whole > 0.0 ? (*this)[phase] / whole : 0.0;
}

void PhaseTimer::mark(Phase phase) {
    const std::int64_t now = trace::now_ns();
    if (!borders_.empty() && borders_.back().phase != Phase::other)
        show_in_trace(borders_.back().phase, borders_.back().host_ns, now);
    borders_.push_back({mark_moment(device_), phase, now});
}

void PhaseTimer::begin(Phase phase) {
    if (borders_.empty() || borders_.back().phase != phase) mark(phase);
}

void PhaseTimer::end() {
    if (!borders_.empty()) mark(Phase::other);
}

PhaseSeconds PhaseTimer::seconds() const {
    PhaseSeconds result;
    for (std::size_t i = 0; i + 1 < borders_.size(); ++i)
        result[borders_[i].phase] += borders_[i + 1].moment->seconds_since(*borders_[i].moment);
    return result;
}

PhaseScope::PhaseScope(PhaseSeconds& seconds, Phase phase)
    : seconds_(seconds), phase_(phase), start_ns_(trace::now_ns()) {}

PhaseScope::~PhaseScope() {
    const std::int64_t end = trace::now_ns();
    seconds_[phase_] += 1e-9 * static_cast<double>(end - start_ns_);
    try {
        show_in_trace(phase_, start_ns_, end);
    } catch (...) {  // no memory for the event: the phase itself went well
    }
}

}  // namespace potluck
