"""Batch systems: Slurm, LSF, SGE, those of other packages, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpcsched.batch import kinds
from hpcsched.batch.base import BatchSystem
from hpcsched.batch.queue import Queue
from hpcsched.errors import ConfigError


def open_batch(
    kind: str = "auto",
    *,
    environ: Mapping[str, str],
    hosts: Sequence[str] = (),
    launcher: str = "auto",
    pyslurm: str = "auto",
    tell: Callable[[str], None] | None = None,
) -> BatchSystem:
    """The batch system that this process runs under.

    Args:
        kind: one of `kinds.names`, or "auto": hosts named -> none; a Slurm job; an LSF job; an SGE job; a job
            of what other packages add; none.
        environ: this process's environment.
        hosts: hosts named by the user, where no batch system grants them.
        launcher: how node agents are started; "auto": the batch system's own way (none: ssh).
        pyslurm: "auto" asks Slurm through pyslurm where that is usable, and by its commands otherwise;
            "off" never tries.
        tell: is told of adapters of other packages that are passed over; None: on stderr.

    Raises ConfigError for words not accepted, and for a launcher or hosts that do not go with the kind.
    """
    if kind == "auto":
        kind = "none" if hosts else kinds.detected(environ, tell)
    cls = kinds.load(kind)
    if hosts and kind != "none":
        raise ConfigError(
            where="--hosts",
            got=f"hosts, though {kind} grants them",
            accepted="hosts with --batch none",
        )
    launcher = _launcher(launcher, cls)
    if kind == "none":
        from hpcsched.batch.local import Local

        return Local(hosts, launcher=launcher)
    if kind == "slurm" and pyslurm == "auto":
        from hpcsched.batch.pyslurm import PySlurm

        adapter = PySlurm(environ, launcher=launcher)
        if adapter.usable() is None:
            return adapter
    return _made(cls, environ, launcher)


def batch_of(
    kind: str, *, cluster: str | None = None, environ: Mapping[str, str] | None = None
) -> BatchSystem:
    """The batch system of a run's allocation, asked from outside it: for `job_state` and `version` only.

    Args:
        kind, cluster: as `Allocation` has them.
        environ: None means this process's.
    """
    import os

    cls = kinds.load(kind)
    environ = os.environ if environ is None else environ
    if kind == "slurm":
        from hpcsched.batch.slurm import Slurm

        return Slurm(environ, cluster=cluster)
    return open_batch(kind, environ=environ, launcher=cls.launchers[0])


def queue_of(kind: str, *, environ: Mapping[str, str]) -> Queue | None:
    """The queue of a batch system, for questions; None for one that cannot tell (all but Slurm)."""
    if kind != "slurm":
        return None
    from hpcsched.batch.slurm_queue import SlurmQueue

    return SlurmQueue(environ)


def _launcher(given: str, cls: type[BatchSystem]) -> str:
    if given == "auto":
        return cls.launchers[0]
    if given not in cls.launchers:
        raise ConfigError(
            where="--launcher",
            got=f"{given!r} with batch system {cls.kind}",
            accepted=", ".join(dict.fromkeys(("auto", *cls.launchers))),
        )
    return given


def _made(cls: type[BatchSystem], environ: Mapping[str, str], launcher: str) -> BatchSystem:
    make: Callable[..., BatchSystem] = cls
    if cls.kind in kinds.BUILT_IN:
        return make(environ, launcher=launcher)
    try:
        return make(environ, launcher=launcher)
    except Exception as error:  # whatever a class that is not ours raises
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            where="--batch", got=f"{cls.kind} fails: {why}", accepted="one that works"
        ) from error
