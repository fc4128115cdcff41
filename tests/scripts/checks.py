"""Test cases in Python for everything that is not C++: each check is a function marked @case("the tested property").

A check fails by raising an exception (CheckFailed for a plain message), and is skipped by raising Skip("why").
run() runs them in order and reports as tests/main.cpp does: lines in POTLUCK_TEST_RESULTS/POTLUCK_TEST_NAME.tsv,
and POTLUCK_TEST_FILTER keeps the checks whose name contains it.
"""

import os
import pathlib
import subprocess
import sys
import time
import traceback

root = pathlib.Path(__file__).resolve().parents[2]

# `meson test` sets it to the build folder, whose library would replace the one that a check is about.
os.environ.pop("LD_LIBRARY_PATH", None)


class CheckFailed(Exception):
    """A readable description of what is wrong."""


class Skip(Exception):
    """The reason why a check cannot run here."""


_cases = []


def case(name):
    def register(function):
        add_case(name, function)
        return function

    return register


def add_case(name, function):
    _cases.append((name, function))


def require(condition, message):
    if not condition:
        raise CheckFailed(message)


def shell(arguments, **options):
    """Runs a program without input and returns its result with output as text. Never raises for its exit status."""
    options.setdefault("stdin", subprocess.DEVNULL)
    options.setdefault("timeout", 900)
    return subprocess.run([str(a) for a in arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          errors="replace", **options)


def succeed(arguments, **options):
    """Like shell(), but a non-zero exit status fails the check. Returns the output."""
    result = shell(arguments, **options)
    if result.returncode != 0:
        command = " ".join(map(str, arguments))
        raise CheckFailed(f"{command}\nended with status {result.returncode}:\n{result.stdout[-6000:]}")
    return result.stdout


def _record(outcome, name, reason=""):
    folder, program = os.environ.get("POTLUCK_TEST_RESULTS"), os.environ.get("POTLUCK_TEST_NAME")
    if folder and program:
        first_line = reason.strip().split("\n")[0]
        with open(pathlib.Path(folder) / f"{program}.tsv", "a") as file:
            file.write(f"{outcome}\t{name}\t{first_line}\n")


def run(closing_line=False):
    """Runs every check and ends the program. With closing_line, it ends as ./test does: `N passed, ...`."""
    text = os.environ.get("POTLUCK_TEST_FILTER", "")
    passed = failed = skipped = 0
    folder, program = os.environ.get("POTLUCK_TEST_RESULTS"), os.environ.get("POTLUCK_TEST_NAME")
    if folder and program:  # also when no check is asked for, so that this program does not count as a case
        (pathlib.Path(folder) / f"{program}.tsv").touch()
    for name, function in _cases:
        if text not in name:
            continue
        _record("started", name)
        start = time.monotonic()
        try:
            function()
        except Skip as reason:
            skipped += 1
            _record("skipped", name, str(reason))
            print(f"skipped: {name}: {reason}", flush=True)
        except Exception as error:
            failed += 1
            detail = str(error) if isinstance(error, CheckFailed) else traceback.format_exc()
            _record("failed", name, str(error))
            print(f"FAILED: {name}\n{detail}", flush=True)
        else:
            passed += 1
            _record("passed", name)
            print(f"passed: {name} ({time.monotonic() - start:.1f} s)", flush=True)
    if closing_line:
        print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)
