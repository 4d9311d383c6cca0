"""What the trainings of a demo were worth, and who ran where: pure text from what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hpcsched.core.profile import Profile
from hpcsched.durations import clock
from hpcsched.report.result import AttemptResult, JobResult

PAYS = 1.05
"""The least factor that is called sooner (chosen): less is lost in the noise of a machine."""


LEAST_S = 2.0
"""Seconds of training of which a speed is believed (chosen)."""


class Stretch(NamedTuple):
    """What a training of a model did on so many devices, until that changed."""

    model: str
    devices: int
    steps: int
    trained_s: float


class Work(NamedTuple):
    """A training by itself: the seconds of its start, and its steps."""

    model: str
    start_s: float
    steps: int


def best_rates(
    profiles: Mapping[str, Profile], stretches: Iterable[Stretch], devices: int
) -> dict[str, float]:
    """The highest speed of each model in steps per second, on at most so many devices: measured alone, or as
    seen in the run. What is computed with it is not too long, in whichever of the two the machine was busier.
    """
    totals: dict[tuple[str, int], tuple[int, float]] = {}
    for model, count, steps, trained_s in stretches:
        before = totals.get((model, count), (0, 0.0))
        totals[model, count] = before[0] + steps, before[1] + trained_s
    best = {model: profile.rate(profile.optimal(devices)) for model, profile in profiles.items()}
    for (model, _), (steps, trained_s) in totals.items():
        if trained_s >= LEAST_S:
            best[model] = max(best[model], steps / trained_s)
    return best


def alone_s(works: Iterable[Work], rates: Mapping[str, float]) -> float:
    """The seconds that trainings take one after the other, at these speeds of their models."""
    return sum(work.start_s + work.steps / rates[work.model] for work in works)


def pace(profiles: Mapping[str, Profile], stretches: Sequence[Stretch]) -> float | None:
    """How fast trainings went in a run, as a share of the measured speeds; None if none trained."""
    alone = sum(one.steps / profiles[one.model].rate(one.devices) for one in stretches)
    took_s = sum(one.trained_s for one in stretches)
    return alone / took_s if took_s > 0 else None


def value(what: str, count: int, took_s: float, alone_s: float) -> str:
    """The sentence on what it was worth that `count` trainings ran as they did, or that it was not."""
    both = f"{count} {what} in {clock(took_s)}; one after the other they take {clock(alone_s)}"
    factor = alone_s / took_s
    return f"{both}: {factor:.1f}x sooner." if factor >= PAYS else f"{both}: it did not pay here just now."


class _Bar(NamedTuple):
    job: JobResult
    start_s: float
    end_s: float


def timeline(jobs: Sequence[JobResult], devices: int, noun: str, width: int) -> list[str]:
    """A Gantt chart in text: a line for each device, with the trainings on it, at most `width` characters
    wide; below it where a training got more devices, and the time."""
    end_s = max((job.end_s or 0.0 for job in jobs), default=0.0)
    head = max(len(f"{noun} {index}") for index in range(devices)) + 1
    room = width - head - 1
    if end_s <= 0 or room < 1:
        return []

    def at(seconds: float) -> int:
        return min(room, round(room * seconds / end_s))

    lines = []
    for index in range(devices):
        cells = [" "] * room
        for bar in _bars(jobs, index):
            first, last = at(bar.start_s), at(bar.end_s)
            cells[first:last] = f"│{bar.job.name} ".ljust(last - first, "━")[: last - first]
        lines.append(f"{noun} {index}".ljust(head) + "".join(cells).rstrip())
    for job in jobs:
        for before, after in zip(job.attempts, job.attempts[1:], strict=False):
            if len(after.gpus) > len(before.gpus):
                lines.append(" " * head + _pointer(job, before, after, at(after.start_s), room))
    end = clock(end_s)
    return [*lines, " " * head + "0:00".ljust(room - len(end)) + end]


def _pointer(job: JobResult, before: AttemptResult, after: AttemptResult, place: int, room: int) -> str:
    """The mark below the moment at which a training got more devices, and what it was."""
    text = f"{clock(after.start_s)} {job.name}: {len(before.gpus)} to {len(after.gpus)}"
    left = place + len(text) + 2 > room
    return (f"{text} ▲".rjust(place + 1)) if left else " " * place + f"▲ {text}"


def _bars(jobs: Sequence[JobResult], device: int) -> list[_Bar]:
    """The stretches of trainings on a device; one that stays there when it is resized has one bar."""
    bars: list[_Bar] = []
    for job in jobs:
        for attempt in job.attempts:
            if device not in attempt.gpus or attempt.end_s is None:
                continue
            if bars and bars[-1].job is job and bars[-1].end_s == attempt.start_s:
                bars[-1] = bars[-1]._replace(end_s=attempt.end_s)
            else:
                bars.append(_Bar(job, attempt.start_s, attempt.end_s))
    return bars
