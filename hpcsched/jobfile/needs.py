"""The keys of a job about its resources and surroundings: time, cores, memory, kinds of GPUs, modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Protocol

from hpcsched.contract import schema
from hpcsched.contract.strategies import Strategy
from hpcsched.core.model import Device, HostCores, JobSpec
from hpcsched.core.needs import Needs, said_mib
from hpcsched.core.resources.gpus import suits
from hpcsched.durations import parse_duration

Refuse = Callable[[str, object, str], NoReturn]

MOST_CPUS = 4096
"""Cores for each GPU."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT])")
_MIB = {"K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20}
MOST_MIB = 2.0**40

SIZE = schema.text(
    'a size of at least 1M with its unit (K, M, G, T: of 1024), such as "16G"', f"^{_SIZE.pattern}$"
)
GPU_TYPE = schema.text(
    'words of a GPU\'s name as `nvidia-smi -L` has it, such as "A100" or "H100 NVL"',
    "^[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}$",
)
MODULES = schema.many(
    schema.text("", r"^[A-Za-z0-9_][A-Za-z0-9_.+/:@~-]{0,199}$"),
    'a list of names of modules, such as ["cuda/12.4", "gcc"]',
)
KEYS = ("time", "cpus_per_gpu", "memory", "gpu_type", "gpu_memory", "modules")


class Written(Protocol):
    """The keys of a [[job]] table that this is about, as written, and what they may not go together with."""

    @property
    def time(self) -> float | str | None: ...
    @property
    def cpus_per_gpu(self) -> int | None: ...
    @property
    def memory(self) -> str | None: ...
    @property
    def gpu_type(self) -> str | None: ...
    @property
    def gpu_memory(self) -> str | None: ...
    @property
    def modules(self) -> Sequence[str]: ...
    @property
    def background(self) -> bool: ...
    @property
    def replay(self) -> bool: ...


def needs_of(job: Written, strategy: Strategy, refuse: Refuse, *, share: float | None) -> Needs | None:
    """What a [[job]] table says of these, and of the share of a GPU that it asks for; None: nothing. Refused
    is what does not go together."""
    if all(not getattr(job, key) for key in KEYS) and job.time is None and share is None:
        return None
    fixed = "a job in the background" if job.background else strategy.job
    shares = job.background or strategy.gpus is not None
    for key in ("cpus_per_gpu", "gpu_type", "gpu_memory"):
        if shares and getattr(job, key) is not None:
            refuse(key, getattr(job, key), f"nothing for {fixed}: it has no GPU of its own")
    if share is not None and job.cpus_per_gpu is not None:
        refuse(
            "cpus_per_gpu", job.cpus_per_gpu, "nothing for a job that shares a GPU: it has that GPU's cores"
        )
    if job.memory is not None and (job.background or strategy.gpus == 1):
        refuse("memory", job.memory, f"nothing for {fixed}: other jobs may be in its process")
    if job.modules and job.replay:
        refuse("modules", job.modules, "a trainer or a command")
    return _shared(
        _time(job.time, refuse),
        job.cpus_per_gpu,
        _mib("memory", job.memory, refuse),
        (job.gpu_type or "").strip(),
        _mib("gpu_memory", job.gpu_memory, refuse),
        tuple(dict.fromkeys(job.modules)),
        share,
    )


@lru_cache(maxsize=256)
def _shared(
    time_s: float | None,
    cpus_per_gpu: int | None,
    memory_mib: float | None,
    gpu_type: str,
    gpu_memory_mib: float | None,
    modules: tuple[str, ...],
    share: float | None,
) -> Needs:
    """One object for all jobs that say the same."""
    return Needs(
        time_s=time_s,
        cpus_per_gpu=cpus_per_gpu,
        memory_mib=memory_mib,
        gpu_type=gpu_type,
        gpu_memory_mib=gpu_memory_mib,
        modules=modules,
        share=share,
    )


def check_needs(spec: JobSpec, devices: Sequence[Device], cores: Sequence[HostCores], *, where: str) -> None:
    """Refuse a job that no host here could ever run, as far as is known of them. Raises ConfigError."""
    needs = spec.needs
    if needs is None:
        return
    if needs.picky:
        suiting = Counter(device.host for device in devices if suits(needs, device))
        most = max(suiting.values(), default=0)
        if most < max(1, spec.gpus_min):
            key = "gpu_type" if needs.gpu_type else "gpu_memory"
            got = f"{spec.gpus_min} x {needs.gpu_type or 'GPU'}"
            got += f" with {said_mib(needs.gpu_memory_mib)}" if needs.gpu_memory_mib else ""
            schema.refuse(
                where, f"job {spec.name}.{key}", got, f"at most {most} on a host: here are {_here(devices)}"
            )
    kept = [host.kept for host in cores]
    if needs.cpus_per_gpu is not None and kept and all(kept):
        all_of_them = needs.cpus_per_gpu * spec.gpus_min
        if all_of_them > max(kept):
            accepted = f"at most {max(kept)}: so many are kept for GPU jobs on a host (--cpus-per-gpu)"
            schema.refuse(where, f"job {spec.name}.cpus_per_gpu", f"{all_of_them} cores on a host", accepted)
    memory = [host.memory_mib for host in cores]
    known = [mib for mib in memory if mib is not None]
    if needs.memory_mib is not None and known and len(known) == len(memory) and needs.memory_mib > max(known):
        accepted = f"at most {said_mib(max(known))}: no host here has more for jobs"
        schema.refuse(where, f"job {spec.name}.memory", said_mib(needs.memory_mib), accepted)


def _here(devices: Sequence[Device]) -> str:
    kinds = Counter((device.gpu_type, device.memory_mib) for device in devices)
    said = [
        f"{count} x {kind}" + (f" with {said_mib(memory)}" if memory else "")
        for (kind, memory), count in kinds.items()
    ]
    return ", ".join(said) or "no GPUs"


def as_keys(needs: Needs | None) -> dict[str, Any]:
    """The keys that say what `needs` does."""
    if needs is None:
        return {}
    modules: Sequence[str] | None = list(needs.modules) or None
    return {
        "time": needs.time_s,
        "cpus_per_gpu": needs.cpus_per_gpu,
        "memory": _size(needs.memory_mib),
        "gpu_type": needs.gpu_type or None,
        "gpu_memory": _size(needs.gpu_memory_mib),
        "modules": modules,
    }


def _size(mib: float | None) -> str | None:
    return None if mib is None else f"{mib!r}M"


def _mib(key: str, value: str | None, refuse: Refuse) -> float | None:
    if value is None:
        return None
    found = _SIZE.fullmatch(value)
    mib = float(found[1]) * _MIB[found[2]] if found and len(value) < 40 else 0.0
    if not 1 <= mib <= MOST_MIB:
        refuse(key, value, SIZE.words)
    return mib


def _time(value: float | str | None, refuse: Refuse) -> float | None:
    if value is None:
        return None
    words = 'a time above 0: seconds, or such as "90m", "2h", "1-12:00:00"'
    try:
        seconds = parse_duration(value)
    except (ValueError, OverflowError):
        refuse("time", value, words)
    if not seconds:
        refuse("time", value, words)
    return seconds
