"""clang-tidy finds nothing in the library and the examples (.clang-tidy says what it looks for).

    tidy.py BUILD_FOLDER [FILE]...      all sources, or only these

Most of what clang-tidy looks at are the standard headers, anew in each translation unit. So it is given several sources as
one: a file that includes them all. Sources that do not go together, since both define a function of the same name, are put
into different ones.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import sys
import tempfile

from checks import CheckFailed, add_case, case, require, root, run, shell

folders = ("core", "autograd", "cuda", "data", "nn", "examples")
build_folder = pathlib.Path(sys.argv[1]).resolve()
group_size = 12
temporary = tempfile.TemporaryDirectory()
# clang refuses options that only g++ knows.
of_gcc_alone = re.compile(r"-m(move|store)-max=\d+")
error_in_file = re.compile(r"^([^:\n]+):\d+:\d+: error: .*\[clang-diagnostic-error\]$", re.MULTILINE)
using_declaration = re.compile(r"^\s*using [\w:]+;", re.MULTILINE)


def options_of(command):
    """What the compiler is told about a source, without the names of its files."""
    words = [word for word in shlex.split(command["command"]) if not of_gcc_alone.fullmatch(word)]
    start = next(i for i, word in enumerate(words) if word.startswith("-"))
    options, skip = [], False
    for word in words[start:]:
        if skip or word in ("-o", "-MF", "-MQ", "-c", "-MD", command["file"]):
            skip = not skip and word in ("-o", "-MF", "-MQ")
        else:
            options.append(word)
    return tuple(options)


def groups():
    """Pairs of options and sources: all that the build knows, from its compile_commands.json."""
    chosen = {pathlib.Path(name).resolve() for name in sys.argv[2:]}
    files = collections.defaultdict(set)
    for command in json.loads((build_folder / "compile_commands.json").read_text()):
        file = pathlib.Path(command["directory"], command["file"]).resolve()
        if root in file.parents and file.relative_to(root).parts[0] in folders and (not chosen or file in chosen):
            files[options_of(command)].add(file)
    for options, sources in files.items():
        ordered = sorted(sources)
        for i in range(0, len(ordered), group_size):
            yield options, ordered[i : i + group_size]


def look(source, options, *arguments):
    """What clang-tidy says of one file. Options with a relative path are relative to the build folder."""
    result = shell(["clang-tidy", "--quiet", f"--config-file={root}/.clang-tidy", *arguments, source, "--", *options,
                    "-Wno-unknown-warning-option", "-Wno-ignored-optimization-argument"], cwd=build_folder)
    return "" if result.returncode == 0 else re.sub(r"^\d+ warnings? generated\.\n", "", result.stdout, flags=re.MULTILINE)


def findings(options, files):
    """Everything that clang-tidy finds in these sources."""
    with tempfile.NamedTemporaryFile("w", dir=temporary.name, suffix=".cpp") as together:
        # That a source is included is itself something that clang-tidy would find.
        together.write("".join(f'#include "{file}"  // NOLINT\n' for file in files))
        together.flush()
        # The first look is a short one: which of them are in the way of those before them? They form a group of their own.
        # Where only a header shows that they do not go together, each half is one.
        errors = error_in_file.findall(look(together.name, options, "--checks=-*,misc-unused-using-decls"))
        refused = [file for file in files[1:] if str(file) in errors]
        if errors and len(files) > 1:
            refused = refused or files[len(files) // 2 :]
            return findings(options, [file for file in files if file not in refused]) + findings(options, refused)
        found = look(together.name, options)
    # The only check that never looks into an included file.
    return found + "".join(look(file, options, "--checks=-*,misc-unused-using-decls")
                           for file in files if using_declaration.search(file.read_text()))


def check(options, files):
    found = findings(options, files)
    if found:
        raise CheckFailed("\n".join(found.splitlines()[:60]))


@case("clang-tidy: what is wrong is found in each of the sources that it is given as one")
def planted():
    folder = pathlib.Path(temporary.name, "core")
    folder.mkdir()
    faults = {
        "bugprone-use-after-move": "int f(std::string s) { std::string t = std::move(s); return int(s.size() + t.size()); }",
        "bugprone-infinite-loop": "void f() { for (int i = 0; i < 3;) {} }",
        "bugprone-reserved-identifier": "int __reserved();",
        "bugprone-sizeof-expression": "std::size_t f(const std::string* s) { return sizeof(s); }",
        "bugprone-unused-raii": "int f() { std::string(3, 'a'); return 1; }",
        "misc-unused-parameters": "int f(int number) { return 1; }",
        "misc-unused-using-decls": "namespace lib { struct Name {}; }\nusing lib::Name;",
        "modernize-make-unique": "auto f() { return std::unique_ptr<int>(new int(1)); }",
        "modernize-use-equals-default": "struct Nothing { Nothing() {} };",
        "modernize-use-nullptr": "int* f() { return 0; }",
        "modernize-use-override": "struct Base { virtual ~Base(); virtual void f(); };\n"
                                  "struct Derived : Base { virtual void f(); };",
        "performance-unnecessary-value-param": "std::size_t f(std::string s) { return s.size(); }",
        "performance-move-const-arg": "void g(int); void f(const int i) { g(std::move(i)); }",
        "performance-unnecessary-copy-initialization":
            "const std::string& g(); std::size_t f() { const std::string s = g(); return s.size(); }",
        "performance-for-range-copy": "void f(const std::vector<std::string>& all) { for (auto s : all) (void)s.size(); }",
        "readability-container-size-empty": "bool f(const std::string& s) { return s.size() == 0; }",
        "readability-redundant-smartptr-get": "int f(const std::unique_ptr<int>& p) { return *p.get(); }",
        "readability-redundant-string-cstr":
            "std::size_t g(const std::string& s); std::size_t f(const std::string& s) { return g(s.c_str()); }",
        "readability-identifier-naming": "int BadName() { return 1; }",
        "cppcoreguidelines-virtual-class-destructor": "struct Base { virtual void f(); };",
    }
    sources = []
    for name, fault in faults.items():
        sources.append(folder / (name + ".cpp"))
        own = name.replace("-", "_")  # a namespace for each, so that they go together
        sources[-1].write_text("#include <memory>\n#include <string>\n#include <utility>\n#include <vector>\n"
                               f"namespace {own} {{\n{fault}\n}}\n")
    for name in ("first", "second"):  # these two do not go together
        sources.append(folder / (name + ".cpp"))
        sources[-1].write_text(f"static int same() {{ return 1; }}\nint {name}() {{ int* p = 0; return p ? 1 : same(); }}\n")
    output = findings(("-std=c++20",), sources)
    missed = [name for name in faults
              if not re.search(rf"/{name}\.cpp:\d+:\d+: error: .*\[{name}\b", output)]
    missed += [name for name in ("first", "second") if f"/{name}.cpp:2:" not in output]
    require(not missed, f"not found: {', '.join(missed)}\n{output}")


pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
# The largest first, so that the processors end together.
for options, files in sorted(groups(), key=lambda group: -sum(file.stat().st_size for file in group[1])):
    title = " ".join(str(file.relative_to(root)) for file in files)
    add_case(f"clang-tidy: {title}", pool.submit(check, options, files).result)
run(closing_line=True)
