"""What a pool asks for next, and why. Pure: a situation in, a decision out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcsched.durations import clock
from hpcsched.pool.poolfile import Pool, Template
from hpcsched.pool.record import Allocation, State, Trouble, Wanted

LEAST_GAIN_S = 60.0
LEAST_GAIN = 0.02
"""The end has to come sooner by so many seconds, and by so large a share (chosen): less is within the doubt
of any forecast."""
ALIKE = 0.05
"""Ends that differ by less than this share count as equal: the cheaper one is taken (chosen)."""
MOST_BACKOFF_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has to do. `waiting`: jobs that could run and do not, `running` those that do, `leads`: an
    agent works. `wanted_gpus` are the fewest GPUs that the waiting jobs need together, `free_gpus` are idle
    ones that the run has. `over`: nothing is left to do."""

    waiting: int = 0
    running: int = 0
    wanted_gpus: int = 0
    free_gpus: int = 0
    leads: bool = False

    @property
    def over(self) -> bool:
        return not (self.waiting or self.running)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """When the run's queue ends, in seconds from now (infinite: never), and GPU-seconds charged till then."""

    end_s: float
    gpu_s: float


@dataclass(frozen=True, kw_only=True)
class Situation:
    """All that a decision rests on. `held` are the pool's allocations that are not over, `coming` those of
    them whose hosts are not in the run yet; `used_gpu_s` is charged so far, `promised_gpu_s` may still be.
    `waits`: by template the seconds that it would wait now (not named: not known), `refused` why it would not
    be taken."""

    now: float
    work: Work
    held: Sequence[Allocation] = ()
    coming: Sequence[Allocation] = ()
    used_gpu_s: float = 0.0
    promised_gpu_s: float = 0.0
    troubles: Mapping[str, Trouble] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    wanted: Wanted = Wanted.RUN


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Ask for `template`; None: for nothing. `why` in words; `give_up` are waiting allocations that
    nothing needs any more."""

    template: Template | None = None
    why: tuple[str, ...] = ()
    give_up: tuple[Allocation, ...] = ()


Foresee = Callable[[Template | None], Forecast | None]
"""The forecast with one more allocation of a template, or without (None); None where it cannot be known."""


def decide(pool: Pool, at: Situation, foresee: Foresee) -> Decision:
    """What the pool does now: at most one allocation more."""
    work = at.work
    if at.wanted is not Wanted.RUN:
        return Decision(why=("paused" if at.wanted is Wanted.PAUSE else "stopped",))
    if not work.waiting:
        waiting = tuple(one for one in at.held if one.state is State.WAITING)
        idle = "all jobs of the run run" if work.running else "no job waits"
        return Decision(why=(f"nothing is needed: {idle}",), give_up=waiting)
    able, refusals = _able(pool, at)
    if not able:
        return Decision(why=refusals)
    if not (work.leads or at.held):
        return _first(able, at, foresee, refusals)
    return _more(able, at, foresee, refusals)


def may_ask(pool: Pool, at: Situation) -> list[Template]:
    """The templates that may be asked for now, whether that pays or not."""
    if at.wanted is not Wanted.RUN or not at.work.waiting:
        return []
    return _able(pool, at)[0]


def _able(pool: Pool, at: Situation) -> tuple[list[Template], tuple[str, ...]]:
    """The templates that may be asked for, and why others may not."""
    live, gpus = len(at.held), sum(one.gpus for one in at.held)
    if live >= pool.max_allocations:
        return [], (f"{live} allocations wait or run: max_allocations = {pool.max_allocations}",)
    able, refusals = [], []
    for one in pool.templates:
        if why := _why_not(one, pool, at, gpus):
            refusals.append(f"{one.name}: {why}")
        else:
            able.append(one)
    return able, tuple(refusals)


def _why_not(one: Template, pool: Pool, at: Situation, gpus: int) -> str:
    trouble = at.troubles.get(one.name)
    if trouble and trouble.count >= pool.failures:
        return f"set aside after {trouble.count} failures ({trouble.why}); `hpcsched pool resume` tries again"
    if trouble and at.now < (until := trouble.last + backoff_s(trouble.count, pool.period_s)):
        return f"tried again in {clock(until - at.now)}: {trouble.why}"
    if why := at.refused.get(one.name):
        return f"the batch system would not take it: {why}"
    if sum(held.template == one.name for held in at.held) >= one.most:
        return f"{one.most} of it wait or run: its max"
    if gpus + one.gpus > pool.max_gpus:
        return f"{gpus} GPUs are asked for or held, {one.gpus} more are over max_gpus = {pool.max_gpus}"
    left_s = pool.gpu_hours * 3600 - at.used_gpu_s - at.promised_gpu_s
    if one.most_gpu_s > left_s + 1e-6:
        need, left = one.most_gpu_s / 3600, max(0.0, left_s) / 3600
        return (
            f"up to {need:.3g} GPU-hours, and {left:.3g} of gpu_hours = {pool.gpu_hours:g} are not spoken for"
        )
    return ""


def backoff_s(failures: int, period_s: float) -> float:
    """How long a template is left alone after so many failures in a row: doubling from a period on."""
    return min(MOST_BACKOFF_S, period_s * 2.0 ** min(failures, 30))


def _first(able: Sequence[Template], at: Situation, foresee: Foresee, refusals: tuple[str, ...]) -> Decision:
    """The first allocation: without one nothing runs, so one is asked for whatever it costs."""
    known = [(one, found) for one in able if (found := foresee(one)) is not None]
    ends = [(one, found) for one, found in known if math.isfinite(found.end_s)]
    if ends:
        soonest = min(found.end_s for _, found in ends)
        alike = [(one, found) for one, found in ends if found.end_s <= soonest * (1 + ALIKE)]
        one, found = min(alike, key=lambda pair: (pair[1].gpu_s, pair[1].end_s))
        why = (
            f"no agent leads the run, and {_jobs(at.work.waiting)}: all would be done in {clock(found.end_s)}"
        )
    else:
        one = min(able, key=lambda one: (at.waits.get(one.name, math.inf), -one.gpus))
        what = "for not all of which one allocation is enough" if known else "of unknown length"
        why = f"no agent leads the run, and {_jobs(at.work.waiting)}, {what}"
    return Decision(template=one, why=(why + _wait(one, at), *refusals))


def _more(able: Sequence[Template], at: Situation, foresee: Foresee, refusals: tuple[str, ...]) -> Decision:
    """An allocation more than there are: where all is done sooner by more than that costs."""
    without = foresee(None)
    if without is None:
        return _by_count(able, at, refusals)
    found: list[tuple[Template, Forecast]] = []
    whys: list[str] = []
    for one in able:
        then = foresee(one)
        if then is None:
            return _by_count(able, at, refusals)
        if why := why_not_worth(one, without, then):
            whys.append(f"{one.name}: {why}")
        else:
            found.append((one, then))
    if not found:
        return Decision(why=(*whys, *refusals))
    soonest = min(then.end_s for _, then in found)
    alike = [pair for pair in found if pair[1].end_s <= soonest * (1 + ALIKE)]
    one, then = min(alike, key=lambda pair: (pair[1].gpu_s, pair[1].end_s))
    instead = f"instead of {clock(without.end_s)}" if math.isfinite(without.end_s) else "instead of never"
    more_h = round((then.gpu_s - without.gpu_s) / 3600, 2) if math.isfinite(without.gpu_s) else 0.0
    cost = f", for {abs(more_h):g} GPU-hours {'more' if more_h > 0 else 'less'}" if more_h else ""
    why = f"{_jobs(at.work.waiting)}: all would be done in {clock(then.end_s)} {instead}{cost}"
    return Decision(template=one, why=(why + _wait(one, at), *whys, *refusals))


def why_not_worth(one: Template, without: Forecast, then: Forecast) -> str:
    """Why an allocation more does not pay; empty if it does.

    It does where the end comes sooner, and where each GPU-second by which the bill grows has the end come
    sooner by at least that on one of the GPUs asked for.
    """
    if math.isinf(then.end_s):
        return "the queue would not end with it either"
    if math.isinf(without.end_s):
        return ""
    sooner_s = without.end_s - then.end_s
    if sooner_s < max(LEAST_GAIN_S, LEAST_GAIN * without.end_s):
        return f"all is done in {clock(without.end_s)} without it, {clock(max(0.0, sooner_s))} sooner with it"
    more_s = then.gpu_s - without.gpu_s
    if more_s > sooner_s * one.gpus:
        cost, gain = more_s / 3600, sooner_s * one.gpus / 3600
        return f"{clock(sooner_s)} sooner on {one.gpus} GPUs ({gain:.2g} GPU-hours) would cost {cost:.2g}"
    return ""


def _by_count(able: Sequence[Template], at: Situation, refusals: tuple[str, ...]) -> Decision:
    """Where nobody knows how long jobs take: as many GPUs as the waiting ones need at least."""
    there = at.work.free_gpus + sum(one.gpus for one in at.coming)
    if there >= at.work.wanted_gpus:
        what = f"{at.work.wanted_gpus} GPUs are needed at least, {there} are free or asked for"
        return Decision(why=(f"{_jobs(at.work.waiting)}, of unknown length: {what}", *refusals))
    lacking = at.work.wanted_gpus - there
    one = min(
        able, key=lambda one: (at.waits.get(one.name, math.inf), abs(one.gpus - lacking), one.most_gpu_s)
    )
    why = f"{_jobs(at.work.waiting)}, of unknown length, for {lacking} GPUs more than are free or asked for"
    return Decision(template=one, why=(why + _wait(one, at), *refusals))


def _jobs(number: int) -> str:
    return "1 job waits" if number == 1 else f"{number} jobs wait"


def _wait(one: Template, at: Situation) -> str:
    wait_s = at.waits.get(one.name)
    return "" if wait_s is None else f" (it would wait {clock(wait_s)})"
