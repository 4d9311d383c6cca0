"""Descriptions of simulated nodes, `--devices replay:NODE.toml`: GPUs, and what happens to them when."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.contract.schema import check, either, flag, many, number, one_of, printed, refuse, table, whole
from hpcsched.decoding import read_file
from hpcsched.devices.simulated_nvml import Happening, SimulatedGpu
from hpcsched.errors import BadInput, ConfigError

MOST_GPUS = 64
"""On a node; seven instances on a GPU are the most that MIG makes."""

_MOST_BYTES = 2**20
_LASTING = ("hang", "timeout", "unknown-error", "memory-stays")
_AT_ONCE = ("xid", "lost", "returns", "memory-error")
_INSTANCES = whole("MIG instances on a GPU: 0 to 7", 0, 7)

KEYS = {
    "schema": whole("1", 1, 1),
    "gpus": whole(f"GPUs: 1 to {MOST_GPUS}", 1, MOST_GPUS),
    "name": printed("the product's name"),
    "memory_mib": number("MiB of memory of a GPU, more than 0", exclusiveMinimum=0, maximum=2.0**30),
    "mig": either("MIG instances on each GPU, 0 to 7, or a list of them", _INSTANCES, many(_INSTANCES, "")),
    "recovery_action": flag("whether the driver tells what a GPU needs, as from R570 on"),
    "visible": printed('what CUDA_VISIBLE_DEVICES says, such as "3,1"'),
    "happens": many(table("a table"), "a list of tables"),
}

HAPPENS_KEYS = {
    "at_s": number("seconds after the start, 0 or more", minimum=0, maximum=1e9),
    "gpu": whole("a GPU by its index", 0),
    "instance": whole("a MIG instance by its index on that GPU", 0),
    "what": one_of(*_AT_ONCE, *_LASTING),
    "xid": whole("an Xid's number, 1 or more", 1, 2**16),
    "for_s": number("seconds that it lasts, more than 0", exclusiveMinimum=0, maximum=1e9),
}


@dataclass(frozen=True)
class Node:
    """A node: `gpus` GPUs, `mig[i]` instances on the i-th, none where it is (). Without `memory_mib` nobody
    knows the memory, and without a `visible` all GPUs are shown. `named`: its GPUs stand for those of that
    name."""

    gpus: int
    name: str = "NVIDIA H100 80GB HBM3"
    named: bool = False
    memory_mib: float | None = None
    mig: Sequence[int] = ()
    recovery_action: bool = True
    visible: str | None = None
    script: Sequence[Happening] = field(default_factory=tuple)

    def simulated(self, host: str) -> list[SimulatedGpu]:
        """Its GPUs; their UUIDs are the same each time, and others on another host."""
        used = (
            None if self.memory_mib is None else min(512.0, self.memory_mib / 4)
        )  # "memory-stays": half of it
        common: Any = {"busy": None, "recovery": 0 if self.recovery_action else None}
        boards = []
        for i in range(self.gpus):
            count = self.mig[i] if self.mig else 0
            parts = [
                SimulatedGpu(
                    _uuid("MIG", host, i, k),
                    f"{self.name} MIG",
                    memory_mib=None if self.memory_mib is None else self.memory_mib / count,
                    used_mib=None if used is None else used / count,
                    **common,
                )
                for k in range(count)
            ]
            board = SimulatedGpu(
                _uuid("GPU", host, i),
                self.name,
                memory_mib=self.memory_mib,
                used_mib=used,
                instances=parts,
                **common,
            )
            boards.append(board)
        return boards


def read_node(path: Path) -> Node:
    """The node that a TOML file describes. Raises ConfigError."""
    import tomllib  # only for this kind of devices

    where = f"--devices {path}"
    try:
        given = tomllib.loads(read_file(path, most_bytes=_MOST_BYTES).decode())
    except OSError as error:
        raise ConfigError(where=where, got=str(error.strerror), accepted="a readable file") from error
    except (BadInput, ValueError, RecursionError) as error:
        raise ConfigError(where=where, got=str(error), accepted="a TOML file") from error
    check(given, KEYS, where=where, needed=("schema", "gpus"))
    gpus = given["gpus"]
    mig = given.get("mig", 0)
    mig = mig if isinstance(mig, list) else [mig] * gpus
    if len(mig) != gpus:
        refuse(where, "mig", f"{len(mig)} numbers", f"one for each of the {gpus} GPUs")
    known = {key: given[key] for key in ("name", "memory_mib", "recovery_action", "visible") if key in given}
    script = tuple(
        _happening(row, where, f"happens[{i}]", mig, "memory_mib" in given)
        for i, row in enumerate(given.get("happens", ()))
    )
    return Node(gpus=gpus, named="name" in given, mig=mig if any(mig) else (), script=script, **known)


def _happening(
    row: Mapping[str, Any], where: str, place: str, mig: Sequence[int], knows_memory: bool
) -> Happening:
    what = row.get("what")
    own = {"xid": ("xid",), **dict.fromkeys(_LASTING, ("for_s",))}.get(str(what), ())
    check(row, HAPPENS_KEYS, where=where, prefix=f"{place}.", needed=("at_s", "gpu", "what", *own))
    for key in ("xid", "for_s"):
        if key in row and key not in own:
            refuse(where, f"{place}.{key}", str(row[key]), f"nothing, as {what!r} has none")
    if row["gpu"] >= len(mig):
        refuse(where, f"{place}.gpu", str(row["gpu"]), f"0 to {len(mig) - 1}")
    if row.get("instance", -1) >= mig[row["gpu"]]:
        most = f"one of the {mig[row['gpu']]} MIG instances of GPU {row['gpu']}"
        refuse(where, f"{place}.instance", str(row["instance"]), most)
    if what == "memory-stays" and not knows_memory:
        refuse(where, f"{place}.what", repr(what), "memory_mib for the node, so that there is memory")
    return Happening(**row)


def _uuid(kind: str, host: str, *numbers: int) -> str:
    return f"{kind}-{uuid.uuid5(uuid.NAMESPACE_DNS, '/'.join(map(str, (host, *numbers))))}"
