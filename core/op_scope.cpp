#include "core/op_scope.h"

#include "core/trace.h"

namespace potluck {
namespace {

thread_local const char* innermost = nullptr;

}  // namespace

OpScope::OpScope(const char* name) noexcept
    : name_(name), outer_(innermost), start_ns_(is_tracing() ? trace::now_ns() : -1) {
    innermost = name;
}

OpScope::~OpScope() {
    innermost = outer_;
    if (start_ns_ < 0 || !is_tracing()) return;
    try {
        trace::record(name_, start_ns_, trace::now_ns());
    } catch (...) {  // no memory for the event: the op itself succeeded
    }
}

const char* OpScope::current() noexcept { return innermost == nullptr ? "tensor" : innermost; }

}  // namespace potluck
