#!/usr/bin/env python3
"""compile_kernel.py OUTPUT COMMAND...: compiles a kernel file for the emulator, and adds a table to the object.

The table lists how many bytes of static shared memory (`__shared__` variables) a launch of each function needs, counted
like nvcc: the variables that the function uses, and those of the functions that it calls. They are thread-local
variables here, so the assembler code names them at each use. `emulator::add_static_shared` reads the table.
"""

import re
import subprocess
import sys

SYMBOL = re.compile(r"[A-Za-z_.$][\w.$]*")
THREAD_LOCAL = re.compile(r"([A-Za-z_.$][\w.$]*)@(?:tlsgd|tlsld|dtpoff|gottpoff|tpoff|ntpoff)")


def read(text):
    """({function: symbols that it names}, {thread-local variable: its bytes})"""
    functions = set(re.findall(r"^\t\.type\t(\S+), [@%]function", text, re.MULTILINE))
    thread_local = set(THREAD_LOCAL.findall(text))
    sizes = {name: int(size) for name, size in re.findall(r"^\t\.size\t(\S+), (\d+)$", text, re.MULTILINE)}
    variables = {name: sizes[name] for name in thread_local if name in sizes}
    known = functions | variables.keys()
    uses, function = {}, None
    for line in text.splitlines():
        if not line.startswith("\t"):
            label = line.split(":")[0]
            if label in functions:
                function = label
                uses[function] = set()
        elif function is not None:
            if line.startswith("\t.size\t" + function + ","):
                function = None
            elif not line.startswith("\t."):
                uses[function].update(name for name in SYMBOL.findall(line) if name in known)
    return uses, variables


def totals(uses, variables):
    """{function: bytes of all variables that it reaches}, without those that reach none."""
    found = {}
    for function in uses:
        reached, open_ends = set(), [function]
        while open_ends:
            name = open_ends.pop()
            if name not in reached:
                reached.add(name)
                open_ends.extend(uses.get(name, ()))
        size = sum(variables.get(name, 0) for name in reached)
        if size > 0:
            found[function] = size
    return found


def main(output, command):
    assembly = output + ".s"
    compiled = subprocess.run(command + ["-S", "-o", assembly])
    if compiled.returncode != 0:
        return compiled.returncode
    with open(assembly, encoding="utf-8") as file:
        table = totals(*read(file.read()))
    with open(assembly, "a", encoding="utf-8") as file:
        file.write('\t.section potluck_static_shared,"aw",@progbits\n\t.align 8\n')
        for function, size in sorted(table.items()):
            file.write(f"\t.quad\t{function}\n\t.quad\t{size}\n")
    compiler = command[1:2] if command[0].endswith("ccache") else command[:1]
    return subprocess.run(compiler + ["-c", assembly, "-o", output]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
