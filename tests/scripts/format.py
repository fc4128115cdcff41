"""The sources are formatted according to .clang-format."""

import difflib
import shutil

from checks import CheckFailed, Skip, case, root, run, shell

folders = ["core", "autograd", "data", "nn", "examples", "tests"]
# Releases of clang-format differ in details, so one release decides.
release = "14"


def find_formatter():
    for name in (f"clang-format-{release}", "clang-format"):
        if shutil.which(name) and f"version {release}." in shell([name, "--version"]).stdout:
            return name
    raise Skip(f"clang-format {release} is not installed, and other releases format differently")


def first_difference(text, formatted):
    lines = difflib.unified_diff(text.splitlines(), formatted.splitlines(), "as it is", "as it should be", lineterm="")
    return "\n".join(list(lines)[:12])


@case("format: every C++ file is as clang-format would write it")
def every_file():
    formatter = find_formatter()
    files = sorted(f for folder in folders for e in ("*.h", "*.cpp") for f in (root / folder).rglob(e))
    wrong = []
    for file in files:
        text = file.read_text()
        formatted = shell([formatter, "--style=file", file]).stdout
        if text != formatted:
            wrong.append(f"{file.relative_to(root)}\n{first_difference(text, formatted)}")
    if wrong:
        names = "\n".join(wrong)
        raise CheckFailed(f"{len(wrong)} of {len(files)} files are formatted differently. Run {formatter} -i on them.\n{names}")


run()
