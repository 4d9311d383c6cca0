"""What the trainings of this life used, put into the site's folder of records, and brought up to date."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcsched
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import Attempt
from hpcsched.errors import StoreError
from hpcsched.store import job_use, site_records
from hpcsched.store.job_use import JobUse
from hpcsched.store.site_records import Life, Training

PERIOD_S = 600.0
"""How often it is written, in real seconds (chosen): what a killed agent may leave out."""

MOST_SHARE, MOST_PERIOD_S = 0.01, 3600.0
"""The largest share of the time that goes into it, where that is not less often than so (chosen)."""


_NOBODY = (0, 0)


@dataclass(frozen=True)
class Held:
    """GPU-seconds of a life, on the run's clock: of each attempt, and in which nobody held a GPU."""

    by_attempt: Mapping[tuple[int, int], float]
    idle_s: float
    gpu_s: float


def held_in(machine: Machine, number: int = -1) -> Held:
    """What was held in a life (its number; the last). A GPU that several attempts have is theirs in equal
    parts, so that all of it sums up to the GPUs that were there."""
    begins = [life.at for life in machine.run.lives]
    number %= len(begins)
    from_s = begins[number]
    next_s = begins[number + 1] if number + 1 < len(begins) else max(machine.run.now, from_s)
    stretches: dict[int, list[tuple[float, float, tuple[int, int]]]] = {}
    for job, attempt in attempts_in(machine, number):
        end_s = next_s if attempt.end_s is None else attempt.end_s
        for gpu in attempt.gpus:
            stretches.setdefault(gpu, []).append((attempt.start_s, end_s, (job.id, attempt.number)))
    came = {one.host: one.at for one in machine.hosts.joined if from_s <= one.at <= next_s}
    left = [(one.host, one.left) for one in machine.hosts.joined if one.left is not None]
    left += [(one.host, one.at) for one in machine.hosts.given_back]
    gone = {host: at for host, at in left if from_s <= at <= next_s}
    by_attempt: dict[tuple[int, int], float] = {}
    idle_s = gpu_s = 0.0
    for device in machine.hosts.devices[number]:
        begins_s = came.get(device.host, from_s)
        until_s = max(begins_s, min(next_s, gone.get(device.host, next_s)))
        gpu_s += until_s - begins_s
        changes = [(until_s, False, _NOBODY)]
        for begun, over, key in stretches.get(device.index, []):
            if begun < min(over, until_s):
                changes += [(max(begun, begins_s), True, key), (min(over, until_s), False, key)]
        holders: set[tuple[int, int]] = set()
        reached = begins_s
        for at, begins_now, key in sorted(changes):
            for holder in holders:
                by_attempt[holder] = by_attempt.get(holder, 0.0) + (at - reached) / len(holders)
            idle_s += 0.0 if holders else at - reached
            reached = at
            (holders.add if begins_now else holders.discard)(key)
    return Held(by_attempt, idle_s, gpu_s)


def attempts_in(machine: Machine, number: int = -1) -> Iterator[tuple[Job, Attempt]]:
    """The attempts that ran in a life (its number; the last)."""
    run = machine.run
    number %= len(run.lives)
    for job in run.jobs.since(run.lives[number].at):
        for attempt in job.attempts:
            end_s = max(run.now, attempt.start_s) if attempt.end_s is None else attempt.end_s
            if number in run.lives_of(attempt.start_s, end_s):
                yield job, attempt


class SiteRecord:
    """Writes the file of this life.

    Args:
        folder: the site's.
        uses: where what jobs have used is added up (`job-use.jsonl`).
        allocation: the batch job's kind, id, cluster, account and partition, as far as known.
        speed: of the run's clock.
        tell: shows people a line; called once, if it cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        machine: Machine,
        *,
        uses: Path,
        user: str,
        run_id: str,
        allocation: Mapping[str, str | None],
        speed: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._machine, self._uses = folder, machine, uses
        self._user, self._run_id, self._allocation, self._speed = user, run_id, allocation, speed
        self._tell, self._clock, self._due, self._told = tell, clock, clock(), False
        self._before = len(machine.run.lives)
        # What is told of an attempt that this life adopts is what it has done since.
        self._steps_before = {job.id: job.step for job in machine.run.active.values()}
        self._uses_before: Mapping[tuple[int, int], JobUse] = {}
        if machine.run.active:
            with contextlib.suppress(StoreError):
                self._uses_before = job_use.read_attempts(uses)

    def look(self, _: float) -> None:
        """Write what there is, if that is due; never raises."""
        if self._clock() >= self._due and self._begun:
            began = self._clock()
            self._write(over=False)
            took_s = self._clock() - began
            self._due = began + max(PERIOD_S, min(took_s / MOST_SHARE, MOST_PERIOD_S))

    def close(self) -> None:
        """Write it for the last time."""
        if self._begun:
            self._write(over=True)

    @property
    def _begun(self) -> bool:
        """Whether this life has begun: earlier ones were other allocations'."""
        return len(self._machine.run.lives) > self._before

    def _write(self, *, over: bool) -> None:
        try:
            site_records.write(self._folder, *self.records(over=over))
        except StoreError as error:
            if not self._told:
                self._told = True
                self._tell(f"the site has no record of this run: {error}")

    def records(self, *, over: bool) -> tuple[Life, list[Training]]:
        """The life, and its trainings. Raises StoreError."""
        machine, speed = self._machine, self._speed
        life = machine.run.lives[-1]
        whose: dict[str, Any] = {
            "user": self._user,
            "uid": os.geteuid(),
            "batch": self._allocation.get("kind") or "none",
            "batch_job": self._allocation.get("id"),
            **{key: self._allocation.get(key) for key in ("account", "partition", "cluster")},
            "run": self._run_id,
            "life": len(machine.run.lives),
            "version": hpcsched.__version__,
        }

        def wall(at: float) -> float:
            return round(life.wall + (at - life.at) / speed, 3)

        held, uses = held_in(machine), job_use.read_attempts(self._uses)
        by_job: dict[int, tuple[Job, list[Attempt]]] = {}
        for job, attempt in attempts_in(machine):
            by_job.setdefault(job.id, (job, []))[1].append(attempt)
        trainings = []
        for job_id, (job, attempts) in by_job.items():
            used = JobUse(job=job_id)
            for attempt in attempts:
                used.add(uses.get((job_id, attempt.number), JobUse(job=job_id)))
            first, from_step = attempts[0], attempts[0].from_step
            if first.start_s < life.at:
                used.take_off(self._uses_before.get((job_id, first.number), JobUse(job=job_id)))
                from_step = self._steps_before.get(job_id, from_step)
            step: int | None = job.step if attempts[-1].to_step is None else attempts[-1].to_step
            ends = [attempt.end_s for attempt in attempts]
            trainings.append(
                Training(
                    **whose,
                    job=job_id,
                    name=job.spec.name[:256],
                    state=str(job.state),
                    start=wall(max(first.start_s, life.at)),
                    end=wall(max((machine.run.now if end is None else end) for end in ends)),
                    attempts=len(attempts),
                    steps=None if step is None else max(0, step - from_step) or None,
                    gpu_s=round(
                        sum(held.by_attempt.get((job_id, a.number), 0.0) for a in attempts) / speed, 3
                    ),
                    sampled_gpu_s=round(used.gpu_s / speed, 3),
                    busy_gpu_s=round(min(used.busy_gpu_s, used.gpu_s) / speed, 3) if used.gpu_s else None,
                    cpu_s=round(used.cpu_s, 3) if used.cpu_over_s else None,
                    max_rss_bytes=int(used.memory_mib * 2**20) or None,
                )
            )
        about = Life(
            **whose,
            start=round(life.wall, 3),
            end=wall(machine.run.now),
            gpus=life.gpus,
            gpu_s=round(held.gpu_s / speed, 3),
            idle_gpu_s=round(held.idle_s / speed, 3),
            over=over,
        )
        return about, trainings
