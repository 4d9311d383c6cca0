"""Burst plans: which ranks compute which layer, and when."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

from hpcsched.compat import dataclass
from hpcsched.planning.burst.graph import MAX_GPUS
from hpcsched.planning.json_reader import JsonReader


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """A layer's place: its ranks, and when they compute it (microseconds from the step's start).

    `amplification`: its GPU-seconds over those of one GPU (section 4); infinite where it takes no time there.
    """

    id: int
    name: str
    ranks: tuple[int, ...]
    start_us: float = 0.0
    end_us: float = 0.0
    amplification: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    """A burst plan, its layers in the order in which they are run.

    `iter_us` is the time of a step (forward, backward and synchronisation), `data_parallel_us` that of
    plain data parallelism on all GPUs by the same model, `gpu_us` the busy time of all GPUs together.
    `notes`: what a reader should know.
    """

    model: str
    gpus: int
    global_batch: int
    amplification_limit: float = inf
    iter_us: float = 0.0
    data_parallel_us: float = 0.0
    gpu_us: float = 0.0
    layers: tuple[PlannedLayer, ...]
    notes: tuple[str, ...] = ()

    @property
    def placement(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each layer, in the order in which they are run."""
        return {layer.id: layer.ranks for layer in self.layers}

    def to_table(self) -> dict[str, Any]:
        """Its JSON form; times in seconds."""
        limit = self.amplification_limit
        return {
            "schema": 1,
            "model": self.model,
            "gpus": self.gpus,
            "global_batch": self.global_batch,
            "amplification_limit": limit if isfinite(limit) else None,
            "feasible": True,
            "iter_s": self.iter_us / 1e6,
            "data_parallel_s": self.data_parallel_us / 1e6 if isfinite(self.data_parallel_us) else None,
            "gpu_s": self.gpu_us / 1e6,
            "notes": list(self.notes),
            "layers": [
                {
                    "id": layer.id,
                    "name": layer.name,
                    "ranks": list(layer.ranks),
                    "start_s": layer.start_us / 1e6,
                    "end_s": layer.end_us / 1e6,
                    "amplification": layer.amplification if isfinite(layer.amplification) else None,
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def parse(cls, table: Any, *, where: str) -> BurstPlan:
        """A plan of its JSON form; of the times only `iter_s` is needed.

        Raises ConfigError naming the layer and the key that is wrong.
        """

        read = JsonReader(where)
        if not isinstance(table, Mapping):
            read.refuse("", table, "a table")
        if table.get("schema") != 1 or isinstance(table["schema"], bool):
            read.refuse("schema", table.get("schema"), "1")
        if table.get("feasible") is False:
            read.refuse("feasible", False, "a plan that was found")
        for key in ("gpus", "global_batch"):
            if type(table.get(key)) is not int or not 1 <= table[key] <= MAX_GPUS:
                read.refuse(key, table.get(key), "a positive whole number")
        limit = table.get("amplification_limit")
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit < 1
        ):
            read.refuse("amplification_limit", limit, "a number of at least 1, or null")
        rows = table.get("layers")
        if not isinstance(rows, list) or not rows:
            read.refuse("layers", rows, "a list of at least one layer")
        layers = []
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                read.refuse(f"layers[{number}]", row, "a table")
            name, ranks = row.get("name"), row.get("ranks")
            if not isinstance(name, str):
                read.refuse(f"layers[{number}].name", name, "text")
            if type(row.get("id")) is not int or row["id"] < 0:
                read.refuse(f"layer {name!r}: id", row.get("id"), "0 or a positive whole number")
            if not (isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks)):
                read.refuse(f"layer {name!r}: ranks", ranks, "a list of ranks")
            if sorted(set(ranks)) != ranks or ranks[0] < 0 or ranks[-1] >= table["gpus"]:
                accepted = f"a list of different ranks, ascending, from 0 to {table['gpus'] - 1}"
                read.refuse(f"layer {name!r}: ranks", ranks, accepted)
            times = [_number(row, key) for key in ("start_s", "end_s", "amplification")]
            layers.append(
                PlannedLayer(
                    id=row["id"],
                    name=name,
                    ranks=tuple(ranks),
                    start_us=times[0] * 1e6,
                    end_us=times[1] * 1e6,
                    amplification=times[2],
                )
            )
        if sorted(layer.id for layer in layers) != list(range(len(layers))):
            read.refuse("layers", [layer.id for layer in layers], f"each id from 0 to {len(layers) - 1} once")
        model = table.get("model", "")
        return cls(
            model=model if isinstance(model, str) else "",
            gpus=table["gpus"],
            global_batch=table["global_batch"],
            amplification_limit=inf if limit is None else _number(table, "amplification_limit"),
            iter_us=_number(table, "iter_s") * 1e6,
            data_parallel_us=_number(table, "data_parallel_s") * 1e6,
            gpu_us=_number(table, "gpu_s") * 1e6,
            layers=tuple(layers),
            notes=_notes(table.get("notes")),
        )


def _number(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key, 0.0)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0.0
    try:
        return float(value)
    except OverflowError:
        return inf


def _notes(value: Any) -> tuple[str, ...]:
    return tuple(note for note in value if isinstance(note, str)) if isinstance(value, list) else ()
