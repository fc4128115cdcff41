// The house rules: the rules in rules.h find no fault in this tree, and each finds a fault that is planted for it.

#include <doctest/doctest.h>

#include <fstream>
#include <random>
#include <string>
#include <utility>

#include "tests/house/rules.h"

namespace {

namespace fs = std::filesystem;
using namespace potluck::house;

std::string joined(const Faults& faults) {
    std::string text;
    for (const std::string& fault : faults) text += "\n  " + fault;
    return text;
}

/// A small tree in a temporary folder that obeys every rule, to plant faults in.
class SmallHouse {
public:
    SmallHouse()
        : root_(fs::temp_directory_path() / ("potluck_house_" + std::to_string(std::random_device{}()))) {
        write("core/tensor.h", "#pragma once\n#include <vector>\n");
        write("core/cpu/norm.cpp", "#include \"core/tensor.h\"\n#include <Eigen/Core>\n");
        write("core/cpu/meson.build", "files(\n  'norm.cpp',\n)\n");
        write("cuda/kernels/norm.cu", "#include \"core/tensor.h\"\n");
        write("cuda/meson.build", "files('kernels' / 'norm')\n");
        write("core/meson.build", "install_headers(\n  'tensor.h',\n)\n");
        write("autograd/ops/norm.h",
              "#include \"core/tensor.h\"\n\nnamespace potluck {\n\n/// Normalises.\n"
              "int layer_norm(int x,\n               int y);\nint layer_norm(int x);\n\n}\n");
        write("autograd/ops/norm.cpp", "#include \"autograd/ops/norm.h\"\n");
        write("autograd/ops/meson.build", "files('norm.cpp')\ninstall_headers('norm.h')\n");
        write("data/text.h", "#include \"core/tensor.h\"\n");
        write("data/meson.build", "install_headers('text.h')\n");
        write("potluck.h", "#include \"autograd/ops/norm.h\"\n#include \"data/text.h\"\n");
        write("meson.build", "op_families = [\n  'norm',\n]\ninstall_headers('potluck.h')\n");
        write("examples/hello.cpp", "#include <potluck.h>\n");
        write("examples/meson.build", "programs = [\n  'hello',\n]\n");
        write("tests/ops/norm.cpp", "#include \"autograd/ops/norm.h\"\n#include <doctest/doctest.h>\n");
        write("tests/ops/meson.build",
              "foreach family : op_families\n  sources += files(family + '.cpp')\nendforeach\n");
    }
    ~SmallHouse() {
        std::error_code ignored;
        fs::remove_all(root_, ignored);
    }
    SmallHouse(const SmallHouse&) = delete;
    SmallHouse& operator=(const SmallHouse&) = delete;

    void write(const std::string& file, const std::string& text) const {
        fs::create_directories((root_ / file).parent_path());
        std::ofstream(root_ / file) << text;
    }
    void remove(const std::string& file) const { fs::remove(root_ / file); }
    Tree tree() const { return read_tree(root_); }

private:
    fs::path root_;
};

/// Checks that there is exactly one fault, with this text.
void check_one_fault(const Faults& faults, const std::string& says) {
    INFO("faults:", joined(faults));
    REQUIRE(faults.size() == 1);
    CHECK(faults[0].find(says) != std::string::npos);
}

const std::vector<std::pair<const char*, Faults (*)(const Tree&)>> rules = {
    {"no include goes up a floor", includes_going_up},
    {"no circle of includes", include_circles},
    {"no third-party header in a public header", third_party_in_public_headers},
    {"installed headers are those that potluck.h reaches", installed_headers_differ},
    {"every source file is built", sources_not_built},
    {"every op family has its twins", missing_twins},
    {"every kernel file has its twin on the other device", missing_cuda_twins},
    {"every op has a docstring", undocumented_ops},
    {"no path of one machine", machine_paths},
};

}  // namespace

TEST_CASE("house: this tree keeps every rule") {
    // The tests run in the root of the source tree (tests/meson.build says so).
    const Tree tree = read_tree(fs::current_path());
    REQUIRE(tree.files.size() > 20);
    for (const auto& [name, rule] : rules) {
        SUBCASE(name) {
            const Faults faults = rule(tree);
            CHECK_MESSAGE(faults.empty(), joined(faults));
        }
    }
    SUBCASE("no exception without need") {
        const Faults faults = needless_exceptions(tree);
        CHECK_MESSAGE(faults.empty(), joined(faults));
    }
    SUBCASE("files longer than 400 lines are reported") {
        const Faults report = long_files(tree);
        if (!report.empty()) MESSAGE("longer than 400 lines:", joined(report));
    }
}

TEST_CASE("house: a tree without faults is left in peace") {
    const SmallHouse house;
    for (const auto& [name, rule] : rules) {
        const Faults faults = rule(house.tree());
        CHECK_MESSAGE(faults.empty(), name, joined(faults));
    }
    CHECK(long_files(house.tree()).empty());
}

TEST_CASE("house: a planted fault is found") {
    const SmallHouse house;
    SUBCASE("an include that goes up") {
        house.write("core/tensor.h", "#include \"potluck.h\"\n");
        check_one_fault(includes_going_up(house.tree()), "core/tensor.h:1: core/ may not include potluck.h");
    }
    SUBCASE("an include of the room next door") {
        house.write("data/text.h", "\n#include \"autograd/ops/norm.h\"\n");
        check_one_fault(includes_going_up(house.tree()),
                        "data/text.h:2: data/ may not include autograd/ops/norm.h");
    }
    SUBCASE("an include in angles that goes up") {
        house.write("core/tensor.h", "#  include <potluck.h>\n");
        check_one_fault(includes_going_up(house.tree()), "core/ may not include potluck.h");
    }
    SUBCASE("an include that is not written from the root") {
        house.write("core/cpu/norm.cpp", "#include \"../tensor.h\"\n");
        check_one_fault(includes_going_up(house.tree()), "no file \"../tensor.h\"");
    }
    SUBCASE("a circle of two") {
        house.write("core/tensor.h", "#include \"core/shape.h\"\n");
        house.write("core/shape.h", "#include \"core/tensor.h\"\n");
        check_one_fault(include_circles(house.tree()), "a circle of includes");
    }
    SUBCASE("a header that includes itself") {
        house.write("core/tensor.h", "#include \"core/tensor.h\"\n");
        check_one_fault(include_circles(house.tree()), "core/tensor.h -> core/tensor.h");
    }
    SUBCASE("a third-party header two steps behind potluck.h") {
        house.write("core/tensor.h", "#include <fmt/format.h>\n");
        check_one_fault(third_party_in_public_headers(house.tree()), "<fmt/format.h>");
    }
    SUBCASE("a header of the compiler in a public header") {
        house.write("core/tensor.h", "#include <omp.h>\n");
        check_one_fault(third_party_in_public_headers(house.tree()), "<omp.h>");
    }
    SUBCASE("no umbrella header") {
        house.remove("potluck.h");
        check_one_fault(third_party_in_public_headers(house.tree()), "umbrella header is missing");
    }
    SUBCASE("a public header that is not installed") {
        house.write("core/meson.build", "install_headers(\n# 'tensor.h',\n)\n");
        check_one_fault(installed_headers_differ(house.tree()), "core/tensor.h: potluck.h includes it");
    }
    SUBCASE("an internal header that is installed") {
        house.write("core/format.h", "#include <fmt/format.h>\n");
        house.write("core/meson.build", "install_headers('tensor.h', 'format.h')\n");
        check_one_fault(installed_headers_differ(house.tree()), "core/format.h: it is installed");
    }
    SUBCASE("a source file that nobody compiles") {
        house.write("tests/ops/forgotten.cpp", "");
        check_one_fault(sources_not_built(house.tree()), "tests/ops/forgotten.cpp: tests/ops/meson.build");
    }
    SUBCASE("a kernel without an op") {
        house.write("core/cpu/softmax.cpp", "");
        check_one_fault(missing_twins(house.tree()), "autograd/ops/softmax.cpp is missing");
    }
    SUBCASE("an op without a kernel") {
        house.remove("core/cpu/norm.cpp");
        check_one_fault(missing_twins(house.tree()), "core/cpu/norm.cpp is missing");
    }
    SUBCASE("an op without tests") {
        house.remove("tests/ops/norm.cpp");
        check_one_fault(missing_twins(house.tree()), "tests/ops/norm.cpp is missing");
    }
    SUBCASE("a kernel that only the CPU has") {
        house.remove("cuda/kernels/norm.cu");
        check_one_fault(missing_cuda_twins(house.tree()), "core/cpu/norm.cpp: neither cuda/kernels/norm.cu");
    }
    SUBCASE("a kernel that only the CUDA device has") {
        house.write("cuda/kernels/sort.cu", "");
        check_one_fault(missing_cuda_twins(house.tree()),
                        "cuda/kernels/sort.cu: core/cpu/sort.cpp is missing");
    }
    SUBCASE("the CUDA device may include the emulator, and no other test") {
        house.write("tests/cuda_emulator/memory.h", "");
        house.write("tests/skip.h", "");
        house.write("cuda/launch.h",
                    "#include \"tests/cuda_emulator/memory.h\"\n#include \"tests/skip.h\"\n");
        check_one_fault(includes_going_up(house.tree()),
                        "cuda/launch.h:2: cuda/ may not include tests/skip.h");
    }
    SUBCASE("a part of a family needs no twin, a stranger does") {
        house.write("core/cpu/norm_rows.cpp", "");
        house.write("core/cpu/normal.cpp", "");
        check_one_fault(missing_twins(house.tree()),
                        "core/cpu/normal.cpp: autograd/ops/normal.cpp is missing");
    }
    SUBCASE("an exception for a file that has its twin") {
        house.write("core/cpu/view.cpp", "");
        const Faults faults = needless_exceptions(house.tree());
        CHECK(joined(faults).find("autograd/ops/view.cpp: core/cpu/view.cpp exists now") !=
              std::string::npos);
    }
    SUBCASE("an op without a header") {
        house.remove("autograd/ops/norm.h");
        check_one_fault(missing_twins(house.tree()), "its header is missing");
    }
    SUBCASE("an op without a docstring") {
        house.write("autograd/ops/norm.h",
                    "/// Documented.\nint layer_norm(int x);\n\nint rms_norm(int x);\n");
        check_one_fault(undocumented_ops(house.tree()), "autograd/ops/norm.h:4");
    }
    SUBCASE("a path of one machine") {
        house.write("README.md",
                    "Built in /wo"
                    "rk/build.\n");
        check_one_fault(machine_paths(house.tree()), "README.md:1");
    }
    SUBCASE("a long file") {
        house.write("core/tensor.h", std::string(401, '\n'));
        check_one_fault(long_files(house.tree()), "core/tensor.h: 401 lines");
    }
}
