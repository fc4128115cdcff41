"""Executes docs/adding_an_op.md literally in a copy of the tree, as a reader would do by hand.

    chapter.py BUILD_FOLDER

The words on the opening line of a code block say where its lines belong:

    ```cpp new PATH                         the whole of a new file
    ```cpp insert PATH after "TEXT"         after the only line of the file that contains TEXT (before: before that line)
    ```cpp append PATH                      at the end of the file
    ```sh run                               the commands a reader types in the root of the tree; each must succeed
    ```text output                          what the commands before it print (output.py says what may differ)

All blocks are used in their order, whatever the language (meson, cpp, sh). `build` in the commands is a copy of the
build folder, so that only what the chapter touches is built again.
"""

import os
import pathlib
import shutil
import sys
import tempfile

from checks import CheckFailed, case, require, root, run, succeed
from markdown import blocks_of
from output import check_output

chapter = "docs/adding_an_op.md"
build_folder = pathlib.Path(sys.argv[1]).resolve()
temporary = tempfile.TemporaryDirectory(prefix="potluck_chapter_")
actions = ("new", "insert", "append", "run")


def place(block):
    return f"{chapter}:{block.line}"


def copy_tree(target):
    """Copies the sources and the build folder with their time stamps, so that only later changes are rebuilt."""
    def ignore(parent, names):
        top = pathlib.Path(parent) == root
        return [n for n in names if n in (".git", "__pycache__") or (top and (n.startswith("build") or n == "runs"))]

    shutil.copytree(root, target, ignore=ignore, symlinks=True)
    # The compiler is called with paths relative to the build folder, so the copy keeps its place beside the sources.
    build = pathlib.Path(os.path.normpath(target / os.path.relpath(build_folder, root)))
    shutil.copytree(build_folder, build, ignore=shutil.ignore_patterns("results", "meson-logs"), symlinks=True)
    if build != target / "build":
        (target / "build").symlink_to(build)
    succeed(["meson", "setup", "--reconfigure", build, target])
    return target


def apply(block, tree):
    action, path = block.marks[0], tree / block.marks[1]
    if action == "new":
        require(not path.exists(), f"{place(block)}: {block.marks[1]} is there already")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code)
        return
    require(path.exists(), f"{place(block)}: there is no file {block.marks[1]}")
    text = path.read_text()
    if action == "append":
        path.write_text(text + block.code)
        return
    require(len(block.marks) == 4 and block.marks[2] in ("after", "before"),
            f'{place(block)}: expected `insert PATH after "TEXT"` or `insert PATH before "TEXT"`')
    _, _, side, anchor = block.marks
    lines = text.splitlines(keepends=True)
    found = [i for i, line in enumerate(lines) if anchor in line]
    require(len(found) == 1,
            f"{place(block)}: {len(found)} lines of {block.marks[1]} contain {anchor!r}, exactly one should")
    at = found[0] + (1 if side == "after" else 0)
    path.write_text("".join(lines[:at]) + block.code + "".join(lines[at:]))


def follow(blocks, tree):
    """Applies every block in its order and runs the commands. Returns the number of blocks used."""
    printed, used = "", 0
    for block in blocks:
        action = block.marks[0] if block.marks else ""
        if action == "run":
            printed = succeed(["bash", "-euo", "pipefail", "-c", block.code], cwd=tree)
        elif action in actions:
            apply(block, tree)
        elif action == "output":
            check_output(place(block), printed, block)
        else:
            continue
        used += 1
    return used


@case("docs: the chapter on adding an op, followed literally, ends with a tested op")
def literally():
    blocks = blocks_of(root / chapter)
    kinds = {block.marks[0] for block in blocks if block.marks}
    require({"new", "run"} <= kinds, f"{chapter} adds no file or runs no command")
    # The same name as here, so that no build command changes when the build folder is beside the sources.
    tree = copy_tree(pathlib.Path(temporary.name) / root.name)
    follow(blocks, tree)
    # The new op must obey the house rules, too.
    succeed(["ninja", "-C", tree / "build", "tests/test_house"])
    succeed([tree / "build" / "tests" / "test_house", "--test-case=house: this tree keeps every rule"], cwd=tree)


@case("docs: an op touches at most 10 files, 5 of them new")
def few_files():
    paths = {action: {block.marks[1] for block in blocks_of(root / chapter) if block.marks[:1] == [action]}
             for action in ("new", "insert", "append")}
    changed = paths["insert"] | paths["append"]
    require(len(paths["new"]) <= 5, f"{chapter} adds {len(paths['new'])} files: {sorted(paths['new'])}")
    require(len(paths["new"] | changed) <= 10,
            f"{chapter} touches {len(paths['new'] | changed)} files: {sorted(paths['new'] | changed)}")


@case("docs: a chapter that no longer fits the tree is found")
def faults_are_found():
    folder = pathlib.Path(temporary.name) / "small"
    folder.mkdir()
    (folder / "list.txt").write_text("one\ntwo\ntwo\n")
    document = folder / "chapter.md"

    def finds(text):
        document.write_text(text)
        try:
            follow(blocks_of(document), folder)
        except CheckFailed:
            return True
        return False

    require(not finds('```cpp insert list.txt after "one"\nand a half\n```\n'), "a right block was refused")
    require((folder / "list.txt").read_text() == "one\nand a half\ntwo\ntwo\n", "it was inserted in the wrong place")
    require(not finds("```sh run\ncat list.txt\n```\n```text output\none\n...\ntwo\n```\n"), "a right output was refused")
    for fault in ('```cpp insert list.txt after "two"\nx\n```\n', '```cpp insert list.txt after "three"\nx\n```\n',
                  "```cpp new list.txt\nx\n```\n", "```cpp append missing.txt\nx\n```\n", "```sh run\nfalse\ntrue\n```\n",
                  "```sh run\necho one\n```\n```text output\ntwo\n```\n"):
        require(finds(fault), f"not found:\n{fault}")


run()
