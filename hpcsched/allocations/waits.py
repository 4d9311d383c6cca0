"""How long an allocation would wait in its queue, who says so, and how sure that is.

In this order: the user's own number, the batch system's plan (`sbatch --test-only`), the plan for a job of
the user's that waits (`squeue --start`), and how long earlier allocations of a similar shape waited. Else it
is unknown, and stays so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hpcsched.batch.queue import Pending, Planned, Queue, Shape
from hpcsched.errors import BatchError

MOST_QUESTIONS = 40
"""Shapes that the batch system is asked about in one call, and MOST_ASKING_S the seconds that this may take
in all: beyond that no more questions are begun (chosen: a controller has other users)."""
MOST_ASKING_S = 60.0
MOST_SILENT = 2
"""Questions without an answer after which no more are put."""
SIMILAR = 2.0
"""Allocations count as similar up to this factor of GPUs and of time (chosen)."""

GIVEN, PLAN, BETWEEN, PENDING, HISTORY, UNKNOWN = (
    "given",
    "test-only",
    "between",
    "squeue --start",
    "history",
    "unknown",
)
"""Who says how long a wait is: BETWEEN is between the plans for a smaller shape and for a larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Seconds in the queue, from `low_s` to `high_s` where a range is known; None: not known.

    `refused`: the batch system does not take such a job, in its words. `of`: how many earlier allocations say
    so.
    """

    seconds: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    source: str = UNKNOWN
    refused: str = ""
    of: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """An earlier allocation: its shape, and seconds for which it waited when it might have started."""

    shape: Shape
    waited_s: float


@dataclass(kw_only=True)
class Waits:
    """What is known about waiting. `asked` are the answers about some shapes, in seconds from now, `refused`
    those that are not taken."""

    given_s: float | None = None
    asked: dict[Shape, float] = field(default_factory=dict)
    refused: dict[Shape, str] = field(default_factory=dict)
    pending: Sequence[tuple[Shape, float]] = ()
    past: Sequence[Past] = ()
    notes: list[str] = field(default_factory=list)

    def of(self, shape: Shape) -> Wait:
        """The wait of a shape."""
        if refused := self.refusal(shape):
            return Wait(refused=refused)
        if (seconds := self.given_s) is not None:
            return Wait(seconds=seconds, low_s=seconds, high_s=seconds, source=GIVEN)
        if (seconds := self.asked.get(shape)) is not None:
            return Wait(seconds=seconds, source=PLAN)
        return self._between(shape) or self._as_pending(shape) or self._as_before(shape) or Wait()

    def refusal(self, shape: Shape) -> str:
        """Why this shape, or a smaller one, is not taken; empty if that is not known."""
        return next((why for other, why in self.refused.items() if within(other, shape)), "")

    def _between(self, shape: Shape) -> Wait | None:
        """A larger job waits no less: so it is between the largest wait of smaller ones, and the smallest of
        larger ones."""
        low = max((s for other, s in self.asked.items() if within(other, shape)), default=None)
        high = min((s for other, s in self.asked.items() if within(shape, other)), default=None)
        if low is None or high is None:
            return None
        low, high = min(low, high), max(low, high)
        return Wait(seconds=(low + high) / 2, low_s=low, high_s=high, source=BETWEEN)

    def _as_pending(self, shape: Shape) -> Wait | None:
        plans = [seconds for other, seconds in self.pending if within(shape, other)]
        if not plans:
            return None
        return Wait(seconds=min(plans), low_s=0.0, high_s=min(plans), source=PENDING, of=len(plans))

    def _as_before(self, shape: Shape) -> Wait | None:
        waits = sorted(one.waited_s for one in self.past if similar(one.shape, shape))
        if not waits:
            return None
        median = statistics.median(waits)
        return Wait(seconds=median, low_s=waits[0], high_s=waits[-1], source=HISTORY, of=len(waits))


def within(small: Shape, large: Shape) -> bool:
    """Whether one shape asks for no more than another one, in the same partition."""
    return (
        small.partition == large.partition
        and small.nodes <= large.nodes
        and small.gpus <= large.gpus
        and small.limit_s <= large.limit_s
    )


def similar(one: Shape, other: Shape) -> bool:
    """Whether the wait of one says something of the other."""

    def near(a: float, b: float) -> bool:
        return max(a, b) <= SIMILAR * min(a, b)

    gpus, others = (max(1, shape.gpus * shape.nodes) for shape in (one, other))
    return (
        (one.partition == other.partition or not other.partition)
        and near(gpus, others)
        and near(one.limit_s, other.limit_s)
    )


def ask(
    queue: Queue,
    *shapes: Iterable[Shape],
    options: Sequence[str] = (),
    now: Callable[[], float],
    most: int = MOST_QUESTIONS,
    for_s: float = MOST_ASKING_S,
) -> Waits:
    """Ask the batch system about at most `most` of these shapes: of the first ones, then of the next, each
    time the ends of what there is first.

    Never raises: what is not answered is not known, and `notes` say why. `options`: of the batch script.
    """
    waits, silent = Waits(), 0
    wanted = list(dict.fromkeys(shape for some in shapes for shape in in_order(some)))
    begun = now()
    asked = 0
    for number, shape in enumerate(wanted):
        if waits.refusal(shape):
            continue
        late = now() - begun > for_s
        if asked >= most or late or silent >= MOST_SILENT:
            why = f"{for_s:.0f} s were over" if late else f"{most} questions are the most in one call"
            if silent < MOST_SILENT:
                left = len(wanted) - number
                waits.notes.append(f"{left} of {len(wanted)} shapes were not asked about, as {why}: their "
                                   "waits are between those of smaller and larger ones")  # fmt: skip
            break
        asked += 1
        try:
            answer: Planned = queue.planned(shape, tuple(options))
        except BatchError as error:
            silent += 1
            waits.notes.append(str(error))
            continue
        if answer.start is None:
            waits.refused[shape] = answer.refused
        else:
            waits.asked[shape] = max(0.0, answer.start - now())
    return waits


def in_order(shapes: Iterable[Shape]) -> list[Shape]:
    """The distinct shapes in the order in which they are asked about: of each partition the least and the
    most, then always the one in the middle of the widest gap."""
    by_partition: dict[str, list[Shape]] = {}
    for shape in sorted(
        set(shapes), key=lambda s: (s.partition, s.nodes * max(1, s.gpus), s.nodes, s.limit_s)
    ):
        by_partition.setdefault(shape.partition, []).append(shape)
    queues = [[row[i] for i in _spread(len(row))] for row in by_partition.values()]
    rounds = max(map(len, queues), default=0)
    return [row[i] for i in range(rounds) for row in queues if i < len(row)]


def _spread(count: int) -> list[int]:
    """All of 0..count-1: the ends, then middles of gaps, the widest first."""
    if count <= 2:
        return list(range(count))
    order, gaps = [0, count - 1], [(0, count - 1)]
    while gaps:
        gaps.sort(key=lambda gap: (gap[0] - gap[1], gap[0]))
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def planned_for(pending: Iterable[Pending], now: float) -> list[tuple[Shape, float]]:
    """Shapes of the user's jobs that wait, and in how many seconds they are planned to start."""
    return [(one.shape, max(0.0, one.start - now)) for one in pending if one.start is not None]
