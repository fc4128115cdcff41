#!/usr/bin/env python3
"""compile_kernel.py REPORT COMMAND...: runs nvcc, and writes the output of ptxas -v about the kernels to REPORT.

Everything else that nvcc prints is passed on, so that the build stays quiet unless something is wrong.
"""

import re
import subprocess
import sys

# The lines of ptxas about one kernel: its name, its stack and spills, its registers and memory.
OF_A_KERNEL = re.compile(r"^ptxas info|^\s+\d+ bytes stack frame|^\s*$")


def main(report, command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = result.stdout.splitlines()
    others = [line for line in lines if not OF_A_KERNEL.match(line)]
    if others:
        print("\n".join(others), file=sys.stderr)
    with open(report, "w", encoding="utf-8") as file:
        file.write("\n".join(line for line in lines if OF_A_KERNEL.match(line)) + "\n")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
