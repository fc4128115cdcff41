"""clang-tidy finds nothing in the library and the examples (.clang-tidy says what it looks for).

    tidy.py BUILD_FOLDER [FILE]...      all sources, or only these
"""

import concurrent.futures
import json
import os
import pathlib
import sys

from checks import CheckFailed, add_case, root, run, shell

folders = ("core", "autograd", "data", "nn", "examples")
build_folder = pathlib.Path(sys.argv[1]).resolve()


def sources():
    """The sources that the build knows, from its compile_commands.json."""
    commands = json.loads((build_folder / "compile_commands.json").read_text())
    files = {pathlib.Path(c["directory"], c["file"]).resolve() for c in commands}
    chosen = {pathlib.Path(name).resolve() for name in sys.argv[2:]}
    return sorted(f for f in files
                  if root in f.parents and f.relative_to(root).parts[0] in folders and (not chosen or f in chosen))


def check(file):
    result = shell(["clang-tidy", "--quiet", "-p", build_folder, f"--config-file={root}/.clang-tidy",
                    # g++'s own options that clang does not know are none of its business.
                    "--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Wno-ignored-optimization-argument", file])
    if result.returncode != 0:
        lines = [line for line in result.stdout.splitlines() if not line.endswith("warnings generated.")]
        raise CheckFailed("\n".join(lines[:60]))


pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
for source in sources():
    add_case(f"clang-tidy: {source.relative_to(root)}", pool.submit(check, source).result)
run(closing_line=True)
