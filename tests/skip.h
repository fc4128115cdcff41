#pragma once

#include <string>

namespace potluck::test {

/// Marks the running test case as skipped, with the reason that ./test prints. Return from the test case next.
void skip(std::string reason);

/// The reason given to skip() since the last call, or empty. For the reporter in main.cpp.
std::string take_skip_reason();

}  // namespace potluck::test
