"""Costs of a model and the GPUs that they are for, as JSON (see docs/vsw-plans.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpcsched.compat import dataclass
from hpcsched.planning.json_reader import JsonReader
from hpcsched.planning.vsw.configure import ClusterGpu
from hpcsched.planning.vsw.costs import AllReduceCost, AllReduceCosts, BatchTimes, GpuCosts, Times, VswCosts

_MAX_GPUS = 4096
"""The most GPUs in one file (chosen); more was meant for something else."""


@dataclass(frozen=True, kw_only=True)
class VswProfile:
    """The measurements of one model.

    Args:
        model: its name.
        costs: what its workers take.
        cluster: the GPUs to plan for; empty: not said.
        global_batch: the least and the largest, if there are bounds.
        note: where it comes from, for readers.
    """

    model: str
    costs: VswCosts
    cluster: tuple[ClusterGpu, ...] = ()
    global_batch: tuple[int, int] | None = None
    note: str = ""

    @property
    def local_batches(self) -> list[int]:
        """All that were measured on some kind of GPU."""
        return sorted({size for own in self.costs.gpus.values() for size in own.speeds})

    @classmethod
    def parse(cls, table: Any, *, where: str) -> VswProfile:
        """The profile of its JSON form. Raises ConfigError naming the key that is wrong."""
        read = JsonReader(where)
        table = read.table(table, "", ("schema", "model", "note", "global_batch", "cluster", "costs"))
        if table.get("schema") != 1 or isinstance(table["schema"], bool):
            read.refuse("schema", table.get("schema"), "1")
        costs = _costs(read, table.get("costs"), "costs")
        note = table.get("note", "")
        return cls(
            model=read.text(table.get("model"), "model"),
            costs=costs,
            cluster=_cluster(read, table.get("cluster", []), costs),
            global_batch=_bounds(read, table.get("global_batch")),
            note=note if note == "" else read.text(note, "note"),
        )

    def to_table(self) -> dict[str, Any]:
        """Its JSON form."""
        numbers: dict[ClusterGpu, int] = {}
        for gpu in self.cluster:
            numbers[gpu] = numbers.get(gpu, 0) + 1
        return {
            "schema": 1,
            "model": self.model,
            "note": self.note,
            **({"global_batch": list(self.global_batch)} if self.global_batch else {}),
            "cluster": [
                {"host": gpu.host, "kind": gpu.kind, "gpus": number} for gpu, number in numbers.items()
            ],
            "costs": {
                "gpus": {kind: _gpu_table(own) for kind, own in self.costs.gpus.items()},
                "buckets": list(self.costs.buckets),
                "network": {
                    "within": _line_table(self.costs.network.within),
                    "between": _line_table(self.costs.network.between),
                },
            },
        }


def _gpu_table(own: GpuCosts) -> dict[str, Any]:
    return {
        "update_s": own.update_s,
        "copy_s": own.copy_s,
        "buffers_s": own.buffers_s,
        "speeds": [
            {
                "local_batch": speed.local_batch,
                "most": speed.most,
                "times": {
                    str(n): {
                        "data_s": each.data_s,
                        "forward_s": each.forward_s,
                        "backward_s": each.backward_s,
                    }
                    for n, each in sorted(speed.times.items())
                },
            }
            for _, speed in sorted(own.speeds.items())
        ],
    }


def _line_table(line: AllReduceCost) -> dict[str, float]:
    return {"per_byte_s": line.per_byte_s, "latency_s": line.latency_s}


def _costs(read: JsonReader, value: Any, key: str) -> VswCosts:
    table = read.table(value, key, ("gpus", "buckets", "network"))
    gpus = table.get("gpus")
    if not isinstance(gpus, Mapping) or not gpus:
        read.refuse(f"{key}.gpus", gpus, "a table of costs by kind of GPU")
    network = read.table(table.get("network"), f"{key}.network", ("within", "between"))
    buckets = table.get("buckets")
    if not isinstance(buckets, list) or not buckets:
        read.refuse(f"{key}.buckets", buckets, "a list of bytes, at least one")
    return VswCosts(
        gpus={
            read.text(kind, f"{key}.gpus"): _gpu(read, own, f"{key}.gpus.{kind}")
            for kind, own in gpus.items()
        },
        buckets=tuple(read.whole(size, f"{key}.buckets") for size in buckets),
        network=AllReduceCosts(
            within=_line(read, network.get("within"), f"{key}.network.within"),
            between=_line(read, network.get("between"), f"{key}.network.between"),
        ),
    )


def _line(read: JsonReader, value: Any, key: str) -> AllReduceCost:
    table = read.table(value, key, ("per_byte_s", "latency_s"))
    return AllReduceCost(
        per_byte_s=read.number(table.get("per_byte_s"), f"{key}.per_byte_s", "seconds per byte"),
        latency_s=read.number(table.get("latency_s"), f"{key}.latency_s", "seconds"),
    )


def _gpu(read: JsonReader, value: Any, key: str) -> GpuCosts:
    table = read.table(value, key, ("update_s", "copy_s", "buffers_s", "speeds"))
    speeds: dict[int, BatchTimes] = {}
    for i, row in enumerate(read.rows(table.get("speeds"), f"{key}.speeds", least=1)):
        speed = _speed(read, row, f"{key}.speeds[{i}]")
        if speed.local_batch in speeds:
            read.reject(f"{key}.speeds[{i}]", f"local batch {speed.local_batch} again", "each one once")
        speeds[speed.local_batch] = speed
    return GpuCosts(
        speeds=dict(sorted(speeds.items())),
        update_s=read.number(table.get("update_s"), f"{key}.update_s", "seconds"),
        copy_s=read.number(table.get("copy_s", 0.0), f"{key}.copy_s", "seconds"),
        buffers_s=read.number(table.get("buffers_s", 0.0), f"{key}.buffers_s", "seconds"),
    )


def _speed(read: JsonReader, value: Any, key: str) -> BatchTimes:
    table = read.table(value, key, ("local_batch", "most", "times"))
    times = table.get("times")
    accepted = 'a table of times by the number of workers at once, such as {"1": {"forward_s": ...}}'
    if not isinstance(times, Mapping) or not times:
        read.refuse(f"{key}.times", times, accepted)
    by_count = {}
    for count, row in times.items():
        if not (isinstance(count, str) and re.fullmatch("[1-9][0-9]{0,2}", count)):
            read.refuse(f"{key}.times", count, accepted)
        by_count[int(count)] = _times(read, row, f"{key}.times.{count}")
    most = table.get("most")
    return BatchTimes(
        local_batch=read.whole(table.get("local_batch"), f"{key}.local_batch"),
        times=dict(sorted(by_count.items())),
        most=None if most is None else 0 if most == 0 else min(read.whole(most, f"{key}.most"), 1000),
    )


def _times(read: JsonReader, value: Any, key: str) -> Times:
    table = read.table(value, key, ("data_s", "forward_s", "backward_s"))
    return Times(
        data_s=read.number(table.get("data_s", 0.0), f"{key}.data_s", "seconds"),
        forward_s=read.number(table.get("forward_s"), f"{key}.forward_s", "seconds", above_0=True),
        backward_s=read.number(table.get("backward_s"), f"{key}.backward_s", "seconds", above_0=True),
    )


def _bounds(read: JsonReader, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        read.refuse("global_batch", value, "the least and the largest, such as [256, 32768]")
    low, high = (read.whole(each, "global_batch") for each in value)
    if low > high:
        read.refuse("global_batch", value, "the least first")
    return low, high


def _cluster(read: JsonReader, value: Any, costs: VswCosts) -> tuple[ClusterGpu, ...]:
    gpus: list[ClusterGpu] = []
    for i, row in enumerate(read.rows(value, "cluster")):
        key = f"cluster[{i}]"
        table = read.table(row, key, ("host", "kind", "gpus"))
        kind = read.text(table.get("kind"), f"{key}.kind")
        if kind not in costs.gpus:
            read.refuse(f"{key}.kind", kind, f"a kind with costs: {', '.join(costs.gpus)}")
        number = read.whole(table.get("gpus"), f"{key}.gpus")
        if len(gpus) + number > _MAX_GPUS:
            read.refuse(f"{key}.gpus", number, f"at most {_MAX_GPUS} in all")
        gpus += [ClusterGpu(kind=kind, host=read.text(table.get("host"), f"{key}.host"))] * number
    return tuple(gpus)
