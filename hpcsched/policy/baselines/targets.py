"""For policies that change GPU counts freely: who is to share, and the way to the counts they should have.

All counts are counts on each of a job's hosts; how many GPUs there are is counted over all hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from heapq import merge

from hpcsched.core.jobs import Job
from hpcsched.core.model import JobState, Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import Decision, Preempt, Resize, Start, View

Resizes = Callable[[Job, int], str]
"""Why a running job is to be resized to so many GPUs, in words; empty if it is not."""


def least_counts(
    view: View, floor: Callable[[Job], int], *, only_waiting: bool = False, without: Collection[int] = ()
) -> tuple[dict[int, int], int]:
    """First come, first served: jobs that run or wait, each with its least count; and the GPUs left.

    `floor(job)` is what the job gets at least if that many are left, and else its `gpus_min`. Jobs that are
    being sent away get nothing. `only_waiting`: the free GPUs, for the jobs that wait; `without` are left
    out. It takes time in the jobs that get GPUs, not in the length of the queue.
    """
    counts: dict[int, int] = {}
    left = view.free.left if only_waiting else view.capacity.left
    waiting = (view.jobs[i] for i in view.queue.walk(lambda need, nodes, uneven: need * nodes <= left))
    running = () if only_waiting else (j for j in view.running if not j.held and not j.wanted)
    for job in merge(running, waiting, key=lambda j: (j.submit_s, j.id)):
        (least, most), nodes = view.limits(job), job.spec.nodes
        count = job.fitting(min(max(least, floor(job), 1), most, left // nodes))
        if count >= max(least, 1) and job.id not in without:
            counts[job.id] = count
            left -= count * nodes
    return counts, left


def coming(view: View) -> bool:
    """Whether a job is about to give up GPUs."""
    return any(
        job.wanted not in ("", "suspend")
        or (
            (job.state is JobState.SUSPENDING or job.resizing)
            and not (job.target and set(job.gpus) <= set(job.target.gpus))
        )
        for job in view.running
    )


def approach(
    view: View, targets: Mapping[int, int], why: Callable[[Job, int], Reason], resizes: Resizes
) -> list[Decision]:
    """What can be done now to bring the jobs to their targets: 0 is to wait, none is to stay as it is.

    First running jobs give up GPUs. While any are about to come free, a job whose target cannot be had yet
    waits for it; else it makes do with what there is, as it does when its hosts have too few. A running job
    is left as it is if it cannot be suspended now, could not go on before the allocation ends, or would lose
    more work that it has not saved than its GPUs can bring.
    """
    decisions: list[Decision] = []
    movable = [job for job in view.running if job.settled]
    for job in movable:
        target = targets.get(job.id, job.width)
        if target >= job.width or _too_late(view, job, target) or not (words := resizes(job, target)):
            continue
        if (target and not job.allows(target)) or not view.worth_changing(job, target):
            continue
        facts = {"old": job.width, "gpus": target, "why": words}
        if target == 0:
            decisions.append(Preempt(job=job, reason=Reason(Why.PREEMPTED, facts)))
        else:
            hosts = tuple(view.hosts_of(job))
            decisions.append(_resize(view, job, target, hosts, Reason(Why.RESIZED, facts)))
    wait = bool(decisions) or coming(view)
    for job in movable:
        target, own = targets.get(job.id, 0), view.hosts_of(job)
        grows = target > job.width and not _too_late(view, job, target)
        have, hosts = view.pick(job, target, own) if grows else (0, ())
        worth = have > job.width and view.worth_changing(job, have)
        if worth and (have == target or not wait) and (words := resizes(job, have)):
            facts = {"old": job.width, "gpus": have, "why": words}
            decisions.append(_resize(view, job, have, hosts, Reason(Why.RESIZED, facts)))
            view.free.take(hosts, have, own)
    for job in view.waiting(view.free.fits):
        target = targets.get(job.id, 0)
        have, hosts = view.pick(job, target)
        if have >= max(1, job.least) and (have == target or not wait):
            role = _role(view, job, have)
            decisions.append(Start(job=job, gpus=have, hosts=hosts, role=role, reason=why(job, have)))
            view.free.take(hosts, have)
    return decisions


def _too_late(view: View, job: Job, gpus: int) -> bool:
    return view.switch_s(job, gpus or job.width) >= view.left_s


def _resize(view: View, job: Job, gpus: int, hosts: tuple[str, ...], reason: Reason) -> Resize:
    return Resize(job=job, gpus=gpus, hosts=hosts, role=_role(view, job, gpus), reason=reason)


def _role(view: View, job: Job, gpus: int) -> Role:
    """As under MARBLE's policy: primary on its fastest count, secondary on fewer."""
    least, most = view.limits(job)
    profile = view.curve(job)
    return Role.SECONDARY if profile and gpus < job.fastest(profile, most, least) else Role.PRIMARY
