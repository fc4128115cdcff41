"""A program outside the tree can use an installed copy, through pkg-config and through CMake.

    install.py BUILD_FOLDER
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile

from checks import Skip, case, require, root, run, shell, succeed

build_folder = pathlib.Path(sys.argv[1]).resolve()
temporary = tempfile.TemporaryDirectory(prefix="potluck_install_")
folder = pathlib.Path(temporary.name)
external = root / "tests" / "install"
expected = "loss is small\n"


def installed_prefix():
    """Installs a copy once and then moves it: nothing in it may depend on its first location."""
    prefix = folder / "moved"
    if not prefix.exists():
        succeed(["meson", "install", "-C", build_folder, "--no-rebuild", "--destdir", folder / "first"])
        configured = succeed(["meson", "introspect", "--buildoptions", build_folder])
        installed = folder / "first" / prefix_of(configured).lstrip("/")
        shutil.move(installed, prefix)
    return prefix


def prefix_of(build_options):
    return next(o["value"] for o in json.loads(build_options) if o["name"] == "prefix")


def find(prefix, name):
    found = sorted(prefix.rglob(name))
    require(len(found) == 1, f"expected one {name} under the prefix, found {[str(f) for f in found]}")
    return found[0]


@case("install: headers, library, potluck.pc and the CMake package are there")
def everything_is_there():
    prefix = installed_prefix()
    for name in ("potluck.h", "tensor.h", "potluck.pc", "potluckConfig.cmake", "potluckConfigVersion.cmake"):
        find(prefix, name)
    require((prefix / "include" / "potluck" / "core" / "tensor.h").exists(), "the headers keep their folders")
    require(not list(prefix.rglob("*.cpp")), "sources are not installed")
    require(not list(prefix.rglob("test_*")), "tests are not installed")


@case("install: a program builds through pkg-config and runs")
def through_pkg_config():
    prefix = installed_prefix()
    library_folder = find(prefix, "potluck.pc").parent.parent
    environment = {**os.environ, "PKG_CONFIG_PATH": str(library_folder / "pkgconfig")}
    flags = succeed(["pkg-config", "--cflags", "--libs", "potluck"], env=environment).split()
    program = folder / "by_pkg_config"
    succeed(["g++", "-Wall", "-Wextra", "-Werror", external / "external.cpp", "-o", program, *flags])
    output = succeed([program], env={**os.environ, "LD_LIBRARY_PATH": str(library_folder)})
    require(output == expected, f"it printed {output!r}, expected {expected!r}")


@case("install: a program builds through CMake and runs")
def through_cmake():
    if not shutil.which("cmake"):
        raise Skip("cmake is not installed")
    build = folder / "by_cmake"
    succeed(["cmake", "-G", "Ninja", "-S", external, "-B", build, f"-DCMAKE_PREFIX_PATH={installed_prefix()}"])
    succeed(["cmake", "--build", build])
    output = succeed([build / "external"])
    require(output == expected, f"it printed {output!r}, expected {expected!r}")


@case("install: CMake refuses a version that is not the installed one")
def wrong_version():
    if not shutil.which("cmake"):
        raise Skip("cmake is not installed")
    source = folder / "wrong_version"
    source.mkdir()
    text = (external / "CMakeLists.txt").read_text().replace("potluck 0.1", "potluck 99.0")
    (source / "CMakeLists.txt").write_text(text)
    (source / "external.cpp").write_text("int main() {}\n")
    result = shell(["cmake", "-G", "Ninja", "-S", source, "-B", source / "build", f"-DCMAKE_PREFIX_PATH={installed_prefix()}"])
    require(result.returncode != 0 and "99.0" in result.stdout, f"it was not refused:\n{result.stdout[-2000:]}")


run()
