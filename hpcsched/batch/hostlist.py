"""Slurm's compressed lists: host names such as `r[1-2]n[01-12],login1`, counts such as `4(x2),3`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

MAX_HOSTS = 100_000
"""The longest list that is expanded (chosen); a longer one raises before it is built."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_NAME = re.compile(r"[^\s\[\],]+")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand(text: str) -> tuple[str, ...]:
    """The host names of a list, in its order, with duplicates. Raises ValueError, in one line."""
    hosts: list[str] = []
    if not text.strip():
        return ()
    for item in _items(text.strip()):
        hosts.extend(_names(item, text, MAX_HOSTS - len(hosts)))
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """One number for each host: `4(x2),3` -> (4, 4, 3). Raises ValueError."""
    counts: list[int] = []
    for item in text.strip().split(",") if text.strip() else ():
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} in {text!r} is no count such as 4 or 4(x2)")
        times = int(match[2] or 1)
        if times > MAX_HOSTS - len(counts):
            raise ValueError(f"{text!r} names more than {MAX_HOSTS} hosts")
        counts.extend([int(match[1])] * times)
    return tuple(counts)


def _items(text: str) -> Iterator[str]:
    """The parts between the commas that stand outside brackets."""
    start = depth = 0
    for at, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
        if depth not in (0, 1):
            raise ValueError(f"brackets do not match in the host list {text!r}")
    if depth:
        raise ValueError(f"brackets do not match in the host list {text!r}")
    yield text[start:]


def _names(item: str, text: str, room: int) -> Iterator[str]:
    """The names of one part, such as `r[1-2]n[01,03]s`; ValueError when there are more than `room`."""
    pieces: list[list[str]] = []
    size = 1
    for at, piece in enumerate(re.split(r"[\[\]]", item)):
        if at % 2 == 0:
            if piece and not _NAME.fullmatch(piece):
                raise ValueError(f"{piece!r} in the host list {text!r} is no host name")
            pieces.append([piece])
        else:
            pieces.append(_numbers(piece, text, room))
            size *= len(pieces[-1])
            if size > room:
                raise _too_many(text)
    if not item or size > room:
        raise _too_many(text) if item else ValueError(f"empty name in the host list {text!r}")
    return ("".join(parts) for parts in product(*pieces))


def _numbers(inside: str, text: str, room: int) -> list[str]:
    """`1-3,07` -> 1 2 3 07: padded as the lower end is."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"[{part}] in the host list {text!r} is no number or range")
        low, high = match[1], match[2] or match[1]
        if len(low) > 18 or len(high) > 18 or int(high) < int(low):
            raise ValueError(f"[{part}] in the host list {text!r} is no rising range")
        if int(high) - int(low) >= room - len(numbers):
            raise _too_many(text)
        numbers.extend(str(n).zfill(len(low)) for n in range(int(low), int(high) + 1))
    return numbers


def _too_many(text: str) -> ValueError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return ValueError(f"the host list {shown!r} names more than {MAX_HOSTS} hosts")
