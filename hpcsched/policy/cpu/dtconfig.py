"""The scaling engine: how many parameter servers and workers a training has, and the cores of each, found
from what its processes are measured to use (NEARCHUS, section IV). No model, nothing measured beforehand.

A search goes from where it stands to a configuration that differs by one move, and stays there if training
goes faster by it, or if a bottleneck is gone and it goes no slower; when no move is left it goes back to the
fastest seen, and rests. Cores are counted in hundredths. What is not the paper's is in
docs/adr/0015-cpu-cores.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from hpcsched.contract.seats import Seat
from hpcsched.core.mechanisms.cpu.cores import WHOLE
from hpcsched.core.model import Usage
from hpcsched.core.reasons import Reason, Why
from hpcsched.policy.cpu.configurations import (
    EFFICIENT,
    IDLE,
    LEAST_FACTOR,
    SCALE_UP,
    CpuShape,
    Rules,
    SeenUsage,
    balanced,
    idle_facts,
    scaled,
    trimmed,
    with_all,
    with_fewer,
    with_servers,
    with_workers,
)

BETTER = 0.03
"""A configuration is better if steps are faster by so much: samples differ by less than 5 %."""

WORTH = 0.05
"""So much faster must a training be by half as many cores again: others could use them."""

PAID = 0.8
"""More cores have paid if the speed grew by so much of what they grew by: then the next step is twice as
large, and comes before more workers (the paper: always the same step)."""

NO_WORSE = 0.02
"""What costs no more than this of the speed costs nothing."""

MORE_USED = 0.02
"""Cores are used better if the efficiency is higher by so much."""

DRIFT = 0.1
"""A training whose speed changes by more at rest has changed: the search begins anew."""

MOST_CHANGES = 60
"""Of a job's configuration in an attempt: by then it has been looked at long enough."""

PATIENCE = 3
"""After so many measurements at rest all is tried again, then after twice as many, and so on."""


class ScalingMove(StrEnum):
    """What can be changed."""

    UP = "more cores"
    SERVER = "more servers"
    WORKER = "more workers"
    WIDER = "more cores, and what they ask for"
    OUT = "more of all"
    FEWER = "fewer workers"
    BALANCE = "cores moved to where they are used"
    TRIM = "fewer cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSearch:
    """What is remembered of a job's search.

    `base` is the configuration from which moves are tried, `best` the fastest seen; `trial` the move that led
    away from the base, to `shape`, and is not judged yet (no trial, but a shape: it goes back). `tried` are
    the moves that did not help from there; `doubted`: more workers did not help the last time, so more cores
    come first; `raised` is what was measured of more cores that did not help. `stride`: how many times the
    usual part the next more cores are, above 1 if the last ones have paid. `changes` counts all; `rests`:
    nothing is left to try, `waits`: more cores are, once there are some. `looked_at` is the newest
    measurement taken in; of `patience` measurements at rest there were `rested`.
    """

    base: SeenUsage | None = None
    best: SeenUsage | None = None
    trial: ScalingMove | None = None
    shape: CpuShape | None = None
    tried: frozenset[ScalingMove] = frozenset()
    doubted: bool = False
    raised: SeenUsage | None = None
    stride: int = 1
    changes: int = 0
    rests: bool = False
    waits: bool = False
    looked_at: Usage | None = None
    rested: int = 0
    patience: int = PATIENCE

    def anew(self) -> ScalingSearch:
        """The search of a job that starts again: what it was about to try is forgotten."""
        return ScalingSearch(base=self.base, best=self.best, tried=self.tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStep:
    """What a search says: the configuration to go to (None: stay), and why."""

    search: ScalingSearch
    shape: CpuShape | None = None
    reason: Reason | None = None


def look(
    search: ScalingSearch,
    seats: Sequence[Seat],
    usage: Usage,
    rules: Rules,
    room: int,
    held: int | None = None,
) -> ScalingStep | None:
    """What to do with a job that has these seats and was measured so; None: nothing, and nothing is new.

    Args:
        room: hundredths of cores that it could get besides those it has.
        held: those that it has, if its seats do not need all of them.
    """
    # A change that was not made waits for the next measurement: the job may be about to end.
    fresh = usage != search.looked_at or search.shape == CpuShape.of(seats)
    if not fresh and not (search.waits and room > 0):
        return None
    now = SeenUsage.of(seats, usage)
    if fresh:
        search = _judged(replace(search, looked_at=usage, waits=False), now)
        if search.rests:
            return ScalingStep(search=search)
    return _next(search, now, rules, min(rules.budget, (held or now.shape.cores) + room))


def _next(search: ScalingSearch, now: SeenUsage, rules: Rules, there: int) -> ScalingStep:
    """The move to try, the way back, or rest; on `there` hundredths at most."""
    base, best = search.base or now, search.best or now
    for move, why in _moves(search, base, rules) if search.changes < MOST_CHANGES else ():
        shape = None if move in search.tried else _moved(move, search, base, rules, there)
        if shape is not None and shape not in (now.shape, base.shape):
            count = search.changes + 1
            changed = replace(search, trial=move, shape=shape, changes=count, waits=False)
            return ScalingStep(search=changed, shape=shape, reason=_said(why, shape, now, base))
    goals = [best, base] if base.rate < best.rate * (1 - NO_WORSE) else [base]
    goal = next((seen for seen in goals if seen.shape == now.shape or seen.shape.cores <= there), None)
    if goal is None:  # others have its cores
        return _next(_from_here(search, now), now, rules, there)
    if now.shape == goal.shape:
        return _at_rest(search, now, rules)
    facts = {"old": str(now.shape), "seats": str(goal.shape), "best": goal.rate, "rate": now.rate}
    count, tried = search.changes + 1, frozenset(ScalingMove)
    back = replace(search, base=goal, shape=goal.shape, changes=count, tried=tried, waits=False)
    return ScalingStep(search=back, shape=goal.shape, reason=Reason(Why.BEST_SEEN, facts))


def _from_here(search: ScalingSearch, now: SeenUsage) -> ScalingSearch:
    """The search begins anew where the job stands."""
    anew = replace(search, base=now, best=now, tried=frozenset(), raised=None, trial=None, shape=None)
    return replace(anew, rests=False, rested=0, stride=1)


def _judged(search: ScalingSearch, now: SeenUsage) -> ScalingSearch:
    """What was measured says of the move that led here."""
    base, move, best = search.base, search.trial, search.best
    if base is None or best is None:
        return replace(search, base=now, best=now)
    if move is None:
        back = search.shape is not None
        search = replace(search, shape=None)
        if now.shape == base.shape:
            return _still_good(search, base, now)
        return _from_here(search, now) if back else search  # it could not go back
    came = now.shape == search.shape  # else it could not be done
    helps = came and _helps(move, base, now)
    if now.rate > best.rate and (helps or not _more_cores(base, now)):
        best = now
    search = replace(search, trial=None, shape=None, best=best)
    if not helps:
        if came and move is ScalingMove.UP and search.stride > 1:
            return replace(search, stride=1)  # fewer of them may help
        doubted = search.doubted or move is ScalingMove.WORKER
        raised = now if came and move is ScalingMove.UP else search.raised
        return replace(search, tried=search.tried | {move}, doubted=doubted, raised=raised)
    tried = (
        {move}
        if move in (ScalingMove.BALANCE, ScalingMove.TRIM) and now.rate < base.rate * (1 + BETTER)
        else set()
    )
    doubted = search.doubted and move is not ScalingMove.WORKER
    search = replace(search, base=now, tried=frozenset(tried), doubted=doubted)
    stride = search.stride
    if move is ScalingMove.UP:
        paid = now.rate / base.rate - 1 >= PAID * (now.shape.cores / base.shape.cores - 1)
        stride = 2 * stride if paid else 1
    return replace(search, raised=None, patience=PATIENCE, stride=stride)


def _still_good(search: ScalingSearch, base: SeenUsage, now: SeenUsage) -> ScalingSearch:
    """What it says that the same configuration was measured once more: at rest all is tried anew when the
    training has changed, and now and then, ever more seldom, as what was measured may have been disturbed."""
    if not search.rests:
        return replace(search, base=now)
    if abs(now.rate / base.rate - 1) > DRIFT:
        return _from_here(search, now)
    rested = search.rested + 1
    if rested < search.patience or search.changes >= MOST_CHANGES:
        return replace(search, rested=rested)
    return replace(_from_here(search, now), patience=2 * search.patience)


def _helps(move: ScalingMove, base: SeenUsage, now: SeenUsage) -> bool:
    """Whether a move was a good one."""
    gain = now.rate / base.rate - 1
    if move is ScalingMove.SERVER and now.full < base.full:
        return gain >= -NO_WORSE
    if _more_cores(base, now):
        return gain >= max(BETTER, WORTH * (now.shape.cores / base.shape.cores - 1) / SCALE_UP)
    used_better = move is ScalingMove.WORKER and now.efficiency >= base.efficiency + MORE_USED
    return gain >= (-NO_WORSE if used_better or move in (ScalingMove.BALANCE, ScalingMove.TRIM) else BETTER)


def _more_cores(base: SeenUsage, now: SeenUsage) -> bool:
    return now.shape.cores > base.shape.cores * LEAST_FACTOR


def _moves(search: ScalingSearch, base: SeenUsage, rules: Rules) -> list[tuple[ScalingMove, Reason]]:
    """What can be tried from a configuration: what its bottleneck asks for, then what else may help."""
    facts: dict[str, Any] = {
        "old": str(base.shape),
        "had": base.shape.cores / WHOLE,
        "rate": base.rate,
        "efficiency": base.efficiency,
    }
    up, both = (ScalingMove.UP, Reason(Why.MORE_CORES, facts)), Reason(Why.AT_ONCE, facts)
    wider, out = (ScalingMove.WIDER, both), (ScalingMove.OUT, both)
    full, used = base.full, base.efficiency >= EFFICIENT
    worker = (
        ScalingMove.WORKER,
        Reason(Why.MORE_WORKERS if full or used else Why.UTILISATION_BOTTLENECK, facts),
    )
    server = ScalingMove.SERVER, Reason(Why.MORE_SERVERS, facts)
    fewer = ScalingMove.FEWER, Reason(Why.FEWER_WORKERS, facts)
    if full:
        where = {"server": base.links.index(full), "net": full}
        server = ScalingMove.SERVER, Reason(Why.NETWORK_BOTTLENECK, {**facts, **where})
    idle = idle_facts(base)
    found = [(ScalingMove.BALANCE, Reason(Why.BALANCED, {**facts, **idle}))] if idle else []
    whole = base.shape.cores * LEAST_FACTOR >= rules.budget
    if used and not (full or search.raised or whole or ScalingMove.UP in search.tried):
        return [*found, up, wider]  # without free cores it waits for some
    cores_first = used or search.doubted or search.stride > 1
    others = [up, wider, worker] if cores_first else [worker, up, wider]
    found += [server, *others] if full else [*others, server]
    found += [out, fewer]
    if base.efficiency < IDLE:
        found.append((ScalingMove.TRIM, Reason(Why.TRIMMED, facts)))
    fixed = set()
    if rules.servers is not None:
        fixed |= {ScalingMove.SERVER, ScalingMove.OUT}
    if rules.workers is not None:
        fixed |= {ScalingMove.WORKER, ScalingMove.OUT, ScalingMove.FEWER}
    return [(move, why) for move, why in found if move not in fixed]


def _moved(
    move: ScalingMove, search: ScalingSearch, base: SeenUsage, rules: Rules, there: int
) -> CpuShape | None:
    """The configuration after a move, on `there` hundredths at most; None if it cannot be done."""
    shape = base.shape
    if move is ScalingMove.UP:
        factor = min(1 + rules.scale_up * search.stride, there / shape.cores)
        return scaled(shape, factor) if factor >= LEAST_FACTOR else None
    if move is ScalingMove.WIDER:
        return _widened(search.raised, rules, there)
    if move is ScalingMove.OUT:
        return with_all(shape, rules, there)
    if shape.cores > there:
        return None  # it has given cores back since, and others have them
    match move:
        case ScalingMove.BALANCE:
            return balanced(base)
        case ScalingMove.TRIM:
            return trimmed(base)
        case ScalingMove.SERVER:
            return with_servers(shape, there)
        case ScalingMove.FEWER:
            return with_fewer(shape)
    return with_workers(base, there)


def _widened(raised: SeenUsage | None, rules: Rules, there: int) -> CpuShape | None:
    """More cores alone were no use: with what their bottleneck asks for they may be (as in the paper, which
    takes the one after the other)."""
    if raised is None or raised.shape.cores > there:
        return None
    if raised.full:
        return with_servers(raised.shape, there) if rules.servers is None else None
    return with_workers(raised, there) if rules.workers is None else None


def _said(why: Reason, shape: CpuShape, now: SeenUsage, base: SeenUsage) -> Reason:
    """The reason in full: where the job stands elsewhere, that did not help."""
    facts = {**why.facts, "seats": str(shape)}
    if now.shape != base.shape:
        facts["because"] = f" ({now.shape} did not help: {now.rate:.4g})"
    return replace(why, facts=facts)


def _at_rest(search: ScalingSearch, now: SeenUsage, rules: Rules) -> ScalingStep:
    """Nothing is left to try: the job stays as it is, or waits for more cores."""
    whole = now.shape.cores * LEAST_FACTOR >= rules.budget
    facts = {
        "seats": str(now.shape),
        "had": now.shape.cores / WHOLE,
        "rate": now.rate,
        "efficiency": now.efficiency,
    }
    if ScalingMove.UP not in search.tried and not whole and search.changes < MOST_CHANGES:
        return ScalingStep(search=replace(search, waits=True), reason=Reason(Why.WANTS_CORES, facts))
    because = "nothing else that was tried is faster"
    if whole:
        because = f"it uses {now.efficiency:.0%} of its whole budget, and {because}"
    if search.changes >= MOST_CHANGES:
        because = f"its configuration has been changed {search.changes} times"
    facts["because"] = because
    return ScalingStep(search=replace(search, rests=True), reason=Reason(Why.SETTLED, facts))
