#include "tests/skip.h"

#include <utility>

namespace potluck::test {
namespace {

std::string current_reason;

}  // namespace

void skip(std::string reason) { current_reason = std::move(reason); }

std::string take_skip_reason() { return std::exchange(current_reason, std::string()); }

}  // namespace potluck::test
