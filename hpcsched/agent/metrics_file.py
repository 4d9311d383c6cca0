"""The state of a run for Prometheus: a text file that node_exporter's textfile collector reads.

The exposition format of text, version 0.0.4. What there is of jobs is bounded: those that run have lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState, Progress
from hpcsched.devices.base import Sample
from hpcsched.errors import StoreError
from hpcsched.store.files import write_atomically

PERIOD_S = 15.0
"""How often it is written (chosen): as often as servers ask, or oftener."""

MOST_SHARE = 0.01
"""The largest share of the time that goes into it (chosen): with a million jobs counting takes long."""

MOST_JOBS = 200
"""Jobs with lines of their own (chosen): those that run, the first by id. A server keeps each for weeks."""

STATES = ("RUNNING", "DRAINING", "STOPPED", "FINISHED")

Labels = Mapping[str, str]


class Family(NamedTuple):
    """A metric: its samples, by labels."""

    name: str
    kind: str
    about: str
    samples: Sequence[tuple[Labels, float]]


class MetricsFile:
    """Writes the file.

    Args:
        sample: the newest sample of a GPU, by its number.
        progress: that of the jobs that run, by id.
        saved_at: the Unix time of a job's newest checkpoint; None: there is none, or it is not known.
        tell: takes a line that people should see.
        clock: monotonic seconds; `wall`: Unix time.
    """

    def __init__(
        self,
        path: Path,
        machine: Machine,
        *,
        sample: Callable[[int], Sample | None],
        progress: Callable[[], Mapping[int, Progress]],
        saved_at: Callable[[int], float | None],
        tell: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._machine, self._sample = path, machine, sample
        self._progress, self._saved_at, self._tell = progress, saved_at, tell
        self._clock, self._wall = clock, wall
        self._due, self._at = clock(), 0.0
        self._failed = False
        self._over_s, self._before, self._reopenings = 0.0, float("-inf"), 0
        """What jobs have held that ended before then, and how many had come back by then."""

    def look(self, at: float) -> None:
        """Write it where that is due; `at`: now, on the run's clock."""
        now = self._clock()
        if now >= self._due:
            self._at = at
            self._write("DRAINING" if self._machine.deadline.draining else "RUNNING", at)
            self._due = now + max(PERIOD_S, (self._clock() - now) / MOST_SHARE)

    def close(self) -> None:
        """Write how it ended."""
        self._write("FINISHED" if self._machine.run.finished else "STOPPED", self._machine.run.now)

    def _write(self, state: str, at: float) -> None:
        try:
            write_atomically(self._path, exposition(self._families(state, at)).encode(), mode=0o644)
        except StoreError as error:
            if not self._failed:
                self._tell(f"{error} (the run goes on)")
            self._failed = True
        else:
            self._failed = False

    def _families(self, state: str, at: float) -> Iterator[Family]:
        run, ledger = self._machine.run, self._machine.ledger
        mine = {"run": run.run_id}
        yield Family(
            "hpcsched_run_state",
            "gauge",
            "1 for the state of the run, 0 for the others.",
            [({**mine, "state": one}, float(one == state)) for one in STATES],
        )
        counts = run.jobs.counts()
        yield Family(
            "hpcsched_jobs",
            "gauge",
            "Jobs of the run by state.",
            [({**mine, "state": str(one)}, counts[one]) for one in JobState],
        )
        there, free = len(ledger.devices), len(ledger.free)
        gpus = {"busy": there - free, "idle": free, "lost": len(ledger.lost)}
        yield Family(
            "hpcsched_gpus",
            "gauge",
            "GPUs of the run: held by jobs, held by none, and lost.",
            [({**mine, "state": one}, count) for one, count in gpus.items()],
        )
        yield Family(
            "hpcsched_held_gpu_seconds_total",
            "counter",
            "GPU-seconds that jobs have held.",
            [(mine, round(self._held_s(at), 3))],
        )
        yield from self._of_gpus(mine)
        yield from self._of_jobs(mine)
        yield Family(
            "hpcsched_written_timestamp_seconds",
            "gauge",
            "Unix time at which this was written.",
            [(mine, round(self._wall(), 3))],
        )

    def _of_gpus(self, mine: Labels) -> Iterator[Family]:
        found = [
            ({**mine, "gpu": str(gpu), "host": device.host}, sample)
            for gpu, device in sorted(self._machine.ledger.devices.items())
            if (sample := self._sample(gpu)) is not None
        ]
        used = [(labels, s.memory_mib * 2**20) for labels, s in found if s.memory_mib is not None]
        yield Family(
            "hpcsched_gpu_utilisation_ratio",
            "gauge",
            "Share of the time for which the GPU was busy, by its newest sample.",
            [(labels, s.utilisation) for labels, s in found if s.utilisation is not None],
        )
        yield Family("hpcsched_gpu_memory_used_bytes", "gauge", "Memory in use on the GPU.", used)
        yield Family(
            "hpcsched_gpu_energy_joules_total",
            "counter",
            "Energy that the GPU took since its driver was loaded.",
            [(labels, s.energy_j) for labels, s in found if s.energy_j is not None],
        )

    def _of_jobs(self, mine: Labels) -> Iterator[Family]:
        jobs = sorted(self._machine.run.active.values(), key=lambda job: job.id)[:MOST_JOBS]
        progress = self._progress()
        named = [({**mine, "job": str(job.id), "name": job.spec.name}, job) for job in jobs]
        about_steps = [(labels, job.steps) for labels, job in named if job.steps is not None]
        saved = [(labels, self._saved_at(job.id)) for labels, job in named]
        now = self._wall()
        yield Family(
            "hpcsched_job_gpus",
            "gauge",
            "GPUs that the job has.",
            [(labels, len(job.current.gpus)) for labels, job in named],
        )
        yield Family(
            "hpcsched_job_step",
            "gauge",
            "Steps that the job has made, where it tells them.",
            [(labels, step) for labels, job in named if (step := _step(job, progress)) is not None],
        )
        yield Family("hpcsched_job_steps", "gauge", "Steps that the job is to make.", about_steps)
        yield Family(
            "hpcsched_job_checkpoint_age_seconds",
            "gauge",
            "Time since the job's newest checkpoint.",
            [(labels, round(max(0.0, now - at), 3)) for labels, at in saved if at is not None],
        )

    def _held_s(self, at: float) -> float:
        run, now_s, over_s = self._machine.run, 0.0, 0.0
        if run.reopenings != self._reopenings:
            self._reopenings, self._over_s, self._before = run.reopenings, 0.0, float("-inf")
        for job in run.jobs.since(self._before):
            if job.state.final and job.ended_s is not None and job.ended_s < run.now:
                over_s += self._held_by(job, at)
            else:
                now_s += self._held_by(job, at)
        self._over_s, self._before = self._over_s + over_s, run.now
        return self._over_s + now_s

    def _held_by(self, job: Job, at: float) -> float:
        held_from_s = self._machine.ledger.held_from_s
        return sum(
            len(attempt.gpus) * max(0.0, (at if attempt.end_s is None else attempt.end_s) - from_s)
            for attempt in job.attempts
            if (from_s := held_from_s(job, attempt)) is not None
        )


def _step(job: Job, progress: Mapping[int, Progress]) -> int | None:
    seen = progress.get(job.id)
    if seen is not None and seen.attempt == job.attempt:
        return max(job.step, seen.step)
    return job.step if job.reports else None


def exposition(families: Iterable[Family]) -> str:
    """The text of these metrics; of one without samples there is none."""
    lines = []
    for name, kind, about, samples in families:
        if samples:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            given = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{given}}} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
