"""Lines of metrics.jsonl in a job's folder: metrics by step, one flat JSON object a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpcsched.contract import codec
from hpcsched.errors import BadInput

RESERVED = ("step", "t", "attempt")
"""Keys that are no metrics."""

MOST_METRICS = 256
"""In one line."""

MOST_NAME = 128
"""Characters in the name of a metric."""


@dataclass(frozen=True)
class Point:
    """`values` by name after `step` steps in all, written by `attempt` at Unix time `t` (seconds).

    None is a value that was not finite.
    """

    step: int
    t: float
    attempt: int
    values: Mapping[str, float | None]

    def encode(self) -> bytes:
        """The line, with its end. Raises BadInput for names that `decode` would not take."""
        table: dict[str, float | None] = {"step": self.step, "t": self.t, "attempt": self.attempt}
        for name, value in self.values.items():
            table[_name(name)] = value if value is not None and math.isfinite(value) else None
        if len(self.values) > MOST_METRICS:
            raise BadInput(f"{len(self.values)} metrics in one line, more than {MOST_METRICS}")
        return codec.line(table)

    @classmethod
    def decode(cls, data: bytes) -> Point:
        """What a program has written; raises BadInput."""
        table = codec.document(data, most_bytes=codec.LINE_BYTES)
        if len(table) > MOST_METRICS + len(RESERVED):
            raise BadInput(f"more than {MOST_METRICS} metrics in one line")
        return cls(
            codec.step(table),
            codec.number(table, "t"),
            codec.whole(table, "attempt", 1, least=0),
            {
                _name(name): None if value is None else codec.finite(value, "metrics")
                for name, value in table.items()
                if name not in RESERVED
            },
        )


def is_name(name: str) -> bool:
    """Whether a metric can have it."""
    return 0 < len(name) <= MOST_NAME and name.isprintable() and name not in RESERVED


def _name(name: str) -> str:
    if not is_name(name):
        raise BadInput(f"{name[:MOST_NAME]!r} is no name of a metric")
    return name
