"""A packing problem: members, devices, measured costs; its JSON form (see docs/packing-plans.md)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from hpcsched.errors import ConfigError
from hpcsched.planning.json_reader import JsonReader
from hpcsched.planning.packing.admission import MAX_PACK_SIZE, MEMORY_RESERVE, PackLimits
from hpcsched.planning.packing.costs import ModelBatch, PackCosts
from hpcsched.planning.packing.distance import DistanceAxis, axes_of, places
from hpcsched.planning.packing.speeds import EPOCH_SAMPLES, PackMember, Speeds
from hpcsched.printing import printable

MAX_KNN_DISTANCE = 5.0
"""The largest distance of nearest neighbours in a pack (chosen): the paper leaves it to the user (section
5.3)."""

MAX_DEVICES = 2**16
"""The most devices that are taken for meant (chosen)."""

_KEYS = (
    "schema",
    "devices",
    "memory_mib",
    "reserve",
    "most",
    "epoch",
    "members",
    "costs",
    "pairs",
    "axes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProblem:
    """Members, and devices of one type.

    Args:
        members: with different names.
        speeds: what packs of them take.
        limits: those of each device.
        devices: how many there are.
        axes: for distances between configurations; none given: those of the members' own configurations.
        threshold: how far from its centroid a member of a `knn` pack may be.
        seed: of what is drawn at random.
    """

    members: tuple[PackMember, ...]
    speeds: Speeds
    limits: PackLimits = PackLimits()  # noqa: RUF009 (frozen)
    devices: int = 1
    axes: tuple[DistanceAxis, ...] = ()
    threshold: float = MAX_KNN_DISTANCE
    seed: int = 0

    @property
    def space(self) -> tuple[DistanceAxis, ...]:
        """The axes along which distances are measured."""
        return self.axes or axes_of(self.members)

    @property
    def share(self) -> int:
        """Members that a heuristic may put into a pack: not more than each device's share of them.

        Packing is for when there are more trainings than devices (section 5.2).
        """
        return max(1, min(self.limits.most, -(-len(self.members) // self.devices)))

    @classmethod
    def parse(cls, table: Any, *, where: str) -> PackProblem:
        """The problem in a table of JSON. Raises ConfigError naming the member and the key that is wrong."""
        read = JsonReader(where)
        table = read.table(table, "", _KEYS)
        if table.get("schema") != 1 or isinstance(table["schema"], bool):
            read.refuse("schema", table.get("schema"), "1")
        devices = read.whole(table.get("devices", 1), "devices")
        if devices > MAX_DEVICES:
            read.refuse("devices", devices, f"at most {MAX_DEVICES}")
        memory_mib = table.get("memory_mib")
        if memory_mib is not None:
            memory_mib = read.number(memory_mib, "memory_mib", "MiB of a device", above_0=True)
        reserve = read.number(
            table.get("reserve", MEMORY_RESERVE), "reserve", "a share of the memory below 1"
        )
        if reserve >= 1:
            read.refuse("reserve", reserve, "a share of the memory below 1")
        limits = PackLimits(
            capacity_mib=memory_mib,
            most=read.whole(table.get("most", MAX_PACK_SIZE), "most"),
            reserve=reserve,
        )
        costs = [
            PackCosts.parse(row, where=where, key=f"costs[{i}]")
            for i, row in enumerate(read.rows(table.get("costs"), "costs", least=1))
        ]
        keys = [each.key for each in costs]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                accepted = "each model and batch once"
                read.reject(f"costs[{i}]", f"{key.model!r} with batch {key.batch} a second time", accepted)
        speeds = Speeds(
            costs,
            factors=_factors(read, table.get("pairs", []), set(keys)),
            epoch=read.whole(table.get("epoch", EPOCH_SAMPLES), "epoch"),
        )
        axes = tuple(
            DistanceAxis.parse(row, where=where, key=f"axes[{i}]")
            for i, row in enumerate(read.rows(table.get("axes", []), "axes"))
        )
        for a, b in pairwise(sorted(axis.name for axis in axes)):
            if a == b:
                read.reject("axes", f"{a!r} a second time", "each name once")
        rows = read.rows(table.get("members"), "members", least=1)
        members = tuple(_member(read, row, f"members[{i}]", set(keys)) for i, row in enumerate(rows))
        names: set[str] = set()
        for i, member in enumerate(members):
            if member.name in names:
                read.reject(f"members[{i}].name", f"{member.name!r} a second time", "each name once")
            names.add(member.name)
            _checked_places(read, member, axes, f"members[{i}]")
        return cls(members=members, speeds=speeds, limits=limits, devices=devices, axes=axes)


def _member(read: JsonReader, row: Any, key: str, known: set[ModelBatch]) -> PackMember:
    row = read.table(row, key, ("name", "model", "batch", "config", "steps"))
    name = read.text(row.get("name"), f"{key}.name")
    config = row.get("config", {})
    if not isinstance(config, dict):
        read.refuse(f"{key}.config", config, "a table of hyper-parameters")
    for name_, value in config.items():
        plain = value is None or isinstance(value, (str, bool, int, float))
        if not plain or (isinstance(value, float) and not isfinite(value)):
            read.refuse(f"{key}.config.{name_}", value, "text, a number, true, false or null")
    steps = row.get("steps")
    member = PackMember(
        name=name,
        model=read.text(row.get("model"), f"{key}.model"),
        batch=read.whole(row.get("batch"), f"{key}.batch"),
        config=config,
        steps=None if steps is None else read.whole(steps, f"{key}.steps"),
    )
    if member.key not in known:
        got = f"{name!r} is {member.model!r} with batch {member.batch}"
        accepted = ", ".join(f"{printable(k.model)} with batch {k.batch}" for k in sorted(known))
        read.reject(key, got, f"one that has costs: {accepted}")
    return member


def _checked_places(read: JsonReader, member: PackMember, axes: tuple[DistanceAxis, ...], key: str) -> None:
    try:
        places(member, axes)
    except ConfigError as error:
        read.reject(f"{key}.{error.key}", error.got, error.accepted)


def _factors(
    read: JsonReader, rows: Any, known: set[ModelBatch]
) -> dict[tuple[ModelBatch, ModelBatch], float]:
    """By two keys in their order: how much longer a pack takes that has both."""
    found: dict[tuple[ModelBatch, ModelBatch], float] = {}
    for i, value in enumerate(read.rows(rows, "pairs")):
        place = f"pairs[{i}]"
        row = read.table(value, place, ("models", "batches", "factor"))
        models: Any = row.get("models")
        batches: Any = row.get("batches")
        pairs = isinstance(models, list) and isinstance(batches, list)
        if not pairs or not len(models) == len(batches) == 2:
            read.refuse(
                place, value, 'two models and two batches: {"models": [], "batches": [], "factor": 1}'
            )
        keys = []
        for model, batch in zip(models, batches, strict=True):
            keys.append(
                ModelBatch(read.text(model, f"{place}.models"), read.whole(batch, f"{place}.batches"))
            )
            if keys[-1] not in known:
                read.reject(place, f"{model!r} with batch {batch}", "a model and batch that has costs")
        pair = (min(keys), max(keys))
        if pair[0] == pair[1] or pair in found:
            accepted = "each pair of different ones once (the costs' points are for identical ones)"
            read.reject(place, f"{models[0]!r} with {models[1]!r}", accepted)
        found[pair] = read.number(row.get("factor"), f"{place}.factor", "a factor", above_0=True)
    return found
