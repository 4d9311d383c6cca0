"""Bugs put in on purpose, each in another place: what finds nothing any more must still find these."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug in what a target reaches; `put` puts it into this process."""

    target: str
    about: str
    put: Callable[[], None]


class _Sure(dict[str, float]):
    """A table whose reader is sure that the key is there."""

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


def _unit() -> None:
    from hpcsched import durations

    durations._UNITS = _Sure(durations._UNITS)


def _pattern() -> None:
    from hpcsched.planning.burst import graph

    graph._COUNT = re.compile(r"(?:[A-Za-z]+)*[1-9]\d{0,17}", re.ASCII)


def _errors() -> None:
    import msgspec

    from hpcsched import decoding

    decoding._EXPECTED = (msgspec.MsgspecError,)  # type: ignore[assignment]


def _admission() -> None:
    from hpcsched import submission

    submission.checked = lambda job, *, where: job  # type: ignore[assignment]


def _readings() -> None:
    from hpcsched.launch.remote.host import RemoteHost
    from hpcsched.launch.remote.protocol import Reading

    RemoteHost.reading = lambda self, device: self.readings[device] if self.readings else Reading()  # type: ignore


def _guess() -> None:
    from hpcsched.cli import common

    common.suggestion = lambda word, among: f"; did you mean {get_close_matches(word, [*among], n=1)[0]!r}?"


def _number() -> None:
    from hpcsched.batch import slurm

    slurm.whole = lambda text: int(text) if text else None  # type: ignore[attr-defined]


PLANTED = {
    "unit": Planted("pool", "a KeyError for a time in a unit that nobody knows", _unit),
    "pattern": Planted("burst", "a pattern that takes words for numbers, after exponential time", _pattern),
    "errors": Planted("record", "decoding lets all errors but msgspec's own through", _errors),
    "admission": Planted("inbox", "jobs in the inbox are not checked as a job file's are", _admission),
    "guess": Planted("arguments", "an IndexError for a job whose name is like that of no other", _guess),
    "number": Planted("environment", "a ValueError for a number of Slurm's that is none", _number),
    "readings": Planted("to-head", "an IndexError for a beat with fewer readings than devices", _readings),
}
