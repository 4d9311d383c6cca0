"""Who runs on the background lanes, the same under every policy: beside whom, how fast, and for how long.

DeepPool (Park et al., MLSys 2022, section 4) lets a low-priority job use what an important one leaves of a
GPU. Here that is kept by measurement: a foreground job that gets slower than it tolerates has its guests go
slower, and then leave. What its speed would be without them is measured before, and in pauses meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf, isfinite

from hpcsched.contract.variables import LANE_MODE
from hpcsched.core.jobs import Job
from hpcsched.core.learning import LEAST_SAMPLES, LEAST_STEPS
from hpcsched.core.mechanisms.background.lanes import PACES, LaneGuest, can_be_paced, slowdown
from hpcsched.core.mechanisms.background.view import LaneDecision, LaneView, SetPace, Share, Yield
from hpcsched.core.mechanisms.packing.packs import is_packed
from hpcsched.core.mechanisms.sharing.shares import shares_a_gpu
from hpcsched.core.mechanisms.speed import Speed, own_speed
from hpcsched.core.model import ComputeMode, JobState, Kind
from hpcsched.core.profile import cost_at
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import LookAgain

WINDOW = 100
"""Waiting jobs that are looked at: a decision must not take time in the length of the queue."""

MEASURED_EVERY_S = 600.0
"""How often the guests pause for the foreground's own speed to be measured again, at least: it may drift."""

LOOK_S = 10.0
"""About how often a job's progress is looked at."""

SILENT_S = 300.0
"""A foreground job that tells nothing of its progress for so long is not shared: nobody could measure it."""

FAR = 4
"""So many times as long as measuring takes alone is waited, at least, before what has not been measured
beside guests is taken to be far slower than alone."""

WRONG = -0.1
"""A foreground job that goes so much faster beside guests than alone was measured at another time: what it
does alone now is not known."""

LOW = 0.5
"""Below this share of what is tolerated there is room: for a guest to go faster, or for one more."""


class FillLanes:
    """What makes a policy fill the background lanes; it need not know of them."""

    def share(self, view: LaneView) -> list[LaneDecision]:
        """Who leaves, who goes slower or faster, who starts."""
        if view.now >= view.until:
            return [Yield(job=job, reason=Reason(Why.ENDS_SOON)) for job in _staying(view)]
        decisions: list[LaneDecision] = [*_give_way(view), *_regulate_all(view)]
        leaving = {decision.job.id for decision in decisions if isinstance(decision, Yield)}
        decisions += _starts(view, disturbed=bool(leaving))
        looks = [decision.at for decision in decisions if isinstance(decision, LookAgain)]
        if view.lanes.guests and isfinite(view.until):
            looks.append(view.until)
        others: list[LaneDecision] = [one for one in decisions if not isinstance(one, LookAgain)]
        return [*others, LookAgain(at=min(looks))] if looks else others


# --- who may share ----------------------------------------------------------------------------------


def why_not_beside(view: LaneView, host: Job, guest: Job, gpu: int) -> str:
    """Why this job may not be on the background lane of a GPU whose foreground `host` has; "" if it may."""
    if shares_a_gpu(host.spec):
        return f"job {host.id} ({host.spec.name}) shares it with others that are content with a part"
    if is_packed(host.spec):
        return f"job {host.id} ({host.spec.name}) shares it with those that it is packed with"
    if host.spec.max_foreground_slowdown == 0:
        return f"job {host.id} ({host.spec.name}) shares no GPU"
    if guest.id in view.lanes.quarantined:
        return "after a fault beside another job it shares no GPU"
    if (host.spec.model, guest.spec.model) in view.lanes.costly:
        return f"{guest.spec.model} slows {host.spec.model} down too much"
    if _alone(view, host, guest, gpu):
        return f"GPU {gpu} is in compute mode EXCLUSIVE_PROCESS, and they are processes of their own"
    if full := _too_full(view, host, guest, gpu):
        return full
    if own_speed(view.lanes.speed(host), expected(view, host)) is None:
        return f"what job {host.id} ({host.spec.name}) does alone is not known yet"
    return ""


def _alone(view: LaneView, host: Job, guest: Job, gpu: int) -> bool:
    """Whether a GPU lets only one of them in. With a guest in the foreground's process, and under MPS, it is
    one process that has it open."""
    device = view.devices.get(gpu)
    if device is None or device.compute_mode is not ComputeMode.EXCLUSIVE_PROCESS:
        return False
    modes = [job.spec.env.get(LANE_MODE) for job in (host, guest)]
    commands = Kind.COMMAND in (host.spec.kind, guest.spec.kind)
    return modes != ["mps", "mps"] and (commands or "process" in modes)


def _too_full(view: LaneView, host: Job, guest: Job, gpu: int) -> str:
    device = view.devices.get(gpu)
    if device is None or device.memory_mib is None:
        return ""
    needs = []
    for job, count in ((host, host.width), (guest, 1)):
        profile = view.loaded(job)
        need = cost_at(profile.memory_mib, count) if profile else None
        if need is None:
            return f"how much memory {job.spec.model} needs is not known (its profile has no memory_mib)"
        needs.append(need)
    if sum(needs) <= device.memory_mib:
        return ""
    return f"GPU {gpu} has {device.memory_mib:.0f} MiB, they need {needs[0]:.0f} and {needs[1]:.0f}"


def why_no_more(view: LaneView, host: Job) -> str:
    """Why a foreground job takes no more guests at the moment; "" if it does."""
    name = f"job {host.id} ({host.spec.name})"
    if host.state is not JobState.RUNNING or host.wanted or host.resizing:
        return f"{name} is {host.state if not host.resizing else 'being resized'}"
    speed = view.lanes.speed(host)
    if view.now >= _silent_from(view, host, host.current.start_s):
        return f"{name} tells nothing of its progress"
    guests = view.lanes.beside(host)
    if not guests:
        return ""
    cost = slowdown(speed, expected(view, host))
    if cost is None or any(guest.share < 1 for guest in guests):
        return f"what its guests cost {name} is being measured"
    if cost < WRONG:
        return f"{name} is faster than alone: its own speed has to be measured again"
    return "" if cost < LOW * host.spec.max_foreground_slowdown else f"{name} has no more room for guests"


def expected(view: LaneView, host: Job) -> float | None:
    """What a foreground job does in a second on its GPUs by its profile; None where that does not say."""
    profile = view.profile(host)
    if profile is None or (view.loaded(host) is None and host.width not in profile.throughput):
        return None
    return profile.rate(host.width)


def why_waiting(view: LaneView, job: Job) -> Iterator[tuple[int, str]]:
    """GPU by GPU, why a waiting background job does not run there."""
    for gpu in sorted(view.devices):
        host = view.foreground(gpu)
        if gpu in view.lanes.holder:
            yield gpu, f"its background lane has job {view.lanes.holder[gpu]}"
        elif host and (why := why_not_beside(view, host, job, gpu) or why_no_more(view, host)):
            yield gpu, why


def _measured_within_s(view: LaneView, host: Job) -> float:
    """Seconds in which a foreground job's speed can be measured, with time to spare."""
    speed = own_speed(view.lanes.speed(host), expected(view, host))
    sample_s = max(LOOK_S, LEAST_STEPS / speed) if speed else LOOK_S
    return 2 * (LEAST_SAMPLES + 1) * sample_s


def _silent_from(view: LaneView, host: Job, since_s: float) -> float:
    """From when on it counts as one that tells nothing of its progress, of which nothing can be measured.

    That is for `SILENT_S`, or as long as a few of its own steps take, after `since_s` or its last progress.
    Stand-ins never are: they tell no times, but cannot slow each other down either.
    """
    device = view.devices.get(host.current.gpus[0])
    if host.spec.kind is Kind.REPLAY or (device is not None and device.kind == "replay"):
        return inf
    speed = view.lanes.speed(host)
    own, heard_s = own_speed(speed, expected(view, host)), speed.heard_s if speed else since_s
    return max(since_s, heard_s) + max(SILENT_S, LEAST_STEPS / own if own else 0.0)


# --- who leaves -------------------------------------------------------------------------------------


def _staying(view: LaneView) -> list[Job]:
    """Who is on a background lane and has not been asked to leave, those that came first in front."""
    jobs = [view.jobs[job_id] for job_id in view.lanes.guests]
    return [job for job in jobs if job.state is not JobState.SUSPENDING and job.wanted in ("", "suspend")]


def _give_way(view: LaneView) -> Iterator[LaneDecision]:
    """Those whose GPU has been given to a job that does not share it with them."""
    for job in _staying(view):
        gpu = view.lanes.guests[job.id].gpu
        host = view.foreground(gpu)
        if host and (why := why_not_beside(view, host, job, gpu)):
            yield _way_given(job, host, gpu, why)


def _way_given(job: Job, host: Job, gpu: int, why: str, *, unknown: bool = False) -> Yield:
    facts = {"gpu": gpu, "job": host.id, "name": host.spec.name, "because": why}
    return Yield(job=job, reason=Reason(Why.GIVES_WAY, facts), host=host, unknown=unknown)


# --- how fast they go -------------------------------------------------------------------------------


def _regulate_all(view: LaneView) -> Iterator[LaneDecision]:
    staying = {job.id for job in _staying(view)}
    hosts: dict[int, Job] = {}
    for job_id, guest in view.lanes.guests.items():
        if host := view.foreground(guest.gpu):
            hosts[host.id] = host
        elif job_id in staying and guest.share != 1:
            yield SetPace(job=view.jobs[job_id], share=1.0)
    for host in hosts.values():
        guests = view.lanes.beside(host)
        tolerated = all(not why_not_beside(view, host, view.jobs[g.job_id], g.gpu) for g in guests)
        if tolerated and all(guest.job_id in staying for guest in guests):
            yield from _regulate(view, host, guests)


def _regulate(view: LaneView, host: Job, guests: list[LaneGuest]) -> Iterator[LaneDecision]:
    """What is to be done about the guests of a foreground job: the fastest go slower first, then the one of
    them that came last goes."""
    speed, limit = view.lanes.speed(host), host.spec.max_foreground_slowdown
    if any(guest.paused_s is not None for guest in guests):
        yield from _go_on(view, host, guests)
        return
    newest = guests[-1]
    silent_from = _silent_from(view, host, max(host.current.start_s, newest.since_s))
    if view.now >= silent_from:
        yield _way_given(view.jobs[newest.job_id], host, newest.gpu, "it tells nothing of its progress")
        return
    if isfinite(silent_from):
        yield LookAgain(at=silent_from)
    cost, pace = slowdown(speed, expected(view, host)), max(guest.pace for guest in guests)
    fastest = [guest for guest in guests if guest.pace == pace]
    newest = fastest[-1]
    job = view.jobs[newest.job_id]
    if speed is None:
        return
    if cost is None:
        yield from _too_slow_to_measure(view, host, newest, speed)
        return
    too_slow, slower = cost > limit, can_be_paced(job) and pace > PACES[-1]
    old = _is_old(view, host, speed) or (cost < WRONG and not speed.anew)
    # What parts two jobs for good must not be a drift, or an error of the profile.
    doubtful = speed.own is None or (not slower and (old or not speed.anew))
    pausing = all(can_be_paced(view.jobs[guest.job_id]) for guest in guests)
    if pausing and (old or (too_slow and doubtful)):
        yield from (SetPace(job=view.jobs[guest.job_id], share=0.0) for guest in guests)
        yield LookAgain(at=view.now + _measured_within_s(view, host))
    elif too_slow and doubtful:
        yield _way_given(job, host, newest.gpu, "its own speed has to be measured", unknown=True)
    elif too_slow and slower:
        jobs = (view.jobs[guest.job_id] for guest in fastest)
        share = PACES[PACES.index(pace) + 1]
        yield from (_paced(job, host, share, cost) for job in jobs if can_be_paced(job))
    elif too_slow:
        reason = _parted(job, host, newest, cost, speed.own, speed.contended)
        yield Yield(job=job, reason=reason, host=host, costly=True)
    elif WRONG <= cost < LOW * limit and len(speed.beside) >= 2 * LEAST_SAMPLES:
        for guest in guests:
            faster = PACES[max(0, PACES.index(guest.pace) - 1)]
            if guest.pace < faster <= guest.most:
                yield _paced(view.jobs[guest.job_id], host, faster, cost)
                return


def _is_old(view: LaneView, host: Job, speed: Speed) -> bool:
    """Whether a foreground job's own speed may have drifted since it was measured."""
    measured_s = host.current.start_s if speed.own is None else speed.own_s
    return view.now >= measured_s + max(MEASURED_EVERY_S, 5 * _measured_within_s(view, host))


def _too_slow_to_measure(
    view: LaneView, host: Job, newest: LaneGuest, speed: Speed
) -> Iterator[LaneDecision]:
    """A foreground job that goes on, but for long has not done what a measurement takes: its newest guest
    goes, for good if what it does alone is known well enough."""
    own, job = own_speed(speed, expected(view, host)), view.jobs[newest.job_id]
    if own is None:  # pragma: no cover - a guest is beside a job of which something is known
        return
    since_s = max(host.current.start_s, newest.since_s, speed.since_s)
    due = since_s + max(SILENT_S, FAR * _measured_within_s(view, host))
    if view.now < due:
        yield LookAgain(at=due)
        return
    rate = (speed.step - speed.since_step) / (view.now - since_s)
    cost = 1 - rate / own
    if cost <= host.spec.max_foreground_slowdown:
        return  # something is under way with it, or it is looked at too seldom
    if speed.own is None or _is_old(view, host, speed):
        yield _way_given(job, host, newest.gpu, "it is far slower than alone", unknown=True)
    else:
        reason = _parted(job, host, newest, cost, speed.own, rate)
        yield Yield(job=job, reason=reason, host=host, costly=True)


def _go_on(view: LaneView, host: Job, guests: list[LaneGuest]) -> Iterator[LaneDecision]:
    """After a pause, as soon as the foreground's own speed is known again."""
    speed = view.lanes.speed(host)
    since_s = min(guest.paused_s for guest in guests if guest.paused_s is not None)
    until = since_s + _measured_within_s(view, host)
    if view.now >= until or (speed is not None and len(speed.alone) >= LEAST_SAMPLES):
        yield from (SetPace(job=view.jobs[guest.job_id], share=guest.pace) for guest in guests)
    else:
        yield LookAgain(at=until)


def _facts(host: Job, cost: float) -> dict[str, object]:
    limit = 100 * host.spec.max_foreground_slowdown
    return {"job": host.id, "name": host.spec.name, "slowdown": cost, "limit": limit}


def _paced(job: Job, host: Job, share: float, cost: float) -> SetPace:
    return SetPace(job=job, share=share, reason=Reason(Why.PACED, {"share": share, **_facts(host, cost)}))


def _parted(
    job: Job, host: Job, guest: LaneGuest, cost: float, alone: float | None, beside: float | None
) -> Reason:
    numbers = {"alone": alone, "beside": beside, "share": guest.pace}
    names = {"guest": f"job {job.id} ({job.spec.name})", "host": f"job {host.id} ({host.spec.name})"}
    return Reason(Why.TOO_COSTLY, {**_facts(host, cost), **names, **numbers})


# --- who starts -------------------------------------------------------------------------------------


def _starts(view: LaneView, *, disturbed: bool) -> Iterator[LaneDecision]:
    """First come, first served: on GPUs that nobody has, then beside those who have most room."""
    free = [gpu for gpu in sorted(view.devices, reverse=True) if gpu not in view.lanes.holder]
    idle = [gpu for gpu in free if view.foreground(gpu) is None]
    hosts = {host.id: host for gpu in free if (host := view.foreground(gpu))}
    open_ = [] if disturbed else [host for host in hosts.values() if not why_no_more(view, host)]
    open_.sort(key=lambda host: (-_room(view, host), host.id))
    starting: list[Job] = []
    for job in islice(view.waiting(), WINDOW):
        if not idle and not open_:
            return
        if not view.in_time(job, starting):
            continue
        if idle:
            gpu = idle.pop(0)
            starting.append(job)
            yield Share(job=job, gpu=gpu, reason=Reason(Why.IDLE_GPU, {"gpu": gpu}))
            continue
        for host in open_:
            lanes = (gpu for gpu in free if gpu in host.current.gpus)
            there = next((gpu for gpu in lanes if not why_not_beside(view, host, job, gpu)), None)
            if there is not None:
                open_.remove(host)  # until what this one costs has been measured
                starting.append(job)
                facts = {"gpu": there, "job": host.id, "name": host.spec.name}
                yield Share(job=job, gpu=there, reason=Reason(Why.BESIDE, facts))
                break


def _room(view: LaneView, host: Job) -> float:
    """How much slower a foreground job may get, as a share of its speed."""
    cost = slowdown(view.lanes.speed(host), expected(view, host)) or 0.0
    return host.spec.max_foreground_slowdown - max(0.0, cost)
