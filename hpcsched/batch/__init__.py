"""Batch systems: Slurm, LSF, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcsched.batch.base import BatchSystem
from hpcsched.batch.queue import Queue
from hpcsched.errors import ConfigError

KINDS = ("auto", "slurm", "lsf", "none")
LAUNCHERS = ("auto", "srun", "blaunch", "jsrun", "ssh", "local")
_OF_KIND = {
    "slurm": ("srun", "ssh", "local"),
    "lsf": ("auto", "blaunch", "jsrun", "ssh", "local"),
    "none": ("ssh", "local"),
}


def open_batch(
    kind: str = "auto",
    *,
    environ: Mapping[str, str],
    hosts: Sequence[str] = (),
    launcher: str = "auto",
    pyslurm: str = "auto",
) -> BatchSystem:
    """The batch system that this process runs under.

    Args:
        kind: "slurm", "lsf", "none", or "auto": hosts named -> none; a Slurm job; an LSF job; none.
        environ: this process's environment.
        hosts: hosts named by the user, where no batch system grants them.
        launcher: how node agents are started; "auto": the batch system's own way (none: ssh).
        pyslurm: "auto" asks Slurm through pyslurm where that is usable, and by its commands otherwise;
            "off" never tries.

    Raises ConfigError for words not accepted, and for a launcher or hosts that do not go with the kind.
    """
    _accept("--batch", kind, KINDS)
    _accept("--launcher", launcher, LAUNCHERS)
    if kind == "auto":
        kind = _detected(environ, hosts)
    if hosts and kind != "none":
        raise ConfigError(
            where="--hosts",
            got=f"hosts, though {kind} grants them",
            accepted="hosts with --batch none",
        )
    if launcher != "auto":
        _accept("--launcher", launcher, _OF_KIND[kind], why=f" with batch system {kind}")
    if kind == "slurm":
        return _slurm(environ, "srun" if launcher == "auto" else launcher, pyslurm)
    if kind == "lsf":
        from hpcsched.batch.lsf import Lsf

        return Lsf(environ, launcher=launcher)
    from hpcsched.batch.local import Local

    return Local(hosts, launcher="ssh" if launcher == "auto" else launcher)


def batch_of(
    kind: str, *, cluster: str | None = None, environ: Mapping[str, str] | None = None
) -> BatchSystem:
    """The batch system of a run's allocation, asked from outside it: for `job_state` and `version` only.

    Args:
        kind, cluster: as `Allocation` has them.
        environ: None means this process's.
    """
    import os

    _accept("--batch", kind, KINDS[1:])
    environ = os.environ if environ is None else environ
    if kind == "slurm":
        from hpcsched.batch.slurm import Slurm

        return Slurm(environ, cluster=cluster)
    return open_batch(kind, environ=environ)


def queue_of(kind: str, *, environ: Mapping[str, str]) -> Queue | None:
    """The queue of a batch system, for questions; None for one that cannot tell (LSF, none)."""
    if kind != "slurm":
        return None
    from hpcsched.batch.slurm_queue import SlurmQueue

    return SlurmQueue(environ)


def _detected(environ: Mapping[str, str], hosts: Sequence[str]) -> str:
    if hosts:
        return "none"
    if environ.get("SLURM_JOB_ID"):
        return "slurm"
    return "lsf" if environ.get("LSB_JOBID") else "none"


def _slurm(environ: Mapping[str, str], launcher: str, pyslurm: str) -> BatchSystem:
    from hpcsched.batch.slurm import Slurm

    if pyslurm == "auto":
        from hpcsched.batch.pyslurm import PySlurm

        adapter = PySlurm(environ, launcher=launcher)
        if adapter.usable() is None:
            return adapter
    return Slurm(environ, launcher=launcher)


def _accept(where: str, got: str, accepted: Sequence[str], *, why: str = "") -> None:
    if got not in accepted:
        raise ConfigError(where=where, got=repr(got) + why, accepted=", ".join(accepted))
