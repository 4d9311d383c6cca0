"""How much the devices of a run were used over time: `device-use.jsonl` in its folder, bounded in size.

A line is the mean of `n` samples of each device. When the file is full neighbouring lines become one, and
each line to come is of twice as many samples: the whole run stays in it, ever more coarsely.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hpcsched.errors import StoreError
from hpcsched.store.files import write_atomically
from hpcsched.store.json_lines import append_lines, encoded, read_lines

MOST_BYTES = 2**21
"""The longest that the file gets (chosen): 8 GPUs are in it every 5 s for half a day."""

_Share = Annotated[float, Meta(ge=0, le=1)]
_Mib = Annotated[float, Meta(ge=0, le=2.0**40)]


class Use(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The devices up to `at`, in seconds of the run's clock: the means of `n` samples.

    `gpus` has by the number of a device the share of the time for which it was busy, and its used memory in
    MiB; None: not measured.
    """

    at: Annotated[float, Meta(ge=0, le=1e12)]
    n: Annotated[int, Meta(ge=1, le=2**40)]
    gpus: dict[int, tuple[_Share | None, _Mib | None]]


def read_use(path: Path) -> Sequence[Use]:
    """What is in the file, in order of time; nothing where there is no such file.

    Lines that cannot be decoded are left out, and so are those before the newest ones of the same time: a
    life of the agent that was lost. Raises StoreError if the file cannot be read.
    """
    kept: list[Use] = []
    for use in read_lines(path, Use, most_bytes=2 * MOST_BYTES):
        while kept and kept[-1].at >= use.at:
            kept.pop()
        kept.append(use)
    return kept


class UseRecord:
    """Writes the file, and goes on with what an earlier agent has written. It never raises: a run does not
    end because nobody can see later how busy its devices were."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._pending: list[Use] = []
        self._begun = False
        self.stride = 1
        """The number of samples in each line."""

    def add(self, at: float, gpus: Mapping[int, tuple[float | None, float | None]]) -> None:
        """Add a sample of each device: its utilisation (0 to 1) and its used memory in MiB."""
        if not gpus:
            return
        self._pending.append(Use(at=max(0.0, at), n=1, gpus=dict(gpus)))
        if len(self._pending) < self.stride:
            return
        line = [_mean(self._pending)]
        self._pending.clear()
        with contextlib.suppress(OSError, StoreError):
            if not self._begun or not append_lines(self._path, line, most_bytes=self._most_bytes):
                self._rewrite()
                append_lines(self._path, line, most_bytes=self._most_bytes)

    def _rewrite(self) -> None:
        """Have whole lines alone in the file, and fewer of them if it is full."""
        try:
            uses = read_use(self._path)
        except StoreError:
            uses = ()  # somebody else's
        self.stride = max(self.stride, uses[-1].n if uses else 1)
        data = encoded(uses)
        while len(data) > self._most_bytes // 2 and len(uses) > 1:
            uses = [_mean(pair) for pair in _pairs(uses)]
            self.stride *= 2
            data = encoded(uses)
        write_atomically(self._path, data)
        self._begun = True


def _pairs(uses: Sequence[Use]) -> Iterable[Sequence[Use]]:
    return ((one,) if other is None else (one, other) for one, other in zip_longest(uses[::2], uses[1::2]))


def _mean(uses: Sequence[Use]) -> Use:
    """One line of several, up to the time of the last."""
    numbers = sorted({number for use in uses for number in use.gpus})
    gpus = {}
    for number in numbers:
        seen = [use.gpus[number] for use in uses if number in use.gpus]
        gpus[number] = (_rounded([busy for busy, _ in seen], 4), _rounded([mib for _, mib in seen], 1))
    return Use(at=round(uses[-1].at, 3), n=sum(use.n for use in uses), gpus=gpus)


def _rounded(values: Sequence[float | None], digits: int) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), digits) if known else None
