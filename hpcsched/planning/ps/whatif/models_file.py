"""Models of trainings on CPU cores, as JSON (see docs/ps-plans.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hpcsched.planning.json_reader import JsonReader
from hpcsched.planning.ps.model import NetworkLink, PsModel
from hpcsched.planning.ps.training import PsTraining

_MIB = 2**20

_SECONDS = ("batch_cpu_s", "worker_cpu_s", "update_cpu_s", "byte_cpu_s")
_PARTS = ("uneven", "serial", "overlap")
_TIMES = tuple(field.name for field in fields(PsTraining) if field.name.endswith("_s"))
_KEYS = (
    "model",
    *_SECONDS,
    "parameter_mib",
    *_PARTS,
    "most_cores",
    "staleness",
    "weak",
    "link_mib_s",
    *_TIMES,
    "source",
    "note",
)


def parse(table: Any, *, where: str) -> dict[str, PsTraining]:
    """The trainings of a JSON form, by model. Raises ConfigError naming the key that is wrong."""
    read = JsonReader(where)
    table = read.table(table, "", ("schema", "models"))
    if table.get("schema") != 1 or isinstance(table["schema"], bool):
        read.refuse("schema", table.get("schema"), "1")
    found: dict[str, PsTraining] = {}
    for i, row in enumerate(read.rows(table.get("models"), "models", least=1)):
        key = f"models[{i}]"
        row = read.table(row, key, _KEYS)
        name = read.text(row.get("model"), f"{key}.model")
        if name in found:
            read.reject(f"{key}.model", f"{name!r} again", "each model once")
        for words in ("source", "note"):
            if words in row:
                read.text(row[words], f"{key}.{words}")
        found[name] = _training(read, row, key)
    return found


def to_table(name: str, training: PsTraining, **words: str) -> dict[str, Any]:
    """The JSON form of one model, without what is as it is by default; `words`: its `source`, its `note`."""
    model = training.model
    table: dict[str, Any] = {
        "model": name,
        "batch_cpu_s": model.batch_cpu_s,
        "parameter_mib": model.parameter_bytes / _MIB,
    }
    for field in fields(PsModel):
        if field.name not in (*table, "parameter_bytes") and getattr(model, field.name) != field.default:
            table[field.name] = getattr(model, field.name)
    if training.link is not None:
        table["link_mib_s"] = training.link.bytes_s / _MIB
    return {**table, **{time: getattr(training, time) for time in _TIMES}, **words}


def _training(read: JsonReader, row: Mapping[str, Any], key: str) -> PsTraining:
    model: dict[str, Any] = {}
    for name in _SECONDS:
        if name in row or name == "batch_cpu_s":
            above_0 = name == "batch_cpu_s"
            model[name] = read.number(row.get(name), f"{key}.{name}", "CPU seconds", above_0=above_0)
    for name in _PARTS:
        if name in row:
            model[name] = read.number(row[name], f"{key}.{name}", "a part")
            if model[name] > 1:
                read.refuse(f"{key}.{name}", row[name], "a part, 0 to 1")
    if "most_cores" in row:
        model["most_cores"] = read.number(row["most_cores"], f"{key}.most_cores", "cores", above_0=True)
    if "staleness" in row:
        model["staleness"] = row["staleness"]
        if type(row["staleness"]) is not int or row["staleness"] < 0:
            read.refuse(f"{key}.staleness", row["staleness"], "a whole number, 0 or more")
    if "weak" in row:
        model["weak"] = read.flag(row["weak"], f"{key}.weak")
    mib = read.number(row.get("parameter_mib"), f"{key}.parameter_mib", "MiB", above_0=True)
    link = None
    if "link_mib_s" in row:
        link_mib_s = read.number(row["link_mib_s"], f"{key}.link_mib_s", "MiB a second", above_0=True)
        link = NetworkLink(bytes_s=link_mib_s * _MIB)
    times = {name: read.number(row[name], f"{key}.{name}", "seconds") for name in _TIMES if name in row}
    return PsTraining(model=PsModel(parameter_bytes=mib * _MIB, **model), link=link, **times)
