"""Compares what a program printed with what a text shows."""

import re

from checks import CheckFailed


def pattern_of(shown):
    """A regular expression for a shown output: `...` stands for any text in its line, alone for any lines."""
    lines = []
    for line in shown.rstrip().split("\n"):
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            parts = [re.escape(part) for part in line.rstrip().split("...")]
            lines.append("[^\n]*".join(parts) + r"[ \t]*\n")
    return re.compile("".join(lines) + r"\s*\Z")


def check_output(place, printed, shown):
    """The printed text ends with the shown one (what comes before belongs to earlier code)."""
    text = printed.rstrip() + "\n"
    starts = [0] + [match.end() for match in re.finditer("\n", text)]
    if not any(pattern_of(shown).match(text, start) for start in starts):
        raise CheckFailed(f"{place}: the text shows\n{shown}\nbut this was printed\n{printed}")
