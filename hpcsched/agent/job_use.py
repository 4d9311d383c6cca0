"""What jobs use while they run: how busy their GPUs are, the energy of these, CPU time and memory.

GPUs are looked at as a whole, so what several jobs have at once is nobody's alone. Processes are only seen on
the agent's host; a thread of its own reads them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path

from hpcsched.core.machine import Machine
from hpcsched.devices.base import Sample
from hpcsched.launch.memory import all_processes, trees, used_mib
from hpcsched.store.job_use import JobUse, append
from hpcsched.threads import started

PERIOD_S = 5.0
"""How often it is looked at, in real seconds (chosen): as often as devices are sampled."""

PROCESSES_EVERY = 4
"""Of how many looks one looks at processes too (chosen): reading them takes milliseconds for some hundred."""

WRITTEN_EVERY_S = 600.0
"""How often what attempts that run have used is written, in real seconds (chosen)."""

MOST_WATTS = 20_000.0
"""More than a device takes (chosen): a count that jumps so far was set anew, or is none."""

Holders = tuple[tuple[int, int], ...]
"""The jobs and attempts that have a GPU."""

Processes = Mapping[int, tuple[float, float]]
"""By job the CPU-seconds of its processes so far, and their resident memory in MiB."""


class JobUseRecord:
    """Adds up what is sampled, and writes it.

    Args:
        path: of the file.
        sample: the newest sample of a GPU, by its number.
        processes: reads the processes of jobs, whose leaders it is given by job; None: they are not seen.
        start: calls a function in a thread of its own.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        machine: Machine,
        sample: Callable[[int], Sample | None],
        *,
        processes: Callable[[Mapping[int, Sequence[tuple[int, int]]]], Processes] | None,
        start: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._machine, self._sample = path, machine, sample
        self._processes, self._start, self._clock = processes, start or _in_a_thread, clock
        self._uses: dict[tuple[int, int, bool], JobUse] = {}
        self._holders: dict[int, Holders] = {}
        self._energy: dict[int, float] = {}
        self._cpu_s: dict[tuple[int, int], float] = {}
        self._at, self._real = 0.0, -inf
        self._due, self._written_at, self._looks = clock(), clock(), 0
        self._reading = False
        self._read: tuple[dict[int, int], float, Processes] | None = None
        self._read_at: dict[tuple[int, int], float] = {}

    def look(self, at: float) -> None:
        """Add what is new at `at` of the run's clock; never waits."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + PERIOD_S
        passed_s, real_s = at - self._at, now - self._real
        holders = self._held()
        if passed_s > 0 and real_s < 4 * PERIOD_S:  # else all of us were stopped, or this is the first look
            for gpu in self._machine.ledger.devices:
                before, have = self._holders.get(gpu, ()), holders.get(gpu, ())
                if before == have:
                    self._add_gpu(gpu, have, passed_s, real_s)
        self._energy = {
            gpu: energy
            for gpu in self._machine.ledger.devices
            if (sample := self._sample(gpu)) and (energy := sample.energy_j) is not None
        }
        self._holders, self._at, self._real = holders, at, now
        self._look_at_processes(at)
        self._write(all_of_them=now >= self._written_at + WRITTEN_EVERY_S)

    def close(self) -> None:
        """Write what is left."""
        self._write(all_of_them=True)

    def _held(self) -> dict[int, Holders]:
        held: dict[int, Holders] = {}
        for job in self._machine.run.active.values():
            for gpu in job.current.gpus:
                held[gpu] = (*held.get(gpu, ()), (job.id, job.attempt))
        return held

    def _use_of(self, holders: Holders) -> JobUse:
        job, attempt = holders[0] if len(holders) == 1 else (0, 0)
        shared = len(holders) > 1
        key = job, attempt, shared
        return self._uses.setdefault(key, JobUse(job=job, attempt=attempt, shared=shared))

    def _add_gpu(self, gpu: int, holders: Holders, passed_s: float, real_s: float) -> None:
        sample = self._sample(gpu)
        if sample is None:
            return
        use = self._use_of(holders)
        if sample.utilisation is not None:
            use.gpu_s += passed_s
            use.busy_gpu_s += passed_s * min(1.0, max(0.0, sample.utilisation))
        if sample.energy_j is not None and gpu in self._energy:
            taken = sample.energy_j - self._energy[gpu]
            if 0 <= taken <= MOST_WATTS * real_s:
                use.energy_j += taken
                use.energy_gpu_s += passed_s

    def _look_at_processes(self, at: float) -> None:
        if (read := self._read) is not None:
            self._read, self._reading = None, False
            self._add_processes(*read)
        self._looks += 1
        processes = self._processes
        if processes is None or self._reading or self._looks % PROCESSES_EVERY:
            return
        jobs = [job for job in self._machine.run.active.values() if job.processes]
        leaders, attempts = {job.id: job.processes for job in jobs}, {job.id: job.attempt for job in jobs}

        def measure() -> None:
            self._read = attempts, at, processes(leaders)

        if jobs:
            self._reading = True
            try:
                self._start(measure)
            except OSError:  # no room for one more thread
                self._reading = False

    def _add_processes(self, attempts: Mapping[int, int], at: float, found: Processes) -> None:
        for job_id, (cpu_s, memory_mib) in found.items():
            key = job_id, attempts[job_id]
            job = self._machine.run.jobs[job_id]
            since = self._read_at.get(key, job.attempts[key[1] - 1].start_s)
            use = self._use_of((key,))
            use.cpu_s += max(0.0, cpu_s - self._cpu_s.get(key, 0.0))
            use.cpu_over_s += max(0.0, at - since)
            use.memory_mib = max(use.memory_mib, memory_mib)
            self._cpu_s[key], self._read_at[key] = max(cpu_s, self._cpu_s.get(key, 0.0)), at

    def _write(self, *, all_of_them: bool) -> None:
        """Write what attempts have used that are over, or all of them."""
        lasting = {(job.id, job.attempt) for job in self._machine.run.active.values()} | {(0, 0)}
        over = [key for key in self._uses if all_of_them or key[:2] not in lasting]
        if over:
            append(self._path, [_rounded(self._uses.pop(key)) for key in over])
        for gone in [key for key in self._read_at if key not in lasting]:
            del self._read_at[gone], self._cpu_s[gone]
        if all_of_them:
            self._written_at = self._clock()


def read_processes(leaders: Mapping[int, Sequence[tuple[int, int]]]) -> Processes:
    """The CPU time and the memory of jobs on this host; `leaders`: by job (pid, start time) of each rank."""
    import psutil

    stats, found = all_processes(), dict[int, tuple[float, float]]()
    for job_id, processes in leaders.items():
        own = [pid for pid, start in processes if pid in stats and stats[pid].start_ticks == start]
        pids, cpu_s = trees(own, stats), 0.0
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                used = psutil.Process(pid).cpu_times()
                cpu_s += used.user + used.system + used.children_user + used.children_system
        if pids:
            found[job_id] = cpu_s, used_mib(pids, inf)
    return found


def _rounded(use: JobUse) -> JobUse:
    for name in use.__struct_fields__:
        if isinstance(value := getattr(use, name), float):
            setattr(use, name, round(value, 3))
    return use


def _in_a_thread(measure: Callable[[], None]) -> None:
    started(measure, "processes of jobs")
