r"""Patterns that find a step in a line of output, such as `step (\d+)`, in time linear in the line; or a
number of any kind, such as `loss[=:] *([-0-9.]+)`.

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
_ANY_GROUP = re.compile(r"\((?:[^()\\]|\\.)+\)")
_ANY_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?(?<![a-z_])(?:nan|inf(?:inity)?)(?![a-z_0-9])",
    re.IGNORECASE | re.ASCII,
)
_MOST_KNOWN = 1000
"""Moves of an automaton that are kept (chosen)."""

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

    before: _Automaton
    after: _Automaton

    def find(self, line: str) -> int | None:
        """The first number of a line that stands where `(\\d+)` does; None if there is none."""
        if len(line) > MOST_LINE:
            return None
        numbers = list(_NUMBER.finditer(line))
        if not numbers:
            return None
        ends, starts = self.before.ends(line), self.after.ends(line[::-1])
        for number in numbers:
            begin, end = number.span()
            if begin and line[begin - 1] in "0123456789":
                continue  # the tail of a number that is too long
            if ends >> begin & 1 and starts >> (len(line) - end) & 1:
                return int(number[0])
        return None


@dataclass(frozen=True, slots=True)
class NumberPattern:
    """What stands before a number, and after it."""

    before: _Automaton
    after: _Automaton

    def last(self, line: str) -> float | None:
        """The last number of a line that stands where the parentheses do, nan and inf included; None if there
        is none."""
        if len(line) > MOST_LINE:
            return None
        numbers = list(_ANY_NUMBER.finditer(line))
        if not numbers:
            return None
        ends, starts = self.before.ends(line), self.after.ends(line[::-1])
        for number in reversed(numbers):
            begin, end = number.span()
            # What looks like a sign, or a point at the end, may be the text around it.
            for first in (begin, begin + 1) if number[0][0] in "+-" else (begin,):
                for last in (end, end - 1) if number[0][-1] == "." else (end,):
                    if ends >> first & 1 and starts >> (len(line) - last) & 1:
                        return float(line[first:last])
        return None


@lru_cache(maxsize=256)
def step_pattern(text: str) -> StepPattern:
    """A pattern as it is written; raises BadInput, which says what is accepted."""
    text = text.replace("([0-9]+)", _GROUP)
    if text.count(_GROUP) != 1:
        _check_length(text)
        raise BadInput(r"one (\d+) where the number of the step stands, such as 'step (\d+)'")
    before, _, after = text.partition(_GROUP)
    return StepPattern(*_around(text, before, after))


@lru_cache(maxsize=256)
def number_pattern(text: str) -> NumberPattern:
    """A pattern as it is written, with parentheses where a number stands, whatever is in them; raises
    BadInput, which says what is accepted."""
    at = int(text.startswith("^"))
    while item := _ITEM.match(text, at):
        at = item.end()
    group = _ANY_GROUP.match(text, at)
    if group is None:
        _check_length(text)
        raise BadInput(f"one pair of parentheses where the number stands, such as 'loss: (.+)'; {_KNOWN}")
    return NumberPattern(*_around(text, text[:at], text[group.end() :]))


def _around(text: str, before: str, after: str) -> tuple[_Automaton, _Automaton]:
    """What finds the text before a number, and, backwards, the text after it."""
    _check_length(text)
    at_end = after.endswith("$") and not after.endswith("\\$")
    return (
        _Automaton(_parts(before.removeprefix("^")), before.startswith("^")),
        _Automaton(_parts(after[:-1] if at_end else after)[::-1], at_end),
    )


def _check_length(text: str) -> None:
    if len(text) > _MOST_PATTERN:
        raise BadInput(f"at most {_MOST_PATTERN} characters")


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


class _Automaton:
    """Finds where in a line all parts can have been matched in order (Thompson): each character is seen once,
    and moves that were made before are known.

    Args:
        from_start: they begin with the line, and not anywhere in it.
    """

    def __init__(self, parts: tuple[_Part, ...], from_start: bool) -> None:
        self._parts, self._from_start = parts, from_start
        self._first, self._done = self._skipped(1), 1 << len(parts)
        self._moves: dict[tuple[int, str], int] = {}

    def ends(self, line: str) -> int:
        """A set of positions, as bits."""
        moves, done, states = self._moves, self._done, self._first
        found = 1 if states & done else 0
        for position, character in enumerate(line, 1):
            after = moves.get((states, character))
            states = self._move(states, character) if after is None else after
            if states & done:
                found |= 1 << position
        return found

    def _move(self, states: int, character: str) -> int:
        """The states after one more character, each a bit: so many parts have been matched."""
        after = 0 if self._from_start else 1
        for at, part in enumerate(self._parts):
            if states >> at & 1 and part.kind.fullmatch(character):
                after |= 1 << (at if part.many else at + 1)
        if len(self._moves) >= _MOST_KNOWN:
            self._moves.clear()
        found = self._moves[states, character] = self._skipped(after)
        return found

    def _skipped(self, states: int) -> int:
        for at, part in enumerate(self._parts):
            if part.optional and states >> at & 1:
                states |= 1 << at + 1
        return states
