#pragma once

#include <string>
#include <vector>

#include "tests/house/tree.h"

namespace potluck::house {

/// Each rule returns one line for every fault: "file:line: what is wrong, and what to do". Empty: all is well.
using Faults = std::vector<std::string>;

/// An include names a file that exists, from the root of the tree, on the same floor or below.
Faults includes_going_up(const Tree& tree);

/// No header includes itself through others.
Faults include_circles(const Tree& tree);

/// What a user includes by potluck.h pulls in our headers and the standard library, nothing else.
Faults third_party_in_public_headers(const Tree& tree);

/// The headers that are installed are those that potluck.h reaches, no more and no fewer.
Faults installed_headers_differ(const Tree& tree);

/// Every source file is named by the meson.build beside it; else it is never compiled.
Faults sources_not_built(const Tree& tree);

/// One op family has one file name in every layer: core/cpu, autograd/ops and tests/ops.
Faults missing_twins(const Tree& tree);
/// A kernel file of the CPU has one of the CUDA device, and the other way round.
Faults missing_cuda_twins(const Tree& tree);

/// The exceptions to the rule above (in file_rules.cpp, each with its reason) are needed.
Faults needless_exceptions(const Tree& tree);

/// Every function declared in autograd/ops/*.h has a `///` docstring.
Faults undocumented_ops(const Tree& tree);

/// No file names a folder that only exists on the machine where it was written.
Faults machine_paths(const Tree& tree);

/// Files longer than 400 lines. A report, not a fault: a few files have a reason.
Faults long_files(const Tree& tree);

}  // namespace potluck::house
