"""Times and costs of jobs: the training that is left on a GPU count, the cost of a restart."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hpcsched.core.jobs import Job
from hpcsched.core.model import JobSpec
from hpcsched.core.profile import Profile, cost_at
from hpcsched.core.view import View
from hpcsched.errors import ConfigError
from hpcsched.planning.jobs.course import Course


def time_left(view: View, job: Job, gpus: int) -> float | None:
    """Seconds of training `job` has left on `gpus` GPUs on each of its hosts.

    None without a profile or a step count.
    """
    profile, remaining = view.curve(job), job.remaining
    return None if profile is None or remaining is None else remaining / profile.rate(gpus)


def lost_s(
    view: View, job: Job, gpus: int, hosts: Collection[str] | None, now_s: float, then_s: float
) -> float:
    """Seconds that a change to `gpus` GPUs costs a job that has `now_s` left where it is and `then_s` there.

    While ranks that are to join it start, it goes on as it is: what that costs is the difference.
    """
    cost_s = view.switch_s(job, gpus, hosts)
    if gpus <= job.width or now_s <= 0 or not view.in_place(job, gpus, hosts):
        return cost_s
    return cost_s + view.built_s(job, gpus) * (1 - then_s / now_s)


def course_of(profile: Profile, gpus: int, *, from_step: int, steps: int, first: bool) -> Course:
    """The course an attempt takes by its profile: start cost if it is the first, else resume cost."""
    return Course(
        from_step=from_step,
        steps=steps,
        rate=profile.rate(gpus),
        start_s=profile.launch_s(gpus, first=first) or 0.0,
        suspend_s=cost_at(profile.suspend_s, gpus) or 0.0,
    )


def require_profiles(jobs: Iterable[JobSpec], profiles: Iterable[Profile]) -> None:
    """Raise ConfigError for the first job that cannot be simulated: no profile or no steps."""
    known = {p.model for p in profiles}
    for job in jobs:
        if job.model not in known:
            names = ", ".join(sorted(known)) or "none (give --profiles)"
            raise ConfigError(
                where=f"job {job.name}", key="model", got=f"no profile of {job.model!r}", accepted=names
            )
        if job.steps is None:
            raise ConfigError(
                where=f"job {job.name}", key="steps", got="missing", accepted="a positive number of steps"
            )
