"""Summarises a run of `meson test` for ./test: what failed, what was skipped and why, and the closing line.

    summarize.py BUILD_FOLDER STATUS_OF_MESON

The test programs and the scripts write one line per test case to BUILD_FOLDER/results/NAME.tsv (tests/main.cpp
describes the format). A test without such a file counts as one case, by its exit status. Exit status 1 when anything
failed, when nothing ran, or when a program died.
"""

import json
import pathlib
import sys


def read_outcomes(path):
    """Returns [(outcome, name, reason)], where a case that was started and never ended has the outcome 'died'."""
    outcomes, running = [], None
    for line in path.read_text(errors="replace").splitlines():
        outcome, name, reason = (line.split("\t", 2) + ["", ""])[:3]
        if outcome == "started":
            running = name
            continue
        outcomes.append((outcome, name, reason))
        running = None
    if running is not None:
        outcomes.append(("died", running, "the program ended in the middle of it"))
    return outcomes


def collect(folder):
    """Returns (passed, failures, skips, logs): a count, and lists of (test, case, reason); logs by failed test."""
    passed, failures, skips, logs = 0, [], [], {}
    log_file = folder / "meson-logs" / "testlog.json"
    lines = log_file.read_text().splitlines() if log_file.exists() else []
    for run in map(json.loads, lines):
        name = run["name"].split(" / ")[-1]
        result_file = folder / "results" / f"{name}.tsv"
        outcomes = read_outcomes(result_file) if result_file.exists() else []
        for outcome, case, reason in outcomes:
            if outcome == "passed":
                passed += 1
            elif outcome == "skipped":
                skips.append((name, case, reason or "no reason given"))
            else:
                failures.append((name, case, reason))
        ok = run["result"] in ("OK", "SKIP")
        if not ok:
            logs[name] = run.get("stdout", "") + run.get("stderr", "")
            if not any(test == name for test, _, _ in failures):
                failures.append((name, run["result"].lower(), f"exit status {run.get('returncode')}"))
        elif not result_file.exists():
            if run["result"] == "SKIP":
                skips.append((name, "", (run.get("stdout") or "no reason given").strip().splitlines()[-1]))
            else:
                passed += 1
    return passed, failures, skips, logs


def main():
    folder, status = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    passed, failures, skips, logs = collect(folder)
    for name, text in logs.items():
        print(f"---- {name}")
        lines = text.strip().splitlines()
        if len(lines) > 120:
            print(f"[{len(lines) - 120} lines before these are in {folder / 'meson-logs' / 'testlog.txt'}]")
        print("\n".join(lines[-120:]))
    for name, case, reason in failures:
        print(f"failed: {name}: {case} {reason}".rstrip())
    for name, case, reason in skips:
        print(f"skipped: {name}: {case}: {reason}")
    if not failures and (status != 0 or passed == 0):
        print("no test ran" if passed == 0 else f"meson test ended with status {status}")
        print((folder / "test.log").read_text(errors="replace")[-2000:])
        failures.append(("meson", "test", ""))
    print(f"{passed} passed, {len(failures)} failed, {len(skips)} skipped")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
