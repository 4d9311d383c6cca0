"""Random job sets, for benchmarks and tests of policies: the same seed gives the same set.

Four families of models:

- `summit`: the curves of profiles/marble-summit.json, 1 to 6 GPUs, flat beyond.
- `gavel`: the curves of profiles/gavel-v100.json that were measured on 1, 2, 4 and 8 GPUs; the counts
  between are interpolated.
- `pollux`: those of profiles/pollux-t4.json, measured on up to 4 GPUs of one host. Counts up to 8 are
  extrapolated by Amdahl's law, t(g) = a + b / g through the last two measured counts with a >= 0 (never
  better than linear), and stay flat where the last count was no faster than the one before.
- `synthetic`: random curves: each further GPU adds a share of the first one's throughput that shrinks from
  count to count; from a random count on it adds nothing (a plateau) or takes some away (a decline).

What starts and restarts cost is drawn for every family alike, so that sets of all families can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from hpcsched.core.model import JobSpec, Kind
from hpcsched.core.profile import Profile
from hpcsched.sim.blocks import Block
from hpcsched.store.profiles import load_profiles

GPU_COUNTS = (4, 6, 8)
SIZE_LAWS = ("log-uniform", "uniform")
JOB_COUNT_RANGE = (3, 100)
JOB_S_RANGE = (60.0, 14_400.0)
SWITCH_S_RANGE = (0.0, 65.0)
MODEL_COUNT_RANGE = (3, 8)
"""How many GPUs; and the ranges that jobs, seconds of a job on one GPU, seconds of suspend and resume
together, and models of a synthetic set are drawn from."""


@dataclass(frozen=True, kw_only=True)
class JobSet:
    """Jobs, the true profiles of their models, and the GPUs of one host to run them on.

    `switch_s` is what the costliest suspend and resume may take. `arrivals`: 0 if all jobs are there at
    the start, else the jobs come one by one over about this share of the time that all their work takes.
    """

    jobs: tuple[JobSpec, ...]
    profiles: tuple[Profile, ...]
    gpus: int
    family: str
    switch_s: float
    arrivals: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.seed}"


def random_set(
    seed: int,
    family: str | None = None,
    *,
    arrivals: float = 0.0,
    most_jobs: int = JOB_COUNT_RANGE[1],
    sizes: str = SIZE_LAWS[0],
) -> JobSet:
    """The job set of this seed, of this family or of a random one.

    The lengths of the jobs are log-uniform, so that short ones are as frequent as long ones. So is their
    number, or it is uniform (`sizes`): half of the sets have less than 18 jobs, or 52. With `arrivals`
    jobs come as a Poisson process: it takes about that share of the seconds that all jobs, each on one GPU,
    keep all GPUs busy.
    """
    rng = Random(seed)
    # Drawn even if it is given: a set differs from that of a random family in its models alone.
    drawn = rng.choice(sorted(FAMILIES))
    family = drawn if family is None else family
    gpus = rng.choice(GPU_COUNTS)
    switch_s = rng.uniform(*SWITCH_S_RANGE)
    most_jobs = max(JOB_COUNT_RANGE[0], most_jobs)
    drawn_count = rng.random()
    if sizes == "uniform":
        count = JOB_COUNT_RANGE[0] + int(drawn_count * (most_jobs - JOB_COUNT_RANGE[0] + 1))
    else:
        count = round(JOB_COUNT_RANGE[0] * (most_jobs / JOB_COUNT_RANGE[0]) ** drawn_count)
    profiles = tuple(_with_costs(rng, p, switch_s) for p in FAMILIES[family](Random(rng.random())))
    jobs, work_s = [], 0.0
    for i in range(1, count + 1):
        profile, seconds = rng.choice(profiles), _log_uniform(rng, *JOB_S_RANGE)
        steps = max(1, round(seconds * profile.rate(1)))
        work_s += seconds
        jobs.append(JobSpec(name=f"j{i}", kind=Kind.REPLAY, model=profile.model, steps=steps))
    if arrivals:
        jobs = _spread(rng, jobs, mean_s=arrivals * work_s / gpus / count)
    return JobSet(
        jobs=tuple(jobs),
        profiles=tuple(p for p in profiles if any(job.model == p.model for job in jobs)),
        gpus=gpus,
        family=family,
        switch_s=switch_s,
        arrivals=arrivals,
        seed=seed,
    )


def come_and_go(jobs: JobSet) -> tuple[Block, ...]:
    """Hosts for a set that come and go.

    One stays, with half of the set's GPUs. One to four others have 1 GPU to as many as the set, come within
    the time that all work takes on so many, each job on one GPU, and stay for a twentieth to a half of that.
    """
    rng = Random(f"come and go {jobs.seed}")
    rates = {profile.model: profile.rate(1) for profile in jobs.profiles}
    whole_s = sum((job.steps or 0) / rates[job.model] for job in jobs.jobs) / jobs.gpus
    blocks = [Block(gpus=jobs.gpus // 2)]
    for _ in range(rng.randint(1, 4)):
        start_s = rng.choice([0.0, rng.uniform(0, whole_s)])
        gpus, lasts_s = rng.randint(1, jobs.gpus), max(300.0, whole_s * rng.uniform(0.05, 0.5))
        blocks.append(Block(gpus=gpus, start_s=round(start_s), lasts_s=round(lasts_s)))
    return tuple(blocks)


def wrong(profiles: Iterable[Profile], seed: int, by: float = 0.15) -> tuple[Profile, ...]:
    """The profiles with each throughput multiplied by a random factor, log-normal with sigma `by`.

    So a typical point is wrong by the share `by`, in either direction alike, and one in twenty by twice
    that; the points of a curve are wrong independently of each other. Costs stay as they are.
    """
    rng = Random(seed)
    return tuple(
        replace(p, throughput={g: x * rng.lognormvariate(0.0, by) for g, x in sorted(p.throughput.items())})
        for p in profiles
    )


# --- how they are drawn ---------------------------------------------------------------------


def _log_uniform(rng: Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _spread(rng: Random, jobs: Sequence[JobSpec], mean_s: float) -> list[JobSpec]:
    """The first job comes at 0, each of the others a random time, `mean_s` on average, after the last."""
    at, spread = 0.0, []
    for job in jobs:
        spread.append(replace(job, submit_at=at))
        at += rng.expovariate(1.0) * mean_s
    return spread


def _with_costs(rng: Random, profile: Profile, switch_s: float) -> Profile:
    """Half to all of `switch_s` for suspend and resume together; a first start is like a resume.

    Suspending is the shorter part: a job that nobody has a profile of gets 30 s for it.
    """
    cost_s = switch_s * rng.uniform(0.5, 1.0)
    suspend_s = cost_s * rng.uniform(0.2, 0.4)
    resume_s = cost_s - suspend_s
    start_s = resume_s * rng.uniform(0.8, 1.2)
    return replace(profile, start_s=start_s, suspend_s=suspend_s, resume_s=resume_s)


def _summit(rng: Random) -> list[Profile]:
    return list(load_profiles("marble-summit"))


def _gavel(rng: Random) -> list[Profile]:
    return [p for p in load_profiles("gavel-v100") if len(p.throughput) == 4]


def _pollux(rng: Random) -> list[Profile]:
    return [replace(p, throughput=_extrapolated(p.throughput)) for p in load_profiles("pollux-t4")]


def _extrapolated(measured: Mapping[int, float]) -> dict[int, float]:
    (g0, x0), (g1, x1) = sorted(measured.items())[-2:]
    if x1 <= x0:
        return dict(measured)
    b = min((1 / x0 - 1 / x1) / (1 / g0 - 1 / g1), g1 / x1)
    a = 1 / x1 - b / g1
    return {**measured, **{g: 1 / (a + b / g) for g in range(g1 + 1, max(GPU_COUNTS) + 1)}}


def _synthetic(rng: Random) -> list[Profile]:
    return [_random_curve(rng, f"model{i}") for i in range(1, rng.randint(*MODEL_COUNT_RANGE) + 1)]


def _random_curve(rng: Random, model: str) -> Profile:
    rate, table = _log_uniform(rng, 0.5, 50.0), {}
    gain, shrink = rng.uniform(0.4, 1.0), rng.uniform(0.6, 1.0)
    knee, after = rng.randint(1, max(GPU_COUNTS)), rng.choice((0.0, 0.0, -0.02, -0.1))
    x = 1.0
    for g in range(1, max(GPU_COUNTS) + 1):
        table[g] = rate * x
        x = x + gain if g < knee else max(0.3, x * (1 + after))
        gain *= shrink
    return Profile(model=model, device="random", throughput=table)


FAMILIES: dict[str, Callable[[Random], list[Profile]]] = {
    "summit": _summit,
    "gavel": _gavel,
    "pollux": _pollux,
    "synthetic": _synthetic,
}
