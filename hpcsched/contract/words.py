"""Words that lie in a job's folder, each in a file of its own (`files`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcsched.contract import codec
from hpcsched.errors import BadInput

MOST_BYTES = 4096
"""Of any of them."""

MOST_PACKAGES = 16
"""Whose versions are told."""

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_!-]{0,63}", re.ASCII)
_PACKAGE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}", re.ASCII)


@dataclass(frozen=True)
class Ready:
    """The attempt can be suspended from now on. An empty file says no more than that.

    `parallel`: the program can be one of several ranks. `in_place`: ranks can come and go while it runs.
    After a resize in place `step` is where it was done, and `stopped_s` how many seconds there were without
    training between the last step before it and the first one after.
    """

    in_place: bool = False
    parallel: bool = False
    step: int | None = None
    stopped_s: float | None = None

    def encode(self) -> bytes:
        """JSON with what is to be said."""
        said = {
            "parallel": self.parallel or None,
            "in_place": self.in_place or None,
            "step": self.step,
            "stopped_s": self.stopped_s,
        }
        return _written({key: value for key, value in said.items() if value is not None})

    @classmethod
    def decode(cls, data: bytes) -> Ready:
        """What a program has written; raises BadInput."""
        if not data.strip():
            return cls()
        table = codec.document(data)
        return cls(
            in_place=codec.flag(table, "in_place", False),
            parallel=codec.flag(table, "parallel", False),
            step=codec.step(table, "step", None),
            stopped_s=codec.number(table, "stopped_s", None),
        )


@dataclass(frozen=True)
class Held:
    """The state after `step` steps and `samples` samples is in shared memory."""

    step: int
    samples: int | None = None

    def encode(self) -> bytes:
        """JSON."""
        return _written({"step": self.step, "samples": self.samples})

    @classmethod
    def decode(cls, data: bytes) -> Held:
        """What a program has written; raises BadInput."""
        table = codec.document(data)
        return cls(step=codec.step(table), samples=codec.whole(table, "samples", None))


@dataclass(frozen=True)
class Versions:
    """The version of Python that trains, and those of the packages that it has imported for that, by name."""

    python: str
    packages: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {version}" for name, version in {"Python": self.python, **self.packages}.items()
        )

    def encode(self) -> bytes:
        """JSON."""
        return _written({"python": self.python, "packages": dict(self.packages)})

    @classmethod
    def decode(cls, data: bytes) -> Versions:
        """What a program has written; raises BadInput."""
        table = codec.document(data, most_bytes=MOST_BYTES)
        packages = codec.an_object(table.get("packages", {}), "packages")
        if len(packages) > MOST_PACKAGES or not all(map(_PACKAGE.fullmatch, packages)):
            raise BadInput(f"at most {MOST_PACKAGES} names of packages are expected")
        return cls(
            python=_version(table.get("python"), "python"),
            packages={name: _version(version, name) for name, version in packages.items()},
        )


@dataclass(frozen=True)
class Unusable:
    """The program could not use GPU `gpu`, and `why`.

    `torch` is the file of the torch that could not; `changed` are the variables that find the driver and are
    not as the launcher gave them.
    """

    gpu: int
    why: str
    torch: str = ""
    changed: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """JSON."""
        return _written(
            {"gpu": self.gpu, "why": self.why, "torch": self.torch, "changed": list(self.changed)}
        )

    @classmethod
    def decode(cls, data: bytes) -> Unusable:
        """What a program has written; raises BadInput."""
        table = codec.document(data, most_bytes=MOST_BYTES)
        return cls(
            gpu=codec.whole(table, "gpu"),
            why=codec.text(table, "why"),
            torch=codec.text(table, "torch", ""),
            changed=codec.part(table, "changed", _names, ()),
        )


@dataclass(frozen=True)
class Stop:
    """The attempt is to save and leave; `signal` is the name of the signal that says the same."""

    signal: str

    def encode(self) -> bytes:
        """JSON."""
        return _written({"signal": self.signal})

    @classmethod
    def decode(cls, data: bytes) -> Stop:
        """What an agent has written; raises BadInput."""
        return cls(signal=codec.text(codec.document(data), "signal"))


def refusal(data: bytes) -> str:
    """Why a resize in place was refused; any bytes make text."""
    return data.decode(errors="replace")


def _written(table: dict[str, Any]) -> bytes:
    return json.dumps(table).encode()


def _version(value: Any, where: str) -> str:
    text = codec.written(value, where)
    if not _VERSION.fullmatch(text):
        raise BadInput(f"{where}: a version is expected")
    return text


def _names(value: Any) -> tuple[str, ...]:
    return codec.a_list(value, "changed", codec.written)
