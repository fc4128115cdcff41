"""clang-tidy finds nothing in the library and the examples (.clang-tidy says what it looks for).

    tidy.py BUILD_FOLDER [FILE]...      all sources, or only these
"""

import concurrent.futures
import json
import os
import pathlib
import re
import sys
import tempfile

from checks import CheckFailed, add_case, root, run, shell

folders = ("core", "autograd", "cuda", "data", "nn", "examples")
build_folder = pathlib.Path(sys.argv[1]).resolve()
# clang refuses options that only g++ knows.
of_gcc_alone = re.compile(r" -m(move|store)-max=\d+")
commands_folder = tempfile.TemporaryDirectory()
commands_text = of_gcc_alone.sub("", (build_folder / "compile_commands.json").read_text())
pathlib.Path(commands_folder.name, "compile_commands.json").write_text(commands_text)


def sources():
    """The sources that the build knows, from its compile_commands.json."""
    files = {pathlib.Path(c["directory"], c["file"]).resolve() for c in json.loads(commands_text)}
    chosen = {pathlib.Path(name).resolve() for name in sys.argv[2:]}
    return sorted(f for f in files
                  if root in f.parents and f.relative_to(root).parts[0] in folders and (not chosen or f in chosen))


def check(file):
    result = shell(["clang-tidy", "--quiet", "-p", commands_folder.name, f"--config-file={root}/.clang-tidy",
                    "--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wno-ignored-optimization-argument", file])
    if result.returncode != 0:
        lines = [line for line in result.stdout.splitlines() if not line.endswith("warnings generated.")]
        raise CheckFailed("\n".join(lines[:60]))


pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
for source in sources():
    add_case(f"clang-tidy: {source.relative_to(root)}", pool.submit(check, source).result)
run(closing_line=True)
