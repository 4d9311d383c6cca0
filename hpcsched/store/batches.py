"""The global batches of a training, from its `jobs/<id>/batches.jsonl`: a line for each decision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hpcsched.store.json_lines import read_lines

BATCHES_FILE = "batches.jsonl"
"""Its name in a job's folder."""

MAX_BYTES = 2**30
"""The longest file that is read (chosen)."""

_Count = Annotated[int, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]
_Workers = Annotated[tuple[_Count, ...], Meta(min_length=1)]


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The batches of a job from a step on.

    `t` is in Unix seconds. `step`, `samples` and `epoch` are how far the job was; `global_batch` and
    `local_batch` count samples, `workers` and `at_once` stream workers by rank. `similarity` or `noise_scale`
    is what was measured last of the gradient, `loss` that of the step before (None: nothing yet, or it was
    not finite); `factor` is on the learning rate.
    """

    t: float
    attempt: _Count
    step: _Count
    samples: _Count
    epoch: Annotated[float, Meta(ge=0)]
    global_batch: _Positive
    local_batch: _Positive
    workers: _Workers
    at_once: _Workers
    similarity: float | None = None
    noise_scale: float | None = None
    loss: float | None = None
    factor: float = 1.0


def read_batches(path: Path) -> Sequence[Decision]:
    """The decisions that hold, in order of step; none where there is no such file.

    After a crash a training resumes from an earlier step: its decisions from there on replace those of the
    lost steps. Lines that cannot be decoded, such as a torn last one, are left out. Raises StoreError if the
    file cannot be read.
    """
    kept: list[Decision] = []
    for decision in read_lines(path, Decision, most_bytes=MAX_BYTES):
        while kept and kept[-1].step >= decision.step:
            kept.pop()
        kept.append(decision)
    return kept
