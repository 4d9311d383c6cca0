"""Rank 0's decisions: the global batch, who computes how much of it, and what to try next (JABAS, Figure
4)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcsched.compat import dataclass
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.batching import RULES, BatchRule, Halves, worker_count
from hpcsched.planning.vsw.configure import ClusterGpu, GpuShare, NoConfiguration, configure
from hpcsched.planning.vsw.costs import AllReduceCost, sync_method
from hpcsched.planning.vsw.options import WorkerOptions, local_batches
from hpcsched.worker.session.mode_trial import WORTH
from hpcsched.worker.vsw.clock import Kind
from hpcsched.worker.vsw.measurements import DeviceTimes, Measurements

TRIAL_STEPS = 4
"""So long is a configuration tried whose speed is not known; its first step counts for nothing."""

KNOWN_FOR, PLAIN_FOR = 10, 4
"""Decisions: so long it counts what steps have taken; so often plain ones are measured anew beside others."""

GUESSED = AllReduceCost(per_byte_s=1e-9, latency_s=2e-4)
"""A sum over ranks, where no two ranks have met yet: a gigabyte a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCourse:
    """What all ranks do until rank 0 says something else.

    `shares` are the workers of the ranks; a step is expected to take `step_s` (None: not known). `overlap`:
    weights are updated while other gradients still travel. `halves` is what learning rates go by. `trial`:
    its memory is not known to suffice. At the beginning of step `until` of the training it is decided anew.
    """

    batch: int
    local_batch: int
    shares: tuple[GpuShare | None, ...]
    overlap: bool
    halves: Halves | None
    trial: bool
    until: int
    step_s: float | None = None

    def first_worker(self, rank: int) -> int:
        """The number of a rank's first worker, over all ranks."""
        return sum(share.workers for share in self.shares[:rank] if share)

    @property
    def order(self) -> tuple[object, ...]:
        """What decides which samples a rank takes when."""
        return self.batch, self.local_batch, tuple(share.workers if share else 0 for share in self.shares)

    @property
    def way(self) -> tuple[object, ...]:
        """What decides how long its steps take."""
        return (*self.order, *(share.at_once if share else 0 for share in self.shares), self.overlap)

    def kind(self, rank: int) -> Kind | None:
        """What this rank's full rounds are; None if it has no worker."""
        share = self.shares[rank]
        return (self.local_batch, share.at_once) if share else None


class BatchControl:
    """What the decisions go by; the same on all ranks, but for what only rank 0 is told. Saved in
    checkpoints.

    `updates` are the steps taken, of whatever size; `offset` are the samples that were not counted in steps
    of `base` samples, but by whoever trained before (None: not known yet); `wish` is the global batch to
    have. `seen` is the metric when it was last measured, `value` the same while the batch has not followed it
    yet.
    """

    def __init__(self, options: WorkerOptions, base: int) -> None:
        self.options = options
        self.base = base
        self.batching: BatchRule = options.batching(base)
        self.updates = 0
        self.offset: int | None = None
        self.wish = float(self.batching.low)
        self.halves: Halves | None = None
        self.value: float | None = None
        self.seen: float | None = None
        self.tables: list[DeviceTimes] = []
        self._taken: dict[tuple[object, ...], list[tuple[float, int]]] = defaultdict(list)
        self._decisions = 0
        self.line: AllReduceCost | None = None
        self.buckets: tuple[int, ...] = ()

    @property
    def least(self) -> int:
        """The smallest local batch that the job file allows; 0 where it pins the workers instead."""
        return self.options.local_batch[0] if self.options.local_batch else 0

    def factor(self, course: BatchCourse, batch: int) -> float:
        """What goes onto the learning rates in a step of so many samples: a shortened last one has less."""
        rule = RULES[self.options.learning_rate]
        return min(rule(b / self.base, course.halves, self.base) for b in (batch, course.batch))

    @property
    def batch(self) -> int:
        """The global batch to have, in whole workers."""
        return self.batching.rounded(self.wish)

    def measures(self, update: int) -> bool:
        """Whether the two halves of the gradient are compared in this step."""
        return self.batching.adapts and (update + 1) % self.batching.every == 0

    def saw(self, halves: Halves) -> None:
        """The halves of this step's gradient; where they say nothing, nothing changes."""
        self.halves = halves if halves.known else None
        self.value = value = self.batching.metric.value(halves)
        self.seen = value if math.isfinite(value) else None

    def adapt(self) -> None:
        """Go by what was seen last, once: the batch grows or falls (section 6.1)."""
        if self.value is not None:
            self.wish = self.batching.next(self.wish, self.value)
            self.value = None

    def course(self, ranks: int) -> BatchCourse:
        """What to do from here on. Raises ConfigError if the batch cannot be computed by these ranks."""
        if self.options.pinned:
            return self._pinned(ranks, *self.options.pinned)
        tables = Measurements(self.tables)
        if len(tables.tables) != ranks or not tables.known or self.batch // self.least < ranks:
            return self._equal(ranks, tables)
        limits = (2 * tables.largest, 2**31)  # what is near comes first, else what there is
        larger = [c for limit in limits for c in local_batches(self.options, self.batch, ranks, limit)]
        guess = tables.next_local(larger)
        chosen = (guess,) if guess else local_batches(self.options, self.batch, ranks, tables.largest)
        gpus = [ClusterGpu(kind=str(rank), host=table.host) for rank, table in enumerate(tables.tables)]
        try:
            made = configure(
                tables.costs(self.buckets, self.line or GUESSED, guess or 0),
                gpus,
                self.batch,
                local_batches=chosen,
                accumulation=(0, self.batch),
                even=self.batching.adapts,
                sync=self.options.synchronize,
            )
        except NoConfiguration as error:
            raise ConfigError(
                where="strategy vsw", got=f"a global batch of {self.batch}: {error}", accepted="one that fits"
            ) from error
        local, wanted = made.local_batch, made.shares
        shares = tuple(self._try_more(rank, share, local, tables) for rank, share in enumerate(wanted))
        trial_of = [
            share is not None and not tables.has_room(rank, (local, share.at_once))
            for rank, share in enumerate(shares)
        ]
        course = self._make(
            made.global_batch,
            local,
            shares,
            overlap=made.sync == "overlap",
            trial=any(trial_of),
            step_s=made.iter_s,
        )
        return course if course.trial else self._no_slower(course, self._plain(ranks, tables))

    def took(self, course: BatchCourse, step_s: float) -> None:
        """The steps of a course that is over have taken so long, the samples of one counted."""
        self._taken[course.way].append((step_s / course.batch, self._decisions))

    def _plain(self, ranks: int, tables: Measurements) -> BatchCourse | None:
        """The same batch as by data parallelism: one worker on each rank, all with as many samples, and
        weights updated when all gradients are there. None where the job file allows no such local batch, or
        some memory has no room for it."""
        assert self.options.local_batch is not None
        low, high = self.options.local_batch
        local, rest = divmod(self.batch, ranks)
        odd = self.batching.adapts and ranks % 2
        if rest or odd or not low <= local <= high or not tables.may_fit(local):
            return None
        trial = not all(tables.has_room(rank, (local, 1)) for rank in range(ranks))
        shares = (GpuShare(workers=1, at_once=1),) * ranks
        overlap = self.options.synchronize == "overlap"
        return self._make(self.batch, local, shares, overlap=overlap, trial=trial)

    def _no_slower(self, course: BatchCourse, plain: BatchCourse | None) -> BatchCourse:
        """The course, unless it was no faster than plain data parallelism when both were measured: what it is
        expected to take is put together from rounds. What plain steps take is measured first; of several
        times the least counts, as whatever disturbs makes them longer."""
        self._decisions += 1
        oldest = self._decisions - KNOWN_FOR
        for way, found in self._taken.items():
            self._taken[way] = [(s, at) for s, at in found if at >= oldest]
        if plain is None or plain.way == course.way:
            return course
        known = self._taken[plain.way]
        if not known or known[-1][1] < self._decisions - PLAIN_FOR:
            return replace(plain, until=min(plain.until, self.updates + 2 * TRIAL_STEPS))
        tried = self._taken[course.way]
        return plain if tried and min(tried)[0] > WORTH * min(known)[0] else course

    def _try_more(
        self, rank: int, share: GpuShare | None, local: int, tables: Measurements
    ) -> GpuShare | None:
        more = tables.next_at_once(rank, local) if share else None
        if share is None or more is None or more > share.workers:
            return share
        return GpuShare(workers=share.workers, at_once=more)

    def _equal(self, ranks: int, tables: Measurements) -> BatchCourse:
        """As nothing is known yet, or there are hardly any workers: the smallest local batches, as many for
        each rank; the first ones have one more. Rank 0 has one in any case: its buffers are those that
        count."""
        local = self.least
        total = worker_count(self.batch, local, even=self.batching.adapts)
        counts = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
        shares = tuple(GpuShare(workers=count, at_once=1) if count else None for count in counts)
        known = len(tables.tables) == ranks
        known = known and all(tables.has_room(rank, (local, 1)) for rank in range(ranks) if counts[rank])
        return self._make(total * local, local, shares, overlap=self._overlaps, trial=not known)

    def _pinned(self, ranks: int, workers: int, more: int) -> BatchCourse:
        count = workers * (1 + more)
        if why := self.cannot_be(ranks):
            accepted = f"a divisor of {self.base}"
            raise ConfigError(where="strategy vsw", key="workers", got=why, accepted=accepted)
        shares = (GpuShare(workers=count, at_once=workers),) * ranks
        local = self.base // (ranks * count)
        return self._make(self.base, local, shares, overlap=self._overlaps, trial=False)

    def cannot_be(self, ranks: int) -> str:
        """Why so many ranks cannot compute the batch; empty if they can."""
        if self.options.pinned is None:
            return ""
        workers, more = self.options.pinned
        count = ranks * workers * (1 + more)
        if self.base % count == 0:
            return ""
        return f"{count} workers on {ranks} devices, for a global batch of {self.base}"

    @property
    def _overlaps(self) -> bool:
        asked = self.options.synchronize
        return (sync_method(self.buckets) if asked == "auto" else asked) == "overlap"

    def _make(
        self,
        batch: int,
        local: int,
        shares: tuple[GpuShare | None, ...],
        *,
        overlap: bool,
        trial: bool,
        step_s: float | None = None,
    ) -> BatchCourse:
        every = self.batching.every
        until = (self.updates // every + 1) * every
        return BatchCourse(
            batch=batch,
            local_batch=local,
            shares=shares,
            overlap=overlap,
            halves=self.halves,
            trial=trial,
            until=min(until, self.updates + TRIAL_STEPS) if trial else until,
            step_s=step_s,
        )

    # -- what a checkpoint keeps -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        halves = self.halves
        return {
            "base": self.base,
            "offset": self.offset,
            "updates": self.updates,
            "wish": self.wish,
            "value": self.value,
            "seen": self.seen,
            "halves": None if halves is None else [halves.aa, halves.bb, halves.ab, halves.samples],
            "tables": [table.state_dict() for table in self.tables],
            "line": None if self.line is None else [self.line.per_byte_s, self.line.latency_s],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a batch that the bounds no longer allow is brought between them."""
        rule = self.batching
        self.offset = state["offset"] if state["base"] == self.base else None
        self.updates = state["updates"]
        self.wish = min(float(rule.high), max(float(rule.low), state["wish"]))
        self.value, self.seen = state["value"], state["seen"]
        halves = state["halves"]
        self.halves = halves and Halves(aa=halves[0], bb=halves[1], ab=halves[2], samples=halves[3])
        self.tables = [DeviceTimes.of_state(table) for table in state["tables"]]
        line = state["line"]
        self.line = line and AllReduceCost(per_byte_s=line[0], latency_s=line[1])
