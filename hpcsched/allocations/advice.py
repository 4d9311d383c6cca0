"""The advice: each allocation that was tried with what comes of it, the front of those that nothing beats,
and which one to take. `advise --json` prints it, `script --advice` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from hpcsched import decoding
from hpcsched.allocations.outcomes import Outcome
from hpcsched.allocations.waits import Wait
from hpcsched.batch.queue import Shape
from hpcsched.errors import BadInput, ConfigError

SCHEMA = 1
NEAR = 0.05
"""Two ends, or two costs, that differ by less than this share count as the same (chosen: what is predicted is
not better known than that)."""

TIME, GPU_HOURS = "time", "gpu-hours"

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation to ask for, and what comes of it. Times are seconds of the clock.

    `time_s` is its time limit; `allocations` says how many of its kind one after the other it takes. `wait_s`
    is the time in the queue, all of them together, with the time for which the batch system holds back what
    it has requeued (`hold_s` of it); None where nobody knows. `wait_low_s` and `wait_high_s` are its range,
    where one is known. `end_s` is from submission to the last result: waiting and running; None with an
    unknown wait. `least_s` is the same if nothing waits, only what is held back. `front`: no other row ends
    earlier for as few GPU-hours. `preempted`: more important jobs may end it.
    """

    number: Positive
    partition: str
    nodes: Positive
    gpus_per_node: Count
    time_s: Seconds
    allocations: Positive
    wait_s: Seconds | None
    wait_low_s: Seconds | None
    wait_high_s: Seconds | None
    wait_source: str
    wait_of: Count
    hold_s: Seconds
    running_s: Seconds
    end_s: Seconds | None
    least_s: Seconds
    gpu_hours: Seconds
    front: bool = False
    preempted: bool = False

    def compared_s(self, *, waiting: bool) -> float:
        """What rows are compared by: the end, or what it would be without waiting."""
        if not waiting:
            return self.least_s
        return math.inf if self.end_s is None else self.end_s


class Separate(msgspec.Struct, frozen=True, kw_only=True):
    """A batch job for each training instead: `gpus` are those of each, fewest and most.

    `end_s` is the end at best, if the first one waits `wait_s` and all others start as soon as the partition
    has room; `end_high_s` if all wait as long as one job that is as large as all of them; None where not
    known.
    """

    how: str
    jobs: Count
    gpus: tuple[Count, Count]
    gpus_in_all: Count
    partition: str
    wait_s: Seconds | None
    wait_source: str
    end_s: Seconds | None
    end_high_s: Seconds | None
    least_s: Seconds
    gpu_hours: Seconds
    too_long: Count

    def compared_s(self, *, waiting: bool) -> float:
        """See `Row`."""
        if not waiting:
            return self.least_s
        return math.inf if self.end_s is None else self.end_s


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is counted nowhere, and what is missing: "steps", "profile"."""

    name: str
    missing: tuple[str, ...]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What `advise` says of a job file. `waiting`: rows are compared with their waits; False: no wait is
    known.

    `doubt` is the share by which the running time may be off, from the spread of the measured rates; None
    where some were not measured, which `notes` say. `recommended` is a row's number; None if no row is left.
    """

    schema: int = SCHEMA
    file: str
    system: str
    jobs: Count
    counted: Count
    missing: tuple[Missing, ...]
    policy: str
    prefer: str
    waiting: bool
    doubt: float | None
    recommended: Positive
    command: str
    rows: tuple[Row, ...]
    separate: tuple[Separate, ...]
    notes: tuple[str, ...]

    def row(self, number: int | None = None) -> Row:
        """The row of a number, or the recommended one. Raises StopIteration."""
        number = self.recommended if number is None else number
        return next(row for row in self.rows if row.number == number)


def row_of(shape: Shape, outcome: Outcome, wait: Wait, hold_s: float, *, preempted: bool = False) -> Row:
    """The row of a shape; each allocation waits as long as the first would, and later ones are held back."""
    count = len(outcome.held_s)
    held_back = (count - 1) * hold_s

    def total(seconds: float | None) -> float | None:
        return None if seconds is None else count * seconds + held_back

    waits = total(wait.seconds)
    return Row(
        number=1,
        partition=shape.partition,
        nodes=shape.nodes,
        gpus_per_node=shape.gpus,
        time_s=shape.limit_s,
        allocations=count,
        wait_s=waits,
        wait_low_s=total(wait.low_s),
        wait_high_s=total(wait.high_s),
        wait_source=wait.source,
        wait_of=wait.of,
        hold_s=held_back,
        running_s=outcome.running_s,
        end_s=None if waits is None else waits + outcome.running_s,
        least_s=held_back + outcome.running_s,
        gpu_hours=outcome.gpu_hours(shape.nodes * shape.gpus),
        preempted=preempted,
    )


def in_order(rows: Iterable[Row], *, waiting: bool) -> tuple[Row, ...]:
    """The rows from the earliest end on, numbered, with the Pareto front marked: of equal ones the first, in
    a partition where nobody is preempted if there is one, with the shorter limit."""

    def key(row: Row) -> tuple[float, float, bool, float]:
        return _second(row, waiting), round(row.gpu_hours, 3), row.preempted, row.time_s

    marked, least = [], math.inf
    for number, row in enumerate(sorted(rows, key=key), 1):
        front = math.isfinite(_second(row, waiting)) and round(row.gpu_hours, 3) < least
        least = min(least, round(row.gpu_hours, 3)) if front else least
        marked.append(msgspec.structs.replace(row, number=number, front=front))
    return tuple(marked)


def _second(row: Row, waiting: bool) -> float:
    """What a row is compared by, in whole seconds: nobody knows it better."""
    at = row.compared_s(waiting=waiting)
    return float(round(at)) if math.isfinite(at) else at


def recommended(rows: Iterable[Row], *, prefer: str, waiting: bool) -> Row:
    """The row of the front to take: the fewest GPU-hours of those that end nearly as early as any, or the
    earliest end of those that cost nearly as little as any. Of at least one row."""
    front = [row for row in rows if row.front]
    if prefer == GPU_HOURS:
        least = min(row.gpu_hours for row in front)
        near = [row for row in front if row.gpu_hours <= least * (1 + NEAR)]
        return min(near, key=lambda row: (row.compared_s(waiting=waiting), row.gpu_hours))
    first = min(row.compared_s(waiting=waiting) for row in front)
    near = [row for row in front if row.compared_s(waiting=waiting) <= first * (1 + NEAR)]
    return min(near, key=lambda row: (row.gpu_hours, row.compared_s(waiting=waiting)))


def read(path: Path, number: int | None) -> tuple[Advice, Row]:
    """The advice of a file that `advise --json` has written, and the row of a number, or the recommended one.

    Raises ConfigError.
    """
    try:
        with decoding.opened(path) as (file, _):
            advice = decoding.decode(file.read(decoding.MOST_BYTES + 1), Advice)
    except OSError as error:
        accepted = "a file that `hpcsched advise --json` has written"
        raise ConfigError(where="--advice", got=f"{path}: {error.strerror}", accepted=accepted) from error
    except BadInput as error:
        accepted = "what `hpcsched advise --json` prints"
        raise ConfigError(where=str(path), got=str(error), accepted=accepted) from error
    if advice.schema != SCHEMA:
        raise ConfigError(where=str(path), key="schema", got=str(advice.schema), accepted=str(SCHEMA))
    try:
        return advice, advice.row(number)
    except StopIteration:
        rows = [row.number for row in advice.rows]
        accepted = f"a row, {min(rows)} to {max(rows)}" if rows else "advice with rows"
        got = f"row {number or advice.recommended}"
        raise ConfigError(where=str(path), got=got, accepted=accepted) from None
