#include <algorithm>
#include <cctype>
#include <set>
#include <span>
#include <string_view>

#include "tests/house/rules.h"

namespace potluck::house {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t longest_file = 400;

// Files without a counterpart, each with its reason. An exception that is no longer needed is a fault as well.
struct Exception {
    std::string_view file;
    std::string_view reason;
};
constexpr Exception without_op[] = {
    {"core/cpu/blocks.cpp", "how all kernels walk their operands"},
    {"core/cpu/convert.cpp", "how all kernels read and write the half types"},
    {"core/cpu/describe.cpp", "names the processor"},
    {"core/cpu/gemm.cpp", "the product of two blocks, for matmul and attention"},
    {"core/cpu/memory.cpp", "allocates and releases"},
    {"core/cpu/optimizer.cpp", "the steps of nn/optim, which are not on the tape"},
    {"core/cpu/parallel.cpp", "the threads of a CPU device"},
    {"core/cpu/random.cpp", "fills the tensors of core/factories, which have no gradient"},
};
constexpr Exception without_kernel[] = {
    {"autograd/ops/dropout.cpp", "its kernel stands beside the random numbers, in core/cpu/random.cpp"},
    {"autograd/ops/join.cpp", "copies into views"},
    {"autograd/ops/mse_loss.cpp", "composed of other ops"},
    {"autograd/ops/view.cpp", "views compute no element"},
};
// Kernels of one device that are in another file, or not needed, on the other.
constexpr Exception without_cuda[] = {
    {"core/cpu/blocks.cpp", "cuda/kernels/layout.h walks operands there"},
    {"core/cpu/convert.cpp", "cuda/kernels/numbers.h converts there"},
    {"core/cpu/describe.cpp", "cuda/devices.cpp describes the card"},
    {"core/cpu/gemm.cpp", "cuBLASLt multiplies there"},
    {"core/cpu/parallel.cpp", "a kernel's launch says how many threads it has there"},
};
constexpr Exception without_cpu[] = {
    {"cuda/kernels/dropout.cu", "stands beside the random numbers, in core/cpu/random.cpp"},
};
// Not an op: it has no kernel and no header of its own, and is tested through the ops that call it.
constexpr Exception not_an_op[] = {
    {"autograd/ops/chain.cpp", "runs several steps of elementwise for the ops that call it"},
    {"autograd/ops/inplace.cpp", "the members of Tensor that change it in place"},
    {"autograd/ops/support.cpp", "the checks that all ops share"},
};

std::set<std::string> stems(const Tree& tree, const std::string& folder,
                            std::string_view extension = ".cpp") {
    std::set<std::string> names;
    for (const std::string& file : tree.files) {
        const fs::path path(file);
        if (path.parent_path() == folder && path.extension() == extension) names.insert(path.stem().string());
    }
    return names;
}

bool excepted(std::span<const Exception> exceptions, std::string_view file) {
    return std::any_of(exceptions.begin(), exceptions.end(),
                       [&](const Exception& one) { return one.file == file; });
}

/// Whether the file only contains a part of another: attention_tiles belongs to attention.
bool is_part_of_another(const std::set<std::string>& names, const std::string& name) {
    for (std::size_t end = name.find('_'); end != std::string::npos; end = name.find('_', end + 1)) {
        if (names.contains(name.substr(0, end))) return true;
    }
    return false;
}

}  // namespace

Faults sources_not_built(const Tree& tree) {
    Faults faults;
    for (const std::string& file : tree.files) {
        const fs::path path(file);
        if (path.extension() != ".cpp" && path.extension() != ".cu") continue;
        // tests/install/external.cpp and similar files are built by the check beside them.
        std::string list = (path.parent_path() / "meson.build").generic_string();
        if (path.parent_path() == "cuda/kernels") list = "cuda/meson.build";
        if (!contains(tree, list)) continue;
        const std::set<std::string> names = listed_names(tree, list);
        if (names.contains(path.filename().string()) || names.contains(path.stem().string())) continue;
        faults.push_back(file + ": " + list + " does not name it, so it is never compiled.");
    }
    return faults;
}

Faults missing_twins(const Tree& tree) {
    const std::set<std::string> kernels = stems(tree, "core/cpu");
    const std::set<std::string> ops = stems(tree, "autograd/ops");
    const std::set<std::string> tests = stems(tree, "tests/ops");
    Faults faults;
    for (const std::string& name : kernels) {
        const std::string file = "core/cpu/" + name + ".cpp";
        if (ops.contains(name) || is_part_of_another(kernels, name) || excepted(without_op, file)) continue;
        faults.push_back(file + ": autograd/ops/" + name + ".cpp is missing.");
    }
    for (const std::string& name : ops) {
        const std::string file = "autograd/ops/" + name + ".cpp";
        if (is_part_of_another(ops, name) || excepted(not_an_op, file)) continue;
        if (!kernels.contains(name) && !excepted(without_kernel, file)) {
            faults.push_back(file + ": core/cpu/" + name + ".cpp is missing.");
        }
        if (!contains(tree, "autograd/ops/" + name + ".h"))
            faults.push_back(file + ": its header is missing.");
        if (!tests.contains(name)) faults.push_back(file + ": tests/ops/" + name + ".cpp is missing.");
    }
    return faults;
}

Faults missing_cuda_twins(const Tree& tree) {
    const std::set<std::string> kernels = stems(tree, "core/cpu");
    const std::set<std::string> cuda_kernels = stems(tree, "cuda/kernels", ".cu");
    Faults faults;
    for (const std::string& name : kernels) {
        const std::string file = "core/cpu/" + name + ".cpp";
        const bool there = cuda_kernels.contains(name) || contains(tree, "cuda/" + name + ".cpp");
        if (there || is_part_of_another(kernels, name) || excepted(without_cuda, file)) continue;
        faults.push_back(file + ": neither cuda/kernels/" + name + ".cu nor cuda/" + name + ".cpp is there.");
    }
    for (const std::string& name : cuda_kernels) {
        const std::string file = "cuda/kernels/" + name + ".cu";
        if (kernels.contains(name) || is_part_of_another(cuda_kernels, name) || excepted(without_cpu, file))
            continue;
        faults.push_back(file + ": core/cpu/" + name + ".cpp is missing.");
    }
    return faults;
}

Faults needless_exceptions(const Tree& tree) {
    Faults faults;
    const auto check = [&](const Exception& exception, std::string_view twin_folder) {
        const std::string file(exception.file);
        if (!contains(tree, file)) faults.push_back(file + ": there is no such file. Drop its exception.");
        const std::string twin = std::string(twin_folder) + "/" + fs::path(file).filename().string();
        if (contains(tree, twin)) faults.push_back(file + ": " + twin + " exists now. Drop the exception.");
    };
    for (const Exception& exception : without_op) check(exception, "autograd/ops");
    for (const Exception& exception : without_kernel) check(exception, "core/cpu");
    for (const Exception& exception : not_an_op) check(exception, "core/cpu");
    for (const Exception& exception : without_cuda) check(exception, "cuda");
    return faults;
}

Faults undocumented_ops(const Tree& tree) {
    Faults faults;
    for (const std::string& file : tree.files) {
        if (fs::path(file).parent_path() != "autograd/ops" || !is_header(file)) continue;
        const std::vector<std::string> lines = read_lines(tree, file);
        // A docstring covers the declarations that follow it without an empty line between (overloads).
        bool documented = false;
        int open_parentheses = 0;
        for (std::size_t i = 0; i < lines.size(); ++i) {
            const std::string& line = lines[i];
            const bool starts_declaration =
                open_parentheses == 0 && !line.empty() &&
                (std::isalpha(static_cast<unsigned char>(line[0])) != 0 || line[0] == '[');
            if (line.starts_with("///")) documented = true;
            if (line.empty() || line[0] == '}') documented = false;
            const std::string code = line.substr(0, line.find("//"));
            const bool is_function = starts_declaration && code.find('(') != std::string::npos &&
                                     !code.starts_with("using") && !code.starts_with("namespace");
            if (is_function && !documented) {
                faults.push_back(at(file, i + 1) + "no `///` docstring: " + code.substr(0, 60));
            }
            open_parentheses += static_cast<int>(std::count(code.begin(), code.end(), '(')) -
                                static_cast<int>(std::count(code.begin(), code.end(), ')'));
        }
    }
    return faults;
}

Faults machine_paths(const Tree& tree) {
    // Written in two pieces each, so that this file does not violate its own rule.
    const std::vector<std::string> foreign = {
        "/wo"
        "rk/",
        "/ro"
        "ot/",
        "/ho"
        "me/"};
    Faults faults;
    for (const std::string& file : tree.files) {
        std::size_t number = 0;
        for (const std::string& line : read_lines(tree, file)) {
            ++number;
            for (const std::string& path : foreign) {
                const std::size_t found = line.find(path);
                if (found == std::string::npos) continue;
                // A longer word with this ending, such as "frame/work/", is not a path of a machine.
                if (found > 0 && (std::isalnum(static_cast<unsigned char>(line[found - 1])) != 0)) continue;
                faults.push_back(at(file, number) + "names " + path + ", a folder of one machine.");
            }
        }
    }
    return faults;
}

Faults long_files(const Tree& tree) {
    Faults faults;
    for (const std::string& file : tree.files) {
        if (!is_source(file)) continue;
        const std::size_t length = read_lines(tree, file).size();
        if (length > longest_file) faults.push_back(file + ": " + std::to_string(length) + " lines");
    }
    return faults;
}

}  // namespace potluck::house
