"""STATE.json: what a job's newest good checkpoint holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcsched.contract import codec

SCHEMA = 1


@dataclass(frozen=True)
class State:
    """The checkpoint at the path `checkpoint` was made after `step` steps and `samples` samples by `attempt`.

    `metrics` are results by name, None what was not finite; `loss` is the one of the step, if it is told.
    """

    step: int
    samples: int | None = None
    checkpoint: str | None = None
    attempt: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    loss: float | None = None

    def encode(self) -> bytes:
        """One line of JSON."""
        table: dict[str, Any] = {
            "schema": SCHEMA,
            "step": self.step,
            "samples": self.samples,
            "checkpoint": self.checkpoint,
            "attempt": self.attempt,
        }
        if self.metrics:
            # JSON has no NaN, and one must not make the record unreadable: null is what is not finite.
            table["metrics"] = {
                name: value if value is not None and math.isfinite(value) else None
                for name, value in self.metrics.items()
            }
        if self.loss is not None and math.isfinite(self.loss):
            table["loss"] = self.loss
        return json.dumps(table).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> State:
        """What a program has written; raises BadInput."""
        table = codec.document(data)
        return cls(
            step=codec.step(table),
            samples=codec.whole(table, "samples", None),
            checkpoint=codec.text(table, "checkpoint", None),
            attempt=codec.whole(table, "attempt", None),
            metrics=codec.part(table, "metrics", _metrics, {}),
            loss=codec.number(table, "loss", None),
        )


def _metrics(value: Any) -> dict[str, float | None]:
    return {
        codec.written(name, "metrics"): None if one is None else codec.finite(one, "metrics")
        for name, one in codec.an_object(value, "metrics").items()
    }
