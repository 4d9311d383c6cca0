"""Layer profiles: the layers of a model, and the time of each by the samples it gets (section 4.1)."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Union

from hpcsched.compat import dataclass
from hpcsched.planning.json_reader import JsonReader

Times = Mapping[int, float]
"""Microseconds by the number of samples on one GPU."""

Fact = Union[bool, int, float, str]
"""One of the conditions of a measurement."""

MAX_US, MAX_GPUS = 1e15, 2**20
"""The largest numbers that are taken for meant (chosen): microseconds, and GPUs."""

_MOST_FACTS, _MOST_TEXT = 64, 200
"""Of the conditions: how many are read, and how long one of them may be."""

_COUNT = re.compile(r"[1-9]\d{0,17}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledLayer:
    """One layer: what cannot be spread over different GPU counts.

    `prev` are the ids of the layers it reads from (none: the model's input). `activation_bytes` are what
    one sample's output takes, `parameter_bytes` those whose gradients are synchronised. `norms` counts its
    batch norms. `launch_us` is what it takes to tell a GPU what to do, in both passes: they take no less.
    """

    id: int
    name: str
    prev: tuple[int, ...]
    parameter_bytes: int
    activation_bytes: int
    forward_us: Times
    backward_us: Times
    norms: int = 0
    launch_us: float = 0.0

    def forward_at(self, samples: int) -> float:
        """Microseconds of the forward pass of so many samples on one GPU (see `time_at`)."""
        return time_at(self.forward_us, samples)

    def backward_at(self, samples: int) -> float:
        """Microseconds of the backward pass of so many samples on one GPU (see `time_at`)."""
        return time_at(self.backward_us, samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """The layers of a model in topological order, as measured on one GPU of type `device`.

    `input_bytes` are those of one sample. `conditions` are what the times depend on besides: versions,
    settings, clocks; earlier versions kept none. `loss_us` is what loss and its backward pass take by
    samples, `update_us` what the optimizer takes for a byte of parameters: as trainings find, else none.
    """

    model: str
    device: str
    source: str = "measured"
    note: str = ""
    input_bytes: int = 0
    conditions: Mapping[str, Fact] = field(default_factory=dict)
    layers: tuple[ProfiledLayer, ...]
    loss_us: Times = field(default_factory=dict)
    update_us: float = 0.0

    @property
    def most_samples(self) -> int:
        """The largest batch on one GPU that every layer has been measured with."""
        return min(max(layer.forward_us) for layer in self.layers)

    @classmethod
    def parse(cls, table: Any, *, where: str) -> LayerProfile:
        """A layer profile of its JSON form.

        Raises ConfigError naming the layer and the key that is wrong.
        """
        read = JsonReader(where)
        if not isinstance(table, Mapping):
            read.refuse("", table, "a table")
        if table.get("schema") != 1 or isinstance(table["schema"], bool):
            read.refuse("schema", table.get("schema"), "1")
        rows = table.get("layers")
        if not isinstance(rows, list) or not rows:
            read.refuse("layers", rows, "a list of at least one layer")
        layers = tuple(_layer(read, row, number) for number, row in enumerate(rows))
        return cls(
            model=_text(read, table, "", "model"),
            device=_text(read, table, "", "device"),
            source=_text(read, table, "", "source", "measured"),
            note=_text(read, table, "", "note", ""),
            input_bytes=_whole(read, table, "", "input_bytes", 0),
            conditions=_conditions(read, table.get("conditions", {})),
            layers=layers,
            loss_us=_times(read, table, "", "loss_us") if "loss_us" in table else {},
            update_us=_microseconds(read, table, "", "update_us"),
        )

    def to_table(self) -> dict[str, Any]:
        """Its JSON form."""
        return {
            "schema": 1,
            "model": self.model,
            "device": self.device,
            "source": self.source,
            "note": self.note,
            "input_bytes": self.input_bytes,
            **({"conditions": dict(self.conditions)} if self.conditions else {}),
            **({"loss_us": _table_of(self.loss_us)} if self.loss_us else {}),
            **({"update_us": self.update_us} if self.update_us else {}),
            "layers": [
                {
                    "id": layer.id,
                    "name": layer.name,
                    "prev": list(layer.prev),
                    "parameter_bytes": layer.parameter_bytes,
                    "activation_bytes": layer.activation_bytes,
                    **({"norms": layer.norms} if layer.norms else {}),
                    **({"launch_us": layer.launch_us} if layer.launch_us else {}),
                    "forward_us": _table_of(layer.forward_us),
                    "backward_us": _table_of(layer.backward_us),
                }
                for layer in self.layers
            ],
        }


def _table_of(times: Times) -> dict[str, float]:
    return {str(n): us for n, us in sorted(times.items())}


def times_at(times: Times, samples: Iterable[float]) -> list[float]:
    """The times of so many samples: as measured, on a straight line between the two nearest measured.

    Fewer samples than were ever measured take as long as the fewest that were: small kernels do not get
    faster by much. More go on along the line through the two largest.
    """
    known = sorted(times)
    return [_time_at(times, known, number) for number in samples]


def time_at(times: Times, samples: int) -> float:
    """The time of one number of samples, as in `times_at`."""
    return _time_at(times, sorted(times), samples)


def _time_at(times: Times, known: list[int], samples: float) -> float:
    right = bisect_left(known, samples)
    if right < len(known) and (right == 0 or known[right] == samples):
        return times[known[right]]
    if len(known) == 1:
        return times[known[0]] * samples / known[0]
    right = min(right, len(known) - 1)
    a, b = known[right - 1], known[right]
    return max(0.0, times[a] + (times[b] - times[a]) * (samples - a) / (b - a))


def _text(
    read: JsonReader, table: Mapping[str, Any], place: str, key: str, default: str | None = None
) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        read.refuse(f"{place}{key}", value, "text")
    return value


def _whole(
    read: JsonReader, table: Mapping[str, Any], place: str, key: str, default: int | None = None
) -> int:
    value = table.get(key, default)
    if type(value) is not int or not 0 <= value < 2**63:
        read.refuse(f"{place}{key}", value, "0 or a positive whole number")
    return value


def _microseconds(read: JsonReader, table: Mapping[str, Any], place: str, key: str) -> float:
    value = table.get(key, 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_US:
        read.refuse(f"{place}{key}", value, f"microseconds, from 0 to {MAX_US:g}")
    return float(value)


def _conditions(read: JsonReader, value: Any) -> dict[str, Fact]:
    if not isinstance(value, Mapping) or len(value) > _MOST_FACTS:
        read.refuse("conditions", value, f"a table of at most {_MOST_FACTS} facts")
    for name, fact in value.items():
        right = isinstance(name, str) and isinstance(fact, (bool, int, float, str))
        if not right or len(name) > _MOST_TEXT or len(str(fact)) > _MOST_TEXT:
            read.refuse(f"conditions.{name}", fact, "true, false, a number or a short text")
    return dict(value)


def _layer(read: JsonReader, row: Any, number: int) -> ProfiledLayer:
    if not isinstance(row, Mapping):
        read.refuse(f"layers[{number}]", row, "a table")
    name = _text(read, row, f"layers[{number}].", "name")
    place = f"layer {name!r}: "
    if row.get("id") != number or isinstance(row["id"], bool):
        read.refuse(f"{place}id", row.get("id"), f"{number}: ids are places in the list")
    layer = ProfiledLayer(
        id=number,
        name=name,
        prev=_previous(read, row.get("prev"), number, place),
        parameter_bytes=_whole(read, row, place, "parameter_bytes"),
        activation_bytes=_whole(read, row, place, "activation_bytes"),
        forward_us=_times(read, row, place, "forward_us"),
        backward_us=_times(read, row, place, "backward_us"),
        norms=_whole(read, row, place, "norms", 0),
        launch_us=_microseconds(read, row, place, "launch_us"),
    )
    if layer.forward_us.keys() != layer.backward_us.keys():
        read.refuse(f"{place}backward_us", sorted(layer.backward_us), "the batches of forward_us")
    return layer


def _previous(read: JsonReader, value: Any, number: int, place: str) -> tuple[int, ...]:
    accepted = "a list of ids of layers before this one"
    if not isinstance(value, Sequence) or isinstance(value, str):
        read.refuse(f"{place}prev", value, accepted)
    for item in value:
        if type(item) is not int or not 0 <= item < number:
            read.refuse(f"{place}prev", item, accepted)
    return tuple(sorted(set(value)))


def _times(read: JsonReader, row: Mapping[str, Any], place: str, key: str) -> dict[int, float]:
    """Microseconds by a count written as text."""
    value = row.get(key)
    accepted = 'a table of microseconds by batch, such as { "1" = 30.0, "2" = 41.5 }'
    if not isinstance(value, Mapping) or not value:
        read.refuse(f"{place}{key}", value, accepted)
    return dict(counted(read, value, f"{place}{key}"))


def counted(read: JsonReader, value: Mapping[str, Any], key: str) -> list[tuple[int, float]]:
    """The pairs of a table of microseconds by a positive count. Raises ConfigError."""
    pairs = []
    for text, us in value.items():
        if not (isinstance(text, str) and _COUNT.fullmatch(text)):
            read.refuse(key, text, "positive whole numbers as keys")
        if isinstance(us, bool) or not isinstance(us, (int, float)) or not 0 <= us <= MAX_US:
            read.refuse(f"{key}.{text}", us, f"microseconds, from 0 to {MAX_US:g}")
        pairs.append((int(text), float(us)))
    return pairs
