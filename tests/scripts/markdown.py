"""Reads the fenced code blocks of a Markdown file."""

import dataclasses
import pathlib
import shlex


@dataclasses.dataclass
class Block:
    file: pathlib.Path
    line: int  # of the first line of code
    words: list  # of the line that opens the fence: ["cpp", "program"]
    code: str

    @property
    def language(self):
        return self.words[0] if self.words else ""

    @property
    def marks(self):
        return self.words[1:]


def blocks_of(file):
    blocks, opened, code = [], None, []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        text = line.strip()
        if opened is None and text.startswith("```"):
            opened = Block(file, number + 1, shlex.split(text[3:]), "")
            indentation, code = len(line) - len(line.lstrip()), []
        elif opened is not None and text == "```":
            opened.code = "".join(code)
            blocks.append(opened)
            opened = None
        elif opened is not None:
            code.append(line[min(indentation, len(line) - len(line.lstrip())):] + "\n")
    if opened is not None:
        raise ValueError(f"{file}:{opened.line - 1}: this code block is never closed")
    return blocks
