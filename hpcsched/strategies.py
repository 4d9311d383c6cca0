"""Ways to run a job, as a job file names them: the options of each, and what is right for those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from hpcsched.core.mechanisms.cpu.cores import LEAST, WHOLE
from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.options import WorkerOptions

ROUNDING = 1e-6

_COUNT, _FLAG, _LIMIT, _FILE, _NORM = (
    "a positive whole number",
    "true or false",
    "a number of at least 1",
    "a file name",
    '"shared" or "local"',
)
_MODE = '"auto", "loop" or "stacked"; on GPUs also "streams" or "graph"'
_CORES = "a number of cores of at least 0.3, for a server and two workers"
_PART = "a number of cores of at least 0.1"
_NUMBER = "a whole number of at least 0"
_SHARE = "a share above 0, at most 1"
_FACTOR = "a share above 0, at most 2"
_SPEED = "a positive number of MiB/s"
_LABEL = "a name for those that belong together"
_IS_RIGHT: dict[str, Callable[[Any], bool]] = {
    _COUNT: lambda value: type(value) is int and value > 0,
    _FLAG: lambda value: type(value) is bool,
    _LIMIT: lambda value: type(value) in (int, float) and value >= 1,
    _FILE: lambda value: type(value) is str and value != "",
    _NORM: lambda value: value in ("shared", "local"),
    _MODE: lambda value: value in ("auto", "loop", "stacked", "streams", "graph"),
    _LABEL: lambda value: type(value) is str and value != "",
    _CORES: lambda value: type(value) in (int, float) and value * WHOLE >= 3 * LEAST - ROUNDING,
    _PART: lambda value: type(value) in (int, float) and LEAST - ROUNDING <= value * WHOLE < inf,
    _NUMBER: lambda value: type(value) is int and value >= 0,
    _SHARE: lambda value: type(value) in (int, float) and 0 < value <= 1,
    _FACTOR: lambda value: type(value) in (int, float) and 0 < value <= 2,
    _SPEED: lambda value: type(value) in (int, float) and 0 < value < inf,
}
_OPTIONS: dict[str, dict[str, str]] = {
    "ddp": {"micro_batch": _COUNT, "reproducible": _FLAG, "shards": _COUNT},
    "packed": {"mode": _MODE, "most": _COUNT, "pack": _LABEL},
    "ps": {
        "cpus": _CORES,
        "staleness": _NUMBER,
        "servers": _COUNT,
        "workers": _COUNT,
        "start": _SHARE,
        "scale_up": _FACTOR,
        "link": _SPEED,
    },
    "cpu": {"cpus": _PART},
    "burst": {"amplification": _LIMIT, "batch_norm": _NORM, "plan": _FILE, "profile": _FILE},
}
STRATEGIES = (*_OPTIONS, "vsw")

DEFAULT_SHARDS = 8
"""As in `worker.ranks.reproducible`: parts of a global batch where the result is to be reproducible."""


def checked(given: str | Mapping[str, Any], *, where: str, key: str, trainer: bool) -> dict[str, Any]:
    """The table of a strategy that was given by its name or with its options.

    `trainer`: the job has one. Raises ConfigError for what makes no sense, as said at `key`.
    """

    def refuse(key: str, got: object, accepted: str) -> ConfigError:
        return ConfigError(where=where, key=key, got=repr(got), accepted=accepted)

    table: dict[str, Any] = {"kind": given} if isinstance(given, str) else dict(given)
    kind = str(table.get("kind"))
    if kind not in STRATEGIES:
        raise refuse(key, kind, ", ".join(STRATEGIES))
    if kind == "vsw":
        if not trainer:
            raise refuse(key, kind, "stream workers for jobs with a trainer only")
        try:
            WorkerOptions.parse(table)
        except ConfigError as error:
            raise ConfigError(
                where=where, key=f"{key}.{error.key}", got=error.got, accepted=error.accepted
            ) from None
        return table
    options = _OPTIONS[kind]
    for name, value in table.items():
        if name == "kind":
            continue
        if name not in options:
            raise refuse(f"{key}.{name}", value, ", ".join(options) or f"no options for {kind}")
        if not _IS_RIGHT[options[name]](value):
            raise refuse(f"{key}.{name}", value, options[name])
    if "shards" in table and not table.get("reproducible"):
        raise refuse(f"{key}.shards", table["shards"], "only with reproducible = true")
    if kind == "cpu":
        if trainer:
            raise refuse(key, kind, "cores for jobs with a command only; for a trainer, ps")
        if "cpus" not in table:
            raise refuse(f"{key}.cpus", "missing", _PART)
    if kind == "ps":
        if not trainer:
            raise refuse(key, kind, "parameter servers for jobs with a trainer only")
        if "cpus" not in table:
            raise refuse(f"{key}.cpus", "missing", _CORES)
        ranks = table.get("servers", 1) + table.get("workers", 2)
        if table["cpus"] * WHOLE < LEAST * ranks - ROUNDING:
            accepted = f"at least {LEAST / WHOLE} cores a process: {LEAST * ranks / WHOLE:.4g}"
            raise refuse(f"{key}.cpus", table["cpus"], accepted)
    for name in ("amplification", "profile"):
        if "plan" in table and name in table:
            raise refuse(f"{key}.{name}", table[name], "a plan, or what to make one from, not both")
    return table


def most_ranks(strategy: Mapping[str, Any], nodes: int) -> int | None:
    """On each host; None: as many as there are GPUs."""
    if not strategy.get("reproducible"):
        return None
    return int(strategy.get("shards", DEFAULT_SHARDS)) // nodes
