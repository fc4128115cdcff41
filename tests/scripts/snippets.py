"""Checks that the C++ in README.md and docs/*.md compiles and runs, and prints the output that the text shows.

    snippets.py BUILD_FOLDER

The words after ```cpp say how a block is tested:

    (nothing)       a program when it has a main(), else a fragment
    program         compiled and run; its exit status is 0
    fragment        the same, put in a main() after `#include <potluck.h>` and `using namespace potluck;`
    more            a fragment that continues the previous fragment
    compile         compiled and linked, not run: training that takes long
    excerpt PATH    exactly these lines are in that file; a line `...` or `// ...` matches any lines in between
    new PATH, insert PATH, append PATH
                    belong to a chapter that chapter.py executes

A block marked ```text output is the output of the program before it; output.py says what may differ.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import sys
import tempfile

from checks import CheckFailed, add_case, case, require, root, run, succeed
from markdown import blocks_of
from output import check_output

build_folder = pathlib.Path(sys.argv[1]).resolve()
temporary = tempfile.TemporaryDirectory(prefix="potluck_snippets_")
folder = pathlib.Path(temporary.name)
followed_elsewhere = ("new", "insert", "append")

# Lines that may only stand outside of a function.
outer_line = re.compile(r"#include|#pragma|using namespace")


def place(block):
    return f"{block.file.relative_to(root)}:{block.line}"


def located(block):
    """The code with its position in the text, so that the compiler's messages refer to that."""
    return f'#line {block.line} "{block.file.relative_to(root)}"\n{block.code}'


def is_program(block):
    return "program" in block.marks or ("fragment" not in block.marks and re.search(r"\bint main\(", block.code))


def source_of(chain):
    """The source of a program, or of fragments that continue one another."""
    if is_program(chain[-1]):
        return located(chain[-1])
    outer, inner = [], []
    for block in chain:
        kept = [("" if outer_line.match(line) else line) for line in block.code.split("\n")]
        outer += [line for line in block.code.split("\n") if outer_line.match(line)]
        inner.append(f'#line {block.line} "{block.file.relative_to(root)}"\n' + "\n".join(kept))
    top = "#include <potluck.h>\n#include <iostream>\n" + "\n".join(outer) + "\nusing namespace potluck;\n"
    return top + "int main() {\n" + "\n".join(inner) + "\n}\n"


def compile_source(name, source):
    file = folder / f"{name}.cpp"
    file.write_text(source)
    program = folder / name
    launcher = ["ccache"] if shutil.which("ccache") else []
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", "-Wno-unused-but-set-variable"]
    paths = [f"-I{build_folder}", f"-I{root}"]
    succeed([*launcher, "g++", *flags, *paths, "-c", file, "-o", f"{program}.o"], cwd=root)
    succeed(["g++", f"{program}.o", "-o", program, f"-L{build_folder}", "-lpotluck", "-pthread",
             f"-Wl,-rpath,{build_folder}"])
    return program


def check_excerpt(block):
    path = root / block.marks[1]
    require(path.exists(), f"{place(block)}: there is no file {block.marks[1]}")
    lines = [line.strip() for line in path.read_text().splitlines()]
    position = 0
    pieces = re.split(r"^\s*(?://\s*)?\.\.\.\s*$", block.code, flags=re.MULTILINE)
    for piece in pieces:
        wanted = [line.strip() for line in piece.strip("\n").split("\n")]
        found = next((i for i in range(position, len(lines) - len(wanted) + 1) if lines[i:i + len(wanted)] == wanted),
                     None)
        require(found is not None, f"{place(block)}: {block.marks[1]} does not have these lines (any more):\n{piece}")
        position = found + len(wanted)


def programs_in(blocks):
    """Yields (chain of blocks, expected output or None) for what is compiled."""
    fragments = []
    for index, block in enumerate(blocks):
        if block.language != "cpp" or any(mark in block.marks for mark in ("excerpt", *followed_elsewhere)):
            continue
        chain = [block]
        if not is_program(block):
            fragments = [*fragments, block] if "more" in block.marks else [block]
            chain = fragments
        following = blocks[index + 1] if index + 1 < len(blocks) else None
        expected = following if following is not None and "output" in following.marks else None
        yield chain, expected


def try_program(chain, expected):
    block = chain[-1]
    name = re.sub(r"\W", "_", place(block))
    program = compile_source(name, source_of(chain))
    if "compile" in block.marks:
        return
    run_folder = folder / f"{name}_run"
    run_folder.mkdir()
    printed = succeed([program], cwd=run_folder, timeout=300)
    if expected is not None:
        check_output(place(expected), printed, expected)


def register():
    documents = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    count = 0
    for document in documents:
        blocks = blocks_of(document)
        for chain, expected in programs_in(blocks):
            # All snippets are compiled and run concurrently; each check below waits for its own.
            future = pool.submit(try_program, chain, expected)
            add_case(f"docs: {place(chain[-1])} compiles and runs", future.result)
            count += 1
        for block in blocks:
            if block.language == "cpp" and "excerpt" in block.marks:
                add_case(f"docs: {place(block)} is an excerpt of {block.marks[1]}", lambda block=block: check_excerpt(block))
                count += 1
    return count


@case("docs: a wrong output, a wrong excerpt and code that does not compile are found")
def faults_are_found():
    document = folder / "faults.md"
    document.write_text("```cpp program\nint main() { return 1; }\n```\n```text output\n1 2 ... 5\n...\nend\n```\n")
    program, output = blocks_of(document)
    program.file = output.file = root / "faults.md"
    for printed, right in (("1 2 3 4 5\nend\n", True), ("1 2 9 5\na\nb\nend", True), ("before\n1 2 x 5\nend\n", True),
                           ("1 2 3 4\nend\n", False), ("1 2 3 5\nend\nafter\n", False), ("", False)):
        require(finds_fault(lambda: check_output(place(output), printed, output)) != right, f"output {printed!r}")
    output.words, output.code = ["text", "output", "about"], "loss 1.00 at step 10\n"
    for printed, right in (("loss 1.05 at step 10\n", True), ("loss 1.2 at step 10\n", False), ("loss 1 step 10\n", False)):
        require(finds_fault(lambda: check_output(place(output), printed, output)) != right, f"output {printed!r}")
    require(finds_fault(lambda: try_program([program], None)), "a program that ends with status 1")
    program.code = "int main() { return missing; }\n"
    require(finds_fault(lambda: compile_source("broken", source_of([program]))), "a program that does not compile")
    program.words = ["cpp", "excerpt", "core/version.h"]
    for code, right in (("#pragma once\n", True), ("#pragma once\n// ...\nnamespace potluck {\n", True),
                        ("namespace potluck {\n...\n#pragma once\n", False), ("int invented();\n", False)):
        program.code = code
        require(finds_fault(lambda: check_excerpt(program)) != right, f"excerpt {code!r}")


def finds_fault(function):
    try:
        function()
    except CheckFailed:
        return True
    return False


@case("docs: the text has code")
def has_code():
    require(number_of_blocks > 0, "README.md and docs/ show no C++ at all")


number_of_blocks = register()
run()
