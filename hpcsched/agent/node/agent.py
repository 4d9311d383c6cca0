"""The node agent: starts, signals and watches the workers of one host, as the head says.

`python -m hpcsched.agent.node --join FILE [--name NAME]`. Exits 0 when told to leave or the head is gone
(its workers have then been asked to save), 2 when it cannot join.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from hpcsched.agent.cpu_cores import gpu_cores, host_cores
from hpcsched.agent.deferred import Deferred
from hpcsched.agent.exits import not_launched
from hpcsched.agent.gpu_memory import FREE_WITHIN_S, GpuMemory
from hpcsched.agent.monitor import Monitor
from hpcsched.agent.node import guard
from hpcsched.agent.node.connection import HeadConnection
from hpcsched.agent.node.held_back import End, HeldBack
from hpcsched.agent.node.link import HeadLink
from hpcsched.agent.node.own_host import address_towards
from hpcsched.agent.node.workers import PartWatcher, sweep_answers
from hpcsched.agent.waiting_launches import TOLD_TO_END
from hpcsched.agent.wakeup import arrived, signals_wake
from hpcsched.contract import orders, variables
from hpcsched.devices import Devices
from hpcsched.errors import BadInput
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.orphans import end_processes, find_orphans
from hpcsched.launch.proc import stat
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.keys import Join
from hpcsched.launch.remote.workers import plan_from_message
from hpcsched.printing import printable

LAST_GRACE_S = 3.0
"""Time that workers get to save when time is up (chosen)."""

KEEPING_PERIOD_S = 0.1
"""How often keepers are looked after (chosen)."""

KILLED_WITHIN_S = 5.0
"""A process that lives so long after SIGKILL hangs in the kernel: waiting longer does not help (chosen)."""


class NodeAgent:
    """The node agent of one host, after its start."""

    def __init__(
        self, join: Join, run_dir: Path, name: str, devices: Devices, connection: HeadConnection
    ) -> None:
        self._join, self._name, self._devices = join, name, devices
        self._inventory = devices.inventory()
        self._cores = host_cores(devices, name, cpus_per_gpu=join.cpus_per_gpu, granted=join.cpus.get(name))
        self._launcher = LocalLauncher(
            cpus=devices.cpus,
            gpu_cores=gpu_cores(self._cores),
            device_env=devices.environment,
            numbered=devices.numbered,
            shielded=frozenset(map(signal.Signals, join.shielded)),
            environ={
                **os.environ,
                variables.NODE: guard.mark(join.life, name),
                variables.RUN_ID: join.run_id,  # not all that it starts is an attempt's
            },
            devices=self._inventory,
            standbys=join.standbys,
        )
        self._keeping: tuple[int, ...] = ()
        self._selector = selectors.DefaultSelector()
        self._head = HeadLink(join, run_dir, name, connection, hello=self._hello, say=say)
        self._listen()
        self._parts: dict[int, PartWatcher] = {}
        self._deferred = Deferred(self._obey)
        """Launches that wait until their interpreters are checked, and later orders for these parts."""
        self._memory = GpuMemory(devices.free, tell=self._tell_of_memory, used_mib=self._used_mib)
        self._selector.register(self._memory, selectors.EVENT_READ, ("memory", None))
        self._held_back = HeldBack(self._memory, self._inventory, self._parts.values())
        self._draining = False
        self._muted: dict[int, PartWatcher] = {}  # by progress descriptor: not to be read before its time
        self._readings: tuple[protocol.Reading, ...] = tuple(protocol.Reading() for _ in self._inventory)
        self._monitor = Monitor(devices.sample, interval_s=protocol.BEAT_S)
        self._beat_due = 0.0
        self._terms = 0
        self._told_at = 0.0
        self._serve_until = float("inf")
        self._leave: list[tuple[float, signal.Signals | None]] = []  # what to do to workers, and when
        self._kill_at = float("inf")
        self.left: str = ""
        """The reason why it leaves; "" while it stays."""

    def run(self) -> None:
        """Serve until told to leave, or the head is gone; no process that it has started is left then."""
        with self._signals():
            while not self._done():
                self._round()
            self._launcher.close()
            if self._keeping:
                orphans = find_orphans(self._join.run_id, [])
                end_processes(guard.marked(orphans, [guard.mark(self._join.life, self._name)]), 0.0)
            self._head.send(protocol.Gone(self.left))

    def _listen(self) -> None:
        for descriptor in self._head.filenos:
            self._selector.register(descriptor, selectors.EVENT_READ, ("head", None))

    def _done(self) -> bool:
        if not (self.left and self._leave):
            return bool(self.left)
        return not self._parts and (not self._keeping or time.monotonic() >= self._kill_at)

    def close(self) -> bool:
        """Close all descriptors; False if a driver hangs."""
        self._launcher.close()
        self._memory.close()
        self._selector.close()
        self._head.close()
        for watcher in self._parts.values():
            watcher.workers.close()
        return self._monitor.close()

    # -- one round -------------------------------------------------------------------------------------

    def _round(self) -> None:
        timeout_s = 0.0 if self._head.pending else max(0.0, self._next_due() - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            kind, watcher = key.data
            if kind == "wake":
                self._signalled(key.fd)
            elif kind == "exit":
                self._rank_ended(key.fd, watcher)
            elif kind == "progress":
                self._progress(key.fd, watcher)
            elif kind == "memory":
                self._memory.heard()
        for said in self._head.receive():
            self._take(said)
        deque(self._deferred.again(), maxlen=0)
        now = time.monotonic()
        for watcher in list(self._parts.values()):
            for message in watcher.look(now):
                self._head.send(message)
            if watcher.late:
                self._part_ended(watcher)
        for descriptor, watcher in list(self._muted.items()):
            if now >= watcher.progress_due:
                del self._muted[descriptor]
                self._selector.register(descriptor, selectors.EVENT_READ, ("progress", watcher))
        self._look_after_keepers()
        self._tell_ends()
        if now >= self._beat_due:
            self._beat_due = now + protocol.BEAT_S
            self._beat(now)
        self._follow(now)
        self._leave_in_time(now)

    def _next_due(self) -> float:
        dues = [self._beat_due, self._serve_until, *(watcher.due() for watcher in self._parts.values())]
        dues += [watcher.progress_due for watcher in self._muted.values()]
        dues += [self._leave[0][0]] if self._leave else []
        soon = self._keeping or self._deferred or self._held_back
        dues += [time.monotonic() + KEEPING_PERIOD_S] if soon else []
        return min(dues)

    def _beat(self, now: float) -> None:
        samples = self._monitor.take()
        if samples is not None:
            self._readings = tuple(
                protocol.Reading(s.utilisation, s.memory_mib, s.healthy, s.why, s.energy_j) for s in samples
            )
        self._head.beat(now, protocol.Beat(time.time(), self._readings, self._monitor.age_s))
        if self.left:
            return
        if why := self._head.lost(now):
            self._go(why, self._join.grace_s)

    def _follow(self, now: float) -> None:
        """Look for another head that leads the run, and tell it what runs here."""
        filenos = self._head.filenos
        if self.left or not self._head.follows(now):
            return
        for descriptor in filenos:
            self._selector.unregister(descriptor)
        self._listen()
        for order in self._deferred.clear():  # the next head does not know of them, and has them done again
            if isinstance(order, protocol.Launch):
                self._launcher.give_up(order.job_id, order.attempt)
        self._beat_due, self._draining = now, False

    def _hello(self, epoch: int) -> protocol.Hello:
        seen = stat(os.getpid())
        living = {part: watcher.running() for part, watcher in self._parts.items()}
        return protocol.Hello(
            name=self._name,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            started=seen.start_ticks if seen else 0,
            devices=self._inventory,
            kind=self._devices.kind,
            speed=self._devices.speed,
            address=address_towards(self._head.join.endpoint),
            wall=time.time(),
            cores=self._cores,
            life=self._join.life,
            epoch=epoch,
            parts=tuple({**self._head.over, **living}.values()),
        )

    # -- what the head says ----------------------------------------------------------------------------

    def _take(self, body: protocol.HeadMessage) -> None:
        part = getattr(body, "part", None)
        ends = isinstance(body, protocol.Signal) and body.number != signal.SIGTSTP
        if ends and isinstance(launch := self._deferred.drop(part), protocol.Launch):
            self._launcher.give_up(launch.job_id, launch.attempt)
            self._head.send(protocol.LaunchFailed(launch.part, TOLD_TO_END, transient=True))
        elif not self._deferred.takes(part, body):
            self._obey(body)

    def _obey(self, message: protocol.HeadMessage) -> None:
        match message:
            case protocol.Welcome():
                self._beat_due = 0.0
            case protocol.Launch() as order:
                self._launch(order)
            case protocol.Signal(part=part, number=number) if part in self._parts:
                self._parts[part].workers.signal(number)
            case protocol.AskToSave(part=part, number=number) if part in self._parts:
                self._parts[part].workers.ask_to_save(number)
            case protocol.SaveBy(part=part, command=command, within_s=within_s) if part in self._parts:
                self._parts[part].workers.save_by(command, within_s)
            case protocol.Order(part=part, line=line):
                with contextlib.suppress(BadInput):  # its rank 0 could do nothing with it either
                    for said in orders.decode(line) if part in self._parts else ():
                        self._parts[part].workers.tell(said)
            case protocol.Expect(part=part, attempt=attempt) if part in self._parts:
                self._parts[part].expect(attempt, time.monotonic())
            case protocol.Forget(job_id=job_id):
                self._launcher.forget(job_id)
            case protocol.Drain():
                self._draining = True
            case protocol.Leave(grace_s=grace_s):
                self._go("the head says so", grace_s)

    def _launch(self, order: protocol.Launch) -> None:
        if self.left:
            error = f"{self._name}'s node agent leaves: {self.left}"
            self._head.send(protocol.LaunchFailed(order.part, error, transient=True, host_fault=True))
            return
        if order.part in self._parts:
            return  # it runs, under another head than had it started
        try:
            plan, place = plan_from_message(order, self._inventory, self._name)
            if not self._launcher.ready_for(plan):
                self._deferred.put_off(order.part, order)
                return
            if order.first_rank == 0:
                sweep_answers(plan.folder, order.attempt)
            workers = self._launcher.launch(plan, place)
        except MemoryError:
            raise
        except Exception as error:  # whatever is wrong with a job, the others go on
            failed = not_launched(error)
            self._head.send(protocol.LaunchFailed(order.part, str(failed), failed.transient))
            return
        watcher = self._parts[order.part] = PartWatcher(order, workers, time.monotonic())
        for descriptor in workers.pidfds:
            self._selector.register(descriptor, selectors.EVENT_READ, ("exit", watcher))
        if workers.progress_fd is not None:
            self._selector.register(workers.progress_fd, selectors.EVENT_READ, ("progress", watcher))
        self._head.send(protocol.Launched(order.part, workers.port))

    # -- what workers do -------------------------------------------------------------------------------

    def _rank_ended(self, descriptor: int, watcher: PartWatcher) -> None:
        if watcher.order.part not in self._parts:
            return  # told together with the rank that ended last
        self._selector.unregister(descriptor)
        if not self._held_back.over(watcher):
            self._part_ended(watcher)

    def _part_ended(self, watcher: PartWatcher) -> None:
        messages = list(watcher.ended())
        self._look_after_keepers()  # first: else the job seems to hang on nothing any more
        for message in messages:
            if isinstance(message, End):
                self._held_back.add(watcher, message)
            else:
                self._head.send(message)
        self._tell_ends()

    def _tell_ends(self) -> None:
        """Tell of ranks that have ended, once their GPUs can be given on; at once where nobody gets them."""
        nobody = self.left or self._told_at or self._draining
        for watcher, message in self._held_back.free(0.0 if nobody else FREE_WITHIN_S):
            self._head.send(message)
            if isinstance(message, protocol.Exited):
                self._head.over[message.part] = msgspec.structs.replace(watcher.running(), over=True)
                self._release(watcher)

    def _look_after_keepers(self) -> None:
        """Begin what is due, and tell when that changes whose state is not durable yet."""
        keeping = tuple(sorted(self._launcher.keeping()))
        if keeping != self._keeping:
            self._keeping = keeping
            self._head.send(protocol.Keeping(keeping))

    def _release(self, watcher: PartWatcher) -> None:
        workers = watcher.workers
        for descriptor in (*workers.pidfds, workers.progress_fd):
            if descriptor is not None:
                self._muted.pop(descriptor, None)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(descriptor)
        workers.close()
        del self._parts[watcher.order.part]

    def _progress(self, descriptor: int, watcher: PartWatcher) -> None:
        if watcher.order.part not in self._parts:
            return
        self._selector.unregister(descriptor)
        messages, more = watcher.progress(time.monotonic())
        for message in messages:
            self._head.send(message)
        if more:
            self._muted[descriptor] = watcher

    def _used_mib(self, gpu: int) -> float | None:
        return self._readings[gpu].memory_mib

    def _tell_of_memory(self, line: str) -> None:
        say(f"{self._name}: {line}")
        self._head.send(protocol.Said(line))

    # -- leaving ---------------------------------------------------------------------------------------

    def _go(self, why: str, grace_s: float) -> None:
        """Have the workers leave: asked to save, then SIGTERM, then SIGKILL; at once without grace.

        States that are being made durable get as long.
        """
        now = time.monotonic()
        kill_at = now + grace_s + min(grace_s, protocol.KILL_AFTER_S)
        if kill_at >= self._kill_at:
            return  # already on its way, and not slower
        self._kill_at = kill_at
        if not self.left:
            self.left = why
            say(f"{self._name}: leaving: {why}")
            if self._head.welcome:
                self._head.send(protocol.Leaving(why))  # the head is to start nothing here any more
            if grace_s > 0:
                for watcher in self._parts.values():
                    watcher.ask_to_save()
        self._leave = [(kill_at, signal.SIGKILL), (kill_at + KILLED_WITHIN_S, None)]
        if grace_s > 0:
            self._leave.insert(0, (now + grace_s, signal.SIGTERM))

    def _leave_in_time(self, now: float) -> None:
        if now >= self._serve_until and not self.left:
            self._go("time is up after SIGTERM", LAST_GRACE_S)
        while self._leave and now >= self._leave[0][0]:
            _, number = self._leave.pop(0)
            for watcher in self._parts.values():
                if number is not None:
                    watcher.workers.signal(number)

    def _signals(self) -> AbstractContextManager[None]:
        """SIGTERM, SIGINT and SIGHUP: see `_signalled`; SIGUSR1 (a worker has news) only wakes up.

        SIGUSR2 is a warning of the batch system to the whole job, which the head sees to.
        """
        watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        return signals_wake(self._selector, watched)

    def _signalled(self, descriptor: int) -> None:
        """A batch system ends everything at once; the head is in charge of an orderly end: give it time."""
        numbers = arrived(descriptor)
        if signal.SIGUSR1 in numbers:
            for watcher in self._parts.values():
                watcher.wake()
        asked = [number for number in numbers if number not in (signal.SIGUSR1, signal.SIGUSR2)]
        if not asked:
            return
        now = time.monotonic()
        self._terms += len(asked)
        if self._terms > len(asked) and self._join.shielded:
            # Not more urgent: LSF sends SIGINT, SIGTERM and SIGKILL, and lets the same time pass in between.
            if signal.SIGTERM in asked:
                left_s = now - self._told_at - 2 * LAST_GRACE_S
                self._serve_until = min(self._serve_until, now + max(0.0, left_s))
        elif self._terms > 2 and not self._join.shielded:
            self._go(f"third {signal.Signals(asked[-1]).name}", LAST_GRACE_S)
        elif self._told_at and not self._join.shielded:
            # A time of grace is over, or the job is ended within it.
            self._serve_until = min(self._serve_until, now + self._join.serve_on_s)
        else:
            say(f"{self._name}: {signal.Signals(asked[0]).name}: serving on until the head says otherwise")
            self._told_at, self._serve_until = now, now + self._join.notice_s + self._join.serve_on_s


def say(line: str) -> None:
    """Write one line to standard error, which is the run's nodes.log."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hpcsched node agent: {printable(line)}\n")
        sys.stderr.flush()
