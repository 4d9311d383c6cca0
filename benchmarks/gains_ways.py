"""Sets of trainings, and the ways to have them done, for `gains.py`: an `sbatch` each, arrays, blocks.

Inside a block hpcsched's own simulator says how long the queue takes: with the end of each allocation, what
is saved before it, and what the next one has to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random

from common import JOB_SETS, ROOT
from queues import GPUS, HOUR, round_up

from hpcsched import jobfile
from hpcsched.allocations.cluster import BatchJob
from hpcsched.core import events as ev
from hpcsched.core.model import Device, JobSpec, JobState, Kind
from hpcsched.core.profile import Profile, cost_at
from hpcsched.sim.blocks import SIM_HOST
from hpcsched.sim.engine import Simulation
from hpcsched.store.profiles import load_profiles

ME = "me"
MARBLE_TIMES = 20
"""The paper's trainings take minutes; here they have so many times the steps."""
LEAVING_S = 5.0
"""From the last job's exit to the end of the batch job."""
LIVES = 60
START_S, SUSPEND_S = 30.0, 20.0
"""Assumed where a profile does not say: from a start to the first step, and for a save."""
WORTH = 0.5
"""The best fixed count is the fastest on a node of which each GPU does at least this share of one alone."""


@dataclass(frozen=True)
class Set:
    """Trainings, how they scale, and how fast each of two goes that share a GPU (None: too large)."""

    name: str
    about: str
    jobs: tuple[JobSpec, ...]
    profiles: Mapping[str, Profile]
    shared: float | None = None

    def seconds(self, job: JobSpec, gpus: int = 1, speed: float = 1.0) -> float:
        """How long a training takes on a fixed count, its start included."""
        profile = self.profiles[job.model]
        return (cost_at(profile.start_s, gpus) or 0.0) + (job.steps or 0) / profile.throughput[gpus] / speed

    def best_count(self, job: JobSpec) -> int:
        rates = self.profiles[job.model].throughput
        worth = [n for n in rates if n <= GPUS and rates[n] / n >= WORTH * rates[1]]
        return max(worth, key=lambda n: rates[n])


@dataclass(frozen=True)
class Way:
    """Batch jobs to submit, with those that follow; in which of them each training ends, how far into it."""

    name: str
    jobs: tuple[BatchJob, ...]
    results: tuple[tuple[str, float], ...]

    @property
    def all_jobs(self) -> list[BatchJob]:
        found = []
        for job in self.jobs:
            one: BatchJob | None = job
            while one is not None:
                found.append(one)
                one = one.follow
        return found


# --- sets -------------------------------------------------------------------------------------------


@cache
def _gavel(model: str) -> Profile:
    (found,) = [p for p in load_profiles(ROOT / "profiles/gavel-v100.json") if p.model == model]
    return replace(found, start_s=START_S, suspend_s=SUSPEND_S, resume_s=START_S)


def _training(name: str, model: str, steps: float) -> JobSpec:
    return JobSpec(name=name, kind=Kind.REPLAY, model=model, steps=round(steps), gpus_min=1)


def many_small() -> Set:
    draw, model = Random(5), _gavel("LM (batch size 10)")
    rate = model.throughput[1]
    jobs = [_training(f"small{n}", model.model, draw.uniform(20, 60) * 60 * rate) for n in range(48)]
    only_one = replace(model, throughput={1: rate})
    about = (
        "48 language models of 20 to 60 minutes on one GPU; two on a GPU do 1.42 times as much (V100, Gavel)"
    )
    return Set("many small", about, tuple(jobs), {model.model: only_one}, shared=57.858 / 81.652)


def mixed() -> Set:
    jobs = []
    for number, path in enumerate(JOB_SETS, 1):
        for job in jobfile.load(path, workdir=ROOT).jobs:
            jobs.append(_training(f"{number}-{job.name}", job.model, (job.steps or 0) * MARBLE_TIMES))
    profiles = {p.model: p for p in load_profiles(ROOT / "profiles/marble-summit.json")}
    about = (
        f"the nine trainings of MARBLE's sets 1 to 3, {MARBLE_TIMES} times as long: 1 to 7 hours on one GPU"
    )
    return Set("mixed", about, tuple(jobs), profiles)


def few_large() -> Set:
    model = _gavel("ResNet-50 (batch size 128)")
    jobs = [_training(f"large{n}", model.model, 24 * HOUR * model.throughput[1]) for n in range(4)]
    about = "4 trainings of ResNet-50, a day each on one GPU, 8.6 hours on four (V100, Gavel)"
    within = {n: rate for n, rate in model.throughput.items() if n <= GPUS}
    return Set("few large", about, tuple(jobs), {model.model: replace(model, throughput=within)})


SETS = {made.__name__: made for made in (many_small, mixed, few_large)}


# --- plain ways -------------------------------------------------------------------------------------


def each(trainings: Set, how: str = "1") -> Way:
    """An `sbatch` each: on "1" GPU, on its "best" count, as a "shard" of a GPU, in an "array", "array %N"."""
    jobs = []
    for job in trainings.jobs:
        gpus = trainings.best_count(job) if how == "best" else 1
        speed = trainings.shared or 1.0 if how == "shard" else 1.0
        runs_s = trainings.seconds(job, gpus, speed)
        array = "mine" if how.startswith("array") else ""
        limit = int(how.partition("%")[2] or 0)
        jobs.append(
            BatchJob(
                name=job.name, submit_s=0.0, limit_s=round_up(1.5 * runs_s), runs_s=runs_s, gpus=gpus,
                shards=int(how == "shard"), user=ME, array=array, at_once=limit,
            )
        )  # fmt: skip
    if how.startswith("array"):  # tasks of an array have one limit
        longest = max(job.limit_s for job in jobs)
        jobs = [replace(job, limit_s=longest) for job in jobs]
    names = {
        "1": "an `sbatch` each, 1 GPU",
        "best": "an `sbatch` each, its best count",
        "shard": "an `sbatch` each, half a GPU",
    }
    name = names.get(how, f"one {how}, 1 GPU a task")
    return Way(name, tuple(jobs), tuple((job.name, job.runs_s) for job in jobs))


# --- blocks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """An allocation to ask for: GPUs on each of its nodes, a time limit, and what runs in it."""

    gpus: int
    nodes: int = 1
    hours: float = 4.0
    count: int = 1
    policy: str = "planner"
    shared: bool = False

    @property
    def name(self) -> str:
        size = f"{self.gpus} GPU{'s' * (self.gpus > 1)}" + f" x {self.nodes} nodes" * (self.nodes > 1)
        many = "a block" if self.count == 1 else f"{self.count} blocks"
        more = [
            word for word in (self.policy * (self.policy != "planner"), "two a GPU" * self.shared) if word
        ]
        return f"{many} of {size}, {self.hours:g} h" + "".join(f", {word}" for word in more)


def blocks(trainings: Set, block: Block) -> Way:
    """The trainings dealt out to so many equal blocks, each of which comes back until its queue is empty."""
    jobs, results = [], []
    for number, share in enumerate(_dealt(trainings, block.count)):
        lives, ends = _lives(trainings, share, block)
        chain: BatchJob | None = None
        for life in reversed(range(len(lives))):
            chain = BatchJob(
                name=f"block{number}.{life}", submit_s=0.0, limit_s=block.hours * HOUR, runs_s=lives[life],
                gpus=block.gpus, nodes=block.nodes, user=ME, follow=chain,
            )  # fmt: skip
        assert chain is not None, "a block has something to do"
        jobs.append(chain)
        results += [(f"block{number}.{life}", into_s) for life, into_s in ends]
    return Way(block.name, tuple(jobs), tuple(results))


def _dealt(trainings: Set, count: int) -> list[list[JobSpec]]:
    """The longest first, each to who has least so far."""
    shares: list[list[JobSpec]] = [[] for _ in range(count)]
    work = [0.0] * count
    for job in sorted(trainings.jobs, key=trainings.seconds, reverse=True):
        least = work.index(min(work))
        shares[least].append(job)
        work[least] += trainings.seconds(job)
    return [share for share in shares if share]


def _lives(
    trainings: Set, jobs: Sequence[JobSpec], block: Block
) -> tuple[list[float], list[tuple[int, float]]]:
    """How long each allocation lasts; for each training the number of the one it ends in, and when in it."""
    profiles: Iterable[Profile] = trainings.profiles.values()
    gpus, limit_s = block.gpus, block.hours * HOUR
    if block.shared:  # halves of GPUs, each as fast as a training that shares
        speed = trainings.shared or 1.0
        gpus *= 2
        profiles = [replace(p, throughput={1: p.throughput[1] * speed}) for p in profiles]
    hosts = [f"{SIM_HOST}{n + 1}" for n in range(block.nodes)]
    devices = tuple(
        Device(index=i, host=hosts[i // gpus], kind="simulated", handle=str(i % gpus))
        for i in range(gpus * block.nodes)
    )
    happenings: list[ev.Event] = [ev.DeadlineMoved(at=0.0, deadline=limit_s)]
    for life in range(1, LIVES):
        at = life * limit_s
        happenings += [
            ev.AgentStarted(
                rules=ev.RULES,
                at=at,
                wall=at,
                devices=devices,
                policy=block.policy,
                policy_options={},
                stays=hosts[0],
            ),
            ev.DeadlineMoved(at=at, deadline=at + limit_s),
        ]
    simulation = Simulation(
        jobs,
        profiles,
        gpus=gpus,
        nodes=block.nodes,
        policy=block.policy,
        happenings=happenings,
        stories=False,
    )
    done = list(simulation.run().run.jobs.values())
    if any(job.state is not JobState.COMPLETED for job in done):
        raise RuntimeError(f"{trainings.name} in {block.name}: not done in {LIVES} allocations")
    ends = [(int(job.ended_s // limit_s), job.ended_s % limit_s) for job in done]
    lasts = [0.0] * (1 + max(life for life, _ in ends))
    for job in done:
        for attempt in job.attempts:
            life = int(attempt.start_s // limit_s)
            lasts[life] = max(lasts[life], attempt.end_s - life * limit_s)
    return [min(limit_s, seconds + LEAVING_S) for seconds in lasts], ends
