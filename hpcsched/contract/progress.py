"""Progress lines: how far a program is, one JSON object a line, on its progress pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcsched.contract import codec


@dataclass(frozen=True)
class Batching:
    """How a job computes a global batch that changes: samples of the batch and of each worker's part of it,
    the workers of each rank, and how many of them compute at once.

    `similarity` or `noise_scale` is what was measured last of the gradient (None: nothing yet); `epoch` is
    how many there have been.
    """

    global_batch: int
    local_batch: int
    workers: tuple[int, ...]
    at_once: tuple[int, ...]
    epoch: float
    similarity: float | None = None
    noise_scale: float | None = None

    def table(self) -> dict[str, Any]:
        """Its JSON form."""
        seen = {"similarity": self.similarity, "noise_scale": self.noise_scale}
        return {
            "global_batch": self.global_batch,
            "local_batch": self.local_batch,
            "workers": list(self.workers),
            "at_once": list(self.at_once),
            "epoch": self.epoch,
            **{name: value for name, value in seen.items() if value is not None},
        }

    @classmethod
    def of(cls, value: Any) -> Batching:
        """Of its JSON form; raises BadInput."""
        table = codec.an_object(value, "batching")
        return cls(
            global_batch=codec.whole(table, "global_batch"),
            local_batch=codec.whole(table, "local_batch"),
            workers=codec.part(table, "workers", _counts),
            at_once=codec.part(table, "at_once", _counts),
            epoch=codec.number(table, "epoch"),
            similarity=codec.number(table, "similarity", None),
            noise_scale=codec.number(table, "noise_scale", None),
        )


@dataclass(frozen=True)
class Scaling:
    """How many steps a second a program expects of its next epoch, by GPUs on each host, and its mean
    batch."""

    rates: Mapping[int, float]
    batch: float

    def table(self) -> dict[str, Any]:
        """Its JSON form."""
        return {"rates": {str(gpus): rate for gpus, rate in self.rates.items()}, "batch": self.batch}

    @classmethod
    def of(cls, value: Any) -> Scaling:
        """Of its JSON form; raises BadInput."""
        table = codec.an_object(value, "scaling")
        return cls(rates=codec.part(table, "rates", _rates), batch=codec.number(table, "batch"))


@dataclass(frozen=True)
class Usage:
    """What the processes of `attempt` use, on CPU cores, measured from `samples`.

    `rate`: steps a second. By rank: `cpu`, cores; `net`, the share of the time for which the link was full.
    `stable`: whether the samples agree.
    """

    attempt: int
    rate: float
    cpu: tuple[float, ...]
    net: tuple[float, ...]
    samples: int
    stable: bool = True

    def table(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "attempt": self.attempt,
            "rate": self.rate,
            "cpu": list(self.cpu),
            "net": list(self.net),
            "samples": self.samples,
            "stable": self.stable,
        }

    @classmethod
    def of(cls, value: Any) -> Usage:
        """Of its JSON form; raises BadInput."""
        table = codec.an_object(value, "usage")
        return cls(
            attempt=codec.whole(table, "attempt"),
            rate=codec.number(table, "rate"),
            cpu=codec.part(table, "cpu", _numbers),
            net=codec.part(table, "net", _numbers),
            samples=codec.whole(table, "samples"),
            stable=codec.flag(table, "stable", True),
        )


@dataclass(frozen=True)
class Line:
    """`step` steps done in all at Unix time `t` (seconds), of `total`; `loss` if the program tells it.

    `batching` is how a global batch is computed that changes, `scaling` the newest expectation, `usage` what
    its processes use of CPU cores. `resumed`: nothing is done yet, `step` is where the program goes on from
    in the middle of an attempt, and does once more what that has done after it.
    """

    step: int
    t: float
    loss: float | None = None
    batching: Batching | None = None
    scaling: Scaling | None = None
    usage: Usage | None = None
    total: int | None = None
    resumed: bool = False

    def encode(self) -> bytes:
        """The line, with its end."""
        table: dict[str, Any] = {"step": self.step, "t": self.t}
        for key, number in (("loss", self.loss), ("total", self.total)):
            if number is not None:
                table[key] = number
        for key, part in (("batching", self.batching), ("scaling", self.scaling), ("usage", self.usage)):
            if part is not None:
                table[key] = part.table()
        if self.resumed:
            table["resumed"] = True
        return codec.line(table)

    @classmethod
    def decode(cls, data: bytes) -> Line:
        """What a program has written; raises BadInput."""
        table = codec.document(data, most_bytes=codec.LINE_BYTES)
        return cls(
            codec.step(table),
            codec.number(table, "t"),
            codec.number(table, "loss", None),
            codec.part(table, "batching", Batching.of, None),
            codec.part(table, "scaling", Scaling.of, None),
            codec.part(table, "usage", Usage.of, None),
            codec.step(table, "total", None),
            codec.flag(table, "resumed", False),
        )


def _counts(value: Any) -> tuple[int, ...]:
    return codec.a_list(value, "workers", codec.a_whole)


def _numbers(value: Any) -> tuple[float, ...]:
    return codec.a_list(value, "usage", codec.finite)


def _rates(value: Any) -> dict[int, float]:
    return {
        codec.number_of(gpus, "rates"): codec.finite(rate, "rates")
        for gpus, rate in codec.an_object(value, "rates").items()
    }
