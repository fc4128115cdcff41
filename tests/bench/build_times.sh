#!/usr/bin/env bash
# Measures build times that a developer waits for, in a separate build folder (removed afterwards), on all cores:
#     a clean build of everything with the tests        (should take less than 180 s on 2 cores)
#     one op's file touched: compiled and linked again  (less than 20 s)
#     `#include <potluck.h>` alone                      (less than 2 s)
# Ends with one JSON line. Exit status 1 when a limit is missed. Usage: tests/bench/build_times.sh [OP FILE]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
op_file=${1:-autograd/ops/norm.cpp}
[ -f "$root/$op_file" ] || {
    echo "build_times.sh: no file $op_file in the tree" >&2
    exit 2
}

# A compiler cache would falsify the measurement.
unset CC CXX
export CCACHE_DISABLE=1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/tree"
# A copy, so that touching a file does not trigger builds in other build folders.
tar -C "$root" --exclude=./.git --exclude='./build*' --exclude=./runs -cf - . | tar -C "$folder/tree" -xf -
build=$folder/tree/build

seconds() { # seconds COMMAND...: runs it and prints its wall-clock time
    local started
    started=$(date +%s.%N)
    "$@" >"$folder/log" 2>&1 || {
        tail -n 30 "$folder/log" >&2
        exit 1
    }
    echo "$started $(date +%s.%N)" | awk '{ printf "%.1f", $2 - $1 }'
}
configure_and_build() { meson setup "$build" "$folder/tree" && ninja -C "$build"; }

clean=$(seconds configure_and_build)
sleep 1
touch "$folder/tree/$op_file"
touched=$(seconds ninja -C "$build")
printf '#include <potluck.h>\nint main() {}\n' >"$folder/umbrella.cpp"
umbrella=$(seconds g++ -std=c++20 -I"$folder/tree" -I"$build" -c "$folder/umbrella.cpp" -o "$folder/umbrella.o")

echo "clean build $clean s, $op_file touched $touched s, potluck.h included $umbrella s" >&2
echo "{\"clean_build_s\": $clean, \"touch_one_op_s\": $touched, \"umbrella_include_s\": $umbrella, \"cores\": $(nproc)}"
awk -v clean="$clean" -v touched="$touched" -v umbrella="$umbrella" \
    'BEGIN { exit !(clean < 180 && touched < 20 && umbrella < 2) }'
