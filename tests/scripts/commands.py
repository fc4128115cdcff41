"""./test, ./demo and the set-up they share: options, what is missing, what is installed. Nothing is really installed."""

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


def install(name, needs, programs, user=1000):
    """Runs install_needs with fake programs, as a user of that number."""
    path = with_programs(name, {"id": f"echo {user}", **programs})
    script = f'root={root}; source {setup}; install_needs "{needs}"; echo went on'
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


@case("./test: an unknown option is refused with the nearest one")
def test_options():
    for option, hint in (("--sanitise", "--sanitize"), ("--fliter", "--filter"), ("-long", "--long")):
        result = shell([root / "test", option])
        require(result.returncode == 2 and f"Did you mean {hint}?" in result.stdout, result.stdout)
    result = shell([root / "test", "--filter"])
    require(result.returncode == 2 and "--filter needs a text" in result.stdout, result.stdout)
    result = shell([root / "test", "--sanitize", "--thread-sanitize"])
    require(result.returncode == 2 and "two different builds" in result.stdout, result.stdout)


@case("./test --help and ./demo --help tell their options and build nothing")
def help_texts():
    for command, options in (("test", ("--long", "--filter", "--sanitize")), ("demo", ("--text", "--steps"))):
        result = shell([root / command, "--help"], env={**os.environ, "PATH": "/usr/bin:/bin"}, timeout=10)
        require(result.returncode == 0, result.stdout)
        for option in options:
            require(option in result.stdout, f"./{command} --help does not tell of {option}")


run()
