"""Text from programs and other users, made safe to print on terminals and pages."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterable, Sequence

_CHARACTERS = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_ODD = re.compile(_CHARACTERS)
"""Control characters but tabs and ends of lines, marks that change the direction of text, lone surrogates."""

_OUTPUT = re.compile(f"(\x1b\\[[0-9;:]{{0,64}}m|[\b\r])|{_CHARACTERS}")
"""The same, but colours, and what progress bars need: steps back and to the beginning of a line."""
_BEGUN = re.compile("\x1b(?:\\[[0-9;:]{0,64})?\\Z")

MOST_PRINTED = 2000
"""Characters of an error that are shown (chosen): lists of what is accepted have up to 900."""

LEAST_HANGING = 30
"""Characters that a line needs beside its indent to be broken (chosen)."""


def printable(text: str, *, lines: bool = False) -> str:
    """The text with control characters written as escapes; `lines`: ends of lines and tabs stay."""
    text = _ODD.sub(_escaped, text)
    return text if lines else text.replace("\n", "\\n").replace("\t", "\\t")


def printables(texts: Sequence[str]) -> list[str]:
    """These texts, each made safe to stand in a line: quick where they all are, as in most columns."""
    return [*texts] if "".join(texts).isprintable() else [printable(text) for text in texts]


def json_for_terminals(document: bytes) -> bytes:
    """A JSON document, in UTF-8, in which the same characters are written as JSON's escapes."""
    if document.isascii():  # JSON has escaped the control characters of ASCII
        return document
    return _ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", document.decode()).encode()


class OutputText:
    """A program's output in pieces, as a terminal may have it.

    Text, ends of lines, tabs and colours stay, and what moves back within a line, as progress bars do. All
    else that a terminal would obey (the cursor, the title, the clipboard, links) is written as an escape, as
    are bytes that are no UTF-8.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._begun = ""
        self.coloured = False
        """Whether a colour was among it, which may still be on."""

    def of(self, data: bytes, *, last: bool = False) -> str:
        """The text of the next piece; what may be the beginning of a colour comes with a later one."""
        text = self._begun + self._decoder.decode(data, last)
        begun = None if last else _BEGUN.search(text)
        self._begun = begun[0] if begun else ""
        return _OUTPUT.sub(self._kept, text[: len(text) - len(self._begun)])

    def _kept(self, found: re.Match[str]) -> str:
        self.coloured = self.coloured or found[0].startswith("\x1b[")
        return found[1] or _escaped(found)


def suggestion(word: str, among: Iterable[str]) -> str:
    """Such as "; did you mean 'status'?", or nothing where none of these is like the word."""
    import difflib  # only where something is wrong

    found = difflib.get_close_matches(word, list(among), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def spans(numbers: Iterable[int]) -> str:
    """Such as 0-3,6 for 0, 1, 2, 3 and 6; "-" for none."""
    parts: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "-"


def gpus(numbers: Iterable[int], noun: str = "GPU") -> str:
    """Such as "GPU 3", or "GPUs 0-3,6"; `noun`: what such a device is called."""
    found = list(numbers)
    return f"{noun}{'s' * (len(found) != 1)} {spans(found)}"


def shortened(text: str, width: int) -> str:
    """The text, its middle left out where it is too long: names differ at both ends."""
    if len(text) <= width:
        return text
    return f"{text[: (width - 1) // 2]}~{text[len(text) - (width - 1 - (width - 1) // 2) :]}"


def bounded(text: str, *, lines: bool = False) -> str:
    """The same as `printable`, of a length that people read: its middle is left out."""
    return shortened(printable(text, lines=lines), MOST_PRINTED)


def room() -> int | None:
    """The characters of a line of the terminal that is written to; None: it is none, and all is shown."""
    if not sys.stdout.isatty():
        return None
    import shutil  # with all its archive formats: 2 ms that most commands need not wait for

    return shutil.get_terminal_size().columns


def hanging(text: str, *, under: int, width: int | None) -> str:
    """A line that is broken between words where it is longer than `width`; what follows begins `under` that
    column. Words stay whole, as paths are copied; as it is without a width, or with too little."""
    if width is None or len(text) < width or width - under < LEAST_HANGING:
        return text
    import textwrap

    indent = " " * under
    return textwrap.fill(
        text, width - 1, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def fitting(widths: Sequence[int], ranks: Sequence[int], width: int | None) -> list[int]:
    """Numbers of the columns that fit into `width` characters, with two blanks between them.

    Those of a higher rank go first, those of rank 0 never. `width` None: all fit.
    """
    kept = list(range(len(widths)))
    while width is not None and sum(widths[i] for i in kept) + 2 * (len(kept) - 1) > width:
        least = max(kept, key=lambda i: ranks[i])
        if not ranks[least]:
            break
        kept.remove(least)
    return kept


def said_bytes(number: float) -> str:
    """A number of bytes for people: `640 KiB`, `3.2 GiB`."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while number >= 999.5 and len(units) > 1:
        units.pop()
        number /= 1024
    unit = units[-1]
    return f"{number:.0f} {unit}" if number >= 99.5 or unit == "B" else f"{number:.2g} {unit}"


def short_bytes(number: float) -> str:
    """A number of bytes as Slurm's tables have it: `640K`, `3.2G`; each unit is 1024 of the one before."""
    return said_bytes(number).replace(" ", "").removesuffix("B").removesuffix("i")


def said_cores(cores: float) -> str:
    """A number of CPU cores as it stands where others have GPU counts: `0.9c`."""
    return f"{round(cores, 1 if cores >= 10 else 2):g}c"


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
