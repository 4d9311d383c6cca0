"""The scaling engine: how many parameter servers and workers a training has, and the cores of each, found
from what its processes are measured to use (NEARCHUS, section IV). No model, nothing measured beforehand.

A search goes from where it stands to a configuration that differs by one move, and stays there if training
goes faster by it, or if a bottleneck is gone and it goes no slower; when no move is left it goes back to the
fastest seen, and rests. Cores are counted in hundredths. What is not the paper's is in
docs/adr/0015-cpu-cores.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from hpcsched.core.cores import LEAST, WHOLE
from hpcsched.core.model import Seat, Usage
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.seats import said_seats

START = 0.15
"""R_0: the part of its budget that a job starts with (section V: 15 of 100 vCPUs)."""

SCALE_UP = 0.5
"""R_up: by how much it is given more."""

EFFICIENT = 0.95
"""E_thd_job: a job that uses so much of its cores has no bottleneck."""

IDLE = 0.8
"""E_thd_opt: a process that uses less of its cores can spare some."""

FULL_LINK = 0.1
"""A link that is full for more of the time is a bottleneck: 10 % of the samples above 90 % of its
capacity."""

SLACK = 1.1
"""Servers get so much more than in proportion, as workers wait for them."""

BETTER = 0.03
"""A configuration is better if steps are faster by so much: samples differ by less than 5 %."""

WORTH = 0.05
"""So much faster must a training be by half as many cores again: others could use them."""

NO_WORSE = 0.02
"""What costs no more than this of the speed costs nothing."""

MORE_USED = 0.02
"""Cores are used better if the efficiency is higher by so much."""

WORTH_MOVING = 0.02
"""Of a job's cores: fewer are left where they are."""

DRIFT = 0.1
"""A training whose speed changes by more at rest has changed: the search begins anew."""

MOST_CHANGES = 60
"""Of a job's configuration in an attempt: by then it has been looked at long enough."""

PATIENCE = 3
"""After so many measurements at rest all is tried again, then after twice as many, and so on."""

LEAST_FACTOR = 1.05
"""Fewer cores more than that are not worth a change."""


class Move(StrEnum):
    """What can be changed."""

    UP = "more cores"
    SERVER = "one more server"
    WORKER = "more workers"
    BALANCE = "cores moved to where they are used"
    TRIM = "fewer cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A DT-config: the cores of each server and each worker, in hundredths."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def cores(self) -> int:
        """All of them, in hundredths."""
        return sum(self.servers) + sum(self.workers)

    @classmethod
    def even(cls, servers: int, workers: int, cores: int) -> Shape:
        """The same share for every process, of so many cores at most."""
        share = cores // (servers + workers)
        return cls(servers=(share,) * servers, workers=(share,) * workers)

    @classmethod
    def of(cls, seats: Sequence[Seat]) -> Shape:
        """The configuration of these seats."""
        shares = [(seat.server, round(WHOLE * seat.share)) for seat in seats]
        return cls(
            servers=tuple(share for server, share in shares if server),
            workers=tuple(share for server, share in shares if not server),
        )

    def __str__(self) -> str:
        seats = [
            *(Seat(server=True, share=share / WHOLE) for share in self.servers),
            *(Seat(server=False, share=share / WHOLE) for share in self.workers),
        ]
        return said_seats(seats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the user has said of a job: its budget in hundredths, how it starts and grows, and counts that are
    not to be searched for (None: they are)."""

    budget: int
    start: float = START
    scale_up: float = SCALE_UP
    servers: int | None = None
    workers: int | None = None

    @classmethod
    def of(cls, strategy: Mapping[str, Any]) -> Rules:
        """As in the job file, where it was checked."""
        return cls(
            budget=round(WHOLE * strategy["cpus"]),
            start=strategy.get("start", START),
            scale_up=strategy.get("scale_up", SCALE_UP),
            servers=strategy.get("servers"),
            workers=strategy.get("workers"),
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Servers and workers to begin with: (1, 2), if nothing else was said."""
        return self.servers or 1, self.workers or 2

    def first(self) -> Shape:
        """The configuration to begin with: (1, 2, R_0/3, 2 R_0/3)."""
        ranks = sum(self.counts)
        return Shape.even(*self.counts, max(LEAST * ranks, int(self.budget * self.start)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A configuration, and what was measured of it: cores used by server and by worker, full links by
    server."""

    shape: Shape
    usage: Usage
    servers: tuple[float, ...]
    workers: tuple[float, ...]
    links: tuple[float, ...]

    @classmethod
    def of(cls, seats: Sequence[Seat], usage: Usage) -> Seen:
        used = list(zip(seats, usage.cpu, usage.net, strict=True))
        return cls(
            shape=Shape.of(seats),
            usage=usage,
            servers=tuple(cpu for seat, cpu, _ in used if seat.server),
            workers=tuple(cpu for seat, cpu, _ in used if not seat.server),
            links=tuple(net for seat, _, net in used if seat.server),
        )

    @property
    def rate(self) -> float:
        return self.usage.rate

    @property
    def efficiency(self) -> float:
        """e_job: the cores used, of those that the job has."""
        return WHOLE * sum(self.usage.cpu) / self.shape.cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is remembered of a job's search.

    `base` is the configuration from which moves are tried, `best` the fastest seen; `trial` the move that led
    away from the base, to `shape`, and is not judged yet. `tried` are the moves that did not help from there;
    `doubted`: more workers did not help the last time, so more cores come first. `changes`
    counts all; `rests`: nothing is left to try, `waits`: more cores are, once there are some. `looked_at` is
    the newest measurement taken in; of `patience` measurements at rest there were `rested`.
    """

    base: Seen | None = None
    best: Seen | None = None
    trial: Move | None = None
    shape: Shape | None = None
    tried: frozenset[Move] = frozenset()
    doubted: bool = False
    changes: int = 0
    rests: bool = False
    waits: bool = False
    looked_at: Usage | None = None
    rested: int = 0
    patience: int = PATIENCE

    def anew(self) -> Search:
        """The search of a job that starts again: what it was about to try is forgotten."""
        return Search(base=self.base, best=self.best, tried=self.tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search says: the configuration to go to (None: stay), and why."""

    search: Search
    shape: Shape | None = None
    reason: Reason | None = None


def look(search: Search, seats: Sequence[Seat], usage: Usage, rules: Rules, room: int) -> Found | None:
    """What to do with a job that has these seats and was measured so; None: nothing, and nothing is new.

    Args:
        room: hundredths of cores that it could get besides those it has.
    """
    fresh = usage != search.looked_at
    if not fresh and not (search.waits and room > 0):
        return None
    now = Seen.of(seats, usage)
    if fresh:
        search = _judged(replace(search, looked_at=usage, waits=False), now)
        if search.rests:
            return Found(search=search)
    base, best = search.base or now, search.best or now
    for move, why in _moves(base, rules, search.doubted) if search.changes < MOST_CHANGES else ():
        shape = None if move in search.tried else _moved(move, base, rules, room, now.shape)
        if shape is not None and shape not in (now.shape, base.shape):
            changed = replace(search, trial=move, shape=shape, changes=search.changes + 1, looked_at=None)
            return Found(search=changed, shape=shape, reason=_said(why, shape, now, base))
    goal = best if base.rate < best.rate * (1 - NO_WORSE) else base
    if now.shape != goal.shape and goal.shape.cores <= min(rules.budget, now.shape.cores + room):
        facts = {"old": str(now.shape), "seats": str(goal.shape), "best": goal.rate, "rate": now.rate}
        count = search.changes + 1
        back = replace(search, base=goal, changes=count, tried=frozenset(Move), looked_at=None)
        return Found(search=back, shape=goal.shape, reason=Reason(Why.BEST_SEEN, facts))
    return _at_rest(search, now, rules)


def _judged(search: Search, now: Seen) -> Search:
    """What was measured says of the move that led here."""
    base, move, best = search.base, search.trial, search.best
    if base is None or best is None:
        return replace(search, base=now, best=now)
    if move is None:
        return _still_good(search, base, now) if now.shape == base.shape else search
    came = now.shape == search.shape  # else it could not be done
    best = max(best, now, key=lambda seen: seen.rate)
    search = replace(search, trial=None, shape=None, best=best)
    if not came or not _helps(move, base, now):
        doubted = search.doubted or move is Move.WORKER
        return replace(search, tried=search.tried | {move}, doubted=doubted)
    tried = {move} if move in (Move.BALANCE, Move.TRIM) and now.rate < base.rate * (1 + BETTER) else set()
    doubted = search.doubted and move is not Move.WORKER
    return replace(search, base=now, best=best, tried=frozenset(tried), doubted=doubted, patience=PATIENCE)


def _still_good(search: Search, base: Seen, now: Seen) -> Search:
    """What it says that the same configuration was measured once more: at rest all is tried anew when the
    training has changed, and now and then, ever more seldom, as what was measured may have been disturbed."""
    if not search.rests:
        return replace(search, base=now)
    if abs(now.rate / base.rate - 1) > DRIFT:
        return replace(search, base=now, best=now, tried=frozenset(), rests=False, rested=0)
    rested = search.rested + 1
    if rested < search.patience or search.changes >= MOST_CHANGES:
        return replace(search, rested=rested)
    anew = replace(search, base=now, best=now, tried=frozenset(), rests=False)
    return replace(anew, rested=0, patience=2 * search.patience)


def _helps(move: Move, base: Seen, now: Seen) -> bool:
    """Whether a move was a good one."""
    gain = now.rate / base.rate - 1
    if move is Move.UP:
        return gain >= WORTH * (now.shape.cores / base.shape.cores - 1) / SCALE_UP
    freed = move in (Move.BALANCE, Move.TRIM)
    freed |= move is Move.SERVER and _full(now) < _full(base)
    freed |= move is Move.WORKER and now.efficiency >= base.efficiency + MORE_USED
    return gain >= (-NO_WORSE if freed else BETTER)


def _full(seen: Seen) -> float:
    """The part of the time for which the fullest link was full, if that makes it a bottleneck."""
    full = max(seen.links, default=0.0)
    return full if full > FULL_LINK else 0.0


def _moves(base: Seen, rules: Rules, doubted: bool) -> list[tuple[Move, Reason]]:
    """What can be tried from a configuration: what its bottleneck asks for, then what else may help."""
    facts: dict[str, Any] = {
        "old": str(base.shape),
        "had": base.shape.cores / WHOLE,
        "rate": base.rate,
        "efficiency": base.efficiency,
    }
    up = Move.UP, Reason(Why.MORE_CORES, facts)
    worker = Move.WORKER, Reason(Why.UTILISATION_BOTTLENECK, facts)
    server = Move.SERVER, Reason(Why.ONE_MORE_SERVER, facts)
    if full := _full(base):
        where = {"server": base.links.index(full), "net": full}
        server = Move.SERVER, Reason(Why.NETWORK_BOTTLENECK, {**facts, **where})
    idle = _balance_facts(base)
    found = [(Move.BALANCE, Reason(Why.BALANCED, {**facts, **idle}))] if idle else []
    if base.efficiency >= EFFICIENT:
        return [*found, up]
    others = [up, worker] if doubted else [worker, up]
    found += [server, *others] if full else [*others, server]
    if base.efficiency < IDLE:
        found.append((Move.TRIM, Reason(Why.TRIMMED, facts)))
    fixed = {Move.SERVER: rules.servers, Move.WORKER: rules.workers}
    return [(move, why) for move, why in found if fixed.get(move) is None]


def _moved(move: Move, base: Seen, rules: Rules, room: int, now: Shape) -> Shape | None:
    """The configuration after a move, on what cores there are; None if it cannot be done."""
    shape = base.shape
    there = min(rules.budget, now.cores + room)
    if move is Move.UP:
        factor = min(1 + rules.scale_up, there / shape.cores)
        return _scaled(shape, factor) if factor >= LEAST_FACTOR else None
    if shape.cores > there:
        return None  # it has given cores back since, and others have them
    if move is Move.BALANCE:
        return _balanced(base)
    if move is Move.TRIM:
        return _trimmed(base)
    return _with_server(shape, there) if move is Move.SERVER else _with_workers(base, there)


def _with_server(shape: Shape, there: int) -> Shape | None:
    """One more server, with as much as the others have: of what is free, else of what the workers have."""
    share = max(LEAST, sum(shape.servers) // len(shape.servers))
    servers = (share,) * (len(shape.servers) + 1)
    left = min(sum(shape.workers), there - sum(servers)) // len(shape.workers)
    return Shape(servers=servers, workers=(left,) * len(shape.workers)) if left >= LEAST else None


def _with_workers(base: Seen, there: int) -> Shape | None:
    """The workers' cores over more of them: half as many again, or as many as use what each then has."""
    shares, count = base.shape.workers, len(base.shape.workers)
    used = WHOLE * sum(base.workers) / sum(shares)
    more = max(count + 1, round(count * min(2.0, max(1 + SCALE_UP, 1 / max(used, 0.5)))))
    more = min(more, max(sum(shares), there - sum(base.shape.servers)) // LEAST)
    share = max(LEAST, sum(shares) // more)
    return replace(base.shape, workers=(share,) * more) if more > count else None


def _scaled(shape: Shape, factor: float) -> Shape:
    """Every process gets as many times what it has."""
    return Shape(
        servers=tuple(int(share * factor) for share in shape.servers),
        workers=tuple(int(share * factor) for share in shape.workers),
    )


def _balance_facts(base: Seen) -> dict[str, Any]:
    """Who can spare cores that another one uses (Resource Optimizer: nodes of a kind, then the kinds)."""
    for kind, used, shares in (
        ("servers", base.servers, base.shape.servers),
        ("workers", base.workers, base.shape.workers),
    ):
        each = [WHOLE * cpu / share for cpu, share in zip(used, shares, strict=True)]
        least, most = min(each), max(each)
        if least < IDLE <= most:
            singular = kind[:-1]
            names = f"{singular} {each.index(least)}", f"{singular} {each.index(most)}"
            return {"low": names[0], "high": names[1], "least": least, "most": most}
    servers = WHOLE * sum(base.servers) / sum(base.shape.servers)
    workers = WHOLE * sum(base.workers) / sum(base.shape.workers)
    if min(servers, workers) < IDLE <= max(servers, workers):
        names = ("the servers", "the workers") if servers < workers else ("the workers", "the servers")
        low, high = sorted((servers, workers))
        return {"low": names[0], "high": names[1], "least": low, "most": high}
    return {}


def _balanced(base: Seen) -> Shape | None:
    """The same cores, in proportion to what each process uses; None if that moves hardly any."""
    used = [*(SLACK * cpu for cpu in base.servers), *base.workers]
    shares, before = _apportioned(used, base.shape.cores), [*base.shape.servers, *base.shape.workers]
    moved = sum(abs(new - old) for new, old in zip(shares, before, strict=True)) / 2
    if moved < WORTH_MOVING * base.shape.cores:
        return None
    count = len(base.servers)
    return Shape(servers=tuple(shares[:count]), workers=tuple(shares[count:]))


def _trimmed(base: Seen) -> Shape | None:
    """As many cores as are used, and a little more."""
    used = [*(SLACK * cpu for cpu in base.servers), *base.workers]
    shares = [max(LEAST, round(WHOLE * cpu / EFFICIENT)) for cpu in used]
    before = [*base.shape.servers, *base.shape.workers]
    shares = [min(pair) for pair in zip(shares, before, strict=True)]
    count = len(base.servers)
    smaller = sum(shares) * LEAST_FACTOR <= sum(before)
    return Shape(servers=tuple(shares[:count]), workers=tuple(shares[count:])) if smaller else None


def _apportioned(used: Sequence[float], cores: int) -> list[int]:
    """So many hundredths in proportion to what is used, `LEAST` at least."""
    shares = [LEAST] * len(used)
    free = set(range(len(used)))
    while free:
        left = cores - sum(shares[i] for i in range(len(used)) if i not in free)
        total = sum(used[i] for i in free) or 1.0
        low = {i for i in free if used[i] / total * left < LEAST}
        if not low:
            for i in free:
                shares[i] = int(used[i] / total * left)
            break
        free -= low
    return shares


def _said(why: Reason, shape: Shape, now: Seen, base: Seen) -> Reason:
    """The reason in full: where the job stands elsewhere, that did not help."""
    facts = {**why.facts, "seats": str(shape)}
    if now.shape != base.shape:
        facts["because"] = f" ({now.shape} did not help: {now.rate:.4g})"
    return replace(why, facts=facts)


def _at_rest(search: Search, now: Seen, rules: Rules) -> Found:
    """Nothing is left to try: the job stays as it is, or waits for more cores."""
    whole = now.shape.cores * LEAST_FACTOR >= rules.budget
    facts = {
        "seats": str(now.shape),
        "had": now.shape.cores / WHOLE,
        "rate": now.rate,
        "efficiency": now.efficiency,
    }
    if Move.UP not in search.tried and not whole and search.changes < MOST_CHANGES:
        return Found(search=replace(search, waits=True), reason=Reason(Why.WANTS_CORES, facts))
    because = "nothing else that was tried is faster"
    if whole:
        because = f"it uses {now.efficiency:.0%} of its whole budget, and {because}"
    if search.changes >= MOST_CHANGES:
        because = f"its configuration has been changed {search.changes} times"
    facts["because"] = because
    return Found(search=replace(search, rests=True), reason=Reason(Why.SETTLED, facts))
