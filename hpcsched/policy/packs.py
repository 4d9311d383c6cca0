"""Which waiting jobs are trained as one with those that have a GPU, the same under every policy (pack,
section 5.2: when there are more models than GPUs).

A job that may be packed rides only when no GPU is free for it. None does while a job that cannot be packed
waits in front of it: that one waits for the GPU that the ride would keep busy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState
from hpcsched.core.packs import can_ride, is_packed, key_of
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import PackView, Ride

MOST = 8
"""Jobs of a pack, unless their strategies say otherwise: the gain grows little beyond (pack, Figure 4)."""

WINDOW = 100
"""Waiting jobs that are looked at: a decision must not take time in the length of the queue."""

RESERVE = 0.9
"""Of a GPU's memory, what may be planned with."""


_THERE = (JobState.STARTING, JobState.RUNNING)


class WithPacks:
    """What makes a policy pack jobs; it need not know of them."""

    def ride(self, view: PackView) -> list[Ride]:
        """Who joins whom now."""
        places = {gpu: [holder, *_riders(view, gpu)] for gpu, holder in view.holders.items()}
        places = {gpu: jobs for gpu, jobs in places.items() if _may_ride(view, gpu, jobs)}
        decisions: list[Ride] = []
        starting: list[Job] = []
        for job in islice(view.waiting(), WINDOW):
            if not places or not is_packed(job.spec):
                break
            found = [
                (_fit(job, jobs), gpu) for gpu, jobs in places.items() if not _why_not(view, gpu, jobs, job)
            ]
            if not found or not view.in_time(job, starting):
                continue
            _, gpu = min(found)
            names = ", ".join(other.spec.name for other in places[gpu])
            facts = {"gpu": gpu, "members": len(places[gpu]) + 1, "others": names}
            decisions.append(Ride(job=job, gpu=gpu, reason=Reason(Why.PACKED, facts)))
            places[gpu].append(job)
            starting.append(job)
        return decisions


def why_waiting(view: PackView, job: Job) -> Iterator[tuple[int, str]]:
    """GPU by GPU where jobs may be packed, why a waiting job is not packed with those."""
    if job.id in view.packs.alone:
        return
    for gpu, holder in sorted(view.holders.items()):
        jobs = [holder, *_riders(view, gpu)]
        if _may_ride(view, gpu, jobs):
            yield gpu, _why_not(view, gpu, jobs, job) or "a job in front of it waits for a GPU"


def _may_ride(view: PackView, gpu: int, jobs: list[Job]) -> bool:
    """Whether those on a GPU may be packed at all."""
    return gpu in view.devices and can_ride(jobs[0].spec, view.devices[gpu])


def _why_not(view: PackView, gpu: int, jobs: list[Job], newcomer: Job) -> str:
    """Why those on a GPU take no more, or not this one; "" if they do."""
    together = [*jobs, newcomer]
    if any(job.id in view.packs.alone for job in together):
        return "who left a pack is packed no more"
    if gpu in view.guests or not any(job.state in _THERE and not job.wanted for job in jobs):
        return "those who train there are leaving"
    if key_of(newcomer.spec) != key_of(jobs[0].spec):
        return f"job {jobs[0].id} ({jobs[0].spec.name}) is of another kind"
    most = min(int(job.spec.strategy.get("most", MOST)) for job in together)
    if len(together) > most:
        return f"{len(jobs)} train there, at most {most} may"
    if not _fits(view, gpu, together):
        return f"{len(together)} of them do not fit into its memory"
    return "" if _pays(view, together) else "as was measured, one more there gains nothing"


def _riders(view: PackView, gpu: int) -> Iterator[Job]:
    return (view.jobs[job_id] for job_id in view.packs.on((gpu,)))


def _fits(view: PackView, gpu: int, jobs: list[Job]) -> bool:
    """Not if it is known not to: what is not known is found out, and the last one in then leaves again."""
    memory = view.devices[gpu].memory_mib
    if memory is None:
        return True
    need = 0.0
    for model, number in Counter(job.spec.model for job in jobs).items():
        profile = view.loaded(next(job for job in jobs if job.spec.model == model))
        need += (profile.packed_memory_mib(number) if profile else None) or 0.0
    return need <= RESERVE * memory


def _pays(view: PackView, jobs: list[Job]) -> bool:
    """Whether one more is quicker than after the others; where that was never measured the pack finds out,
    and has its members take turns if not."""
    profile = view.loaded(jobs[-1])
    if profile is None or any(job.spec.model != jobs[-1].spec.model for job in jobs):
        return True
    now_s, then_s = profile.packed_step_s(len(jobs) - 1), profile.packed_step_s(len(jobs))
    return now_s is None or then_s is None or then_s - now_s < 1 / profile.rate(1)


def _fit(job: Job, others: list[Job]) -> tuple[int, int]:
    """How well a job goes with those on a GPU, less is better: how many they are, and in how many arguments
    the one most like it differs (section 5.3: similar models pack well together)."""
    return len(others), min(_differences(job, other) for other in others)


def _differences(one: Job, other: Job) -> int:
    a, b = one.spec.args, other.spec.args
    return sum(a.get(key) != b.get(key) for key in {*a, *b})
