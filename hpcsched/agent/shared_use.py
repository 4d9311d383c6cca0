"""What jobs that share devices use of them: memory, and the share of the time for which they have them busy.

A CPU slot's processes are looked at one by one. A GPU is looked at as a whole: what it has in use when a job
is alone there is that job's, and what it has more when one comes is the newcomer's. So it is known in
containers, under MPS and on other hosts too, where the driver's process numbers are not ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from hpcsched.agent.job_use import read_processes
from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.model import Device, JobState
from hpcsched.devices.base import Sample
from hpcsched.devices.cpu import cpus_of

PERIOD_S = 2.0
"""How often they are looked at (chosen): a look at some hundred processes takes milliseconds."""

WARM_S, COLD_S = 10.0, 30.0
"""How busy a job keeps its device says nothing for so many seconds after it is ready; after its start, where
it never says that it is (chosen)."""

NEWS_MEMORY, NEWS_BUSY = 0.05, 0.1
"""What is told: memory that is more by this share, a busy share that differs by so much (chosen)."""


@dataclass(slots=True)
class _Seen:
    """An attempt, and what was told of it."""

    attempt: int
    memory_mib: float = 0.0
    busy: float | None = None
    cpu_s: float | None = None
    at: float = 0.0
    samples: list[float] = field(default_factory=list)


class SharedUseMeter:
    """Looks at the jobs that share devices.

    Args:
        sample: the newest sample of a GPU, by its number; None: there is none.
        host: the name of this host; processes of others are not seen here.
        settle_s: time after somebody has come to a GPU, or left it, in which samples may be of before that.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        machine: Machine,
        sample: Callable[[int], Sample | None],
        *,
        host: str,
        settle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine, self._sample, self._host, self._clock = machine, sample, host, clock
        self._sharing, self._settle_s = machine.mechanism(Sharing), settle_s
        self._there: dict[int, tuple[tuple[tuple[int, int], ...], float]] = {}
        """By GPU who has been there since when."""
        self._seen: dict[int, _Seen] = {}
        self._due = -inf

    def look(self, at: float) -> list[ev.Event]:
        """What is new of them; `at`: now, on the run's clock."""
        now = self._clock()
        if not self._sharing.used or now < self._due:
            return []
        self._due = now + PERIOD_S
        jobs = [job for job in self._machine.run.active.values() if self._sharing.with_it(job)]
        jobs = [job for job in jobs if job.state is JobState.RUNNING]
        self._seen = {job.id: self._of(job) for job in jobs}
        told = [self._told(job, at, *self._use(job, now)) for job in jobs]
        return [event for event in told if event is not None]

    def _of(self, job: Job) -> _Seen:
        seen = self._seen.get(job.id)
        return seen if seen and seen.attempt == job.attempt else _Seen(job.attempt)

    def _use(self, job: Job, now: float) -> tuple[float | None, float | None]:
        device = self._machine.ledger.devices.get(job.gpus[0])
        if device is None:
            return None, None
        if device.kind == "cpu":
            return self._of_processes(job, device, now) if device.host == self._host else (None, None)
        return self._of_gpu(job, device)

    def _told(self, job: Job, at: float, memory_mib: float | None, busy: float | None) -> ev.Event | None:
        seen = self._seen[job.id]
        if at < _warm_from_s(job):
            busy = None
        more = memory_mib is not None and memory_mib > seen.memory_mib * (1 + NEWS_MEMORY)
        other = busy is not None and (seen.busy is None or abs(busy - seen.busy) >= NEWS_BUSY)
        if not (more or other):
            return None
        if more and memory_mib is not None:
            seen.memory_mib = memory_mib
        seen.busy = busy if other else seen.busy
        return ev.DeviceUseMeasured(
            at=at,
            job_id=job.id,
            attempt=job.attempt,
            memory_mib=memory_mib if more else None,
            busy=busy if other else None,
        )

    def _of_processes(self, job: Job, device: Device, now: float) -> tuple[float | None, float | None]:
        used = read_processes({job.id: job.processes}).get(job.id)
        if used is None:
            return None, None
        cpu_s, memory_mib = used
        seen = self._seen[job.id]
        before_s, since, (seen.cpu_s, seen.at) = seen.cpu_s, seen.at, (cpu_s, now)
        busy = None
        if before_s is not None and now > since:
            cores = max(1, len(cpus_of(device.handle)))
            busy = min(1.0, max(0.0, cpu_s - before_s) / (now - since) / cores)
        return memory_mib, _mean_of(seen, busy)

    def _of_gpu(self, job: Job, device: Device) -> tuple[float | None, float | None]:
        sample, members = self._sample(device.index), self._sharing.members(device.index)
        there = tuple((member.id, member.attempt) for member in members)
        if self._there.get(device.index, ((), 0.0))[0] != there:
            self._there[device.index] = there, self._clock()
        settled = self._clock() - self._there[device.index][1] >= self._settle_s
        if not settled or sample is None or sample.memory_mib is None:
            return None, None
        if len(members) == 1:
            return sample.memory_mib, _mean_of(self._seen[job.id], sample.utilisation)
        known = [self._sharing.shares.use.get(other.id) for other in members if other is not job]
        mibs = [use.memory_mib if use else None for use in known]
        if job is not members[-1] or any(mib is None for mib in mibs):
            return None, None
        return max(0.0, sample.memory_mib - sum(mib or 0.0 for mib in mibs)), None


def _warm_from_s(job: Job) -> float:
    attempt = job.current
    return attempt.start_s + COLD_S if attempt.ready_s is None else attempt.ready_s + WARM_S


def _mean_of(seen: _Seen, busy: float | None) -> float | None:
    """Of the newest five: one second of a training may be a checkpoint."""
    if busy is None:
        return None
    seen.samples = [*seen.samples[-4:], busy]
    return sum(seen.samples) / len(seen.samples)
