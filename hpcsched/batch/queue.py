"""The seam to a batch system's queue, asked from a login node: partitions, and when a job would start.

Only read: nothing that is asked here submits or changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition that takes jobs.

    `hosts` are its nodes that can be used, by GPUs on each: {4: 10, 8: 2}. `limit_s` is its longest time
    limit, `most_nodes` the most nodes of a job; None: no limit. `preempted`: more important jobs end those in
    it. `holds` is what GPUs there are, by type ("gpu" where no type is named).
    """

    name: str
    hosts: Mapping[int, int]
    limit_s: float | None = None
    most_nodes: int | None = None
    default: bool = False
    preempted: bool = False
    types: tuple[str, ...] = ()

    def nodes_for(self, gpus: int) -> int:
        """How many nodes a job with `gpus` GPUs on each may have."""
        there = sum(count for held, count in self.hosts.items() if held >= gpus)
        return there if self.most_nodes is None else min(there, self.most_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a batch job asks for: GPUs on each of its nodes, for so many seconds. `partition` "": the usual
    one."""

    partition: str
    nodes: int
    gpus: int
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the batch system answers about a job that is not submitted: when it would start, as Unix time, or
    why it does not take it."""

    start: float | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A job of the user's own that waits; `start` is when it is planned to start, as Unix time, if it is."""

    job_id: str
    shape: Shape
    start: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """A job that has started: its shape, and Unix times. `eligible` is when it might have started first: of
    one that was put back into its queue, the end of the time for which it was held back."""

    shape: Shape
    submitted: float
    eligible: float
    started: float


class Queue(Protocol):
    """The queue of one batch system. Each question is one command and raises BatchError without an answer,
    after at most COMMAND_TIMEOUT_S."""

    kind: str
    hold_s: float
    """Seconds for which a job that is put back into its queue is held back."""

    def partitions(self) -> tuple[Partition, ...]:
        """The partitions that take jobs; two commands."""
        ...

    def planned(self, shape: Shape, options: Sequence[str] = ()) -> Planned:
        """When a job of this shape would start if it were submitted now; `options` are more of the
        script's."""
        ...

    def pending(self) -> tuple[Pending, ...]:
        """The user's own jobs that wait."""
        ...

    def times(self, job_id: str) -> JobTimes | None:
        """When a job that has started came, might have started and did; None: it does not say."""
        ...
