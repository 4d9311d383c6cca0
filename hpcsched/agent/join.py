"""The hosts of this allocation join a run that an agent in another allocation leads (`hpcsched join`)."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path

import msgspec

from hpcsched.agent.allocation.ending import forced_s
from hpcsched.agent.allocation.watch import AllocationWatch
from hpcsched.agent.hosts import JOIN_WITHIN_S
from hpcsched.agent.next_head import NextHead
from hpcsched.agent.node.connection import HeadConnection
from hpcsched.agent.node.link import SELDOM_S
from hpcsched.agent.wakeup import arrived, signals_wake
from hpcsched.batch.base import Allocation, BatchSystem, EndReason
from hpcsched.errors import BadInput, ConfigError, LaunchError, NoSuchRun, StoreError
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import MessageChannel
from hpcsched.launch.remote.guests import ENDING, LATER, NOT_JOINABLE, RELEASED
from hpcsched.launch.remote.keys import Join, joined_file, newest_join, read_join, successor, write_join
from hpcsched.launch.remote.starter import NodeAgentCommand, end_all, last_log_line
from hpcsched.store.rundir import RunDir, agent_works, last_status

LOOK_EVERY_S = 1.0
"""How often an agent is looked for (chosen)."""

NO_FILE_S = 10.0
"""An agent that works for so long without a join file takes no hosts in (chosen): it writes one at its start,
and a shared filesystem takes its time."""

WORTHWHILE_S = 15.0
"""Time that hosts which are not in the run have to work for them to join, or to lead it, again (chosen)."""

ROUND_S = 0.25
"""The longest wait in a round (chosen)."""

HEAD_LEAVES_S = 60.0
"""Time that the run's agent gets to leave an allocation whose hosts have left the run (chosen)."""

LEFT_WITHIN_S = 10.0
"""Time that node agents get to leave when they are ended (chosen)."""


class Parted(StrEnum):
    """Why the hosts are in a run no more."""

    LEFT = "left"
    OVER = "over"
    LOST = "lost"
    """Its agent is gone, or has lost them: they may join again."""
    NEVER_CAME = "never came"
    UNREACHED = "unreached"
    """The agent has not answered."""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """The arguments of `hpcsched join`. `batch_words`: the options by which an agent finds this allocation.

    `devices` None: as the run's agent opens its own. `lasts_s`: the hosts leave after so many seconds at the
    latest (None: when their allocation ends). `wait_s`: how long an agent is waited for that takes them in.
    """

    dir: Path
    devices: str | None = None
    lasts_s: float | None = None
    wait_s: float = 600.0
    batch_words: tuple[str, ...] = ()


def join(request: JoinRequest, *, batch: BatchSystem, tell: Callable[[str], None]) -> int:
    """Lend the hosts of this allocation to a run until that is over, or the allocation is about to end.

    Returns the exit code: 0, or 1 where no node agent came. Raises NoSuchRun where there is no run or none
    that goes on, ConfigError where it takes no hosts in or its join file cannot be used, LaunchError where
    its agent cannot be reached, BatchError outside of what `batch` can tell.
    """
    rundir, token = RunDir(request.dir.resolve()), uuid.uuid4().hex
    allocation = batch.allocation()
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        stack.enter_context(signals_wake(selector, watched))
        end = End(batch, allocation, lasts_s=request.lasts_s, tell=tell)
        stack.callback(end.close)
        head = NextHead(rundir, token, request.batch_words, tell)
        stack.callback(head.end)
        until = time.monotonic() + request.wait_s
        while True:
            path = _wait_for_agent(rundir, until, end, selector, tell, head)
            if path is None:
                return 0
            try:
                keys = read_join(path)
            except ConfigError:
                if time.monotonic() > until and path.exists():
                    raise
                end.heard(selector, LOOK_EVERY_S)  # the agent has just ended, and its file with it
                continue
            guest = Membership(
                rundir, keys, batch, allocation, request.devices, end, selector, tell, token, head
            )
            with contextlib.closing(guest):
                try:
                    parted = guest.serve()
                except StoreError:
                    if time.monotonic() > until:
                        raise
                    parted = Parted.UNREACHED
            if parted is not Parted.LOST:
                _let_head_leave(head, end, selector)
            if parted is Parted.NEVER_CAME:
                return 1
            if parted in (Parted.OVER, Parted.LEFT):
                tell("the run is over" if parted is Parted.OVER else f"left the run{end.when}")
                return 0
            if parted is Parted.LOST:
                until = time.monotonic() + request.wait_s
            elif time.monotonic() > until and agent_works(rundir):
                where = f"the agent of the run in {rundir.root} at {keys.endpoint}"
                raise LaunchError(f"{where} has not answered within {request.wait_s:g} s", transient=True)
            end.heard(selector, LOOK_EVERY_S)


def _let_head_leave(head: NextHead, end: End, selector: selectors.BaseSelector) -> None:
    """Wait for the end of the run's agent, if it is in this allocation: it leaves the run to another one when
    none of its hosts is left here."""
    until = time.monotonic() + HEAD_LEAVES_S
    while head.leads and time.monotonic() < until and end.left_s() > 0 and end.interrupts < 2:
        end.heard(selector, ROUND_S)


def _wait_for_agent(
    rundir: RunDir,
    until: float,
    end: End,
    selector: selectors.BaseSelector,
    tell: Callable[[str], None],
    head: NextHead,
) -> Path | None:
    """The join file of the run's agent, which is started here where the last one is gone; None: the
    allocation ends before there is one, the user does not want to wait any longer, or the run is over."""
    works_since, said = None, False
    while end.left_s() > 0 and not end.interrupts:
        now, status = time.monotonic(), last_status(rundir)
        if head.leads:  # it begins with the hosts that join it
            if (path := newest_join(rundir.root)) and _epoch(path) == head.number:
                return path
        elif agent_works(rundir):
            works_since = works_since or now
            if path := newest_join(rundir.root):
                return path
            if now - works_since > NO_FILE_S:
                accepted = "a run that takes them in"
                raise ConfigError(where=str(rundir.root), got=NOT_JOINABLE, accepted=accepted)
        elif status is not None and status.state == "FINISHED":
            tell("the run is over")
            return None
        elif end.left_s() > end.reserve_s + WORTHWHILE_S:
            head.look()
        if now > until:
            rundir.require()
            raise NoSuchRun(f"no agent runs in {rundir.root} that takes hosts in, and none has come in time")
        if not said and works_since is None and not head.leads:
            said = True
            tell(f"no agent works in {rundir.root}: waiting up to {max(0.0, until - now):.0f} s for one")
        end.heard(selector, LOOK_EVERY_S)
    if not end.interrupts:
        tell("the allocation ends, and no agent has come")
    return None


def _epoch(path: Path) -> int | None:
    """The number of the agent whose join file this is; None: it cannot be read."""
    with contextlib.suppress(ConfigError):
        return read_join(path).epoch
    return None


class End:
    """The end of this allocation: what the batch system answers, signals, and what the user has asked for."""

    def __init__(
        self,
        batch: BatchSystem,
        allocation: Allocation,
        *,
        lasts_s: float | None,
        tell: Callable[[str], None],
    ) -> None:
        self._allocation, self._tell = allocation, tell
        self._watch = None
        if allocation.kind != "none":
            self._watch = AllocationWatch(
                batch,
                at_once=allocation.deadline is None,
                deadline=allocation.deadline,
                preemption=allocation.preemption,
            )
        self._last = inf if lasts_s is None else time.monotonic() + lasts_s
        self._deadline = allocation.deadline
        self._forced = inf
        self.reserve_s = 60.0
        """What the run keeps for saving before an end: as long as that saving begins at once."""
        self.lent = False
        """Whether the hosts are in the run."""
        self.interrupts = 0
        """How often the user has asked to leave."""

    def left_s(self) -> float:
        """Seconds that are left; infinite: no end is known."""
        now = time.monotonic()
        if self._forced < inf:  # of a job that is being ended the batch system may say that it has ended
            return min(self._last, self._forced) - now
        return min(self._last - now, inf if self._deadline is None else self._deadline - time.time())

    @property
    def when(self) -> str:
        """Where in the allocation's time we are, as a part of a sentence."""
        if self.interrupts:
            return ", as asked"
        return "" if (left_s := self.left_s()) == inf else f", {max(0.0, left_s):.0f} s before its end here"

    def heard(self, selector: selectors.BaseSelector, timeout_s: float) -> None:
        """Wait for at most so long; take in signals and answers that have come."""
        for key, _ in selector.select(timeout_s):
            if key.data[0] == "wake":
                for number in arrived(key.fd):
                    self._signal(signal.Signals(number))
        for answer in self._watch.take() if self._watch else ():
            if answer.of_end and not answer.error:
                self._deadline = answer.deadline
            if answer.reason is EndReason.NONE:
                self._leave("asked to leave", self.reserve_s)
            elif answer.reason is not None and answer.reason is not EndReason.PREEMPTED:
                self._leave("the batch system ends this job", self._forced_s())

    def _signal(self, number: signal.Signals) -> None:
        ends = number in self._allocation.ends_by and number is not signal.SIGINT
        if number in (signal.SIGUSR1, signal.SIGUSR2) and not ends:
            if self._watch:
                self._watch.ask_now()
        elif self._watch and ends:
            self._forced = min(self._forced, time.monotonic() + self._forced_s())
            self._watch.ask_why()
        else:
            self.interrupts += 1
            self._leave(number.name, self.reserve_s)

    def _forced_s(self) -> float:
        return forced_s(self._watch.kill_wait_s if self._watch else None)

    def _leave(self, why: str, within_s: float) -> None:
        if self._forced == inf and self.lent:
            self._tell(f"{why}: the hosts leave the run within {within_s:.0f} s")
        self._forced = min(self._forced, time.monotonic() + within_s)

    def close(self) -> None:
        """Ask no more."""
        if self._watch:
            self._watch.close()


class Membership:
    """The hosts of this allocation in one life of a run's agent, which `keys` admit them to."""

    def __init__(
        self,
        rundir: RunDir,
        keys: Join,
        batch: BatchSystem,
        allocation: Allocation,
        devices: str | None,
        end: End,
        selector: selectors.BaseSelector,
        tell: Callable[[str], None],
        token: str,
        head: NextHead,
    ) -> None:
        self._head, self._names, self._look_due = head, tuple[str, ...](), 0.0
        self._rundir, self._batch, self._allocation = rundir, batch, allocation
        self._devices, self._end, self._selector, self._tell = devices, end, selector, tell
        self._join, self._token = keys, token
        end.reserve_s = self._join.reserve_s
        cluster = f" of {allocation.cluster}" if allocation.cluster else ""
        here = f"process {os.getpid()} on {os.uname().nodename}"
        self._name = f"{allocation.kind} job {allocation.id}{cluster}" if allocation.id else here
        self._connect()
        self._file = joined_file(rundir.root, self._join.life, token)
        self._log = rundir.root / "nodes.log"
        self._commands: list[NodeAgentCommand] = []
        self._admitted = False
        self._answer: Parted | None = None
        self._beat_due = 0.0

    def _connect(self) -> None:
        self._connection = HeadConnection(self._join, f"join {self._token}")
        for descriptor in self._connection.filenos:
            self._selector.register(descriptor, selectors.EVENT_READ, ("head", None))
        self._channel = MessageChannel()

    def _disconnect(self, flush_ms: int = 1000) -> None:
        for descriptor in self._connection.filenos:
            self._selector.unregister(descriptor)
        self._connection.close(flush_ms)

    def _follow(self, now: float, gone_s: float) -> None:
        """Go over to the next agent of the run, and see to it that there is one: our node agents do so
        too."""
        if now < self._look_due:
            return
        self._look_due = now + (LOOK_EVERY_S if gone_s else SELDOM_S)
        if found := successor(self._rundir.root, self._join):
            self._disconnect(0)
            self._join = found
            self._connect()
        elif gone_s and self._join.holds_s and self._end.left_s() > self._end.reserve_s:
            self._head.look()

    def serve(self) -> Parted:
        """Stay until the hosts leave the run, or its agent is gone."""
        began = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= self._beat_due:
                self._beat_due = now + protocol.BEAT_S
                left_s = self._end.left_s()
                hosts = tuple(host.name for host in self._allocation.hosts)
                joining = protocol.Joining(
                    allocation=self._name,
                    token=self._token,
                    hosts=hosts,
                    names=self._names,
                    left_s=None if left_s == inf else max(0.0, left_s),
                )
                self._connection.send(self._channel.unnumbered(joining))
            for body in self._received():
                self._obey(body)
            ended = [command.look() for command in self._commands]
            if self._admitted and all(ended):
                return self._parted()
            if not self._admitted and (self._end.left_s() <= 0 or self._end.interrupts):
                return Parted.LEFT
            if not self._admitted and self._answer is not None:
                return self._answer
            if self._end.interrupts > 1:
                return Parted.LEFT  # what runs here is killed
            gone_s = self._connection.gone_s(now)
            if self._admitted:
                self._follow(now, gone_s)
            elif gone_s > protocol.LOST_HEAD_S or now - began > JOIN_WITHIN_S:
                return Parted.UNREACHED
            pending = 0.0 if self._connection.pending else ROUND_S
            self._end.heard(self._selector, pending)

    def _received(self) -> Iterator[protocol.HeadMessage]:
        for data in self._connection.receive():
            with contextlib.suppress(BadInput):
                yield protocol.read_to_node(data).body

    def _obey(self, message: protocol.HeadMessage) -> None:
        match message:
            case protocol.SentAway(why=why) if why in (ENDING, LATER):
                self._answer = Parted.UNREACHED
            case protocol.SentAway(why=why) if why == RELEASED:
                self._answer = Parted.LEFT
            case protocol.SentAway(why=why) if not self._admitted:
                raise ConfigError(where=str(self._rundir.root), got=why, accepted="a run that takes them in")
            case protocol.Admitted(names=names, spared=spared) if not self._admitted:
                if len(names) != len(self._allocation.hosts):
                    raise LaunchError("the run's agent counts other hosts than there are", transient=False)
                self._admitted = self._end.lent = True
                self._names = self._head.hosts = names
                by_host = zip((host.name for host in self._allocation.hosts), names, strict=True)
                self._start(dict(by_host), spared)

    def _start(self, names: dict[str, str], spared: tuple[str, ...]) -> None:
        """Start a node agent on each host, which joins by itself."""
        allocation = self._allocation
        write_join(
            self._file,
            msgspec.structs.replace(
                self._join,
                hosts=tuple(names),
                names=names,
                spared=spared,
                cpus={names[host.name]: host.cpus for host in allocation.hosts if host.cpus},
                gpus={names[host.name]: host.gpus for host in allocation.hosts if host.gpus is not None},
                devices=self._devices or self._join.devices,
                shielded=tuple(sorted(allocation.signals_all)),
            ),
            alone=False,
        )
        argv = (sys.executable, "-P", "-m", "hpcsched.agent.node", "--join", str(self._file))
        hosts = allocation.hosts
        for i, command in enumerate(commands := self._batch.on_hosts(hosts, argv)):
            ours = (hosts[i].name,) if len(commands) == len(hosts) else tuple(names)
            started = NodeAgentCommand(command, ours, self._log, shielded=allocation.signals_all)
            self._commands.append(started)
        shown = ", ".join(names.values())
        self._tell(f"starts node agents on {shown} for the run in {self._rundir.root}")

    def _parted(self) -> Parted:
        status = last_status(self._rundir)
        if status is not None and status.state == "FINISHED":
            return Parted.OVER  # whatever the node agents have met at its end
        failed = [command for command in self._commands if not command.succeeded]
        if len(failed) == len(self._commands):
            last = last_log_line(self._log)
            why = "; ".join(sorted({command.why for command in failed}))
            ends = f"; {self._log.name} ends with: {last}" if last else ""
            self._tell(f"the node agents have ended: {why}{ends}")
            return Parted.NEVER_CAME
        over = self._end.left_s() <= self._end.reserve_s + WORTHWHILE_S  # for a run that may have moved on
        return Parted.LEFT if over else Parted.LOST

    def close(self) -> None:
        """End what has been started here, and forget the keys."""
        end_all(self._commands, LEFT_WITHIN_S)
        for command in self._commands:
            command.close()
        self._disconnect()
        with contextlib.suppress(OSError):  # the head removes it at its end
            self._file.unlink(missing_ok=True)
