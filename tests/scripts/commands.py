"""./test, ./demo and their shared set-up: options, missing packages, installation. Nothing is really installed."""

import json
import os
import pathlib
import tempfile

from checks import case, require, root, run, shell

temporary = tempfile.TemporaryDirectory(prefix="potluck_commands_")
folder = pathlib.Path(temporary.name)
setup = root / "tests" / "scripts" / "setup.sh"
real_programs = ("bash", "env", "id", "awk", "tr", "mktemp", "tail", "rm", "g++", "python3", "cat", "basename",
                 "true")


def with_programs(name, programs):
    """A folder for PATH with only the real programs that setup.sh needs itself, and the given fakes {name: script}."""
    path = folder / name
    path.mkdir()
    for program in real_programs:
        found = shell(["bash", "-c", f"type -P {program}"]).stdout.strip()
        (path / program).symlink_to(found)
    for program, script in programs.items():
        (path / program).unlink(missing_ok=True)
        (path / program).write_text(f"#!/bin/bash\n{script}\n")
        (path / program).chmod(0o755)
    return path


def install(name, needs, programs, user=1000, function="install_needs"):
    """Runs install_needs of setup.sh (or another function of it) with fake programs, as a user of that number."""
    path = with_programs(name, {"id": f"echo {user}", **programs})
    script = f'root={root}; source {setup}; {function} "{needs}"; echo went on'
    return shell([path / "bash", "-c", script], env={"PATH": str(path)}), path


needs = "made-up-program   made-up-package\nmade_up/header.h   made-up-dev"
apt_that_installs = 'echo "$@" >>{log}; case $1 in install) echo "#!/bin/bash" >{path}/made-up-program; ' \
                    "/bin/chmod +x {path}/made-up-program;; esac"


@case("set-up: without root or sudo the exact command is printed, and nothing is done")
def prints_the_command():
    result, path = install("no_root", needs, {"apt-get": f"echo called >>{folder}/no_root.log"})
    require(result.returncode != 0 and "went on" not in result.stdout, f"it went on:\n{result.stdout}")
    require("sudo apt-get install -y made-up-program".replace("made-up-program", "made-up-package made-up-dev")
            in result.stdout, f"no command:\n{result.stdout}")
    require(not (folder / "no_root.log").exists(), "apt was called without leave")


@case("set-up: sudo that would ask for a password is not used")
def sudo_that_asks():
    result, _ = install("asks", needs, {"sudo": "exit 1", "apt-get": f"echo called >>{folder}/asks.log"})
    require(result.returncode != 0 and "sudo apt-get install" in result.stdout, result.stdout)
    require(not (folder / "asks.log").exists(), "apt was called without leave")


@case("set-up: root, or sudo without a prompt, installs what is missing and goes on")
def installs():
    for name, user, programs in (("as_root", 0, {}), ("as_sudo", 1000, {"sudo": 'shift; exec "$@"'})):
        log, path = folder / f"{name}.log", folder / name
        fake = apt_that_installs.format(log=log, path=path)
        result, _ = install(name, "made-up-program   made-up-package", {"apt-get": fake, **programs}, user)
        require(result.returncode == 0 and result.stdout.endswith("went on\n"), f"{name}:\n{result.stdout}")
        require("install -y --no-install-recommends made-up-package" in log.read_text(), log.read_text())


@case("set-up: an installation that fails, or brings nothing, is told in words and stops")
def installation_fails():
    result, _ = install("fails", needs, {"apt-get": "echo E: Unable to locate package; exit 100"}, user=0)
    require(result.returncode != 0 and "Unable to locate" in result.stdout and "went on" not in result.stdout,
            result.stdout)
    result, _ = install("brings_nothing", needs, {"apt-get": "exit 0"}, user=0)
    require(result.returncode != 0 and "Still missing" in result.stdout and "made-up-dev" in result.stdout, result.stdout)


@case("set-up: a system without apt is told what to install")
def no_apt():
    result, _ = install("no_apt", needs, {})
    require(result.returncode != 0 and "made-up-package made-up-dev" in result.stdout, result.stdout)


@case("set-up: nothing is installed where all is there")
def all_there():
    result, _ = install("all_there", "g++   g++\nbits/stdc++.h   libstdc++-dev", {"apt-get": "echo called; exit 1"})
    require(result.returncode == 0 and result.stdout == "went on\n", result.stdout)


@case("set-up: what is optional is tried, and its absence stops nothing")
def optional():
    for name, user, known, apt, tried in (("offered", 0, 0, 0, True), ("fails", 0, 0, 100, True),
                                          ("unknown", 0, 1, 0, False), ("not_root", 1000, 0, 0, False)):
        log = folder / f"optional_{name}.log"
        fakes = {"apt-get": f"echo called >>{log}; exit {apt}", "apt-cache": f"exit {known}"}
        result, _ = install(f"optional_{name}", needs, fakes, user, "install_optional")
        require(result.returncode == 0 and result.stdout.endswith("went on\n"), f"{name}:\n{result.stdout}")
        require(log.exists() == tried, f"{name}: apt was {'' if log.exists() else 'not '}called")


@case("./test: an unknown option is refused with the nearest one")
def test_options():
    for option, hint in (("--sanitise", "--sanitize"), ("--fliter", "--filter"), ("-long", "--long")):
        result = shell([root / "test", option])
        require(result.returncode == 2 and f"Did you mean {hint}?" in result.stdout, result.stdout)
    result = shell([root / "test", "--filter"])
    require(result.returncode == 2 and "--filter needs a text" in result.stdout, result.stdout)
    result = shell([root / "test", "--sanitize", "--thread-sanitize"])
    require(result.returncode == 2 and "two different builds" in result.stdout, result.stdout)


@case("./demo: an unknown option is refused with the nearest one, and nothing is built")
def demo_options():
    for option, hint in (("--stpes", "--steps"), ("-steps", "--steps"), ("--widht=8", "--width")):
        result = shell([root / "demo", option], timeout=10)
        require(result.returncode == 2 and f"Did you mean {hint}?" in result.stdout, result.stdout)
        require("Building" not in result.stdout, result.stdout)


@case("./test --help and ./demo --help tell their options and build nothing")
def help_texts():
    for command, options in (("test", ("--long", "--filter", "--sanitize")), ("demo", ("--text", "--steps"))):
        result = shell([root / command, "--help"], env={**os.environ, "PATH": "/usr/bin:/bin"}, timeout=10)
        require(result.returncode == 0, result.stdout)
        for option in options:
            require(option in result.stdout, f"./{command} --help does not tell of {option}")


good_case = ["started\ta\t", "passed\ta\t"]


def summarize(name, results, runs, status=0):
    """The output of summarize.py for these result files {name: lines} and runs of meson [(name, result, status)]."""
    build = folder / name
    (build / "results").mkdir(parents=True)
    (build / "meson-logs").mkdir()
    (build / "test.log").write_text("what meson printed\n")
    for test, lines in results.items():
        (build / "results" / f"{test}.tsv").write_text("".join(f"{line}\n" for line in lines))
    log = [json.dumps({"name": f"fast / {n}", "result": r, "returncode": s, "stdout": f"log of {n}"}) for n, r, s in runs]
    (build / "meson-logs" / "testlog.json").write_text("\n".join(log))
    result = shell(["python3", root / "tests" / "scripts" / "summarize.py", build, status])
    return result.returncode, result.stdout


@case("./test: the closing line adds up all programs, and failures have their text")
def closing_line():
    good = ["started\ta\t", "passed\ta\t", "started\tb\t", "skipped\tb\tno oneDNN"]
    status, text = summarize("good", {"ops": good}, [("ops", "OK", 0), ("plain", "OK", 0)])
    require(status == 0 and text.endswith("\n2 passed, 0 failed, 1 skipped\n"), text)
    require("skipped: ops: b: no oneDNN" in text, text)

    bad = ["started\ta\t", "failed\ta\t"]
    status, text = summarize("bad", {"ops": bad, "nn": good}, [("ops", "FAIL", 1), ("nn", "OK", 0)], status=1)
    require(status == 1 and text.endswith("\n1 passed, 1 failed, 1 skipped\n") and "log of ops" in text, text)


@case("./test: a program that dies, a time-out and an empty run are failures")
def silent_deaths():
    died = ["started\ta\t", "passed\ta\t", "started\tb\t"]
    status, text = summarize("died", {"ops": died}, [("ops", "FAIL", -9)], status=1)
    require(status == 1 and text.endswith("\n1 passed, 1 failed, 0 skipped\n") and "failed: ops: b" in text, text)
    status, text = summarize("late", {"ops": good_case}, [("ops", "TIMEOUT", None)], status=1)
    require(status == 1 and text.endswith("\n1 passed, 1 failed, 0 skipped\n"), text)
    status, text = summarize("leak", {"ops": good_case}, [("ops", "ERROR", 23)], status=1)
    require(status == 1 and text.endswith("\n1 passed, 1 failed, 0 skipped\n"), text)
    for name, runs, meson_status in (("nothing", [], 0), ("broken", [], 1)):
        status, text = summarize(name, {}, runs, meson_status)
        require(status == 1 and text.endswith("\n0 passed, 1 failed, 0 skipped\n"), text)


run()
