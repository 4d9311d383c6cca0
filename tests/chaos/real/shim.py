"""The library that is preloaded into a run's processes (shim.c), and what it is told while they run."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OPEN, WRITE, SYNC, RENAME, READ, MAKE, ROOM, UNLINK = 1, 2, 4, 8, 16, 32, 64, 128
"""Calls: opening to write, writing, making durable, renaming, reading, links and folders; no free space."""
AGENT, WORKER = 1, 2

_HEAD, _RULE, _BELOW, _RULES = struct.Struct("=IIqqq"), struct.Struct("=IIIiII"), 512, 4
_SIZE = _HEAD.size + _RULES * _RULE.size + _BELOW
_ENDLESS = 2**32 - 1


@dataclass(frozen=True)
class Rule:
    """`calls` of `who` fail with `error` (0: do not) after `delay_s`, with a `chance`, so many `times`."""

    calls: int
    who: int = AGENT | WORKER
    error: int = 0
    delay_s: float = 0.0
    chance: float = 1.0
    times: int = _ENDLESS


@cache
def library() -> Path | None:
    """The library, built once a process; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    path = Path(tempfile.mkdtemp(prefix="chaos-shim-")) / "shim.so"
    source = str(Path(__file__).with_name("shim.c"))
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(path), source, "-ldl"], check=True)
    return path


class Shim:
    """What the preloaded library does in one run: nothing, until it is told."""

    def __init__(self, control: Path, below: Path) -> None:
        self._control = control
        control.write_bytes(bytes(_SIZE - _BELOW) + str(below).encode().ljust(_BELOW, b"\0"))
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def environment(self) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(library()), "CHAOS_SHIM": str(self._control)}

    def rules(self, *rules: Rule) -> None:
        """These from now on, and no others."""
        struct.pack_into("=I", self._map, 0, 0)
        for number in range(_RULES):
            one = rules[number] if number < len(rules) else Rule(calls=0)
            at = _HEAD.size + number * _RULE.size
            words = (one.calls, one.who, int(one.chance * 1e6), one.error, int(one.delay_s * 1e6), one.times)
            _RULE.pack_into(self._map, at, *words)
        struct.pack_into("=I", self._map, 0, bool(rules))

    def clock(self, ahead_s: float) -> None:
        """The wall clock is so far ahead of the true one."""
        struct.pack_into("=q", self._map, 8, int(ahead_s * 1e9))

    @property
    def struck(self) -> int:
        """How often a rule has struck."""
        return int(_HEAD.unpack_from(self._map, 0)[1])

    @property
    def durable_bytes(self) -> int:
        """The length of the journal that would be there after a loss of power."""
        return int(_HEAD.unpack_from(self._map, 0)[4])

    def close(self) -> None:
        self._map.close()
