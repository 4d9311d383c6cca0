"""The queue of a demo: real trainings, as long as they shall be on this machine, or pretended ones."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.cli.common import plural
from hpcsched.cli.demo.text import say, title
from hpcsched.core.nouns import SLOT, noun

if TYPE_CHECKING:
    from hpcsched.core.model import JobSpec
    from hpcsched.core.profile import Profile

SLOTS = 2
PRETENDED_GPUS, PRETENDED_SPEED = 6, 40
PRETENDED_PROFILES = "marble-summit"

SHARES = {"small-a": 0.18, "small-b": 0.32, "small-c": 0.22, "wide": 0.28}
"""Each training's part of the time that all take one after the other (chosen): the wide one begins before the
last small one ends, and goes on after it."""

COUNT_S = 7.0
"""About what it takes to measure a model on one number of slots."""

DATABASE = "hpcsched.db"

NO_TORCH = (
    "PyTorch is not installed here, so GPUs and trainings are pretended. For real ones install"
    " hpcsched[torch,report]."
)


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Jobs, their profiles by model, and the devices for them, in a folder of the demo's own.

    `speed`: how much faster than the clock it goes.
    """

    folder: Path
    jobs: Path
    specs: Sequence[JobSpec]
    profiles: Mapping[str, Profile]
    devices: str
    gpus: int
    speed: float = 1.0

    @property
    def pretended(self) -> bool:
        return self.speed != 1.0


def measured_queue(folder: Path, seconds: float) -> Queue:
    """Measure the models on the slots; trainings of them that take so long, one after the other."""
    from hpcsched import jobfile
    from hpcsched.cli.profile.scaling import measured
    from hpcsched.devices import open_devices
    from hpcsched.profiling.sweep import counts_for
    from hpcsched.profiling.trial import TrialSettings
    from hpcsched.store.database import Database

    text = Path(__file__).with_name("trainings.toml").read_text(encoding="utf-8")
    trainings = _parsed(text)
    models = list({job.model: job for job in trainings}.values())
    say(
        f"A queue of {len(trainings)} real trainings on {SLOTS} CPU slots, which stand for GPUs. It takes"
        f" one to two minutes, and writes into {folder}. Ctrl-C ends it."
    )
    if len(os.sched_getaffinity(0)) < SLOTS:
        say("This machine has one core, which both CPU slots share: there is little to gain here.")
    title(f"1. Measure how each model scales (about {COUNT_S * SLOTS * len(models):.0f} s)")
    settings = TrialSettings(seconds=1.5, repeats=2, warmup_s=1.0, costs=False)
    devices = f"cpu:{SLOTS}"
    opened = open_devices(devices, socket.gethostname())
    profiles: dict[str, Profile] = {}
    try:
        with Database(folder / DATABASE) as database:
            for spec in models:
                found = measured(spec, counts_for(spec, opened), opened, settings, None, "")
                database.record_profile(found.profile, found.samples)
                profiles[spec.model] = found.profile
                say(said_speeds(found.profile), indent="   ")
    finally:
        opened.close()
    jobs = folder / "jobs.toml"
    jobs.write_text(with_steps(text, steps_for(trainings, profiles, seconds)), encoding="utf-8")
    specs = jobfile.load(jobs, workdir=Path.cwd()).jobs
    return Queue(
        folder=folder,
        jobs=jobs,
        specs=specs,
        profiles=profiles,
        devices=devices,
        gpus=SLOTS,
    )


def pretended_queue(folder: Path, *, missing: bool) -> Queue:
    """Stand-ins on GPUs that are none, with shipped profiles; `missing`: as PyTorch is not here."""
    from hpcsched import jobfile
    from hpcsched.store.profiles import load_profiles

    if missing:
        say(NO_TORCH)
    jobs = folder / "jobs.toml"
    shutil.copyfile(Path(__file__).with_name("pretended.toml"), jobs)
    specs = jobfile.load(jobs, workdir=Path.cwd()).jobs
    say(
        f"{len(specs)} stand-ins for trainings on {PRETENDED_GPUS} pretended GPUs: real processes that start,"
        f" save and go on, but compute nothing, {PRETENDED_SPEED} times faster than the clock. Their speeds"
        " say nothing of this machine: their profiles are fitted to what the MARBLE paper reports of a node"
        f" of Summit. All is written into {folder}. Ctrl-C ends it."
    )
    return Queue(
        folder=folder,
        jobs=jobs,
        specs=specs,
        profiles={profile.model: profile for profile in load_profiles(PRETENDED_PROFILES)},
        devices=f"replay:{PRETENDED_GPUS}@{PRETENDED_SPEED}",
        gpus=PRETENDED_GPUS,
        speed=PRETENDED_SPEED,
    )


def _parsed(text: str) -> tuple[JobSpec, ...]:
    import tomllib

    from hpcsched import jobfile

    return jobfile.parse(tomllib.loads(text), where="demo", workdir=Path.cwd()).jobs


def said_speeds(profile: Profile) -> str:
    """A model's measured speeds, and the number of CPU slots that it is fastest on."""
    speeds = ", ".join(
        f"{rate:.3g} steps/s on {plural(count, noun((SLOT,)))}"
        for count, rate in sorted(profile.throughput.items())
    )
    return f"{profile.model}: {speeds}; fastest on {profile.optimal(SLOTS)}"


def best_rate(profile: Profile, devices: int) -> float:
    """The highest speed on at most so many devices, in steps per second."""
    return profile.rate(profile.optimal(devices))


def steps_for(
    trainings: Sequence[JobSpec], profiles: Mapping[str, Profile], seconds: float
) -> dict[str, int]:
    """The steps of each, so that all take so long one after the other, each as fast as it can."""
    rates = {job.name: best_rate(profiles[job.model], SLOTS) for job in trainings}
    return {name: max(1, round(seconds * SHARES[name] * rate)) for name, rate in rates.items()}


def with_steps(text: str, steps: Mapping[str, int]) -> str:
    """The job file with the steps of each job below its name."""
    return re.sub(
        r'^name = "(.+)"$', lambda found: f"{found[0]}\nsteps = {steps[found[1]]}", text, flags=re.MULTILINE
    )
