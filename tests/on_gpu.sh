#!/usr/bin/env bash
# Everything that needs a real GPU, in under eight minutes: builds for this machine's GPU, runs the op table and the CUDA
# tests on it (with memcheck if compute-sanitizer is installed), times every hot kernel and one training step of GPT-2
# 124M in bf16 (beside PyTorch if that is installed), and prints a short table.
#
#   tests/on_gpu.sh                     on a machine with the packages of the README, nvcc and a GPU
#   tests/on_gpu.sh --bring FOLDER      on such a machine without a GPU: copies the headers that a build needs to FOLDER
#   tests/on_gpu.sh --headers FOLDER    on a machine with no more than nvcc, meson and ninja: uses those headers
#   ... --out FOLDER                    where the logs and the table go (default: build-on-gpu/results)
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1

headers='' out=$root/build-on-gpu/results
say() { printf '%s\n' "$*" >&2; }
fail() {
    say "tests/on_gpu.sh: $*"
    exit 1
}

# bring FOLDER: copies the header-only libraries that a build needs from this machine.
bring() {
    local folder=$1 found name
    mkdir -p "$folder"
    for name in eigen3/Eigen eigen3/unsupported fmt spdlog nlohmann CLI doctest xxhash.h xxh3.h; do
        found=$(printf '%s\n' /usr/include /usr/local/include | while read -r place; do
            [ ! -e "$place/$name" ] || { printf '%s\n' "$place/$name" && break; }
        done)
        [ -n "$found" ] || { [ "$name" = eigen3/unsupported ] && continue; } || fail "$name is not installed here."
        mkdir -p "$folder/$(dirname "$name")"
        cp -rL "$found" "$folder/$(dirname "$name")/"
    done
    say "The headers are in $folder ($(du -sh "$folder" | cut -f1))."
}

while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || fail "$1 needs a folder."
    case $1 in
        --bring)
            bring "$2"
            exit 0
            ;;
        --headers) headers=$(cd "$2" && pwd) || fail "there is no folder $2." ;;
        --out) out=$2 ;;
        *) fail "unknown option $1. See the top of this script." ;;
    esac
    shift 2
done

command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || fail 'nvcc is not here. Install the CUDA toolkit.'
nvidia-smi >/dev/null 2>&1 || fail 'no GPU is here (nvidia-smi finds none).'
card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
mkdir -p "$out"
table=$out/table.md
started=$SECONDS
failures=0

# step SECONDS LOG COMMAND...: runs the command for at most that long, and records a failure.
step() {
    local limit=$1 log=$out/$2 status=0 began=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$log" 2>&1 || status=$?
    [ "$status" -eq 0 ] || failures=$((failures + 1))
    say "$(printf '%4d s  %s' $((SECONDS - began)) "$(basename "$log")")$([ "$status" -eq 0 ] || echo ": FAILED with $status")"
    return "$status"
}

folder=$root/build-on-gpu
options=(-Dcuda=enabled "-Dgpu_architectures=$capability")
[ -z "$headers" ] || options+=("-Dheaders=$headers" -Donednn=disabled)
[ -f "$folder/build.ninja" ] || step 60 configure.log meson setup "${options[@]}" "$folder" "$root" ||
    { tail -n 5 "$out/configure.log" >&2 && exit 1; }
programs=(tests/test_cuda tests/test_ops tests/bench/bench_hot_kernels)
build_gpt2=yes
[ -z "$headers" ] || [ -d "$headers/CLI" ] || build_gpt2=no
[ $build_gpt2 = no ] || programs+=(tests/bench/bench_gpt2)
step 300 build.log ninja -C "$folder" "${programs[@]}" || { tail -n 20 "$out/build.log" >&2 && exit 1; }

# The measurements first: the tests may use the rest of the time.
export OMP_WAIT_POLICY=passive POTLUCK_TEST_DEVICE=cuda:0
step 60 kernels.log "$folder/tests/bench/bench_hot_kernels" --device cuda
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
batch=4
[ "$memory" -lt 20000 ] || batch=16
[ "$memory" -lt 70000 ] || batch=64
shape=(--batch "$batch" --time 1024 --steps 10 --warmup 3 --device cuda --dtype bf16)
[ $build_gpt2 = no ] || step 60 gpt2.log "$folder/tests/bench/bench_gpt2" "${shape[@]}"
pytorch=no
if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; then
    pytorch=yes
    step 90 pytorch.log python3 tests/bench/pytorch_gpt2.py "${shape[@]}"
fi
step 90 test_cuda.log "$folder/tests/test_cuda" --test-suite-exclude=long
left=$((400 - (SECONDS - started)))
step $((left > 60 ? left : 60)) test_ops.log "$folder/tests/test_ops" --test-suite-exclude=long
if command -v compute-sanitizer >/dev/null; then
    left=$((470 - (SECONDS - started)))
    if [ "$left" -gt 20 ]; then
        step "$left" memcheck.log compute-sanitizer --tool memcheck --error-exitcode 9 \
            "$folder/tests/test_cuda" --test-case='cuda: attention*,cuda: training*'
    fi
fi

# last_json LOG: the line of results that a bench ends with.
last_json() { tail -n 1 "$out/$1" 2>/dev/null; }
{
    printf '## %s, compute capability %s, %s\n\n' "$card" "$capability" "$(nvcc --version | grep -o 'release [0-9.]*')"
    printf 'Commit %s.\n\n' "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    grep -h '^|' "$out/kernels.log" 2>/dev/null
    printf '\n'
    python3 - "$(last_json gpt2.log)" "$([ $pytorch = no ] || last_json pytorch.log)" <<'PYTHON'
import json
import sys

for text in sys.argv[1:]:
    try:
        run = json.loads(text)
    except ValueError:
        continue
    print("GPT-2 124M, {dtype}, {batch} x {time}, {framework}: {:.1f} ms a step, {:.0f} tokens/s".format(
        run["seconds_per_step"] * 1e3, run["tokens_per_second"], **run))
PYTHON
    [ $pytorch = yes ] || printf 'PyTorch is not installed here: not compared.\n'
    printf '\n'
    for log in test_cuda test_ops; do
        printf '%s: %s\n' "$log" "$(grep -h 'test cases:' "$out/$log.log" 2>/dev/null || echo 'did not come to its end')"
    done
    if [ -f "$out/memcheck.log" ]; then
        printf 'memcheck: %s\n' "$(grep -h 'ERROR SUMMARY' "$out/memcheck.log" | tail -n 1 || true)"
    else
        printf 'memcheck: compute-sanitizer is not installed, or there was no time left\n'
    fi
} >"$table"
cat "$table"
say "$((SECONDS - started)) s in all, $failures steps failed; logs in $out"
[ "$failures" -eq 0 ]
