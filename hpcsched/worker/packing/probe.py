"""`python -m hpcsched.worker.packing.probe`: what steps take alone and packed (pack, section 4.2).

The environment has the request, a JSON object (see `PackProbeRequest`). After each finding the file `result`
is replaced by all that is known so far (see `PackTimes`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from hpcsched.compat import dataclass
from hpcsched.contract import variables
from hpcsched.contract.environment import Reader
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.worker.load import load_trainer
from hpcsched.worker.process.contract import JobEnv, say, write_atomically
from hpcsched.worker.process.startup import fewer_collections, run_to_the_end

if TYPE_CHECKING:
    from hpcsched.worker.packing.engine import Pack
    from hpcsched.worker.packing.member import Member
    from hpcsched.worker.session.data_parallel import DataParallel
    from hpcsched.worker.session.session import Session
    from hpcsched.worker.session.trainer import Parts

ENDLESS = 10**9
"""Steps of a training that is not to end by itself."""

WARM_UP = 5
"""Steps alone, or batches read, before any is measured."""

WINDOW_S, LEAST = 0.02, 3
"""A window is at least so long, and of one step; so many windows are measured whatever time they take."""

MOST_STEPS = 64
"""Then it ends even if its members are not equally far: some batches meet rarely."""

SETTLING = 1000
"""Steps after which a pack is measured as it is: no trial of modes takes nearly as many."""

SIGN_S = 0.5
"""Between two signs of life."""


@dataclass(frozen=True, kw_only=True)
class PackProbeRequest:
    """What to measure, each for `seconds`: every job alone, then the `packs`, lists of numbers of jobs.

    A job is a table with its `trainer` and `args`.
    """

    jobs: list[dict[str, Any]]
    packs: list[list[int]]
    result: str
    seconds: float = 2.0
    mode: str = "auto"


@dataclass(kw_only=True)
class PackTimes:
    """What was measured. By job: `batches` in samples, and in windows the seconds a sample takes alone
    (`alone_s`) and to be read (`input_s`). `load_s` are seconds of bringing each member to the device.

    `packs` are tables with `members`; windows of seconds a sample (`sample_s`) in the `mode` they were made
    in; the `memory_mib` of a GPU at the peak; seconds beyond those of the steps made meanwhile for all to
    join (`join_s`) and one to leave (`leave_s`); whether they are `stackable`, or why not (`unstackable`).
    `full` are the members of the first pack that the memory was too small for.
    """

    batches: list[int] = field(default_factory=list)
    alone_s: list[list[float]] = field(default_factory=list)
    input_s: list[list[float]] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    packs: list[dict[str, Any]] = field(default_factory=list)
    full: list[int] | None = None
    about: str = ""


def main() -> int:
    """Measure; returns the exit code. Errors in the user's own code keep their traceback."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        env, asked = JobEnv.from_environ(), Reader(os.environ).table(variables.PACKS)
        if env is None or not asked:
            raise ConfigError(
                where="environment",
                key=variables.PACKS,
                got="not set",
                accepted="a start by `hpcsched profile pack`, which sets it",
            )
        # Its sessions are those of programs by themselves: nothing is saved, and a signal ends them.
        del os.environ[variables.JOB_ID]
        PackProbe(PackProbeRequest(**asked), env).run()
    except HpcschedError as error:
        say(str(error))
        return error.exit_code
    return 0


class PackProbe:
    """Measures on this process's device."""

    def __init__(self, request: PackProbeRequest, env: JobEnv) -> None:
        with fewer_collections():
            import torch

            from hpcsched.worker.ranks.process_group import own_device

            self._trainers = [load_trainer(job["trainer"]) for job in request.jobs]
        self._request, self._env = request, env
        self._torch, self._device = torch, own_device(env)
        self._found = PackTimes(
            alone_s=[[] for _ in request.jobs],
            input_s=[[] for _ in request.jobs],
            about=f"torch {torch.__version__}"
            + (f", {torch.get_num_threads()} threads" if self._device.type == "cpu" else ""),
        )
        self._next_sign = 0.0

    def run(self) -> None:
        """Measure all; alone a part of the time before each pack and after the last, as machines get faster
        and slower."""
        share_s = self._request.seconds / (len(self._request.packs) + 1)
        for members in self._request.packs:
            self._all_alone(share_s)
            try:
                self._packed(members)
            except Exception as error:
                if not _no_room(error):
                    raise
                self._found.full = members
                break
        self._all_alone(share_s)

    # -- alone -----------------------------------------------------------------------------------------

    def _all_alone(self, seconds: float) -> None:
        for job in range(len(self._request.jobs)):
            self._clear()
            try:
                self._alone(job, seconds)
            except Exception as error:
                if not _no_room(error):
                    raise
                where, got = self._request.jobs[job]["trainer"], "out of memory with one model alone"
                raise ConfigError(where=where, got=got, accepted="a smaller model or batch") from error
        self._write()

    def _alone(self, job: int, seconds: float) -> None:
        """Some windows of a job alone; the first time, some of reading its samples as well."""
        from hpcsched.worker.session.data_parallel import DataParallel
        from hpcsched.worker.session.session import session_of

        parts = self._build(job)
        strategy = DataParallel(parts)
        session = session_of(parts, strategy, total_steps=ENDLESS)
        found = self._repeat(_steps(session, strategy), parts.global_batch, seconds)
        if not self._found.alone_s[job]:
            batches = strategy.batches(loaders=parts.loaders)
            self._found.batches.append(parts.global_batch)
            self._found.input_s[job] = self._repeat(batches, parts.global_batch, seconds / 2)
            self._tell(job=job, alone_s=median(found) * parts.global_batch)
        self._found.alone_s[job] += found

    def _repeat(self, steps: Iterator[Any], batch: int, seconds: float) -> list[float]:
        for _ in range(WARM_UP):
            next(steps)
            self._alive()

        def step() -> float:
            next(steps)
            return batch

        return self._windows(step, seconds)

    # -- packed ----------------------------------------------------------------------------------------

    def _packed(self, jobs: list[int]) -> None:
        """A pack from the loading of its members until one has left it. Raises where there is no room."""
        from hpcsched.worker.packing.api import free
        from hpcsched.worker.packing.engine import Pack
        from hpcsched.worker.packing.failures import Failed

        self._clear()
        members = [self._load(job) for job in jobs]
        pack = Pack(self._device, mode=self._request.mode)
        try:
            began = self._now()
            pack.join(*members)
            trials = self._settle(pack)
            joining_s, joined = self._now() - began, _clock(members)
            times = self._windows(lambda: _advance(pack), self._request.seconds, even=lambda: _even(pack))
            sample_s = median(times)
            modes = sorted({group.mode for group in pack.groups})
            memory_mib = self._peak_mib()
            stays, began = members[:-1], self._now()
            before = _clock(stays)
            free(members[-1], pack)
            pack.step()
            pack.settle()
            leaving_s = self._now() - began - (_clock(stays) - before) * sample_s
        except Failed as failed:
            raise failed.errors[0][1] from None
        tried = [*modes, *(mode for trial in trials for mode in trial.times)]
        stackable = any(mode.startswith("stacked") for mode in tried)
        refused = [w for trial in trials for mode, w in trial.refused.items() if mode.startswith("stacked")]
        self._found.packs.append(
            {
                "members": jobs,
                "sample_s": times,
                "mode": "+".join(modes),
                "memory_mib": memory_mib,
                "join_s": max(0.0, joining_s - joined * sample_s),
                "leave_s": max(0.0, leaving_s),
                "stackable": stackable,
                "unstackable": None if stackable else next(iter(refused), None),
            }
        )
        self._tell(members=jobs, step_s=sample_s * members[0].batch, mode="+".join(modes))

    def _load(self, job: int) -> Member:
        """The paper's `load`, timed."""
        from hpcsched.worker.packing.api import load

        began = self._now()
        member = load(self._build(job), name=f"job {job}", steps=ENDLESS)
        self._found.load_s.append(self._now() - began)
        self._alive()
        return member

    def _settle(self, pack: Pack) -> list[Any]:
        """Make steps until the pack's modes are found; returns the trials that there were."""
        trials: dict[int, Any] = {}
        for _ in range(SETTLING):
            trials.update((id(group), group.trial) for group in pack.groups if group.trial is not None)
            if all(
                group.trial is None and group.wanted == group.mode and not (group.first or group.careful)
                for group in pack.groups
            ):
                break
            pack.step()
            self._alive()
        pack.settle()
        return list(trials.values())

    # -- measuring -------------------------------------------------------------------------------------

    def _windows(
        self, step: Callable[[], float], seconds: float, *, even: Callable[[], bool] = lambda: True
    ) -> list[float]:
        """Seconds a sample in each window; `step` returns its samples, a window ends where it is `even`."""
        found: list[float] = []
        until = self._now() + seconds
        while len(found) < LEAST or time.perf_counter() < until:
            began, samples, steps = self._now(), 0.0, 0
            while not (
                samples and time.perf_counter() - began >= WINDOW_S and (even() or steps >= MOST_STEPS)
            ):
                samples += step()
                steps += 1
                self._alive()
            found.append((self._now() - began) / samples)
        return found

    def _now(self) -> float:
        """The time when all that the device was given to do is done."""
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _clear(self) -> None:
        """Let go of what was measured before."""
        gc.collect()
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()
            self._torch.cuda.reset_peak_memory_stats(self._device)

    def _peak_mib(self) -> float | None:
        """Of a GPU's memory. A process on the CPU holds libraries, and much that it no longer needs: its size
        says little of its models."""
        if self._device.type != "cuda":
            return None
        return float(self._torch.cuda.max_memory_allocated(self._device)) / 2**20

    def _build(self, job: int) -> Parts:
        from hpcsched.worker.session.trainer import build

        parts = build(self._trainers[job], self._request.jobs[job]["args"])
        parts.model.train()
        return parts

    # -- who wants to know -----------------------------------------------------------------------------

    def _alive(self) -> None:
        """Give a sign of life now and then, and leave when whoever started us is gone."""
        if time.monotonic() < self._next_sign:
            return
        self._next_sign = time.monotonic() + SIGN_S
        if self._env.notify_pid is not None and os.getppid() != self._env.notify_pid:
            raise SystemExit("hpcsched: whoever wanted this profile is gone")
        self._tell()

    def _tell(self, **facts: Any) -> None:
        if self._env.progress_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._env.progress_fd, json.dumps(facts).encode() + b"\n")

    def _write(self) -> None:
        write_atomically(Path(self._request.result), json.dumps(asdict(self._found)).encode())


def _steps(session: Session, strategy: DataParallel) -> Iterator[None]:
    """The loop of data parallel on one rank, step by step."""
    for _ in session.steps():
        strategy.train_step()
        yield


def _clock(members: list[Member]) -> float:
    """Samples that each of them has made, on average; 0 for nobody."""
    return fmean(member.clock for member in members) if members else 0.0


def _advance(pack: Pack) -> float:
    """A step; how many samples that is for each member, on average."""
    before = _clock(pack.members)
    pack.step()
    return _clock(pack.members) - before


def _even(pack: Pack) -> bool:
    """Whether all members are equally far, and no step has been put off."""
    behind = any(group.runner.ahead for group in pack.groups)
    return not behind and len({member.clock for member in pack.members}) == 1


def _no_room(error: BaseException) -> bool:
    """Whether something has failed for want of memory; what it holds is let go of then."""
    from hpcsched.worker.packing.failures import OutOfMemory, let_go, out_of_memory

    if not (isinstance(error, OutOfMemory) or out_of_memory(error)):
        return False
    let_go(error)
    return True


if __name__ == "__main__":
    run_to_the_end(main)
