"""The format in which JABAS's authors published their measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NoReturn

from hpcsched.errors import ConfigError
from hpcsched.planning.vsw.configure import ClusterGpu
from hpcsched.planning.vsw.costs import (
    MIB,
    AllReduceCost,
    AllReduceCosts,
    BatchTimes,
    GpuCosts,
    Times,
    VswCosts,
    fit_line,
)
from hpcsched.planning.vsw.profile import VswProfile

_IDEAL_PARTS = 2
"""Their ideal time counts 4 (N-1)/N bytes for each byte; a ring all-reduce sends 2 (N-1)/N."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The contents of the files by their names; JSON is read already.

    Args:
        computation: `<model>_<local batch>_<workers>_comp_profile.json`.
        memory: `max_memory_profile_info.json`, of each local batch and server.
        within, between: `intra*.txt` and `inter*.txt`: lines of "ideal ms, measured ms".
        buckets: `<model>_bucket_size_profile.json`; sizes in MiB.
        cluster: `cluster_info.json`; bandwidths in bytes a second.
        job: `config.json` of the job; none: all servers, no bounds of the batch.
    """

    computation: Mapping[str, Any]
    memory: Mapping[str, Any]
    within: Mapping[str, str]
    between: Mapping[str, str]
    buckets: Mapping[str, Any]
    cluster: Mapping[str, Any]
    job: Mapping[str, Any]


def parse(files: Published, *, where: str) -> VswProfile:
    """The profile that the files hold.

    Times and numbers of workers are by type of GPU: of several servers of one type the median. So are update,
    copy of one model and buffers, over all local batches.

    Raises ConfigError naming the file and the key that is wrong, or what is missing.
    """
    cluster_file, servers = _only(files.cluster, where, "a cluster_info.json")
    job_file, job = next(iter(files.job.items()), (where, {}))
    wanted = _get(job, "available_servers", list, job_file) if "available_servers" in job else list(servers)
    for name in wanted:
        if name not in servers:
            _refuse(job_file, "available_servers", name, f"a server of {cluster_file}")
    rows = [_Row.parse(row, name) for name, row in files.computation.items()]
    if not rows:
        _refuse(where, "", None, "files named *_comp_profile.json")
    models = sorted({row.model for row in rows})
    if len(models) > 1:
        _refuse(where, "", f"profiles of {', '.join(models)}", "profiles of one model")
    most: dict[tuple[str, int], int] = {}
    for name, row in files.memory.items():
        key = (_get(row, "gpu_type", str, name), _get(row, "lbs", int, name))
        number = _get(row, "max_num_models", int, name)
        most[key] = min(number, most.get(key, number))
    gpus = {kind: _gpu_costs(kind, rows, most) for kind in dict.fromkeys(row.kind for row in rows)}
    cluster: list[ClusterGpu] = []
    for host in wanted:
        server = servers[host]
        kind = _get(server, "type", str, cluster_file, host)
        if kind not in gpus:
            _refuse(cluster_file, f"{host}.type", kind, f"a type that was measured: {', '.join(gpus)}")
        cluster += [ClusterGpu(kind=kind, host=host)] * _get(server, "number", int, cluster_file, host)
    buckets_file, sizes = _only(files.buckets, where, "a *_bucket_size_profile.json")
    buckets = _get(sizes, "bucket_size_distribution", list, buckets_file)
    if not buckets or not all(isinstance(size, (int, float)) and size > 0 for size in buckets):
        _refuse(buckets_file, "bucket_size_distribution", buckets, "sizes in MiB")
    return VswProfile(
        model=models[0],
        costs=VswCosts(
            gpus=gpus,
            buckets=tuple(round(size * MIB) for size in buckets),
            network=_network(files, [servers[host] for host in wanted], cluster_file, where),
        ),
        cluster=tuple(cluster),
        global_batch=_bounds(job, job_file),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One measured iteration; milliseconds became seconds."""

    model: str
    kind: str
    local_batch: int
    workers: int
    times: Times
    update_s: float
    copy_s: float
    buffers_s: float

    @classmethod
    def parse(cls, row: Any, name: str) -> _Row:
        def seconds(key: str) -> float:
            value = _get(row, key, (int, float), name)
            if not 0 <= value < 1e9:
                _refuse(name, key, value, "milliseconds")
            return float(value) / 1e3

        workers = _get(row, "num_models", int, name)
        forward_s, backward_s = seconds("fwd_time"), seconds("bwd_time")
        if workers < 1 or min(forward_s, backward_s) <= 0:
            _refuse(name, "", "no workers or no time", "num_models, fwd_time and bwd_time above 0")
        return cls(
            model=_get(row, "model", str, name),
            kind=_get(row, "gpu_type", str, name),
            local_batch=_get(row, "lbs", int, name),
            workers=workers,
            times=Times(data_s=seconds("data_time"), forward_s=forward_s, backward_s=backward_s),
            update_s=seconds("update_time"),
            copy_s=seconds("copy_time") / (workers - 1) if workers > 1 else 0.0,
            buffers_s=seconds("bn_sync_time") if "bn_sync_time" in row else 0.0,
        )


def _gpu_costs(kind: str, rows: list[_Row], most: Mapping[tuple[str, int], int]) -> GpuCosts:
    own = [row for row in rows if row.kind == kind]
    measured: dict[int, dict[int, list[Times]]] = {}
    for row in own:
        measured.setdefault(row.local_batch, {}).setdefault(row.workers, []).append(row.times)
    speeds = {
        local_batch: BatchTimes(
            local_batch=local_batch,
            times={n: _middle(times) for n, times in sorted(by_count.items())},
            most=most.get((kind, local_batch)),
        )
        for local_batch, by_count in sorted(measured.items())
    }
    return GpuCosts(
        speeds=speeds,
        update_s=median(row.update_s for row in own),
        copy_s=median([row.copy_s for row in own if row.workers > 1] or [0.0]),
        buffers_s=median(row.buffers_s for row in own),
    )


def _middle(times: list[Times]) -> Times:
    return Times(
        data_s=median(each.data_s for each in times),
        forward_s=median(each.forward_s for each in times),
        backward_s=median(each.backward_s for each in times),
    )


def _network(files: Published, servers: list[Any], cluster_file: str, where: str) -> AllReduceCosts:
    """Both lines; where a cluster has but one host, or one GPU on each, only one is needed."""
    lines: dict[str, AllReduceCost] = {}
    for scope, texts in (("intra", files.within), ("inter", files.between)):
        if texts:
            key = f"{scope}_network_bandwidth"
            bandwidth = min(float(_get(server, key, (int, float), cluster_file)) for server in servers)
            if bandwidth <= 0:
                _refuse(cluster_file, key, bandwidth, "bytes a second")
            lines[scope] = _line(texts, bandwidth)
    if "intra" not in lines and any(_get(server, "number", int, cluster_file) > 1 for server in servers):
        _refuse(where, "", None, "a file intra*.txt with all-reduce times within a host")
    if "inter" not in lines and len(servers) > 1:
        _refuse(where, "", None, "a file inter*.txt with all-reduce times between hosts")
    none = AllReduceCost(per_byte_s=0.0, latency_s=0.0)
    within = lines.get("intra", lines.get("inter", none))
    return AllReduceCosts(within=within, between=lines.get("inter", within))


def _line(texts: Mapping[str, str], bandwidth: float) -> AllReduceCost:
    points = []
    for name, text in texts.items():
        for number, line in enumerate(filter(str.strip, text.splitlines()), start=1):
            try:
                ideal_ms, measured_ms = map(float, line.split(","))
            except ValueError:
                _refuse(name, f"line {number}", line, "ideal ms, measured ms")
            points.append((ideal_ms / 1e3 * bandwidth / _IDEAL_PARTS, measured_ms / 1e3))
    if not points:
        _refuse(next(iter(texts)), "", "nothing", "lines of ideal ms, measured ms")
    return fit_line(points)


def _bounds(job: Any, name: str) -> tuple[int, int] | None:
    keys = ("batch_size_lower_bound", "batch_size_upper_bound")
    if not any(key in job for key in keys):
        return None
    low, high = (_get(job, key, int, name) for key in keys)
    if not 1 <= low <= high:
        _refuse(name, keys[0], low, f"1 to the upper bound of {high}")
    return low, high


def _only(files: Mapping[str, Any], where: str, accepted: str) -> tuple[str, Any]:
    if len(files) != 1:
        _refuse(where, "", ", ".join(files) or None, f"{accepted}, one")
    name, value = next(iter(files.items()))
    if not isinstance(value, Mapping) or not value:
        _refuse(name, "", value, "a table")
    return name, value


def _get(table: Any, key: str, kind: Any, name: str, prefix: str = "") -> Any:
    """A value of this type; raises ConfigError if there is none."""
    value = table.get(key) if isinstance(table, Mapping) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        words = {str: "text", int: "a whole number", list: "a list"}.get(kind, "a number")
        _refuse(name, f"{prefix}.{key}" if prefix else key, value, words)
    return value


def _refuse(where: str, key: str, got: object, accepted: str) -> NoReturn:
    found = "missing" if got is None else repr(got)[:200]
    raise ConfigError(where=where, key=key, got=found, accepted=accepted)
