"""The fenced blocks of a documentation page: the files and the commands that a reader takes from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?:#!.*\n)?# ([\w.-]+\.\w+)(?::.*)?\n")
_COMMENT = re.compile(r"\s+# .*")
_PROMPT = "$ "


@dataclass(frozen=True)
class Command:
    """What is typed, without the comment behind it; `shown`: the lines that the page prints below it."""

    typed: str
    line: int
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """`line` is that of its first line of text, from 1; `words` are those behind the language."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int

    @property
    def file(self) -> str:
        """The name in the comment with which it begins (behind `#!`, before a colon); "" if there is none."""
        named = _FILE.match(self.text) if self.language in ("toml", "python", "bash") else None
        return named[1] if named else ""

    @property
    def commands(self) -> list[Command]:
        """The lines of `sh`, and those of `console` behind a prompt."""
        lines = list(enumerate(self.text.splitlines(), self.line))
        if self.language == "sh":
            typed = [(at, _COMMENT.sub("", line)) for at, line in lines]
            return [Command(line, at) for at, line in typed if line and not line.startswith("#")]
        found: list[Command] = []
        for at, line in lines if self.language == "console" else ():
            if line.startswith(_PROMPT):
                found.append(Command(_COMMENT.sub("", line.removeprefix(_PROMPT)), at))
            elif found:
                found[-1] = Command(found[-1].typed, found[-1].line, (*found[-1].shown, line))
        return found


def blocks(page: Path) -> Iterator[Block]:
    """All of a page, in order; the language of one that only shows something may be ""."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        language, *words = found[1].split() or [""]
        yield Block(language, tuple(words), found[2], text.count("\n", 0, found.start(2)) + 1)
