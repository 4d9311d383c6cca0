"""What is asked of an agent: the arguments of `hpcsched run`, and where it finds what is known of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.agent.cpu_cores import CPUS_PER_GPU
from hpcsched.agent.resources import FindJobs
from hpcsched.core.model import JobSpec, PythonEnvironment
from hpcsched.core.processes import Program
from hpcsched.core.shared_use import SharedUse
from hpcsched.store.profiles import FindProfiles as FindProfiles

FindParallel = Callable[[set[str]], Sequence[Program]]
"""Gives the programs of these models that are known to be parallel."""

FindShared = Callable[[str], Sequence[SharedUse]]
"""Gives what was seen of models that share devices of this type."""


@dataclass(frozen=True, slots=True)
class Leads:
    """An agent that takes a run over from another one, in an allocation whose hosts a `hpcsched join` lends.

    `token` is that command's, `epoch` the agent's number, which it has claimed. `hosts` are those that it has
    lent so far, by their names in the run.
    """

    token: str
    epoch: int
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The arguments of `hpcsched run`.

    `device_type`: whose profiles count for devices of the run's own type; None: those of that. `policy`
    None: the policy of the run's earlier life, else marble. `grace_s` is the least time, in real seconds,
    that a worker has to save before it is ended by force. `margin_s` is kept before the end of the
    allocation besides what saving is known to take. `interface` is the network interface (or address) that
    hosts meet on, `checkpoints` a directory to use for them instead of the run directory, `standbys` the
    most warm processes that wait on a host, None for none at all (see `LocalLauncher`). `cpus_per_gpu` cores
    are kept for the jobs of each GPU: the others are for jobs that need none. `release_idle_s`: seconds
    after which a host that nothing can use any more is given back; None: none is. `stay_s`: seconds that the
    agent stays with nothing to do, inf: until it is drained; None: it leaves. `environment`: of jobs that
    name none. `joinable`: hosts of other allocations may join. `source` gives more jobs as the run goes on,
    all `like` one. `update`: what `jobs`, read in `workdir`, say of jobs that the run has already is taken.
    `retry`: all that failed run again. `comes_back` is how the run is to go on in another allocation:
    "requeue", "chain" or "". `mps`: jobs may share GPUs by NVIDIA's MPS. `poll_s`: the shortest period, in
    seconds, at which the batch system is asked regularly; None: as the watch's own rules say. `records`: the
    site's folder of records. `share`: the group, by id, that may watch it. `leads`: the agent has no hosts of
    its own. `words`: the options with which another agent takes the run over.
    """

    dir: Path
    devices: str
    device_type: str | None = None
    jobs: tuple[JobSpec, ...] = ()
    where: str = "submit"
    update: bool = False
    retry: bool = False
    workdir: str = ""
    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    grace_s: float = 30.0
    monitor_s: float = 5.0
    margin_s: float = 60.0
    interface: str | None = None
    checkpoints: Path | None = None
    standbys: int | None = None
    cpus_per_gpu: int = CPUS_PER_GPU
    release_idle_s: float | None = None
    stay_s: float | None = None
    environment: PythonEnvironment | None = None
    source: FindJobs | None = None
    like: JobSpec | None = None
    metrics_file: Path | None = None
    joinable: bool = False
    comes_back: str = ""
    mps: bool = True
    poll_s: float | None = None
    records: Path | None = None
    share: int | None = None
    leads: Leads | None = None
    words: tuple[str, ...] = ()
