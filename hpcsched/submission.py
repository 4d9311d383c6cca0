"""Jobs that come as specs, by the inbox: checked as fully as a job file, by the same checks."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpcsched import jobfile
from hpcsched.core.model import JobSpec, Kind
from hpcsched.core.processes import launcher_of
from hpcsched.errors import ConfigError
from hpcsched.jobfile import needs
from hpcsched.jobfile.keys import SHARE
from hpcsched.jobfile.restart import as_keys, as_sent
from hpcsched.printing import printable

MOST_USER = 256


def checked(spec: JobSpec, *, where: str) -> JobSpec:
    """The spec as a job file would have given it; raises ConfigError for what no job file can say."""
    given = spec.restart
    found = jobfile.spec_of(as_table(spec), where=where, place="job", workdir=Path(), user=spec.user)
    for key, accepted in _same(spec, found).items():
        raise ConfigError(
            where=where, key=f"job {spec.name}.{key}", got=repr(getattr(spec, key))[:80], accepted=accepted
        )
    try:
        return replace(found, restart=as_sent(found.restart, given)) if given else found
    except ValueError as error:
        accepted = "the name of a file, and words that can be printed"
        raise ConfigError(
            where=where, key=f"job {spec.name}.restart", got=str(error), accepted=accepted
        ) from error


def _same(spec: JobSpec, found: JobSpec) -> dict[str, str]:
    """What a table cannot say, or says otherwise: by key what is accepted."""
    wrong = {}
    if found.kind is not spec.kind:
        wrong["kind"] = f"{found.kind}: that is what the job runs"
    if found.gpus_min != spec.gpus_min:
        wrong["gpus_min"] = f"{found.gpus_min}, with this strategy"
    if spec.restart is not None and spec.kind is not Kind.COMMAND:
        wrong["restart"] = "none: only a command saves by itself"
    if len(spec.user) > MOST_USER or printable(spec.user) != spec.user:
        wrong["user"] = "the name of a user"
    return wrong


def _gpus(spec: JobSpec) -> float | str | dict[str, int]:
    if spec.needs and spec.needs.share is not None:
        return spec.needs.share or SHARE
    if (spec.gpus_min, spec.gpus_max) == (0, 0):
        return "auto"
    limits = {"min": spec.gpus_min}
    limits |= {"max": spec.gpus_max} if spec.gpus_max is not None else {}
    return limits | ({"multiple_of": spec.gpus_multiple} if spec.gpus_multiple != 1 else {})


def _container(spec: JobSpec) -> dict[str, Any] | None:
    if spec.container is None:
        return None
    mounts = [":".join(mount) for mount in spec.container.mounts]
    return {**asdict(spec.container), "mounts": mounts, "options": list(spec.container.options)}


def _array(spec: JobSpec) -> dict[str, Any] | None:
    if spec.array is None:
        return None
    return {key: value for key, value in asdict(spec.array).items() if value is not None}


def as_table(spec: JobSpec) -> dict[str, Any]:
    """The [[job]] table that says what the spec does."""
    table: dict[str, Any] = {
        "name": spec.name,
        "model": spec.model,
        "trainer": spec.trainer,
        "command": list(spec.command) or None,
        "replay": True if spec.kind is Kind.REPLAY else None,
        "args": dict(spec.args),
        "steps": spec.steps,
        "epochs": spec.epochs,
        "continues": spec.continues,
        "after": list(spec.after),
        "gpus": _gpus(spec),
        "nodes": spec.nodes,
        "strategy": dict(spec.strategy),
        "background": spec.background,
        "max_foreground_slowdown": spec.max_foreground_slowdown,
        "submit_at": spec.submit_at,
        "priority": spec.priority,
        "retries": spec.retries,
        "env": dict(spec.env),
        "output": spec.output,
        "checkpoint_every": spec.checkpoint_every_s,
        "keep_checkpoints": spec.keep_checkpoints,
        "workdir": spec.workdir,
        **(as_keys(spec.restart) if spec.kind is Kind.COMMAND else {}),
        "progress_pattern": spec.progress_pattern or None,
        **({spec.environment.kind: spec.environment.name} if spec.environment else {}),
        "container": _container(spec),
        **needs.as_keys(spec.needs),
        "array": _array(spec),
        # In 0.1.0 there was no other word for a launcher's one process.
        "processes": None if spec.processes == "per-gpu" and launcher_of(spec.command) else spec.processes,
    }
    return {key: value for key, value in table.items() if value is not None}
