"""The kinds of batch systems: those that are here, and those that other packages add.

A package adds one by an entry point of the group `hpcsched.batch`: its name is the kind, its object a class
that inherits `base.BatchSystem`. It is loaded when it is named, or when no other batch system is around us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

from hpcsched.batch.base import BatchSystem
from hpcsched.errors import ConfigError

GROUP = "hpcsched.batch"

BUILT_IN = {
    "slurm": "hpcsched.batch.slurm:Slurm",
    "lsf": "hpcsched.batch.lsf:Lsf",
    "sge": "hpcsched.batch.sge:Sge",
    "none": "hpcsched.batch.local:Local",
}
COMMANDS = {"Slurm": "squeue", "LSF": "bjobs", "SGE": "qconf"}
"""A command of each that others do not have."""

REQUIRED = (
    *("inside", "allocation", "end_time", "reason", "job_state", "requeue", "submit_next"),
    *("on_hosts", "version"),
)
"""What an adapter must say itself."""


def names() -> tuple[str, ...]:
    """The kinds that can be named, "none" last."""
    *ours, none = BUILT_IN
    return (*ours, *_added(), none)


def load(kind: str) -> type[BatchSystem]:
    """The class of a kind. Raises ConfigError for one that is not known, or whose package is at fault."""
    if kind in BUILT_IN:
        from importlib import import_module

        module, _, name = BUILT_IN[kind].partition(":")
        return cast(type[BatchSystem], getattr(import_module(module), name))
    point = _added().get(kind)
    if point is None:
        raise ConfigError(where="--batch", got=repr(kind), accepted=", ".join(("auto", *names())))
    try:
        found = point.load()
        why = _fault(found, kind)
    except Exception as error:  # whatever a module that is not ours raises when it is imported
        why = f"it cannot be loaded: {' '.join(str(error).split()) or type(error).__name__}"
    if why:
        raise ConfigError(
            where=f"entry point {GROUP}",
            key=kind,
            got=f"{point.value}: {why}",
            accepted="a package that gives one: mend it, or remove it",
        )
    return cast(type[BatchSystem], found)


def detected(environ: Mapping[str, str], tell: Callable[[str], None] | None = None) -> str:
    """The kind of the batch system whose job this environment is; "none" without one.

    Ours come first. An adapter that is at fault is passed over, with a word to `tell` (None: on stderr).
    """
    for kind in BUILT_IN:
        # Without an import, for a start that is quick.
        if kind != "none" and _MARKS[kind] <= environ.keys() and load(kind).inside(environ):
            return kind
    for kind in _added():
        try:
            if load(kind).inside(environ):
                return kind
        except ConfigError as error:
            (tell or _on_stderr)(f"{error}; it is passed over")
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            (tell or _on_stderr)(f"batch system {kind} is passed over: {why}")
    return "none"


def restarted(environ: Mapping[str, str]) -> bool:
    """Whether a batch system runs this job's script again from its beginning."""
    kind = detected(environ, lambda line: None)
    try:
        return kind != "none" and bool(load(kind).restarted(environ))
    except Exception:  # of a package's: `open_batch` says what is wrong with it
        return False


_MARKS = {"slurm": {"SLURM_JOB_ID"}, "lsf": {"LSB_JOBID"}, "sge": {"JOB_ID", "SGE_TASK_ID"}}
"""Variables of each kind's jobs."""


def _fault(found: Any, kind: str) -> str:
    """What is wrong with an adapter; empty if it has all that it must have."""
    if not (isinstance(found, type) and BatchSystem in found.__mro__):
        return f"{found!r} does not inherit hpcsched.batch.base.BatchSystem"
    if getattr(found, "kind", None) != kind:
        return f"its `kind` is {getattr(found, 'kind', None)!r}, not {kind!r}"
    launchers = getattr(found, "launchers", ())
    if not (isinstance(launchers, tuple) and launchers and all(isinstance(word, str) for word in launchers)):
        return "its `launchers` are no words"
    missing = [name for name in REQUIRED if _is_ours(found, name)]
    return f"it does not say `{'`, `'.join(missing)}`" if missing else ""


def _is_ours(found: type, name: str) -> bool:
    given, ours = getattr(found, name, None), getattr(BatchSystem, name)
    return getattr(given, "__func__", given) is getattr(ours, "__func__", ours)


@cache
def _added() -> dict[str, Any]:
    """Entry points of other packages by their names."""
    from importlib.metadata import entry_points  # slow

    return {point.name: point for point in entry_points(group=GROUP) if point.name not in (*BUILT_IN, "auto")}


def _on_stderr(line: str) -> None:
    print(f"hpcsched: {line}", file=sys.stderr)  # noqa: T201
