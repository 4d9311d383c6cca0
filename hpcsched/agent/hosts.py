"""The hosts that jobs run on: this one alone, or all of the allocation through node agents."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.agent.address import own_address
from hpcsched.agent.allocation.ending import ends, forced_s
from hpcsched.agent.cpu_cores import CPUS_PER_GPU, gpu_cores, host_cores
from hpcsched.batch.base import Allocation, BatchSystem
from hpcsched.core.jobs import Job
from hpcsched.core.model import Device, HostCores
from hpcsched.devices import open_devices
from hpcsched.devices.base import Sample
from hpcsched.errors import ConfigError
from hpcsched.launch.base import Launcher
from hpcsched.launch.interpreters import Interpreters
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.remote.keys import SERVE_ON_S

if TYPE_CHECKING:
    from hpcsched.launch.remote.launcher import RemoteLauncher

MAX_CLOCK_SKEW_S = 2.0
"""Difference between clocks of hosts above which a warning is printed (chosen)."""

JOIN_WITHIN_S = 90.0
"""Time that node agents may take to join (chosen): a cold Python on a busy shared filesystem is slow."""

UNKNOWN_GRACE_S = 3600.0
"""The time of grace to serve through when the batch system does not say how long it is (chosen)."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Devices and cores, the launcher that starts workers on them, and the node agents, if any (`remote`)."""

    kind: str
    speed: float
    inventory: tuple[Device, ...]
    launcher: Launcher
    sample: Callable[[], Sequence[Sample]]
    close: Callable[[], object]
    close_launcher: Callable[[], object] = lambda: None
    """Close all but the devices, where their driver hangs; node agents see to that themselves."""
    free: Callable[[Device], bool | None] | None = None
    """Whether the memory of a device is free (`Devices.free`); None where node agents ask on their hosts."""
    cores: tuple[HostCores, ...] = ()
    remote: RemoteLauncher[Sample] | None = None
    interpreters: Interpreters | None = None
    """The Python interpreters of this host, where it is the only one."""
    granted: int = 1
    """The number of hosts of the allocation; fewer may have joined."""

    @property
    def host_of(self) -> dict[int, str]:
        """The host of each device, those that joined too."""
        inventory = self.remote.inventory() if self.remote else self.inventory
        return {device.index: device.host for device in inventory}

    @property
    def stand_ins(self) -> bool:
        """Whether the devices are simulated, so that every job runs as a stand-in of its profile."""
        return self.kind == "replay"

    @property
    def host_names(self) -> tuple[str, ...]:
        """The hosts that have devices, in order."""
        return tuple(dict.fromkeys(self.host_of.values()))

    @property
    def gpus_per_host(self) -> int:
        """The most devices that a host has."""
        names = list(self.host_of.values())
        return max((names.count(name) for name in set(names)), default=0)

    @property
    def own_name(self) -> str:
        """The name of this host in the run; "" where no node agent runs on it."""
        return self.remote.name_here(socket.gethostname()) if self.remote else self.host_names[0]

    def first_of_each(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, str]]:
        """The jobs, each with the first host of its newest attempt."""
        host_of = self.host_of
        first = next(iter(host_of.values()))
        for job in jobs:
            gpus = job.current.gpus if job.attempts else ()
            seats = job.current.seats if job.attempts else ()
            yield job, seats[0].host if seats else host_of.get(gpus[0], first) if gpus else first


def this_host(
    spec: str, allocation: Allocation, *, standbys: int | None = None, cpus_per_gpu: int = CPUS_PER_GPU
) -> Hosts:
    """The devices of this host alone; workers are child processes of the agent.

    `standbys`: see `LocalLauncher`. `cpus_per_gpu`: cores kept for the jobs of each GPU. Raises ConfigError
    for a bad `spec`.
    """
    name = allocation.here or socket.gethostname()
    granted = next((host for host in allocation.hosts if host.name == name), None)
    devices = open_devices(spec, name, cpus=granted.cpus if granted else None)
    if spec == "auto" and devices.kind == "cpu" and granted and granted.gpus:
        devices.close()
        raise ConfigError(
            where="--devices",
            got=f"{allocation.kind} has granted GPUs {', '.join(granted.gpus)}, but NVML sees none",
            accepted="a host whose GPUs can be seen (`hpcsched doctor`), or cpu:N if CPUs are meant",
        )
    cores = host_cores(devices, name, cpus_per_gpu=cpus_per_gpu, granted=granted.cpus if granted else None)
    launcher = LocalLauncher(
        cpus=devices.cpus,
        gpu_cores=gpu_cores(cores),
        device_env=devices.environment,
        numbered=devices.numbered,
        shielded=allocation.signals_all,
        devices=devices.inventory(),
        standbys=standbys,
    )

    def close() -> None:
        launcher.close()
        devices.close()

    return Hosts(
        kind=devices.kind,
        speed=devices.speed,
        inventory=devices.inventory(),
        launcher=launcher,
        interpreters=launcher.interpreters,
        sample=devices.sample,
        close=close,
        close_launcher=launcher.close,
        free=devices.free,
        cores=(cores,),
    )


def node_agents(
    spec: str,
    batch: BatchSystem,
    allocation: Allocation,
    *,
    run_id: str,
    run_dir: Path,
    interface: str | None,
    grace_s: float,
    say: Callable[[str], None],
    standbys: int | None = None,
    cpus_per_gpu: int = CPUS_PER_GPU,
    serve_on_s: float = SERVE_ON_S,
    notice_s: float = 0.0,
    joinable: bool = False,
    movable: bool = True,
    reserve_s: float = 60.0,
    epoch: int = 0,
    before: Sequence[Device] = (),
    active: Mapping[int, int] | None = None,
    leads: bool = False,
) -> Hosts:
    """The devices of all hosts of the allocation, each behind a node agent that is started now, and of those
    that the agent before had (`before`). `leads`: of those alone.

    Raises ConfigError for an interface that is not here, LaunchError when no node agent comes.
    """
    from hpcsched.launch.remote.launcher import RemoteLauncher  # ZeroMQ: not for runs on one host

    others = [host.name for host in allocation.hosts if host.name != allocation.here]
    launcher = RemoteLauncher(
        hosts=() if leads else allocation.hosts,
        commands=batch.on_hosts,
        run_id=run_id,
        run_dir=run_dir,
        devices=spec,
        address=own_address(interface, others),
        make_sample=Sample,
        say=say,
        grace_s=grace_s,
        standbys=standbys,
        cpus_per_gpu=cpus_per_gpu,
        serve_on_s=serve_on_s,
        notice_s=notice_s,
        shielded=allocation.signals_all,
        joinable=joinable,
        movable=movable,
        reserve_s=reserve_s,
        epoch=epoch,
        before=before,
        active=active,
    )
    launcher.start(JOIN_WITHIN_S)
    for name, ahead_s in launcher.skew_s.items():
        if abs(ahead_s) > MAX_CLOCK_SKEW_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            say(
                f"the clock of host {name} is {abs(ahead_s):.0f} s {way} this one's: its files' times are off"
            )
    return Hosts(
        kind=launcher.kind,
        speed=launcher.speed,
        inventory=launcher.inventory(),
        launcher=launcher,
        sample=launcher.sample,
        close=launcher.close,
        cores=launcher.cores,
        remote=launcher,
        granted=len(allocation.hosts),
    )


def describe_allocation(allocation: Allocation, hosts: Hosts) -> str:
    """The allocation in one line."""
    names = {host.name for host in allocation.hosts}
    come, granted = len(names.intersection(hosts.host_names)), hosts.granted
    shown = f"{come} host{'s' * (come > 1)}" if come == granted else f"{come} of {granted} hosts"
    again = f", restart {allocation.restart_count}" if allocation.restart_count else ""
    devices = f"{sum(one.host in names for one in hosts.inventory)} x {hosts.kind}"
    job = f"{allocation.kind} job {allocation.id}{again}"
    return f"{job} on {shown} with {devices}; it {ends(allocation.deadline)}"


def node_agent_times(batch: BatchSystem, allocation: Allocation) -> dict[str, float]:
    """The times that node agents serve on after a SIGTERM, which may only begin a time of grace."""
    notice_s = 0.0
    if allocation.preemption:
        grace_s = allocation.preemption.grace_s
        notice_s = UNKNOWN_GRACE_S if grace_s is None else grace_s
    return {"serve_on_s": max(SERVE_ON_S, forced_s(batch.kill_wait())), "notice_s": notice_s}


def without_exec(batch: BatchSystem) -> bool:
    """Whether we are the child of a batch script, whose shell gets the signals that are meant for us."""
    return batch.script_pid() not in (None, os.getpid())
