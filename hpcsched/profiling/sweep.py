"""The sweep over device counts: one trial a count, put together as a profile.

A trial per count, in the order the counts are given, with all repeats in one launch: launching again for
each repeat would cost more time than it measures. Where the machine drifts, give the counts in
another order and compare.
"""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hpcsched
from hpcsched.core.model import PER_GPU, JobSpec, Kind
from hpcsched.core.processes import Because, shape_of
from hpcsched.core.profile import Profile
from hpcsched.devices.base import Devices
from hpcsched.dialects import matching
from hpcsched.errors import ConfigError, LaunchError
from hpcsched.launch.base import Launcher
from hpcsched.profiling.measure import median_and_spread
from hpcsched.profiling.trial import ScalingTrial, TrialFailed, TrialResult, TrialSettings
from hpcsched.store.profiles import RateSample


@dataclass(frozen=True, kw_only=True)
class MeasuredProfile:
    """A measured profile, and the windows behind its medians."""

    profile: Profile
    samples: tuple[RateSample, ...]


def counts_for(spec: JobSpec, devices: Devices, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """The device counts to measure: those asked for, else every one the job may have.

    Raises ConfigError for a job that cannot be measured here, and for counts there are no devices for.
    """
    where = f"job {spec.name}"
    if spec.kind is Kind.REPLAY:
        raise ConfigError(where=where, key="replay", got="true", accepted="a trainer or a command to measure")
    if devices.kind == "replay":
        raise ConfigError(
            where="--devices", got="replay", accepted="cuda, cuda:N or cpu:N: pretended GPUs do not train"
        )
    if spec.cpus is not None:
        got, accepted = spec.strategy["kind"], "a job on GPUs: trainings on CPU cores are not profiled"
        raise ConfigError(where=where, key="strategy", got=got, accepted=accepted)
    if spec.nodes > 1:
        raise ConfigError(where=where, key="nodes", got=str(spec.nodes), accepted="1: one host is measured")
    if spec.restart is not None and (there := matching(spec.restart.checkpoints, Path(spec.workdir))):
        got, accepted = f"{there[0]} is there", "no checkpoints: what is measured would go on from them"
        raise ConfigError(where=where, key="checkpoints", got=got, accepted=accepted)
    here = len(devices.inventory())
    shape = shape_of(spec, None, ())
    unknown = shape.because is Because.UNKNOWN
    usable = here if unknown else shape.most or here
    most = min(here, spec.gpus_max or here, usable)
    counts = tuple(dict.fromkeys(asked)) or tuple(range(spec.gpus_min, most + 1, spec.gpus_multiple))
    for count in counts:
        if not 1 <= count <= here:
            raise ConfigError(where="--gpus", got=str(count), accepted=f"1 to {here}: so many are here")
        if count % spec.gpus_multiple:
            accepted = f"multiples of {spec.gpus_multiple}, as {spec.name} wants"
            raise ConfigError(where="--gpus", got=str(count), accepted=accepted)
    if not counts:
        raise ConfigError(
            where=where,
            key="gpus",
            got=f"at least {spec.gpus_min}",
            accepted=f"at most {here}: so many are here",
        )
    if unknown and len(counts) > 1 and counts[0] != 1:
        got = f"counts {', '.join(map(str, counts))} of a program that may not be parallel"
        raise ConfigError(where=where, key="processes", got=got, accepted=_PARALLEL)
    return counts


_PARALLEL = '1 first; or "per-gpu" (--processes per-gpu) for one process on each device, or a number'


def sweep(
    spec: JobSpec,
    *,
    counts: Sequence[int],
    devices: Devices,
    launcher: Launcher,
    settings: TrialSettings,
    global_batch: int | None = None,
    software: str = "",
    watch: Callable[[int, float], None] = lambda gpus, share: None,
    say: Callable[[str], None] = lambda text: None,
) -> MeasuredProfile:
    """Measure a job on each of these device counts; minutes, and nothing is left running at the end.

    Of a command that is not known to be parallel, and does not say so on the first count, only that one.

    Must run in the main thread: SIGINT, SIGTERM and SIGHUP end the workers first, and raise
    SystemExit(128 + N). `watch(gpus, share)` follows each trial, `say(text)` gets what it could not find
    out. Raises TrialFailed or LaunchError when any count fails; the program's output is then kept.
    """
    scratch = Path(tempfile.mkdtemp(prefix="hpcsched-profile-"))
    results: list[TrialResult] = []
    samples: list[RateSample] = []
    try:
        with ending_signals():
            for count in counts:
                trial = ScalingTrial(
                    spec=spec,
                    devices=devices,
                    chosen=devices.inventory()[:count],
                    launcher=launcher,
                    folder=scratch / f"{count}-devices",
                    settings=settings,
                    watch=partial(watch, count),
                    say=say,
                )
                result = trial.run()
                watch(count, 1.0)
                results.append(result)
                at = _now()
                samples += [
                    RateSample(gpus=count, rate=w.rate, seconds=w.seconds, at=at) for w in result.windows
                ]
                shutil.rmtree(trial.folder, ignore_errors=True)
                if count == counts[-1] or shape_of(spec, None, ()).because is not Because.UNKNOWN:
                    continue
                if not result.parallel:
                    say(f"measured on 1 device only, as {Because.UNKNOWN}; processes: {_PARALLEL}")
                    break
                spec = replace(spec, processes=PER_GPU)
    except (TrialFailed, LaunchError):
        for folder in scratch.glob("*-devices"):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    if spec.restart is not None and (left := matching(spec.restart.checkpoints, Path(spec.workdir))):
        say(
            f"its checkpoints are left in {left[0].parent}: a job would go on from them, so remove them first"
        )
    profile = _profile(spec, results, settings, devices.kind, global_batch, software)
    return MeasuredProfile(profile=profile, samples=tuple(samples))


def _profile(
    spec: JobSpec,
    results: Sequence[TrialResult],
    settings: TrialSettings,
    device: str,
    global_batch: int | None,
    software: str,
) -> Profile:
    rates = {r.gpus: median_and_spread([w.rate for w in r.windows]) for r in results}
    batches = {r.global_batch for r in results}
    program = (spec.trainer or " ".join(spec.command))[:200]
    about = f"measured by hpcsched {hpcsched.__version__} on {socket.gethostname()} at {_now()}: {program}"
    return Profile(
        model=spec.model,
        device=device,
        throughput={gpus: rate for gpus, (rate, _) in rates.items()},
        # Programs that keep the batch of a device instead would tell another one for each count.
        global_batch=global_batch or (batches.pop() if len(batches) == 1 else None),
        start_s={r.gpus: r.start_s for r in results},
        suspend_s={r.gpus: r.suspend_s for r in results if r.suspend_s is not None} or None,
        resume_s={r.gpus: r.resume_s for r in results if r.resume_s is not None} or None,
        memory_mib={r.gpus: r.memory_mib for r in results if r.memory_mib} or None,
        checkpoint_mib=max((r.checkpoint_mib for r in results if r.checkpoint_mib), default=None),
        source="measured",
        software=software,
        spread={gpus: spread for gpus, (_, spread) in rates.items() if spread is not None} or None,
        note=f"{about}; median of {settings.repeats} windows of {settings.seconds:g} s"
        f" after {settings.warmup_s:g} s of warm-up",
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def ending_signals() -> Iterator[None]:
    """Signals that end this process raise SystemExit meanwhile, so that the workers are ended first."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        for sig in ending:  # while the workers are ended, which takes bounded time
            signal.signal(sig, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a sweep needs the main thread")
    before = {sig: signal.getsignal(sig) for sig in (*ending, signal.SIGUSR1)}
    for sig in ending:
        signal.signal(sig, leave)
    # Programs send it to say that they have saved; whether they did is seen when they are gone.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
