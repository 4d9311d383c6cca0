"""What the ranks have measured of themselves, and what it says of configurations they have not tried."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from statistics import median
from typing import Any

from hpcsched.compat import dataclass
from hpcsched.planning.vsw.costs import AllReduceCost, AllReduceCosts, BatchTimes, GpuCosts, Times, VswCosts
from hpcsched.worker.vsw.clock import Kind, RoundsTaken, RoundTime

TRUST = 8
"""So many rounds, measured since the last decision, count as much as all that was known before."""
ENOUGH = 24
"""From so many rounds on it is believed that a larger local batch gains nothing: there are bad moments."""
ALIKE = 0.1
"""Ranks whose speeds differ by no more than this share count as alike where it is about how many there should
be."""
GAIN = 0.03
"""One more worker at once is tried while the last one gained this share, and a larger local batch while the
largest one gains it over one half as large."""


@dataclass(kw_only=True)
class DeviceTimes:
    """One device's times by kind of round; `too_large` are the kinds for which its memory was too small.
    `device` is what its model is called, `counts` are how many rounds of each kind there were.

    `streams`: it can compute several local batches at the same time.
    """

    host: str
    device: str
    streams: bool
    rounds: dict[Kind, RoundTime] = field(default_factory=dict)
    counts: dict[Kind, int] = field(default_factory=dict)
    update_s: float | None = None
    too_large: set[Kind] = field(default_factory=set)

    @classmethod
    def here(cls, device: str, *, streams: bool) -> DeviceTimes:
        """An empty one of such a device on this host."""
        return cls(host=os.uname().nodename, device=device, streams=streams)

    def same_device(self, other: DeviceTimes) -> bool:
        """Whether both may be of one device, by all that can be told."""
        return (self.host, self.device) == (other.host, other.device)

    def learn(self, taken: RoundsTaken) -> None:
        """Bring it nearer to what was measured: the nearer, the more was."""
        for kind, seen in taken.rounds.items():
            known, weight = self.rounds.get(kind, seen), _weight(taken.counts[kind])
            self.counts[kind] = self.counts.get(kind, 0) + taken.counts[kind]
            self.rounds[kind] = RoundTime(
                read_s=_nearer(known.read_s, seen.read_s, weight),
                forward_s=_nearer(known.forward_s, seen.forward_s, weight),
                backward_s=_nearer(known.backward_s, seen.backward_s, weight),
            )
        if taken.update_s is not None:
            known_s = taken.update_s if self.update_s is None else self.update_s
            self.update_s = _nearer(known_s, taken.update_s, _weight(TRUST))

    def room(self, local: int) -> int | None:
        """How many workers with this local batch fit into the memory at once; None: not known."""
        if not self.streams:
            return 0 if any(batch <= local for batch, _ in self.too_large) else 1
        return min((count - 1 for batch, count in self.too_large if batch <= local), default=None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "device": self.device,
            "streams": self.streams,
            "rounds": [
                [*kind, each.read_s, each.forward_s, each.backward_s, self.counts.get(kind, 0)]
                for kind, each in self.rounds.items()
            ],
            "update_s": self.update_s,
            "too_large": [list(kind) for kind in sorted(self.too_large)],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> DeviceTimes:
        """What `state_dict` gave."""
        rounds = {
            (local, count): RoundTime(read_s=read_s, forward_s=forward_s, backward_s=backward_s)
            for local, count, read_s, forward_s, backward_s, _ in state["rounds"]
        }
        counts = {(local, count): times for local, count, *_, times in state["rounds"]}
        too_large = {(local, count) for local, count in state["too_large"]}
        return cls(
            host=state["host"],
            device=state["device"],
            streams=state["streams"],
            rounds=rounds,
            counts=counts,
            update_s=state["update_s"],
            too_large=too_large,
        )


def _weight(count: int) -> float:
    return count / (count + TRUST)


def _nearer(known: float, seen: float, weight: float) -> float:
    return (1 - weight) * known + weight * seen


class Measurements:
    """The tables of all ranks, as rank 0 sees them."""

    def __init__(self, tables: Sequence[DeviceTimes]) -> None:
        self.tables = list(tables)
        known = sorted({kind for table in tables for kind in table.rounds})
        self._usual = {
            kind: RoundTime(
                read_s=median(t.rounds[kind].read_s for t in tables if kind in t.rounds),
                forward_s=median(t.rounds[kind].forward_s for t in tables if kind in t.rounds),
                backward_s=median(t.rounds[kind].backward_s for t in tables if kind in t.rounds),
            )
            for kind in known
        }
        updates = [table.update_s for table in tables if table.update_s is not None]
        self._update_s = median(updates) if updates else 0.0

    @property
    def known(self) -> bool:
        """Whether anything has been measured."""
        return bool(self._usual)

    def costs(self, buckets: tuple[int, ...], line: AllReduceCost, guess: int = 0) -> VswCosts:
        """The performance model of the ranks as GPUs of a kind each (called by their numbers), and of one
        like the others (called "usual"). The local batch `guess` is in it even if it was never measured."""
        gpus = {str(rank): self._costs_of(table, guess) for rank, table in enumerate(self.tables)}
        streams = any(table.streams for table in self.tables)
        usual = DeviceTimes(host="", device="", streams=streams, rounds=dict(self._usual))
        usual.too_large = {kind for table in self.tables for kind in table.too_large}
        gpus["usual"] = self._costs_of(usual, guess)
        return VswCosts(gpus=gpus, buckets=buckets, network=AllReduceCosts(within=line, between=line))

    def is_usual(self, rank: int) -> bool:
        """Whether a rank is about as fast as the usual one."""
        common = [(each.all_s, self._usual[kind].all_s) for kind, each in self.tables[rank].rounds.items()]
        return all(abs(own / usual - 1) <= ALIKE for own, usual in common)

    @property
    def largest(self) -> int:
        """The largest local batch that fits everywhere and of which somebody knows how long it takes."""
        return max((batch for batch in self._alone if self.may_fit(batch)), default=0)

    def next_local(self, choices: Sequence[int]) -> int | None:
        """Which of these local batches is to be tried, to know how long it takes; None: enough is known."""
        alone, largest = self._alone, self.largest
        if (least := min(choices)) not in alone:
            return least
        half = max((batch for batch in alone if 2 * batch <= largest), default=0)
        known = sum(table.counts.get((largest, 1), 0) for table in self.tables) >= ENOUGH
        if half and known and alone[largest].all_s / largest > (1 - GAIN) * alone[half].all_s / half:
            return None
        larger = [c for c in choices if c > largest and self.may_fit(c)]
        return max((c for c in larger if c <= 2 * largest), default=min(larger, default=None))

    def may_fit(self, local: int) -> bool:
        """Whether nobody has found this local batch too large."""
        return all(table.room(local) != 0 for table in self.tables)

    def has_room(self, rank: int, kind: Kind) -> bool:
        """Whether a rank's memory is known to suffice for this kind of round."""
        local, count = kind
        return any(batch >= local and n >= count for batch, n in self.tables[rank].rounds)

    @property
    def _alone(self) -> dict[int, RoundTime]:
        return {batch: each for (batch, count), each in self._usual.items() if count == 1}

    def next_at_once(self, rank: int, local: int) -> int | None:
        """How many workers at once a rank should try next; None: it knows enough."""
        table = self.tables[rank]
        tried = sorted(count for batch, count in table.rounds if batch == local)
        if not table.streams or not tried:
            return None
        most, room = tried[-1], table.room(local)
        if tried != list(range(1, most + 1)) or (room is not None and most >= room):
            return None
        if most == 1:
            return 2
        speeds = [count / table.rounds[local, count].all_s for count in (most, most - 1)]
        return most + 1 if speeds[0] >= (1 + GAIN) * speeds[1] else None

    def _costs_of(self, table: DeviceTimes, guess: int) -> GpuCosts:
        common = [table.rounds[kind].all_s / self._usual[kind].all_s for kind in table.rounds]
        slower = median(common) if common else 1.0
        speeds = {}
        for local, each in sorted(self._alone.items()):
            room = table.room(local)
            if room == 0:
                continue
            times = {count: _times(own) for (batch, count), own in table.rounds.items() if batch == local}
            if 1 not in times:  # as much slower or faster than the others as it is elsewhere
                times[1] = _times(each, slower)
            times = {count: each for count, each in times.items() if room is None or count <= room}
            # Only what was tried: whether one more fits, and what it gains, is found out by trying it.
            speeds[local] = BatchTimes(local_batch=local, times=times, most=max(times))
        if guess and guess not in speeds:
            near = min(speeds, key=lambda batch: abs(batch - guess))
            alone = speeds[near].times[1]
            times = {1: _scaled(alone, guess / near)}
            speeds[guess] = BatchTimes(local_batch=guess, times=times, most=1)
        update_s = self._update_s if table.update_s is None else table.update_s
        return GpuCosts(speeds=speeds, update_s=update_s)


def _times(each: RoundTime, scale: float = 1.0) -> Times:
    return _scaled(Times(data_s=each.read_s, forward_s=each.forward_s, backward_s=each.backward_s), scale)


def _scaled(times: Times, scale: float) -> Times:
    return Times(
        data_s=times.data_s * scale, forward_s=times.forward_s * scale, backward_s=times.backward_s * scale
    )
