"""Which jobs share a GPU, the same under every policy: by memory, by what they use, and by measurement.

A job that is content with a part of a GPU starts on one that nobody has, if there is one. Else it comes to
others like it, one at a time: where their memory fits, where they leave time of the GPU, and where those that
are there have been measured. It goes again where that was no gain, and such jobs meet no more. None comes
while a job that wants whole GPUs waits in front of it: that one waits for the GPU that this would keep busy.
When nobody waits any more and GPUs stay free, those that gain most by it go there.

Placing by measured memory and utilisation, and coming back after running out of memory, is CARMA's way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from hpcsched.contract.variables import LANE_MODE
from hpcsched.core.jobs import Job
from hpcsched.core.learning import LEAST_SAMPLES, LEAST_STEPS
from hpcsched.core.mechanisms.sharing.shares import (
    RESERVE,
    asked_mib,
    mixture,
    share_of,
    shares_a_gpu,
)
from hpcsched.core.mechanisms.sharing.view import Join, Separate, ShareDecision, ShareView, Worth
from hpcsched.core.mechanisms.speed import own_speed
from hpcsched.core.model import MOST_JOBS, ComputeMode, JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.gpus import suits
from hpcsched.core.view import LookAgain

WINDOW = 100
"""Waiting jobs that are looked at: a decision must not take time in the length of the queue."""

MOST_SLOWDOWN = 2.0
"""How many times slower than alone a job becomes by others, at most (chosen)."""

UNKNOWN = 0.5
"""Of a GPU's memory, and of a core's time, what must be free for a job of which nothing is known (chosen)."""

FULL = {"cpu": 1.0}
"""By kind of device the sum of busy shares beyond which one more gains nothing: a core that is busy is. A GPU
counts as busy while a kernel runs, however small: what it still has to give, only measuring tells."""

LOOK_S = 2.5
"""How often those that are being measured are looked at (chosen): a little more than a sample takes."""

STARTS_S = 10.0
"""How often it is looked whether one that starts has begun (chosen): one that is ready says so."""

SETTLED_S = 30.0
"""Time after which a job that tells nothing of its progress counts as measured (chosen)."""

FAR, SILENT_S = 4, 300.0
"""A job that tells nothing beside others for so many times as long as measuring takes, and for so long, has
come to nothing there: a validation or a checkpoint may take minutes, too (chosen)."""


class ShareGpus:
    """Has jobs that are content with a part of a GPU share one.

    Args:
        moves: they leave a GPU that they share for one that stays free.
    """

    def __init__(self, *, moves: bool = True) -> None:
        self._moves = moves

    def share(self, view: ShareView) -> list[ShareDecision]:
        """Who goes, who comes, and when to look again."""
        decisions: list[ShareDecision] = []
        places = _places(view)
        for gpu, jobs in places.items():
            decisions += _judged(view, gpu, jobs)
        going = {decision.job.id for decision in decisions if isinstance(decision, Separate)}
        if next(view.waiting(), None):
            decisions += _joins(view, {gpu: jobs for gpu, jobs in places.items() if not going & _ids(jobs)})
        elif self._moves and not going:
            decisions += _moves(view, places)
        looks = [one.at for one in decisions if isinstance(one, LookAgain)]
        rest: list[ShareDecision] = [one for one in decisions if not isinstance(one, LookAgain)]
        return [*rest, LookAgain(at=min(looks))] if looks else rest


def _ids(jobs: Sequence[Job]) -> set[int]:
    return {job.id for job in jobs}


def _places(view: ShareView) -> dict[int, list[Job]]:
    """By GPU those that share it, the holder first, and those that came first in front."""
    return {
        gpu: [holder, *(view.jobs[job_id] for job_id in view.shares.on((gpu,)))]
        for gpu, holder in view.holders.items()
        if shares_a_gpu(holder.spec)
    }


# --- how fast they are ------------------------------------------------------------------------------


def alone(view: ShareView, job: Job) -> float | None:
    """A job's steps per second by itself, as measured or as its model's profile says; None: not known."""
    profile = view.profile(job)
    expected = profile.rate(1) if profile and (view.loaded(job) or 1 in profile.throughput) else None
    return own_speed(view.shares.speeds.of(job), expected)


def kept(view: ShareView, job: Job) -> float | None:
    """The share of its speed alone that a job has beside others; None: not known (yet).

    One that has told nothing for far longer than measuring takes counts as if it had come to nothing.
    """
    speed, own = view.shares.speeds.of(job), alone(view, job)
    if speed is None or not own:
        return None
    if speed.contended is not None:
        return speed.contended / own
    late = view.now >= speed.since_s + max(SILENT_S, FAR * _measured_s(own))
    return (speed.step - speed.since_step) / (view.now - speed.since_s) / own if late else None


def _measured_s(own: float) -> float:
    """Seconds in which a speed is measured."""
    return 2 * (LEAST_SAMPLES + 1) * max(LOOK_S, LEAST_STEPS / own)


def _measurable(view: ShareView, job: Job) -> bool:
    return job.reports and alone(view, job) is not None


def _all_there(jobs: Sequence[Job]) -> bool:
    return all(job.state is JobState.RUNNING and job.wanted in ("", "suspend") for job in jobs)


def _settled(view: ShareView, gpu: int, jobs: Sequence[Job]) -> bool:
    """Whether those on a GPU are known as they are now."""
    if not _all_there(jobs):
        return False
    for job in jobs:
        attempt = job.current  # a program that knows nothing of hpcsched is never said to be ready
        begun_s = attempt.start_s if attempt.ready_s is None else attempt.ready_s
        since_s = max(view.shares.came_s.get(gpu, 0.0), begun_s)
        waited = view.now >= since_s + SETTLED_S
        known = alone(view, job) is not None if len(jobs) == 1 else kept(view, job) is not None
        if not (known or (waited and not _measurable(view, job))):
            return False
    return True


# --- who goes ---------------------------------------------------------------------------------------


def _judged(view: ShareView, gpu: int, jobs: list[Job]) -> Iterator[ShareDecision]:
    """What was measured of those on a GPU says: they stay, or the one that came last goes."""
    if len(jobs) < 2:
        return
    *others, newest = jobs
    shares = {job.id: kept(view, job) for job in jobs}
    if not _all_there(jobs):
        yield LookAgain(at=view.now + STARTS_S)
        return
    if any(shares[job.id] is None and _measurable(view, job) for job in jobs):
        yield LookAgain(at=view.now + LOOK_S)
        return
    if because := _why_apart(jobs, shares):
        if newest.settled:
            facts = {
                "guest": newest.spec.model,
                "hosts": ", ".join(sorted({job.spec.model for job in others})),
                "gpu": gpu,
                "because": because,
            }
            yield Separate(job=newest, reason=Reason(Why.SLOWER_TOGETHER, facts), from_=tuple(others))
        return
    if mixture(jobs) not in view.shares.worth and all(share is not None for share in shares.values()):
        yield Worth(jobs=tuple(jobs), total=sum(share or 0.0 for share in shares.values()))


def _why_apart(jobs: Sequence[Job], shares: Mapping[int, float | None]) -> str:
    """Why jobs that keep such shares of their speeds are not to be together; "" if they are."""
    known = {job.id: share for job in jobs if (share := shares[job.id]) is not None}
    lost = sum(1 - share for share in known.values())
    if lost > len(jobs) - 1:  # those that nobody has measured gain a whole one at best
        return (
            f"together they do {len(jobs) - lost:.2f} times what one does alone: "
            "less than one after the other"
        )
    slowest = min(known, key=lambda job_id: known[job_id], default=None)
    if slowest is not None and known[slowest] < 1 / MOST_SLOWDOWN:
        job = next(job for job in jobs if job.id == slowest)
        return f"job {job.id} ({job.spec.name}) has {known[slowest]:.0%} of its speed alone"
    return ""


# --- who comes --------------------------------------------------------------------------------------


def _joins(view: ShareView, places: Mapping[int, list[Job]]) -> Iterator[ShareDecision]:
    """Who comes to whom: one to each GPU, unless it is known that they go together."""
    places = {gpu: list(jobs) for gpu, jobs in places.items()}
    starting: list[Job] = []
    for job in islice(view.waiting(), WINDOW):
        if not places or not shares_a_gpu(job.spec):
            break
        found = [gpu for gpu, jobs in places.items() if not why_not(view, gpu, jobs, job, starting)]
        if not found or not view.in_time(job, starting):
            continue
        gpu = min(
            found, key=lambda gpu: (_asked(places[gpu]), _busy(view, places[gpu]), len(places[gpu]), gpu)
        )
        names = ", ".join(f"job {other.id} ({other.spec.name})" for other in places[gpu])
        facts = {"gpu": gpu, "others": names, "because": _because(view, gpu, places[gpu], job)}
        yield Join(job=job, gpu=gpu, reason=Reason(Why.SHARED, facts))
        places[gpu].append(job)
        starting.append(job)
    waits = any(shares_a_gpu(job.spec) for job in islice(view.waiting(), 1))
    if waits and any(_all_there(jobs) and not _settled(view, gpu, jobs) for gpu, jobs in places.items()):
        yield LookAgain(at=view.now + LOOK_S)


def why_not(
    view: ShareView, gpu: int, jobs: Sequence[Job], newcomer: Job, starting: Sequence[Job] = ()
) -> str:
    """Why those on a GPU take no more, or not this one; "" if they do. `starting`: others that come now."""
    device = view.devices.get(gpu)
    if device is None or view.others(gpu):
        return "other jobs use it too"
    under_mps = all(job.spec.env.get(LANE_MODE) == "mps" for job in (*jobs, newcomer))
    if device.compute_mode is ComputeMode.EXCLUSIVE_PROCESS and not under_mps:
        return f"GPU {gpu} is in compute mode EXCLUSIVE_PROCESS, and they are processes of their own"
    if not suits(newcomer.spec.needs, device):
        return f"it asks for {newcomer.spec.needs}"
    if full := _no_main_memory(view, gpu, newcomer, starting):
        return full
    if any(job.wanted not in ("", "suspend") or job.state is JobState.SUSPENDING for job in jobs):
        return "one of those who train there is leaving"
    if len(jobs) >= MOST_JOBS:
        return f"{len(jobs)} train there, at most {MOST_JOBS} may"
    if (reason := view.shares.is_costly([*jobs, newcomer])) is not None:
        return str(reason)
    if full := _asks_too_much(jobs, newcomer) or _too_full(view, gpu, jobs, newcomer):
        return full
    if mixture([*jobs, newcomer]) in view.shares.worth or all(
        share_of(job.spec) for job in (*jobs, newcomer)
    ):
        return ""
    return _too_busy(view, gpu, jobs, newcomer)


def _no_main_memory(view: ShareView, gpu: int, newcomer: Job, starting: Sequence[Job]) -> str:
    """Of what it asks for, on a GPU's host; that of a CPU slot is looked at as the slot's own memory."""
    device, wants = view.devices[gpu], asked_mib(newcomer.spec, on_gpu=False)
    left = view.room_mib(device.host) if wants and device.kind != "cpu" else None
    if left is None or wants is None:
        return ""
    left -= sum(asked_mib(job.spec, on_gpu=False) or 0.0 for job in starting)
    return f"its host has {max(0.0, left):.0f} MiB of main memory left" if wants > left else ""


def _asked(jobs: Sequence[Job]) -> float:
    """The sum of the shares of a GPU that they ask for."""
    return sum(share_of(job.spec) for job in jobs)


def _asks_too_much(jobs: Sequence[Job], newcomer: Job) -> str:
    asked = _asked((*jobs, newcomer))
    return f"with it {asked:.4g} of the GPU would be asked for" if asked > 1 + 1e-9 else ""


def _too_busy(view: ShareView, gpu: int, jobs: Sequence[Job], newcomer: Job) -> str:
    """By what they use, and by what they keep of their speeds now."""
    if not _settled(view, gpu, jobs):
        return "those who train there are being measured"
    full = FULL.get(view.devices[gpu].kind)
    busy = _busy(view, [*jobs, newcomer], unknown=UNKNOWN)
    if full is not None and busy > full + 1e-9:
        return f"with it the device would be busy for {busy:.0%} of the time"
    shares = [kept(view, job) for job in jobs] if len(jobs) > 1 else [1.0]
    known = [share for share in shares if share is not None]  # those that nobody has measured do no better
    together = len(shares) * (sum(known) / len(known) if known else 1.0)
    if together / (len(jobs) + 1) < 1 / MOST_SLOWDOWN:
        return f"{len(jobs)} do {together:.2f} times what one does alone there: one more may gain nothing"
    return ""


def _busy(view: ShareView, jobs: Sequence[Job], *, unknown: float = 0.0) -> float:
    """For what share of the time they want the device; `unknown`: each of whom that is not known."""
    known = (view.shares.use_of(job.spec.model).busy for job in jobs)
    return sum(unknown if busy is None else busy for busy in known)


def _too_full(view: ShareView, gpu: int, jobs: Sequence[Job], newcomer: Job) -> str:
    total = view.memory_mib(gpu)
    if total is None:
        return ""
    known = [view.need_mib(job, gpu) for job in jobs]
    if any(mib is None for mib in known):
        return "how much memory those need who train there is not known yet"
    used, wants = sum(mib or 0.0 for mib in known), view.need_mib(newcomer, gpu)
    if wants is None:
        wants = UNKNOWN * total
    if used + wants <= RESERVE * total + 1e-9:
        return ""
    return f"{used:.0f} of its {total:.0f} MiB are needed there, and {wants:.0f} by this job"


def _because(view: ShareView, gpu: int, jobs: Sequence[Job], newcomer: Job) -> str:
    """What is known of them that lets one more come."""
    total = view.shares.worth.get(mixture([*jobs, newcomer]))
    if total is not None:
        return f"such jobs do {total:.2f} times what one does alone"
    asked = sum(share_of(job.spec) for job in (*jobs, newcomer))
    if all(share_of(job.spec) for job in (*jobs, newcomer)):
        return f"they ask for {asked:.4g} of it together"
    busy = _busy(view, jobs)
    return f"those there have it busy for {busy:.0%} of the time" if busy else "to be measured"


def why_waiting(view: ShareView, job: Job) -> Iterator[tuple[int, str]]:
    """GPU by GPU where jobs share one, why a waiting job does not share it with those."""
    for gpu, jobs in sorted(_places(view).items()):
        yield gpu, why_not(view, gpu, jobs, job) or "a job in front of it waits for a GPU"


# --- who moves to what is free ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Move:
    job: Job
    gpu: int
    others: int
    sooner_s: float
    cost_s: float
    due: float


def _moves(view: ShareView, places: Mapping[int, list[Job]]) -> Iterator[ShareDecision]:
    """Who goes to the GPUs that have been free for as long as going there takes."""
    if view.shares.idle_s is None:
        return
    left = {gpu: list(jobs) for gpu, jobs in places.items() if len(jobs) > 1}
    leaving = sum(job.state is JobState.SUSPENDING for jobs in left.values() for job in jobs)
    for _ in range(len(view.free) - leaving):
        found = [move for gpu, jobs in left.items() for move in _gains(view, gpu, jobs)]
        good = [move for move in found if move.due <= view.now]
        if not good:
            if found:
                yield LookAgain(at=max(view.now, min(move.due for move in found)))
            return
        best = max(good, key=lambda move: (move.sooner_s, -move.job.id))
        facts = {"others": best.others, "gpu": best.gpu, "sooner": best.sooner_s, "cost": best.cost_s}
        yield Separate(job=best.job, reason=Reason(Why.MOVED_APART, facts), moves=True)
        left[best.gpu].remove(best.job)
        if len(left[best.gpu]) < 2:
            del left[best.gpu]


def _gains(view: ShareView, gpu: int, jobs: Sequence[Job]) -> Iterator[_Move]:
    """Those on a GPU that would be done sooner by one of their own, for all that is known."""
    for job in jobs[1:]:
        share, ready_s = kept(view, job), job.current.ready_s
        if not job.settled or job.id in view.shares.parted or share is None or share >= 1 or ready_s is None:
            continue
        if not any(suits(job.spec.needs, view.devices[free]) for free in view.free):
            continue
        cost_s = view.save_s(job) + view.unsaved_s(job) + view.launch_s(job, 1, first=False)
        own = alone(view, job)
        if job.remaining is None or not own:
            stay_s = view.now - ready_s  # taken to be half-way
        else:
            stay_s = job.remaining / (own * max(share, 1e-6))
        stay_s = min(stay_s, view.left_s)
        sooner_s = stay_s * (1 - share)
        if sooner_s > cost_s:
            due = (view.shares.idle_s or 0.0) + cost_s
            yield _Move(job, gpu, len(jobs) - 1, sooner_s, cost_s, due)
