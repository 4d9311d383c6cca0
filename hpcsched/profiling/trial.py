"""One trial: a job's workers on some devices, launched, watched, suspended and resumed as the agent would."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcsched.contract import files, variables
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.state import State
from hpcsched.contract.words import Ready
from hpcsched.core.exits import said_exit
from hpcsched.core.model import Device, JobSpec, Restart
from hpcsched.core.processes import shape_of
from hpcsched.decoding import read_file, read_tail
from hpcsched.devices.base import Devices
from hpcsched.dialects import Reader, matching, progress_of, step_of
from hpcsched.errors import BadInput, HpcschedError
from hpcsched.launch.base import Launcher, LaunchPlan, Workers
from hpcsched.launch.environment import inherited
from hpcsched.launch.interpreters import Interpreters
from hpcsched.launch.plans import job_dir, plan_attempt
from hpcsched.launch.proc import wait_ended
from hpcsched.profiling.measure import RateMeter, Window, parse_report

ENDLESS_STEPS = 10**9
"""Steps that a measured program is told to do: more than it gets the time for."""

TERM_GRACE_S = 10.0
"""Seconds that a program has to end after SIGTERM, before it is killed (chosen)."""

TELLS_AFTER_S = 10.0
"""Time without a first step after which the user is told what is waited for (chosen)."""

MEMORY_POLL_S = 0.2
"""Seconds between looks at the devices' memory (chosen)."""

OUTPUT_POLL_S = 0.02
"""Seconds between looks at what a program that knows no contract prints and writes (chosen): as much may be
wrong with the time of a step."""


class TrialFailed(HpcschedError):
    """A program could not be measured; says on how many devices, why, and where its output is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """Settings of a trial: `repeats` windows of at least `seconds` after `warmup_s` from the first step.

    `timeout_s` is the longest wait for the next sign of life (a step, a save). `costs`: whether to
    suspend and resume the program too.
    """

    seconds: float = 5.0
    repeats: int = 3
    warmup_s: float = 2.0
    timeout_s: float = 120.0
    costs: bool = True


@dataclass(slots=True, kw_only=True)
class TrialResult:
    """The result of a trial on `gpus` devices; None is what the program or the device does not tell.

    `start_s` and `resume_s` are from the launch to the first new step, less the time that step takes
    at the measured rate; `suspend_s` from the signal until all processes are gone.
    """

    gpus: int
    windows: list[Window] = field(default_factory=list)
    start_s: float
    suspend_s: float | None = None
    resume_s: float | None = None
    memory_mib: float | None = None
    checkpoint_mib: float | None = None
    global_batch: int | None = None
    parallel: bool = False
    """Its program has said that it can be one of several ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """What a program has saved: `args` tell it to go on from there, `unknown` is why `step` is None."""

    step: int | None = None
    mib: float | None = None
    global_batch: int | None = None
    args: tuple[str, ...] = ()
    unknown: str = f"it saved no {files.STATE} with its step"


@dataclass(slots=True, kw_only=True)
class ScalingTrial:
    """Measures `spec` on `chosen` devices, in a run directory of its own, `folder`, which it makes.

    `watch(share)` is told the share of the measurement that is done, `say(text)` what the user should know.
    """

    spec: JobSpec
    devices: Devices
    chosen: tuple[Device, ...]
    launcher: Launcher
    folder: Path
    settings: TrialSettings
    watch: Callable[[float], None]
    say: Callable[[str], None]
    _memory_before: dict[int, float] = field(default_factory=dict)
    _memory_mib: float | None = None
    _output: Reader | None = None
    """What tells the steps of a program that does not tell them by the contract, as long as it does not."""

    def run(self) -> TrialResult:
        """Measure; whatever happens, no process is left. Raises TrialFailed, LaunchError."""
        self._job_dir.mkdir(mode=0o700, parents=True)
        self._memory_before = self._memory()
        meter = RateMeter(
            warmup_s=self.settings.warmup_s, seconds=self.settings.seconds, repeats=self.settings.repeats
        )
        with self._workers(attempt=1) as workers:
            to_first_step_s = self._follow(workers, meter, lambda: meter.done)
            rate = sum(w.rate for w in meter.windows) / len(meter.windows)
            result = TrialResult(
                gpus=len(self.chosen), windows=meter.windows, start_s=_overhead(to_first_step_s, meter, rate)
            )
            result.parallel = self._says_parallel()
            if self.settings.costs:
                result.suspend_s = self._suspend(workers)
        result.memory_mib = self._memory_mib
        if result.suspend_s is not None:
            saved = self._saved()
            result.checkpoint_mib, result.global_batch = saved.mib, saved.global_batch
            result.resume_s = self._resume(saved, rate)
        return result

    @property
    def _job_dir(self) -> Path:
        return job_dir(self.folder, 1)

    def _workers(self, attempt: int, args: tuple[str, ...] = ()) -> AbstractContextManager[Workers]:
        plan = plan_of(self.spec, self.devices, self.chosen, self.folder, attempt=attempt)
        output, workdir = output_of(self.folder), Path(self.spec.workdir)
        self._output = progress_of(self.spec, workdir, output, since=time.time())
        return running(self.launcher, replace(plan, argv=(*plan.argv, *args)))

    def _follow(self, workers: Workers, meter: RateMeter, enough: Callable[[], bool]) -> float:
        """Read progress until there is enough; seconds from now to the first new step."""
        launched = last_news = time.monotonic()
        first_s: float | None = None
        told = False
        for reports in self._reports(workers):
            now = time.monotonic()
            if first_s is None and not told and now - launched > TELLS_AFTER_S:
                told = True
                within = f"{self.settings.timeout_s:g} s"
                self.say(f"on {self._on()}: no progress yet; waiting up to {within} for it")
            for step, t in reports:
                if meter.add(step, t):
                    last_news = now
                    first_s = now - launched if first_s is None else first_s
            if enough() and first_s is not None:
                return first_s
            self.watch(len(meter.windows) / meter.repeats)
            code = workers.reap()
            # What an ended program has written is read to its end first.
            if not reports and (code is not None or workers.failed_early()):
                self._fail_ended(code, meter)
            if now - last_news > self.settings.timeout_s:
                self._fail_silent(meter)
        raise AssertionError("reports never end")

    def _reports(self, workers: Workers) -> Iterator[list[tuple[int, float]]]:
        """The reports that have come in, again and again, whether there are new ones or not."""
        poll, rest, looked = select.poll(), b"", 0.0
        for descriptor in workers.pidfds:
            poll.register(descriptor, select.POLLIN)
        fd = workers.progress_fd
        if fd is not None:
            poll.register(fd, select.POLLIN)
        while True:
            period_s = OUTPUT_POLL_S if self._output else MEMORY_POLL_S
            ready = {descriptor for descriptor, _ in poll.poll(period_s * 1000)}
            lines: list[bytes] = []
            if fd is not None and fd in ready:
                data = os.read(fd, 1 << 16)
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-4096:]  # a program that never ends its line must not fill our memory
                if not data:
                    poll.unregister(fd)
                    fd = None
            for descriptor in ready.intersection(workers.pidfds):
                poll.unregister(descriptor)  # readable for good: it would wake us all the time
            if time.monotonic() - looked >= MEMORY_POLL_S:
                self._look_at_memory()
                looked = time.monotonic()
            reports = [report for line in lines if (report := parse_report(line)) is not None]
            if reports:
                self._output = None  # the program's own word, and its own clock
            elif self._output is not None and (seen := self._output.read(time.time())) is not None:
                reports = [seen]
            yield reports

    def _says_parallel(self) -> bool:
        """What its ready file says, as far as it can be read."""
        try:
            word = Ready.decode(read_file(self._job_dir / files.ready(1), most_bytes=SMALL_BYTES))
        except (OSError, BadInput):
            return False
        return word.parallel or word.in_place

    def _suspend(self, workers: Workers) -> float | None:
        """Seconds from the order until all ranks have saved and left; None, with a word, if they do not."""
        restart = self.spec.restart
        by_contract = (self._job_dir / files.ready(1)).exists()
        if not by_contract and restart is None:
            self._no_costs("it does not say that it can be suspended")
            return None
        before = self._newest()
        asked = time.monotonic()
        if by_contract:
            workers.signal(signal.SIGTSTP)
        elif restart is not None and restart.signal and workers.catches(signal.Signals[restart.signal]):
            workers.ask_to_save(signal.Signals[restart.signal])
        else:
            self._no_costs("it saves only as it goes, and not when it is asked to")
            return None
        wait_ended(workers.pidfds, self.settings.timeout_s)
        gone = time.monotonic()
        code = workers.reap()
        if code == SUSPENDED or (code is not None and not by_contract and self._newest() != before):
            return gone - asked
        if code is None:
            self._no_costs(f"it had not left {self.settings.timeout_s:g} s after it was asked to save")
        else:
            self._no_costs(f"it ended with {said_exit(code)} when it was asked to save")
        return None

    def _resume(self, saved: _Saved, rate: float) -> float | None:
        """Seconds a resumed program needs before its steps go on; None where it recorded no step."""
        from_step = saved.step
        if from_step is None:
            self._no_costs(saved.unknown)
            return None
        meter = RateMeter(warmup_s=0.0, seconds=0.0, repeats=1, from_step=from_step)
        try:
            with self._workers(attempt=2, args=saved.args) as workers:
                to_first_step_s = self._follow(workers, meter, lambda: meter.first is not None)
        except TrialFailed as error:
            self._no_costs(f"resumed at step {from_step}, {error}")
            return None
        return _overhead(to_first_step_s, meter, rate)

    def _no_costs(self, why: str) -> None:
        self.say(f"on {self._on()}: not all costs of a restart are known: {why}")

    def _saved(self) -> _Saved:
        """What it has saved, as far as that can be known."""
        try:
            record = State.decode(read_file(self._job_dir / files.STATE, most_bytes=SMALL_BYTES))
        except (OSError, BadInput):
            record = None
        if record is not None:
            size = _size_mib(record.checkpoint, self._job_dir)
            return _Saved(step=record.step, mib=size, global_batch=_batch(record))
        restart, newest = self.spec.restart, self._newest()
        if restart is None or newest is None:
            return _Saved()
        path = newest[1]
        return _Saved(
            step=step_of(path),
            mib=_size_mib(str(path), path.parent),
            args=_told(restart, path),
            unknown=f"nothing says of which step {path} is",
        )

    def _newest(self) -> tuple[float, Path] | None:
        """The newest checkpoint of a program that saves by itself, and when it was written."""
        restart, found = self.spec.restart, list[tuple[float, Path]]()
        for path in matching(restart.checkpoints, Path(self.spec.workdir)) if restart else []:
            last = path / restart.complete if restart and restart.complete else path
            with contextlib.suppress(OSError):
                found.append((last.stat().st_mtime, path))
        return max(found, default=None)

    def _memory(self) -> dict[int, float]:
        """Used memory of the chosen devices in MiB, of those that can be measured."""
        chosen = {d.index for d in self.chosen}
        return {
            s.gpu: s.memory_mib for s in self.devices.sample() if s.gpu in chosen and s.memory_mib is not None
        }

    def _look_at_memory(self) -> None:
        """Keep the most that any of the devices has used beyond what was used before the launch."""
        for gpu, used in self._memory().items():
            used -= self._memory_before.get(gpu, 0.0)
            if used > (self._memory_mib or 0.0):
                self._memory_mib = used

    def _fail_ended(self, code: int | None, meter: RateMeter) -> None:
        how = "one of its ranks failed" if code is None else f"it ended with {said_exit(code)}"
        raise TrialFailed(
            f"on {self._on()}: {how} at step {meter.step}, before there was enough to measure"
            f" ({len(meter.windows)} of {meter.repeats} windows){self._last_words()}"
        )

    def _fail_silent(self, meter: RateMeter) -> None:
        what = "no progress" if meter.first is None else f"no progress past step {meter.step}"
        pattern = self.spec.progress_pattern
        found = " --progress-pattern to find its steps in what it prints, as in 'step (\\d+)',"
        if pattern:
            found = f" a pattern that finds its steps ({pattern} does not),"
        raise TrialFailed(
            f"on {self._on()}: {what} in {self.settings.timeout_s:g} s; the program has to write lines like"
            f' {{"step": 1, "t": 0.5}} to the descriptor in {variables.PROGRESS_FD},'
            f"{found}"
            f" or it needs a longer --timeout{self._last_words()}"
        )

    def _on(self) -> str:
        return f"{len(self.chosen)} device{'s' * (len(self.chosen) > 1)}"

    def _last_words(self) -> str:
        try:
            text = read_tail(output_of(self.folder), 4096)
        except (OSError, BadInput):
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"; {output_of(self.folder)} ends: {lines[-1][:200]}" if lines else "; it wrote no output"


def plan_of(
    spec: JobSpec, devices: Devices, chosen: tuple[Device, ...], folder: Path, *, attempt: int
) -> LaunchPlan:
    """The launch plan, as the agent would make it, with `folder` as run directory and work without end.

    The first attempt starts afresh, later ones resume.
    """
    # A save in the middle of a window would be measured as slow steps.
    endless = replace(spec, steps=ENDLESS_STEPS, checkpoint_every_s=float(ENDLESS_STEPS))
    return plan_attempt(
        endless,
        job_id=1,
        attempt=attempt,
        run_id=f"profile-{os.getpid()}",
        run_dir=folder,
        output=output_of(folder),
        devices=chosen,
        resume=attempt > 1,
        per_gpu=shape_of(spec, None, ()).per_gpu,
    )


def argv_of(plan: LaunchPlan) -> tuple[str, ...]:
    """A plan's command, in words for people; raises BadEnvironment."""
    if not plan.module:
        return plan.argv
    named = Interpreters(inherited(os.environ)).programs(plan.environment)
    return named.python if named else "python", "-m", plan.module


def output_of(folder: Path) -> Path:
    """The file that a trial's program writes to; beside its folder, so that it can outlive it."""
    return folder.with_suffix(".out")


@contextmanager
def running(launcher: Launcher, plan: LaunchPlan) -> Iterator[Workers]:
    """Launch a program; whatever becomes of it, nothing of it is left afterwards."""
    workers = launcher.launch(plan)
    try:
        yield workers
    finally:
        try:
            stop(workers)
        finally:
            workers.close()


def stop(workers: Workers) -> None:
    """End all ranks and what they started: SIGTERM, and SIGKILL to those that stay."""
    try:
        if workers.reap() is None:
            workers.signal(signal.SIGTERM)
            wait_ended(workers.pidfds, TERM_GRACE_S)
    finally:  # also when a signal ends the wait above
        if workers.reap() is None:
            workers.signal(signal.SIGKILL)
            wait_ended(workers.pidfds, TERM_GRACE_S)
            workers.reap()


def _told(restart: Restart, checkpoint: Path) -> tuple[str, ...]:
    """The arguments that make a program go on from a checkpoint, on as many devices as it was saved on."""
    values = {"{checkpoint}": str(checkpoint), "{accumulation}": str(restart.accumulation)}
    words = list(restart.resume_args)
    for placeholder, value in values.items():
        words = [word.replace(placeholder, value) for word in words]
    return tuple(words)


def _overhead(to_first_step_s: float, meter: RateMeter, rate: float) -> float:
    """What is left of the time to the first report once its steps are taken off."""
    steps = meter.first[0] - meter.from_step if meter.first else 0
    return max(0.0, to_first_step_s - steps / rate)


def _batch(record: State) -> int | None:
    """Samples a step, where the record has both and they go together."""
    step, samples = record.step, record.samples
    return samples // step if step and samples and samples > 0 and samples % step == 0 else None


def _size_mib(path: str | None, folder: Path) -> float | None:
    """Size of a checkpoint, a file or a folder; None if there is none."""
    if not path:
        return None
    found = folder / path
    inside = [found] if found.is_file() else [f for f in found.rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in inside) / 2**20 if inside else None
