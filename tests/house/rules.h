#pragma once

#include <string>
#include <vector>

#include "tests/house/tree.h"

namespace potluck::house {

/// Each rule returns one line per fault: "file:line: what is wrong, and what to do". Empty: no faults.
using Faults = std::vector<std::string>;

/// An include names an existing file, relative to the root of the tree, on the same floor or below.
Faults includes_going_up(const Tree& tree);

/// No header includes itself through others.
Faults include_circles(const Tree& tree);

/// potluck.h includes, directly and indirectly, only our headers and the standard library.
Faults third_party_in_public_headers(const Tree& tree);

/// The installed headers are exactly those that potluck.h reaches.
Faults installed_headers_differ(const Tree& tree);

/// Every source file is listed in the meson.build beside it; else it would never be compiled.
Faults sources_not_built(const Tree& tree);

/// Each op family has the same file name in every layer: core/cpu, autograd/ops and tests/ops.
Faults missing_twins(const Tree& tree);
/// Each kernel file of the CPU has a counterpart for the CUDA device, and the reverse.
Faults missing_cuda_twins(const Tree& tree);

/// The exceptions to the rule above (in file_rules.cpp, each with its reason) are all needed.
Faults needless_exceptions(const Tree& tree);

/// Every function declared in autograd/ops/*.h has a `///` docstring.
Faults undocumented_ops(const Tree& tree);

/// No file names a folder that only exists on the machine where it was written.
Faults machine_paths(const Tree& tree);

/// Files longer than 400 lines. A report, not a fault: some files have a reason.
Faults long_files(const Tree& tree);

}  // namespace potluck::house
