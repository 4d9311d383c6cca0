"""What a part finds: numbers and checks, on disk as soon as they are known."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.store.files import write_atomically

MIB = 2**20
H100, H200 = "H100", "H200"


class Refused(Exception):
    """This machine cannot do what a part is about; the message says why, in one line."""


@dataclass
class Check:
    """Something that has a goal; `ok` None: told for information."""

    name: str
    goal: str
    found: str
    ok: bool | None


@dataclass
class Found:
    """Of one part.

    Attributes:
        file: holds all of it, from the beginning on.
        cpu: there is no GPU: sizes are tiny, and speed is not judged.
        within_s: the part's time box.
        device: the name of the GPU.
    """

    file: Path
    cpu: bool
    within_s: float
    device: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.within_s

    @property
    def left_s(self) -> float:
        """What is left of the time box."""
        return self._end - time.monotonic()

    @property
    def devices(self) -> str:
        """As `hpcsched --devices` takes it: one."""
        return "cpu:1" if self.cpu else "cuda:1"

    def number(self, **numbers: Any) -> None:
        """Note numbers, or lists and tables of them; units are in their names."""
        self.numbers |= numbers
        self._keep()

    def check(self, name: str, goal: object, found: object, ok: bool | None) -> None:
        """Note whether a goal is met."""
        self.checks.append(Check(name, str(goal), str(found), ok))
        self._keep()

    def speed(self, name: str, goal: str, found: object, ok: bool, *, of: tuple[str, ...] = ()) -> None:
        """The same for how fast something is, which no CPU tells. `of`: the GPUs that the goal is for, as a
        part of their names; all if it is empty."""
        judged = not self.cpu and (not of or any(name in self.device for name in of))
        self.check(name, goal, found, ok if judged else None)

    @contextlib.contextmanager
    def trying(self, name: str, goal: str = "works") -> Iterator[None]:
        """What goes wrong in here is a check that fails, and does no harm to the rest of the part."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.check(name, goal, f"{type(error).__name__}: {lines[0]}"[:300], False)

    def page(self) -> dict[str, Any]:
        return {"numbers": self.numbers, "checks": [asdict(check) for check in self.checks]}

    def _keep(self) -> None:
        write_atomically(self.file, json.dumps(self.page(), default=str).encode())
