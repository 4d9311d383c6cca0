"""Which waiting jobs are trained as one with those that have a GPU, the same under every policy (pack,
section 5.2: when there are more models than GPUs).

A job that may be packed rides only when no GPU is free for it. None does while a job that cannot be packed
waits in front of it: that one waits for the GPU that the ride would keep busy. When nobody waits any more and
GPUs stay free, those that ride go there, one after the other from the fullest packs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.packing.packs import can_ride, is_packed, key_of
from hpcsched.core.mechanisms.packing.view import PackDecision, PackView, Part, Ride
from hpcsched.core.model import JobState
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.view import LookAgain
from hpcsched.planning.packing.costs import ModelBatch
from hpcsched.planning.packing.joining import MAX_MEMBERS, best_place, costs_of, pays
from hpcsched.planning.packing.speeds import MemberKind, Speeds

COST_MODEL = 2
"""The version of the rules from which on packs are chosen by what was measured of them."""

OWN_MODEL_FIRST = 4
"""The version from which on a job joins first where most of its own model train, if that was measured."""

WINDOW = 100
"""Waiting jobs that are looked at: a decision must not take time in the length of the queue."""

RESERVE = 0.9
"""Of a GPU's memory, what may be planned with."""

COST_OF_ONE_MORE = 0.1
"""Of a step alone, what one more model adds at least to a step of models that are computed as one: so it is
assumed where it was not measured."""

_THERE = (JobState.STARTING, JobState.RUNNING)


class FillPacks:
    """Packs jobs that may be packed.

    Args:
        moves: members leave a pack for GPUs that stay free.
    """

    def __init__(self, *, moves: bool = True) -> None:
        self._moves = moves

    def ride(self, view: PackView) -> list[PackDecision]:
        """Who joins whom now, or leaves whom."""
        return list(self._rides(view) if next(view.waiting(), None) else self._leaves(view))

    def _rides(self, view: PackView) -> list[Ride]:
        places = {gpu: [holder, *_riders(view, gpu)] for gpu, holder in view.holders.items()}
        places = {gpu: jobs for gpu, jobs in places.items() if _may_ride(view, gpu, jobs)}
        measured = _Measured(view)
        decisions: list[Ride] = []
        starting: list[Job] = []
        for job in islice(view.waiting(), WINDOW):
            if not places or not is_packed(job.spec) or job.id in view.packs.alone:
                break
            found = {
                gpu: jobs for gpu, jobs in places.items() if not _why_not(view, measured, gpu, jobs, job)
            }
            if not found or not view.in_time(job, starting):
                continue
            gpu = measured.best(found, job)
            names = ", ".join(other.spec.name for other in places[gpu])
            facts = {"gpu": gpu, "members": len(places[gpu]) + 1, "others": names}
            decisions.append(Ride(job=job, gpu=gpu, reason=Reason(Why.PACKED, facts)))
            places[gpu].append(job)
            starting.append(job)
        return decisions

    def _leaves(self, view: PackView) -> Iterator[PackDecision]:
        """Who goes to the GPUs that have been free for as long as going there takes: by then no other job
        has come for them."""
        if view.packs.idle_s is None or not self._moves:
            return
        packs = {gpu: [holder, *_riders(view, gpu)] for gpu, holder in view.holders.items()}
        free = view.free - sum(job.state is JobState.SUSPENDING for jobs in packs.values() for job in jobs)
        for _ in range(free):
            found = [parting for gpu, jobs in packs.items() for parting in _partings(view, gpu, jobs)]
            good = [parting for parting in found if parting.due <= view.now]
            if not good:
                if found:
                    yield LookAgain(at=min(parting.due for parting in found))
                return
            best = max(good, key=lambda parting: (parting.members, parting.sooner_s, -parting.job.id))
            facts = {"others": best.members - 1, "sooner": best.sooner_s, "cost": best.cost_s}
            yield Part(job=best.job, reason=Reason(Why.PARTED, {"gpu": best.gpu, **facts}))
            packs[best.gpu].remove(best.job)


@dataclass(frozen=True, slots=True)
class _Parting:
    """What it comes to if a job leaves its pack of so many members from `due` on."""

    job: Job
    gpu: int
    members: int
    sooner_s: float
    cost_s: float
    due: float


def _partings(view: PackView, gpu: int, jobs: list[Job]) -> Iterator[_Parting]:
    """Those of a pack that gain by a GPU of their own, or will, for all that is known.

    One whose work is not known is taken to be half-way. When the allocation ends first, being sooner is being
    farther by then.
    """
    for job in jobs:
        slower, ready_s = _slower(view, job, jobs), job.current.ready_s
        rides = job.id in view.packs.gpu_of and job.settled and job.id not in view.packs.parted
        if not rides or slower <= 1 or ready_s is None:
            continue
        cost_s, share = view.save_s(job) + view.launch_s(job, 1, first=False), 1 - 1 / slower
        due, least_s = (view.packs.idle_s or 0.0) + cost_s, cost_s / share
        stay_s = _stay_s(view, job, slower)
        if stay_s is None:
            stay_s, due = max(view.now - ready_s, least_s), max(due, ready_s + least_s)
        stay_s = min(stay_s, view.left_s)
        if stay_s >= least_s:
            yield _Parting(job, gpu, len(jobs), stay_s * share, cost_s, due)


def _stay_s(view: PackView, job: Job, slower: float) -> float | None:
    """How long a job still trains if it stays in its pack; None if that is not known."""
    profile = view.loaded(job)
    if job.remaining is not None and profile is not None:
        return job.remaining / profile.rate(1) * slower
    return job.remaining / job.rate if job.remaining is not None and job.rate is not None else None


def _slower(view: PackView, job: Job, jobs: list[Job]) -> float:
    """How many times longer a step of a job takes in its pack than alone."""
    jobs = [other for other in jobs if other.state in _THERE]
    if job.spec.strategy.get("mode") == "loop" or any(other.spec.model != job.spec.model for other in jobs):
        return len(jobs)
    profile = view.loaded(job)
    packed_s = profile.packed_step_s(len(jobs)) if profile else None
    if profile is None or packed_s is None:
        return 1 + COST_OF_ONE_MORE * (len(jobs) - 1)
    return packed_s * profile.rate(1)


def why_waiting(view: PackView, job: Job) -> Iterator[tuple[int, str]]:
    """GPU by GPU where jobs may be packed, why a waiting job is not packed with those."""
    if job.id in view.packs.alone:
        return
    measured = _Measured(view)
    for gpu, holder in sorted(view.holders.items()):
        jobs = [holder, *_riders(view, gpu)]
        if _may_ride(view, gpu, jobs):
            yield gpu, _why_not(view, measured, gpu, jobs, job) or "a job in front of it waits for a GPU"


def _may_ride(view: PackView, gpu: int, jobs: list[Job]) -> bool:
    """Whether those on a GPU may be packed at all."""
    return gpu in view.devices and can_ride(jobs[0].spec, view.devices[gpu])


def _why_not(view: PackView, measured: _Measured, gpu: int, jobs: list[Job], newcomer: Job) -> str:
    """Why those on a GPU take no more, or not this one; "" if they do."""
    together = [*jobs, newcomer]
    if any(job.id in view.packs.alone for job in together):
        return "who left a pack is packed no more"
    if view.shared(gpu) or not any(job.state in _THERE and not job.wanted for job in jobs):
        return "those who train there are leaving"
    if key_of(newcomer.spec) != key_of(jobs[0].spec):
        return f"job {jobs[0].id} ({jobs[0].spec.name}) is of another kind"
    most = min(int(job.spec.strategy.get("most", MAX_MEMBERS)) for job in together)
    if len(together) > most:
        return f"{len(jobs)} train there, at most {most} may"
    if not _fits(view, gpu, together):
        return f"{len(together)} of them do not fit into its memory"
    return "" if measured.pays(together) else "as was measured, one more there gains nothing"


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


class _Measured:
    """What was measured of packs, for one decision.

    Only packs of one model were measured. None of it counts by the first version of the rules.
    """

    def __init__(self, view: PackView) -> None:
        self._view = view
        self._speeds: dict[str, Speeds | None] = {}
        self._pays: dict[tuple[tuple[MemberKind, ...], MemberKind], bool] = {}

    def speeds(self, jobs: list[Job]) -> Speeds | None:
        """What packs of these jobs take; None if that was not measured, or their work is not known."""
        model = jobs[0].spec.model
        other = any(job.remaining is None or job.spec.model != model for job in jobs)
        if self._view.rules < COST_MODEL or other:
            return None
        if model not in self._speeds:
            costs = costs_of(self._view.loaded(jobs[0]))
            self._speeds[model] = Speeds([costs]) if costs else None
        return self._speeds[model]

    def pays(self, jobs: list[Job]) -> bool:
        """Whether the last of these jobs is done sooner there than after the others; where that was never
        measured the pack finds out, and has its members take turns if not."""
        if speeds := self.speeds(jobs):
            *members, newcomer = (_kind(job) for job in jobs)
            key = tuple(members), newcomer
            if key not in self._pays:
                self._pays[key] = pays(speeds, members, newcomer)
            return self._pays[key]
        profile = self._view.loaded(jobs[-1])
        if profile is None or any(job.spec.model != jobs[-1].spec.model for job in jobs):
            return True
        now_s, then_s = profile.packed_step_s(len(jobs) - 1), profile.packed_step_s(len(jobs))
        return now_s is None or then_s is None or then_s - now_s < 1 / profile.rate(1)

    def best(self, places: Mapping[int, list[Job]], job: Job) -> int:
        """The GPU of these that a job is to join: where all are done soonest, as far as that was measured;
        else where most of its own model train, if by what was measured it gains by these; of those that are
        equal, where the fewest train, and the most similar ones (section 5.3)."""
        own = {gpu: self._of_its_own(jobs, job) for gpu, jobs in places.items()}
        like = sorted(places, key=lambda gpu: (-own[gpu], *_fit(job, places[gpu]), gpu))
        if speeds := self.speeds([job, *(other for jobs in places.values() for other in jobs)]):
            kinds = {gpu: [_kind(other) for other in places[gpu]] for gpu in like}
            gpu = best_place(speeds, kinds, _kind(job))
            assert gpu is not None, "it joins none where that does not pay"
            return gpu
        return like[0]

    def _of_its_own(self, jobs: list[Job], job: Job) -> int:
        """How many of these are of its own model; 0 where nobody knows that it gains by them."""
        stacks = self._view.rules >= OWN_MODEL_FIRST and job.spec.strategy.get("mode") != "loop"
        if not stacks or costs_of(self._view.loaded(job)) is None:
            return 0
        own = [other for other in jobs if other.spec.model == job.spec.model]
        return len(own) if own and self.pays([*own, job]) else 0


def _kind(job: Job) -> MemberKind:
    """The job as far as predictions go, by the steps that it has still to do."""
    return MemberKind(ModelBatch(job.spec.model, 1), job.remaining or 0)


def _fit(job: Job, others: list[Job]) -> tuple[int, int]:
    """How well a job goes with those on a GPU, less is better: how many they are, and in how many arguments
    the one most like it differs."""
    return len(others), min(_differences(job, other) for other in others)


def _differences(one: Job, other: Job) -> int:
    a, b = one.spec.args, other.spec.args
    return sum(a.get(key) != b.get(key) for key in {*a, *b})
