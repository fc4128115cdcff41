#!/usr/bin/env python3
"""Compares one GPT-2 training step of ours with PyTorch's: time and peak memory, on the same number of threads.

    ninja -C build tests/bench/bench_gpt2
    sudo apt install python3-torch libopenblas0
    python3 tests/bench/compare_gpt2.py build/tests/bench/bench_gpt2 --threads 2 --rounds 3

The two programs alternate for several rounds, so that a busy machine slows both. The ratio is computed from the fastest
steps (undisturbed performance) and from the medians. With --check, being slower than PyTorch or using more than 2.6 GB
is a failure.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

MOST_MEMORY = 2.6e9


def run(command, environment):
    """The JSON object in the last line of the program's output."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def summary(runs):
    seconds = [s for one in runs for s in one["seconds"]]
    return {"framework": runs[0]["framework"], "fastest": min(seconds), "median": statistics.median(seconds),
            "memory": max(one["peak_memory_bytes"] for one in runs)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", help="our program, bench_gpt2")
    parser.add_argument("--python", default="/usr/bin/python3", help="a Python that has torch")
    parser.add_argument("--pytorch-library-path", help="LD_LIBRARY_PATH for PyTorch alone, to try another BLAS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps in each round")
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16", "f16"], help="of both, under autocast")
    parser.add_argument("--fast", action="store_true", help="PyTorch with fused attention and AdamW")
    parser.add_argument("--check", action="store_true", help="fail when slower, or above 2.6 GB")
    options = parser.parse_args()

    common = ["--threads", str(options.threads), "--steps", str(options.steps), "--warmup", "1"]
    yardstick = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pytorch_gpt2.py")
    # Without this, a BLAS with its own threads ignores PyTorch's setting.
    environment = dict(os.environ, OMP_NUM_THREADS=str(options.threads), OPENBLAS_NUM_THREADS=str(options.threads),
                       BLIS_NUM_THREADS=str(options.threads))
    pytorch_environment = dict(environment)
    if options.pytorch_library_path:
        pytorch_environment["LD_LIBRARY_PATH"] = options.pytorch_library_path

    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(run([options.bench, *common, "--precision", options.precision], environment))
        theirs.append(run([options.python, yardstick, *common, "--dtype", options.precision,
                           *(["--fast"] if options.fast else [])], pytorch_environment))
        print(f"ours {ours[-1]['seconds_per_step']:.3f} s, PyTorch {theirs[-1]['seconds_per_step']:.3f} s", flush=True)
    print("PyTorch's BLAS:", theirs[0]["blas"])

    a, b = summary(ours), summary(theirs)
    print(f"{'':24}{'fastest step':>14}{'median step':>14}{'peak memory':>14}")
    for one in (a, b):
        print(f"{one['framework']:24}{one['fastest']:>12.3f} s{one['median']:>12.3f} s{one['memory'] / 1e9:>11.2f} GB")
    ratios = {key: a[key] / b[key] for key in ("fastest", "median", "memory")}
    print(f"{'ratio':24}{ratios['fastest']:>14.2f}{ratios['median']:>14.2f}{ratios['memory']:>14.2f}")
    print(json.dumps({"threads": options.threads, "ours": a, "pytorch": b, "ratio": ratios}))
    if options.check and (ratios["fastest"] > 1.0 or a["memory"] > MOST_MEMORY):
        sys.exit(f"expected a time ratio of at most 1 and at most {MOST_MEMORY / 1e9} GB")


if __name__ == "__main__":
    main()
