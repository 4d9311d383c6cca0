"""How two definitions of a job of one name differ, in the words of a job file."""

from __future__ import annotations

from dataclasses import fields

from hpcsched.core.model import AUTO, PER_GPU, JobSpec, Kind, Restart
from hpcsched.core.needs import Needs

_KEYS = {
    "kind": "",  # told by command, trainer or replay
    "gpus_min": "gpus",
    "gpus_max": "gpus",
    "gpus_multiple": "gpus",
    "restart": "",
    "checkpoint_every_s": "checkpoint_every",
    "training": "",
    "workdir": "",
    "user": "",
    "processes": "",
    "environment": "",
    "needs": "",
    "array": "",
    "name": "",
}
"""The key of a job file for each field that is not called like it; empty: looked at apart, or not at all."""


def differing(old: JobSpec, new: JobSpec, *, called_in: str = "") -> tuple[str, ...]:
    """The keys of which `new` says otherwise than `old`; none if they mean the same.

    `called_in` is the folder in which `new` was read: a job that names no `workdir` has that one, which is no
    reason to call it another.
    """
    names = (field.name for field in fields(JobSpec))
    keys = [_KEYS.get(name, name) for name in names if getattr(old, name) != getattr(new, name)]
    if old.kind is not new.kind and "replay" in (old.kind, new.kind):
        keys.append("replay")
    if new.kind is Kind.COMMAND and _processes(old) != _processes(new):
        keys.append("processes")
    keys += [key for key in ("epochs", "continues") if getattr(old, key) != getattr(new, key)]
    if old.environment != new.environment:
        keys += sorted({named.kind for named in (old.environment, new.environment) if named})
    keys += [key for field, key in _NEEDS.items() if _need(old, field) != _need(new, field)]
    if _at_once(old) != _at_once(new):
        keys.append("at_once")
    if old.restart != new.restart and not _by_its_pattern(old, new):
        keys += _restarts(old.restart, new.restart)
    if old.workdir != new.workdir:
        unnamed = bool(called_in) and new.workdir == called_in
        below = unnamed and old.workdir.startswith(f"{called_in.rstrip('/')}/")
        keys += ["workdir"] if below or not unnamed else []
    if "continues" in keys and "after" in keys and _rest(old) == _rest(new):
        keys.remove("after")  # it waits for the job that it continues
    return tuple(dict.fromkeys(key for key in keys if key))


_RESTART_KEYS = {
    "signal": "suspend_signal",
    "complete": "speaks",
    "recognised": "",
    "saved_codes": "saved_exit_codes",
}


def _restarts(old: Restart | None, new: Restart | None) -> list[str]:
    if old is None or new is None:
        return ["restartable"]
    names = [field.name for field in fields(Restart) if getattr(old, field.name) != getattr(new, field.name)]
    return [_RESTART_KEYS.get(name, name) for name in names]


def _by_its_pattern(old: JobSpec, new: JobSpec) -> bool:
    """Whether a job is restartable only as 0.6.0 took a pattern to say so (or as good as that)."""
    return bool(old.progress_pattern) and old.restart == Restart() and new.restart is None


def was_unsaid(old: JobSpec, new: JobSpec) -> bool:
    """Whether neither definition may say anything of processes: 0.1.0 took one on each GPU then, and its runs
    go on so."""
    return old.processes == PER_GPU and new.processes == AUTO


_NEEDS = {
    "time_s": "time",
    "cpus_per_gpu": "cpus_per_gpu",
    "memory_mib": "memory",
    "gpu_type": "gpu_type",
    "gpu_memory_mib": "gpu_memory",
    "modules": "modules",
    "share": "gpus",
}
"""By field of a job's needs the key of a job file."""


def _need(spec: JobSpec, field: str) -> object:
    return getattr(spec.needs or Needs(), field)


def _at_once(spec: JobSpec) -> int | None:
    return spec.array.at_once if spec.array else None


def _processes(spec: JobSpec) -> int | str:
    return 1 if spec.processes == "one" else spec.processes


def _rest(spec: JobSpec) -> set[str]:
    return set(spec.after) - {spec.continues or ""}
