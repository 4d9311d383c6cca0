"""Tabulated costs: times by GPU count and transfers by pairs of counts, so that a plan can be judged apart
from any cost model."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np

from hpcsched.compat import dataclass
from hpcsched.planning.burst.costs import Array, BurstCosts, Spot
from hpcsched.planning.burst.graph import MAX_GPUS, MAX_US, counted
from hpcsched.planning.json_reader import JsonReader

MOST_COUNTS = 1024
"""GPU counts that a table may have (chosen): each layer has costs for every two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstProblem:
    """A planning problem: the model and its costs."""

    model: str
    gpus: int
    global_batch: int
    limit: float
    costs: BurstCosts


class TableCosts(BurstCosts):
    """Costs as given; where ranks lie makes no difference."""

    def __init__(self, transfers: Mapping[tuple[int, int], Array], **costs: Any) -> None:
        super().__init__(**costs)
        self._transfers = transfers
        self._none = np.zeros((len(self.counts), len(self.counts)))

    def lag_us(self, layer: int, here: Spot, then: int, there: Spot) -> float:
        return float(self._transfers.get((layer, then), self._none)[here.count, there.count])

    def _lags_us(self, layer: int, then: int) -> Array:
        lags_us = self._transfers.get((layer, then), self._none)
        return np.stack([lags_us, lags_us])


def parse(table: Any, *, where: str) -> BurstProblem:
    """The problem in a table of JSON: see docs/burst.md.

    A layer may use the GPU counts in its `time_us` only, up to `gpus`. Its amplification is measured against
    its time on one GPU. A pair of layers without `transfers` costs nothing; one that has them must have
    them for all pairs of different counts.

    Raises ConfigError naming the layer and the key that is wrong.
    """

    read = JsonReader(where)
    if not isinstance(table, Mapping):
        read.refuse("", table, "a table")
    if table.get("schema") != 1 or isinstance(table["schema"], bool):
        read.refuse("schema", table.get("schema"), "1")
    for key in ("gpus", "global_batch"):
        value = table.get(key, 1 if key == "global_batch" else None)
        if type(value) is not int or not 1 <= value <= MAX_GPUS:
            read.refuse(key, value, f"a positive whole number, at most {MAX_GPUS}")
    limit = table.get("amplification_limit")
    if limit is not None and (type(limit) not in (int, float) or not 1 <= limit <= MAX_US):
        read.refuse("amplification_limit", limit, "a number of at least 1, or null for no limit")
    rows = table.get("layers")
    if not isinstance(rows, list) or not rows:
        read.refuse("layers", rows, "a list of at least one layer")

    gpus: int = table["gpus"]
    prev: list[tuple[int, ...]] = []
    names: list[str] = []
    times: list[dict[int, float]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            read.refuse(f"layers[{number}]", row, "a table")
        name = row.get("name", str(number))
        if not isinstance(name, str):
            read.refuse(f"layers[{number}].name", name, "text")
        place = f"layer {name!r}: "
        if row.get("id") != number or isinstance(row["id"], bool):
            read.refuse(f"{place}id", row.get("id"), f"{number}: ids are places in the list")
        before = row.get("prev", [])
        if not isinstance(before, list) or any(type(i) is not int or not 0 <= i < number for i in before):
            read.refuse(f"{place}prev", before, "a list of ids of layers before this one")
        own = row.get("time_us")
        if not isinstance(own, Mapping) or not own:
            read.refuse(f"{place}time_us", own, 'a table of microseconds by GPU count, such as { "1" = 900 }')
        us = dict(counted(read, own, f"{place}time_us"))
        if 1 not in us:
            read.refuse(
                f"{place}time_us", sorted(us), "one for 1 GPU among them: amplification is measured by it"
            )
        sync = row.get("sync_us", {})
        if not isinstance(sync, Mapping):
            read.refuse(f"{place}sync_us", sync, "a table of microseconds by GPU count")
        for count, more_us in counted(read, sync, f"{place}sync_us"):
            if count in us:
                us[count] += more_us
        names.append(name)
        prev.append(tuple(sorted(set(before))))
        times.append(us)
    counts = sorted({count for us in times for count in us if count <= gpus})
    base_us = np.array([dict(counted(read, row["time_us"], ""))[1] for row in rows])
    if len(counts) > MOST_COUNTS:
        read.reject("time_us", f"{len(counts)} GPU counts", f"at most {MOST_COUNTS} of them in all layers")
    transfers = _transfers(table.get("transfers", []), prev, names, times, counts, read)
    costs = TableCosts(
        transfers,
        names=names,
        prev=prev,
        counts=counts,
        time_us=np.array([[us.get(count, inf) for count in counts] for us in times]),
        base_us=base_us,
        limit=inf if limit is None else float(limit),
    )
    model = table.get("model", "")
    return BurstProblem(
        model=model if isinstance(model, str) else str(model),
        gpus=gpus,
        global_batch=table.get("global_batch", 1),
        limit=costs.limit,
        costs=costs,
    )


def _transfers(
    rows: Any,
    prev: list[tuple[int, ...]],
    names: list[str],
    times: list[dict[int, float]],
    counts: list[int],
    read: JsonReader,
) -> dict[tuple[int, int], Array]:
    """Microseconds by counts, for each pair of layers that has any."""
    if not isinstance(rows, list):
        read.refuse("transfers", rows, "a list of tables")
    found: dict[tuple[int, int], Array] = {}
    at = {count: i for i, count in enumerate(counts)}
    for number, row in enumerate(rows):
        place = f"transfers[{number}]"
        if not isinstance(row, Mapping):
            read.refuse(place, row, "a table with from, to and time_us")
        source: Any = row.get("from")
        target: Any = row.get("to")
        known = type(source) is int and type(target) is int and 0 <= target < len(prev)
        if not known or source not in prev[target]:
            accepted = "two ids, the second of which reads from the first"
            read.reject(place, f"from {source!r} to {target!r}", accepted)
        if (source, target) in found:
            read.reject(place, f"from {source} to {target} a second time", "each pair once")
        place = f"transfer from {names[source]!r} to {names[target]!r}"
        own = row.get("time_us")
        if not isinstance(own, Mapping):
            read.refuse(f"{place}: time_us", own, "a table by GPU count of tables by GPU count")
        lags_us = np.full((len(counts), len(counts)), np.nan)
        np.fill_diagonal(lags_us, 0.0)
        for count, inner in own.items():
            if not isinstance(inner, Mapping):
                read.refuse(f"{place}: time_us.{count}", inner, "a table of microseconds by GPU count")
            ((here, _),) = counted(read, {count: 0.0}, f"{place}: time_us")
            for there, us in counted(read, inner, f"{place}: time_us.{count}"):
                if here in at and there in at:
                    lags_us[at[here], at[there]] = us
        for g, here in enumerate(counts):
            for h, there in enumerate(counts):
                if np.isnan(lags_us[g, h]):
                    if here in times[source] and there in times[target]:
                        words = f"none from {here} to {there} GPUs"
                        read.reject(f"{place}: time_us", words, "one for each pair")
                    lags_us[g, h] = 0.0
        found[source, target] = lags_us
    return found
