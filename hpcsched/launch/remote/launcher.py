"""The launcher for all hosts of an allocation, through one node agent on each.

The node agents are started once, by the batch system's commands, and connect to the head by themselves.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import groupby
from pathlib import Path
from typing import Any, Generic

import msgspec

from hpcsched.core.model import Device, HostCores
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.guests import same_gpus
from hpcsched.launch.remote.host import GrantedHost, MakeSample, RemoteHost, SampleT
from hpcsched.launch.remote.keys import (
    SERVE_ON_S,
    Join,
    KeyPair,
    join_file,
    joined_file,
    remove_join,
    this_process,
    write_join,
)
from hpcsched.launch.remote.sessions import HeadSessions
from hpcsched.launch.remote.socket import HeadSocket
from hpcsched.launch.remote.starter import NodeAgentCommand, end_all, last_log_line
from hpcsched.launch.remote.survivors import GATHER_S, Survivor, first_part, hosts_before, survivors
from hpcsched.launch.remote.workers import AttemptPart, RemoteWorkers, part_launches

LEFT_WITHIN_S, LEAVE_GRACE_S = 5.0, 2.0
"""Time that node agents get to leave at the end, and their workers to save (chosen)."""


class RemoteLauncher(HeadSessions, Generic[SampleT]):
    """A Launcher over several hosts, and their devices under one numbering.

    Everything happens in `pump`, on the caller's thread; `sample` alone may be called from another one.

    Args:
        hosts: all hosts to start a node agent on, the head's own included if workers are to run there.
        commands: gives the commands that run an argv once on each host (`BatchSystem.on_hosts`).
        devices: what each node agent opens (`--devices`).
        address: an IP address of this host that the others can reach.
        make_sample: `devices.Sample`.
        log: where the commands' output goes; default: nodes.log in the run directory.
        say: takes one line that people should see.
        grace_s: how long workers may take to save when the head has gone.
        standbys: how many warm processes wait for tasks on each host; None: every process is started from
            nothing (see `LocalLauncher`).
        cpus_per_gpu: how many cores are kept for the jobs of each GPU.
        serve_on_s, notice_s: how long node agents serve on after a SIGTERM, see `Join`.
        shielded: signals that the batch system sends to every process of the job.
        joinable, movable: whether hosts of other allocations may join, and one of these lead the run next.
        reserve_s: what is kept before the end of an allocation besides the time to save.
        epoch: the number of this head among those of the run.
        before: the devices that the head before had, on hosts that may work on without it.
        active: the attempts that were under way, by job.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[GrantedHost],
        commands: Callable[[Sequence[Any], Sequence[str]], list[tuple[str, ...]]],
        run_id: str,
        run_dir: Path,
        devices: str,
        address: str,
        make_sample: MakeSample[SampleT],
        log: Path | None = None,
        say: Callable[[str], None],
        grace_s: float = 30.0,
        standbys: int | None = None,
        cpus_per_gpu: int = 0,
        serve_on_s: float = SERVE_ON_S,
        notice_s: float = 0.0,
        shielded: frozenset[signal.Signals] = frozenset(),
        joinable: bool = False,
        movable: bool = True,
        reserve_s: float = 60.0,
        epoch: int = 0,
        before: Sequence[Device] = (),
        active: Mapping[int, int] | None = None,
    ) -> None:
        names = (host.name for host in hosts)
        super().__init__(names, grace_s=grace_s, say=say, joinable=joinable, movable=movable)
        self._hosts, self._commands_for = tuple(hosts), commands
        self._run_id, self._devices, self._address = run_id, devices, address
        self._make_sample, self._standbys, self._cpus_per_gpu = make_sample, standbys, cpus_per_gpu
        self._shielded, self._serve_on_s, self._notice_s = shielded, serve_on_s, notice_s
        self._reserve_s, self._epoch = reserve_s, epoch
        self._join, self._log = join_file(run_dir, self.life), log or run_dir / "nodes.log"
        self._inventory: tuple[Device, ...] = ()
        self._active = active or {}
        self._before = hosts_before(before, self._nodes)
        self.survivors: list[Survivor] = []
        """The attempts that run on as they did under the head before."""
        self._next_part = first_part(epoch)
        self._counted: set[str] = set()
        """The hosts whose devices are in the inventory."""
        self._draining = False
        self._end_with_us = frozenset[str]()
        self.moves = False
        """Whether the node agents of other allocations are left to the next head at the end."""
        self._ran_on: dict[int, dict[str, None]] = {}
        """By job: the hosts that may keep shared memory for its next attempt; rank 0's first."""
        self.kind, self.speed = "", 1.0
        self.cores: tuple[HostCores, ...] = ()
        """The cores of each host for jobs that need no GPU."""

    # -- beginning and end -----------------------------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        """Start the node agents and wait until all have joined, at most `timeout_s`.

        Those that have orphans to end get longer. Hosts that did not join, or have died since, are lost from
        the start. Raises LaunchError when none joined, and StoreError when the join file cannot be written;
        no process is left running then.
        """
        try:
            join = self._open()
            self._gather()
            self._start_node_agents(join)
            deadline = time.monotonic() + timeout_s
            while True:
                now = time.monotonic()
                awaited = [max(deadline, node.join_by) for node in self._ours if node.coming]
                if not (self._hosts or any(node.up for node in self._nodes.values())):
                    awaited = [deadline]  # of the allocation that we are in a `hpcsched join` lends us hosts
                if max(awaited, default=now) <= now:
                    break
                self._wait(min(0.1, max(awaited) - now))
            self._settle()
        except BaseException:
            self.close()
            raise

    def _open(self) -> Join:
        server, client = KeyPair.new(), KeyPair.new()
        self._head_socket = HeadSocket(self._address, server, client.public, self._say)
        join = Join(
            life=self.life,
            run_id=self._run_id,
            endpoint=self._head_socket.endpoint,
            server_key=server.public,
            client_public=client.public,
            client_secret=client.secret,
            hosts=tuple(self._nodes),
            cpus={host.name: host.cpus for host in self._hosts if host.cpus},
            gpus={host.name: host.gpus for host in self._hosts if host.gpus is not None},
            devices=self._devices,
            grace_s=self._grace_s,
            standbys=self._standbys,
            cpus_per_gpu=self._cpus_per_gpu,
            serve_on_s=self._serve_on_s,
            notice_s=self._notice_s,
            reserve_s=self._reserve_s,
            shielded=tuple(sorted(self._shielded)),
            head=this_process(),
            epoch=self._epoch,
            holds_s=self._holds_s,
        )
        write_join(self._join, join)
        return join

    def _gather(self) -> None:
        """Wait for the node agents of the head before; those that do not come are lost."""
        for host, devices in self._before.items():
            first = devices[0].index
            self._nodes[host] = RemoteHost(host, guest=True, earlier=True, first_device=first)
        earlier = [node for node in self._nodes.values() if node.earlier]
        self._gathers, until = True, time.monotonic() + GATHER_S
        while any(node.hello is None for node in earlier) and time.monotonic() < until:
            self._wait(0.05)
        for node in earlier:
            if node.hello is None or len(node.hello.devices) != len(self._before[node.name]):
                self._lose(
                    node, "it has not come to this head" if node.hello is None else "it has other devices"
                )
                node.broke_at = node.lost_at
        self.survivors = survivors(self._nodes, active=self._active, send=self._send, pump=self.pump)
        for one in self.survivors:
            hosts = dict.fromkeys(part.host for group in one.groups for part in group.parts)
            self._ran_on.setdefault(one.job_id, {}).update(hosts)
        self._gathers = False

    def _start_node_agents(self, join: Join) -> None:
        file = self._join
        assert self._head_socket is not None
        if not self._hosts:
            return
        if spared := self.spared:
            file = joined_file(file.parent, self.life, "own")
            write_join(file, msgspec.structs.replace(join, spared=spared), alone=False)
        argv = (sys.executable, "-P", "-m", "hpcsched.agent.node", "--join", str(file))
        commands = self._commands_for(self._hosts, argv)
        names = tuple(node.name for node in self._ours)
        for i, command in enumerate(commands):
            ours = (names[i],) if len(commands) == len(names) else names
            started = NodeAgentCommand(command, ours, self._log, shielded=self._shielded)
            self._commands.append(started)
            if started.pidfd is not None:
                self._head_socket.watch(started.pidfd)
            for name in ours:
                self._nodes[name].command = started

    @property
    def _ours(self) -> list[RemoteHost]:
        """The hosts of the head's own allocation."""
        return [node for node in self._nodes.values() if not node.guest]

    def _settle(self) -> None:
        """Number the devices of the hosts that have joined; the others are lost."""
        come = [node for node in self._ours if node.up]
        absent = [node for node in self._ours if node.hello is None or not come]
        for node in self._ours:
            node.fenced = not node.up  # nothing was ever asked of it
        if absent:
            names = ", ".join(node.name for node in absent)
            whys = ((node.command.why if node.command else "") or node.why for node in absent)
            ended = {why for why in whys if why}
            last = last_log_line(self._log)
            why = "; ".join([*sorted(ended), *([f"{self._log.name} ends with: {last}"] if last else [])])
            line = f"no node agent has come from {names}: {why or 'no word from it'}"
            if not come:
                raise LaunchError(line, transient=False)
            self._say(line)
            for node in absent:
                node.why = "its node agent has not come"
        devices = [device for on_host in self._before.values() for device in on_host]
        here = [node for node in self._nodes.values() if node.earlier and node.up]
        come = come or [node for node in self._nodes.values() if node.guest and node.up and not here]
        for node in come:
            devices += node.numbered(devices[-1].index + 1 if devices else 0)
        self._inventory, self._counted = tuple(devices), {node.name for node in (*here, *come)}
        come = [*here, *come]
        if not come:
            raise LaunchError("no host has come that the head before had", transient=True)
        self.cores = tuple(cores for node in come for cores in node.cores)
        first = come[0].hello
        assert first is not None
        self.kind, self.speed = first.kind, first.speed
        for node in come:
            assert node.hello is not None
            if node.hello.kind != self.kind:
                self._say(f"host {node.name} has {node.hello.kind}, but {come[0].name} has {self.kind}")

    def close(self) -> bool:
        """Have all node agents leave, and kill those that do not; False if one could not be ended."""
        if self._head_socket is None:
            return True
        self._closing = True
        deadline = time.monotonic() + LEFT_WITHIN_S
        told = [node for node in self._nodes.values() if node.talks and not (self.moves and node.guest)]
        for node in told:
            self._send(node.name, protocol.Leave(LEAVE_GRACE_S))
        while time.monotonic() < deadline:
            if not (talk := any(node.talks for node in told)):
                deadline = min(deadline, time.monotonic() + 1.0)  # for the commands to notice
            if not talk and all(command.look() for command in self._commands):
                break
            self._wait(0.1)
        ended = end_all(self._commands, 1.0)
        remove_join(self._join, self.life, joined=not self.moves)
        self._head_socket.close()
        self._head_socket = None
        for command in self._commands:
            command.close()
        return ended

    # -- what there is ---------------------------------------------------------------------------------

    def inventory(self) -> tuple[Device, ...]:
        """The devices of all hosts that joined, host by host; those of lost hosts stay in it."""
        return self._inventory

    def come(self) -> list[tuple[tuple[Device, ...], tuple[HostCores, ...]]]:
        """The devices and cores of each host of another allocation that has come since this was last called;
        they are in the inventory from now on."""
        found = []
        for node in self._nodes.values():
            if not (node.guest and node.up) or node.name in self._counted:
                continue
            assert node.hello is not None
            self._counted.add(node.name)
            if (faster := node.hello.speed) != self.speed:
                self._lose(node, f"its devices run at {faster:g} times the clock, not {self.speed:g}")
                continue
            if same := same_gpus(node, [self._nodes[name] for name in self._counted]):
                self._lose(node, f"{same} of its GPUs are in the run already")
                continue
            if node.hello.kind != self.kind:
                self._say(f"host {node.name} has {node.hello.kind}, and others have {self.kind}")
            self._say(f"host {node.name} has joined the run ({self.guests.allocation_of(node.name)})")
            devices = node.numbered(self._inventory[-1].index + 1)
            self._inventory += devices
            found.append((devices, node.cores))
        return found

    def ends(self) -> Mapping[str, float | None]:
        """When each host of another allocation ends, by the monotonic clock; None: it is not known."""
        return self.guests.ends()

    def address_of(self, host: str) -> str:
        """The address at which other hosts reach a host. Raises KeyError for a host that did not join."""
        hello = self._nodes[host].hello
        if hello is None:
            raise KeyError(host)
        return hello.address

    def sample(self) -> list[SampleT]:
        """The newest sample of every device. May be called from any thread."""
        samples = []
        for device in self._inventory:
            node = self._nodes[device.host]
            reading = node.reading(device.index - node.first_device)
            samples.append(
                self._make_sample(
                    gpu=device.index,
                    utilisation=reading.utilisation,
                    memory_mib=reading.memory_mib,
                    energy_j=reading.energy_j,
                    healthy=reading.healthy,
                    why=reading.why,
                    age_s=node.age_s,
                )
            )
        return samples

    def lost(self) -> Mapping[str, str]:
        """The reason of the loss of each lost host, by host."""
        return {node.name: node.why for node in self._nodes.values() if node.why and not node.releasing}

    @property
    def short(self) -> bool:
        """Whether a host of the head's own allocation is lost."""
        return any(not self._nodes[host].guest for host in self.lost())

    def guests_among(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Those of these hosts that joined from other allocations, or end with the head's own."""
        return tuple(host for host in hosts if self._nodes[host].guest or host in self._end_with_us)

    def ends_with_us(self, hosts: Sequence[str]) -> None:
        """These hosts end with the head's allocation: the batch system is not asked to take them back."""
        self._end_with_us = frozenset(hosts)

    def lent_by(self, token: str) -> Sequence[str]:
        """The hosts of the `hpcsched join` with this token ("": of the head's own allocation)."""
        return self.guests.of(token) if token else [node.name for node in self._ours]

    def keeps(self, host: str) -> bool:
        """Whether the newest state of a job is still in a host's memory alone."""
        return bool(self._nodes[host].keeping)

    def releasing(self, hosts: Sequence[str]) -> None:
        """The batch system is asked to take hosts back: the end of their node agents is no loss."""
        for host in hosts:
            self._nodes[host].releasing = True

    def released(self, hosts: Sequence[str]) -> None:
        """The batch system has hosts back: what may be left of their node agents is told to leave."""
        for node in (self._nodes[host] for host in hosts):
            if node.up:
                self._lose(node, "given back to the batch system")

    def stay(self, hosts: Sequence[str]) -> None:
        """The batch system has not taken hosts back; those whose node agents have ended are lost."""
        for node in (self._nodes[host] for host in hosts):
            node.releasing = False
            if node.why:
                self._say_once(f"host {node.name} was lost: {node.why}")

    def drain(self) -> None:
        """Tell the node agents that nothing starts any more; may be called repeatedly."""
        if not self._draining:
            self._draining = True
            for node in self._nodes.values():
                self._send(node.name, protocol.Drain())

    # -- launching -------------------------------------------------------------------------------------

    def launch(self, plan: LaunchPlan) -> RemoteWorkers:
        """Have all ranks started; failures are reported by the workers. Never blocks.

        Hosts that the job has left free its shared memory. Raises LaunchError (transient, the host's fault)
        when one of the hosts has been lost.
        """
        shares = [(host, list(devices)) for host, devices in groupby(plan.devices, lambda d: d.host)]
        for host, _ in shares:
            if self._nodes[host].why:
                error = f"host {host} was lost: {self._nodes[host].why}"
                raise LaunchError(error, transient=True, host_fault=True)
        if plan.once and not plan.per_rank:
            shares = shares[:1]  # the GPUs of the others are the job's all the same
        reached = self.address_of(shares[0][0])
        address = reached if len(shares) > 1 else "127.0.0.1"
        if plan.joins is None:
            self._let_go(plan.job_id, but={host for host, _ in shares})
        ran_on = self._ran_on.setdefault(plan.job_id, {})
        ran_on.update((host, None) for host, _ in shares)
        local = [
            (host, [d.index - self._nodes[host].first_device for d in devices]) for host, devices in shares
        ]
        orders = part_launches(
            plan, local, first_host=next(iter(ran_on)), address=address, first_part=self._next_part
        )
        self._next_part += len(orders)
        parts = [AttemptPart(host, order) for (host, _), order in zip(shares, orders, strict=True)]
        workers = RemoteWorkers(parts, address=reached, send=self._send, pump=self.pump)
        for part in parts:
            self._nodes[part.host].parts[part.order.part] = (workers, part)
        workers.begin()
        return workers

    def ready_for(self, plan: LaunchPlan) -> bool:
        """True: each node agent checks the interpreters on its host by itself."""
        return True

    def give_up(self, job_id: int, attempt: int) -> None:
        """Nothing: `ready_for` begins nothing."""

    def forget(self, job_id: int) -> None:
        """Free a job's shared memory on all hosts: it has no next attempt."""
        self._let_go(job_id)

    def _let_go(self, job_id: int, but: Set[str] = frozenset()) -> None:
        for host in self._ran_on.pop(job_id, {}).keys() - but:
            self._send(host, protocol.Forget(job_id))

    def keeping(self) -> set[int]:
        """Ids of the jobs whose state of a quick suspend is not durable yet, on any host."""
        return {job_id for node in self._nodes.values() for job_id in node.keeping}
