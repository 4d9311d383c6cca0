r"""Patterns that find a step in a line of output, such as `step (\d+)`, in time linear in the line.

A part of regular expressions: characters, `.`, `\d`, `\s`, `\w`, sets like `[a-z]`, each with `?`, `*` or
`+`, `^` at the beginning and `$` at the end, and one `(\d+)`. Python's own `re` takes exponential time for
some patterns, and lines of programs are read where everything else waits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hpcsched.errors import BadInput

MOST_LINE = 1024
"""The longest line that is looked at (chosen): a longer one is no progress report."""

_MOST_PATTERN = 200
_ITEM = re.compile(r"(\\[dswDSW]|\\[^\w]|\[\^?\]?(?:[^\]\\]|\\.)*\]|[^\\\[\](){}|*+?^$])([?*+]?)", re.DOTALL)
_NUMBER = re.compile(r"[0-9]{1,18}(?![0-9])")
_GROUP = r"(\d+)"
_KNOWN = (
    r"known are characters, ., \d, \s, \w, sets like [a-z], each with ?, * or +, and \ before other signs"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """One character of a kind, which may be missing (`optional`), or stand there many times (`many`)."""

    kind: re.Pattern[str]
    optional: bool
    many: bool


@dataclass(frozen=True, slots=True)
class StepPattern:
    """What stands before the number, and after it; whether it begins and ends with the line."""

    before: tuple[_Part, ...]
    after: tuple[_Part, ...]
    at_start: bool
    at_end: bool

    def find(self, line: str) -> int | None:
        """The first number of a line that stands where `(\\d+)` does; None if there is none."""
        if len(line) > MOST_LINE:
            return None
        numbers = list(_NUMBER.finditer(line))
        if not numbers:
            return None
        ends = _ends(self.before, line, self.at_start)
        starts = _ends(self.after[::-1], line[::-1], self.at_end)
        for number in numbers:
            begin, end = number.span()
            if begin and line[begin - 1] in "0123456789":
                continue  # the tail of a number that is too long
            if ends >> begin & 1 and starts >> (len(line) - end) & 1:
                return int(number[0])
        return None


@lru_cache(maxsize=256)
def step_pattern(text: str) -> StepPattern:
    """A pattern as it is written; raises BadInput, which says what is accepted."""
    if len(text) > _MOST_PATTERN:
        raise BadInput(f"at most {_MOST_PATTERN} characters")
    text = text.replace("([0-9]+)", _GROUP)
    if text.count(_GROUP) != 1:
        raise BadInput(r"one (\d+) where the number of the step stands, such as 'step (\d+)'")
    before, _, after = text.partition(_GROUP)
    at_start, at_end = before.startswith("^"), after.endswith("$") and not after.endswith("\\$")
    return StepPattern(
        _parts(before.removeprefix("^")), _parts(after[:-1] if at_end else after), at_start, at_end
    )


def _parts(text: str) -> tuple[_Part, ...]:
    parts: list[_Part] = []
    at = 0
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None:
            raise BadInput(f"{_KNOWN}; not {text[at : at + 10]!r}")
        try:
            kind = re.compile(item[1], re.ASCII)
        except re.error as error:
            raise BadInput(f"{_KNOWN}; not {item[1]!r}") from error
        if item[2] == "+":
            parts.append(_Part(kind, False, False))
        parts.append(_Part(kind, item[2] in ("?", "*", "+"), item[2] in ("*", "+")))
        at = item.end()
    return tuple(parts)


def _ends(parts: tuple[_Part, ...], line: str, from_start: bool) -> int:
    """Where in a line all parts can have been matched in order, begun anywhere (or at its start): a set of
    positions, as bits. Simulates the automaton of the parts (Thompson), so each character is seen once."""

    def skipped(states: int) -> int:
        for at, part in enumerate(parts):
            if part.optional and states >> at & 1:
                states |= 1 << at + 1
        return states

    done = 1 << len(parts)
    states = skipped(1)
    found = 1 if states & done else 0
    for position, character in enumerate(line, 1):
        after = 0 if from_start else 1
        for at, part in enumerate(parts):
            if states >> at & 1 and part.kind.fullmatch(character):
                after |= 1 << (at if part.many else at + 1)
        states = skipped(after)
        if states & done:
            found |= 1 << position
    return found
