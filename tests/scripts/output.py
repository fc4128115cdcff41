"""Compares what a program printed with what a text shows.

In ```text output, `...` matches anything: any text within a line, or any lines when it is alone in a line. In
```text output about, only numbers may differ, by a tenth (training results on another CPU).
"""

import re

from checks import CheckFailed


def pattern_of(shown):
    """A regular expression for an expected output: `...` matches any text in its line, or alone any lines."""
    lines = []
    for line in shown.rstrip().split("\n"):
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            parts = [re.escape(part) for part in line.rstrip().split("...")]
            lines.append("[^\n]*".join(parts) + r"[ \t]*\n")
    return re.compile("".join(lines) + r"\s*\Z")


number = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def about_equal(printed, shown):
    """Whether two texts differ only in numbers, and those by no more than a tenth."""
    if number.sub("#", printed).split() != number.sub("#", shown).split():
        return False
    pairs = zip(map(float, number.findall(printed)), map(float, number.findall(shown)))
    return all(abs(a - b) <= 0.1 * abs(b) for a, b in pairs)


def check_output(place, printed, block):
    """Checks that the printed text ends with the one in the block (text before that belongs to earlier code)."""
    text, shown = printed.rstrip() + "\n", block.code
    starts = [0] + [match.end() for match in re.finditer("\n", text)]
    if "about" in block.marks:
        same = any(about_equal(text[start:], shown) for start in starts)
    else:
        same = any(pattern_of(shown).match(text, start) for start in starts)
    if not same:
        raise CheckFailed(f"{place}: the text shows\n{shown}\nbut this was printed\n{printed}")
