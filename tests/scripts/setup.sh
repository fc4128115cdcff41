# shellcheck shell=bash disable=SC2034,SC2154
# Shared by ./demo, ./test and .ci/run (sourced, bash): installs what a build needs, builds, suggests options.
# Nothing here asks a question. Messages go to standard error, one line per step.

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

# Each line: what to look for, and the Debian package that contains it. Names with a slash or .h* are C++ headers.
build_needs='
g++                     g++
meson                   meson
ninja                   ninja-build
pkg-config              pkg-config
python3                 python3
mold                    mold
Eigen/Core              libeigen3-dev
fmt/format.h            libfmt-dev
spdlog/spdlog.h         libspdlog-dev
nlohmann/json.hpp       nlohmann-json3-dev
xxhash.h                libxxhash-dev
CLI/CLI.hpp             libcli11-dev
oneapi/dnnl/dnnl.hpp    libdnnl-dev
png.h                   libpng-dev
jpeglib.h               libjpeg-dev
zlib.h                  zlib1g-dev
doctest/doctest.h       doctest-dev
'
emulator_needs='
boost/context/fiber.hpp libboost-context-dev
'
test_needs='
cmake                   cmake
'
# Not every release of the distribution has these. Without them the checks that need them are skipped.
optional_needs='
clang-format-14         clang-format-14
chromium-headless-shell chromium-headless-shell
'

# missing_packages NEEDS: prints the packages of everything in NEEDS that is missing, one per line.
missing_packages() {
    local name package headers=''
    while read -r name package; do
        case $name in
            '') ;;
            */* | *.h) headers+="$name $package"$'\n' ;;
            *) command -v "$name" >/dev/null || printf '%s\n' "$package" ;;
        esac
    done <<<"$1"
    [ -n "$headers" ] || return 0
    if ! command -v g++ >/dev/null; then
        awk '{ print $2 }' <<<"${headers%$'\n'}"
        return 0
    fi
    # One run of the preprocessor answers for all headers.
    while read -r name package; do
        [ -z "$name" ] || printf '#if !__has_include(<%s>)\nmissing %s\n#endif\n' "$name" "$package"
    done <<<"$headers" | g++ -E -P -x c++ -std=c++20 -I/usr/include/eigen3 - | awk '$1 == "missing" { print $2 }'
}

can_become_root() { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }

# apt_install LOG PACKAGE...: as root or by sudo; everything it prints goes to LOG.
apt_install() {
    local log=$1 as_root=''
    shift
    [ "$(id -u)" = 0 ] || as_root='sudo -n'
    say "Installing $* ..."
    # shellcheck disable=SC2086  # an empty word is none
    { $as_root apt-get update &&
        DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y --no-install-recommends "$@"; } \
        </dev/null >"$log" 2>&1
}

may_install() { command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || can_become_root; }; }

# install_needs NEEDS: installs missing packages with apt, or prints the command to do so and ends the program.
install_needs() {
    local packages log
    mapfile -t packages < <(missing_packages "$1")
    [ ${#packages[@]} -gt 0 ] || return 0
    if ! command -v apt-get >/dev/null; then
        fail "Missing, by their Debian names: ${packages[*]}. Install them with this system's package manager, then try again."
    fi
    may_install || fail "Missing packages. Install them with:
    sudo apt-get install -y ${packages[*]}
then try again."
    log=$(mktemp)
    if ! apt_install "$log" "${packages[@]}"; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        fail "apt could not install them. The command was: apt-get install -y ${packages[*]}"
    fi
    rm -f "$log"
    mapfile -t packages < <(missing_packages "$1")
    [ ${#packages[@]} -eq 0 ] || fail "Still missing after the installation: ${packages[*]}"
}

# install_optional NEEDS: like install_needs, but only for packages that apt knows; continues without unavailable ones.
install_optional() {
    local package packages=()
    may_install || return 0
    while read -r package; do
        if apt-cache show "$package" >/dev/null 2>&1; then packages+=("$package"); fi
    done < <(missing_packages "$1")
    [ ${#packages[@]} -gt 0 ] || return 0
    apt_install /dev/null "${packages[@]}" || say "Going on without ${packages[*]}."
}

# gpu_architecture: the compute capability (times ten) of this machine's GPU, 80 if there is none. One architecture is
# enough to build and test here, and takes half the time.
gpu_architecture() {
    local found
    found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .) || found=''
    if [[ $found =~ ^[0-9]+$ ]]; then printf '%s\n' "$found"; else printf '80\n'; fi
}

# build FOLDER [MESON OPTION]... -- [TARGET]...: configures the folder (once) and builds.
build() {
    local folder=$1 log
    shift
    local options=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    [ $# -eq 0 ] || shift
    log=$folder/build.log
    mkdir -p "$folder"
    # Two concurrent builds in one folder would corrupt each other's files.
    local lock
    exec {lock}>"$folder/build.lock"
    if command -v flock >/dev/null && ! flock -n "$lock"; then
        say "Another build in $(basename "$folder")/ is running; waiting for it ..."
        flock "$lock"
    fi
    if [ ! -f "$folder/build.ninja" ]; then
        say "Configuring $(basename "$folder")/ ..."
        if ! meson setup "${options[@]}" "$folder" "$root" </dev/null >"$log" 2>&1; then
            tail -n 15 "$log" >&2
            fail "The configuration failed. All of it: $log"
        fi
    elif [ ${#options[@]} -gt 0 ]; then
        # A folder that was configured by hand, or by an older version.
        meson configure "${options[@]}" "$folder" </dev/null >"$log" 2>&1 ||
            fail "$(basename "$folder")/ does not take these options: ${options[*]}. Remove the folder, then try again."
    fi
    if [ -t 2 ]; then
        # Ninja keeps its progress on one line of a terminal.
        say "Building in $(basename "$folder")/ ..."
        ninja -C "$folder" "$@" >&2 || fail 'The build failed.'
    else
        say "Building in $(basename "$folder")/ (a first build takes some minutes) ..."
        if ! ninja -C "$folder" "$@" </dev/null >"$log" 2>&1; then
            grep -E -A 12 'FAILED:|error:' "$log" | tail -n 60 >&2 || tail -n 40 "$log" >&2
            fail "The build failed. All of it: $log"
        fi
    fi
    exec {lock}>&-
}

# nearest WORD CANDIDATE...: prints the candidate that takes the fewest edits to reach.
nearest() {
    local word=$1
    shift
    printf '%s\n' "$@" | awk -v word="$word" '
        function least(a, b, c) { return a < b ? (a < c ? a : c) : (b < c ? b : c) }
        function distance(a, b,    i, j, row, before, kept) {
            for (j = 0; j <= length(b); j++) row[j] = j
            for (i = 1; i <= length(a); i++) {
                before = row[0]; row[0] = i
                for (j = 1; j <= length(b); j++) {
                    kept = row[j]
                    row[j] = least(row[j] + 1, row[j - 1] + 1, before + (substr(a, i, 1) != substr(b, j, 1)))
                    before = kept
                }
            }
            return row[length(b)]
        }
        { d = distance(word, $0); if (NR == 1 || d < best) { best = d; found = $0 } }
        END { print found }'
}

# refuse PROGRAM WORD KNOWN...: the one line for an option that does not exist; ends the program.
refuse() {
    local program=$1 word=$2
    shift 2
    say "$program: unknown option $word. Did you mean $(nearest "$word" "$@")? $program --help lists all."
    exit 2
}
