"""What goes wrong in a schedule, and what users do: how each is played."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from math import inf

from . import jobs
from .ledgers import parts_of
from .places import Numbers, Process
from .schedule import TORCH, Fault
from .shim import Rule
from .world import Life, World, shown

PATIENCE_S = 240.0
"""How long a schedule may take in all, before it counts as hanging."""

SOUGHT_S = 15.0
"""How long a fault looks for what it is to strike."""

LINGERS_S = 10.0
"""How long an agent may take to end once it has let go of a run (where a machine is very busy)."""

SOME_STEPS = 25
"""How far a training comes, at most, before it is struck."""

PERIOD_S = 0.03


class Mend:
    """Makes something well once, after a time or at once."""

    def __init__(self, seconds: float, mend: Callable[[], None]) -> None:
        self._mend, self._lock, self._done = mend, threading.Lock(), False
        self._timer = threading.Timer(seconds, self.at_once)
        self._timer.daemon = True
        self._timer.start()

    def at_once(self) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                self._timer.cancel()
                self._mend()


class Faults:
    """Plays the faults of a world's schedule, each when it is due."""

    def __init__(self, world: World) -> None:
        self.world, self.schedule = world, world.schedule
        self._due = [(fault.at, i, fault) for i, fault in enumerate(self.schedule.faults)]
        self._asks: list[tuple[float, int, Callable[[], None]]] = []
        self._mends: list[Mend] = []
        self._count = 0
        self._torn: tuple[float, bool] | None = None
        self._no_power = False

    def _faults(self) -> None:
        now = self.world.now
        while self._asks and self._asks[0][0] <= now:
            heappop(self._asks)[-1]()
        while self._due and self._due[0][0] <= now:
            _, _, fault = self._due.pop(0)
            PLAYED[fault.kind](self, fault)

    def _later(self, seconds: float, ask: Callable[[], None]) -> None:
        """Something to ask for: it takes its time, so that it is done between two looks."""
        self._count += 1
        heappush(self._asks, (self.world.now + seconds, self._count, ask))

    def _mend(self, seconds: float, mend: Callable[[], None]) -> None:
        """Something to be made well in time, whatever is waited for then."""
        self._mends.append(Mend(seconds, mend))

    def _kill(self, found: list[Process], what: str, job: str = "") -> bool:
        if not found:
            return False
        self.world.disturb(what)
        if job:
            self.world.killed[job] += 1
        for one in found:
            one.kill()
        return True

    def _stop(self, found: list[Process], what: str, seconds: float) -> None:
        if found:
            self.world.disturb(what)
        for one in found:
            one.kill(signal.SIGSTOP)
            self._mend(seconds, partial(one.kill, signal.SIGCONT))

    def kill_agent(self, fault: Fault) -> None:
        if self._kill(self.world.agents(), "kill agent"):
            self.world.lives[-1].killed = True

    def kill_both(self, fault: Fault) -> None:
        workers, agents = self.world.worker(fault.args[0]), self.world.agents()
        if self._kill([*agents, *workers], "kill agent and worker"):
            self.world.lives[-1].killed |= bool(agents)
            self.world.killed[fault.args[0]] += bool(workers)

    def _seek_again(self, fault: Fault) -> None:
        """What is to be struck is not there yet: it is looked for again, for some time."""
        if self.world.now < fault.at + SOUGHT_S:
            self._due.insert(0, (self.world.now + 2 * PERIOD_S, -1, fault))
            self._due.sort(key=lambda due: due[:2])

    def kill_worker(self, fault: Fault) -> None:
        trainer = any(job.name == fault.args[0] and job.kind in TORCH for job in self.schedule.jobs)
        found = self.world.worker(fault.args[0]) if not trainer or self._trains(fault) else []
        if not found:
            self._seek_again(fault)
        if self._kill(found, "kill worker", fault.args[0]):
            for name in self._same_process(found):
                self.world.killed[name] += name != fault.args[0]

    def _same_process(self, found: list[Process]) -> set[str]:
        """The jobs that train in the same process: members of a pack."""
        numbers = {one.inner for one in found}
        return {
            n for n in self.world.ledgers() if (lines := self.world.ledger(n)) and lines[-1].pid in numbers
        }

    def kill_role(self, fault: Fault) -> None:
        if not self._kill(self.world.processes(fault.kind.removeprefix("kill ")), fault.kind):
            self._seek_again(fault)

    def kill_node_agent(self, fault: Fault) -> None:
        self._kill(self._node_agent(fault.args[0]), "kill node agent")

    def _node_agent(self, host: str) -> list[Process]:
        found = self.world.processes("node agent")  # and their guards, which are left alone
        pids = {one.pid for one in found}
        found = [one for one in found if one.parent not in pids]
        return [one for one in found if one.words[-2:-1] == (host,) or one.words[-1:] == (host,)]

    def stop_agent(self, fault: Fault) -> None:
        self._stop(self.world.agents(), "stop agent", fault.args[0])

    def stop_worker(self, fault: Fault) -> None:
        found = self.world.worker(fault.args[0])
        self._stop(found, "stop worker", fault.args[1])
        if not found:
            self._seek_again(fault)

    def stop_node_agent(self, fault: Fault) -> None:
        self._stop(self._node_agent(fault.args[0]), f"stop node agent {fault.args[1]:g} s", fault.args[1])

    def sigterm(self, fault: Fault) -> None:
        for one in self.world.agents():
            self.world.disturb("SIGTERM")
            one.kill(signal.SIGTERM)
            record = self.world.bench.rundir.read_record()
            if record is None or record.pid != one.inner:  # it may have no handler yet
                self.world.lives[-1].killed = True

    def torn(self, fault: Fault) -> None:
        found = self.world.agents()
        if found:
            self._torn = fault.args
            self.kill_agent(fault)

    def power_loss(self, fault: Fault) -> None:
        if self.world.shim and self.world.bench.rundir.begun and self.world.lives[-1].over is None:
            self._no_power = True
            self._kill(self.world.processes(), "power loss")
            self.world.lives[-1].killed = True

    def _trains(self, fault: Fault) -> bool:
        """Whether a training has come so far that it can be struck: as far as the time of the fault says, so
        that it is struck at any step."""
        parts = parts_of(self.world.ledger(fault.args[0]))
        return bool(parts) and parts[-1][-1].step - parts[-1][0].step >= round(10 * fault.at) % SOME_STEPS

    def _waits_for_work(self, fault: Fault) -> bool:
        """Where states in memory are to be had a training has to work first; else it is looked for again."""
        waits = self.schedule.flavour == "memory" and not self._trains(fault)
        if waits:
            self._seek_again(fault)
        return waits

    def suspend_and_kill(self, fault: Fault) -> None:
        name, pause = fault.args
        if not self._waits_for_work(fault) and self._ask("suspend", name):
            time.sleep(pause)
            self.kill_agent(fault)
            self._later(0.0, lambda: self._take_back("resume", name))

    def suspend_and_resume(self, fault: Fault) -> None:
        if not self._waits_for_work(fault):
            self._pair("suspend", "resume", *fault.args)

    def hold_and_release(self, fault: Fault) -> None:
        self._pair("hold", "release", *fault.args)

    def _pair(self, one: str, other: str, name: str, seconds: float) -> None:
        if self._ask(one, name):
            self._later(seconds, lambda: self._take_back(other, name))

    def _ask(self, verb: str, name: str) -> bool:
        done = self.world.command(verb, name)
        waits = "the command waits" in done.said  # nobody has answered, and it counts all the same
        self.world.struck[verb] += done.code == 0 or waits
        return done.code == 0 or waits

    def _take_back(self, verb: str, name: str) -> None:
        """What has been taken back has to be: where no agent takes it, it waits for the next one."""
        if not self._ask(verb, name) and self.world.page()["run"]["state"] != "FINISHED":
            self._count += 1
            if self._count < 200:
                self._later(0.5, lambda: self._take_back(verb, name) if not self._is_over(name) else None)

    def _is_over(self, name: str) -> bool:
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "RUNNING")
        return any(job["name"] == name and job["state"] in final for job in self.world.page()["jobs"])

    def cancel(self, fault: Fault) -> None:
        self._ask("cancel", fault.args[0])

    def submit(self, fault: Fault) -> None:
        self._submit(fault.args[0])

    def _submit(self, name: str) -> None:
        if self.world.struck["submit"]:
            return
        job = next(one for one in self.schedule.later if one.name == name)
        path = jobs.file_of(self.world.folder, f"{name}.toml", job)
        for _ in range(20):  # before a run has begun there is none to submit to, and a disk may be full
            done = self.world.command("submit", str(path))
            if done.code == 0 or "the command waits" in done.said:
                self.world.struck["submit"] += 1
                return
            time.sleep(0.3)
        self.world.wrong.append(f"{name} could not be submitted")

    def second_agent(self, fault: Fault) -> None:
        first, world = self.world.lives[-1], self.world
        if first.process.poll() is not None or not world.bench.rundir.begun:
            return
        world.struck["second agent"] += 1
        second = world.begun("second.err", *world.words(resume=True))
        beside_since, deadline = inf, time.monotonic() + PATIENCE_S
        while second.process.poll() is None and time.monotonic() < deadline:
            now, record = time.monotonic(), world.bench.rundir.read_record()
            if first.process.poll() is not None:
                beside_since = inf
            elif record and record.pid == second.process.pid:
                beside_since = min(beside_since, now)
            if now > beside_since + LINGERS_S:
                world.wrong.append("a second agent was let in: it leads the run, and the first one lives")
                second.process.kill()
            time.sleep(PERIOD_S)
        code = second.process.poll()
        world.note(f"the second agent ended with {code}: {second.said.strip()[-200:]}")
        world.wrong += shown(second, "a second agent")
        if code is None:
            world.wrong.append(f"a second agent has not ended within {PATIENCE_S:.0f} s")
            second.process.kill()
            second.process.wait()
        elif code not in (2, -signal.SIGKILL) and first.process.poll() is None:
            self._has_let_go(first, f"{code}, {second.said.strip()[-200:]}")
        first.forestalled |= code != 2

    def _has_let_go(self, first: Life, second: str) -> None:
        """The run was over, or left, before another agent had it: the one before ends soon."""
        deadline = time.monotonic() + LINGERS_S
        while first.process.poll() is None:
            if time.monotonic() > deadline:
                self.world.wrong.append(f"a second agent was let in: {second}")
                return
            time.sleep(PERIOD_S)

    def no_snapshot(self, fault: Fault) -> None:
        self.world.bench.rundir.status.unlink(missing_ok=True)
        self.world.disturb("no snapshot")

    def noise(self, fault: Fault) -> None:
        inbox = self.world.bench.dir / "inbox" / "new"
        with contextlib.suppress(OSError):
            for number, text in enumerate((b"\xff{", b"[" * 5000, b'{"command": "explode"}', b"")):
                (inbox / f"000{number}-noise").write_bytes(text)
            self.world.disturb("noise in the inbox")

    def clock(self, fault: Fault) -> None:
        if self.world.shim:
            self.world.shim.clock(fault.args[0])
            self.world.disturb(f"clock {fault.args[0]:+g} s")

    def disk(self, fault: Fault) -> None:
        if self.world.shim is None:
            return
        rule: Rule = fault.args[0]
        before = self.world.shim.struck
        self.world.shim.rules(rule)
        what = os.strerror(rule.error) if rule.error else "slow fsync"
        what = f"{what} for {'agents' if rule.who == 1 else 'jobs' if rule.who == 2 else 'all'}"
        self.world.disturb(what)
        self._mend(fault.args[1], partial(self._heal_disk, what, before))

    def _heal_disk(self, what: str, before: int) -> None:
        """What has met no call does not count among the faults."""
        if self.world.shim:
            self.world.shim.rules()
            self.world.disturbed.append((time.monotonic(), "healed"))
            in_vain = self.world.shim.struck == before
            self.world.struck[what] -= in_vain
            self.world.note(f"the disk is well again{', and nobody has met it' * in_vain}")

    def batch(self, fault: Fault) -> None:
        if self.world.cluster:
            cluster = self.world.cluster
            cluster.mood(fault.args[0])
            self.world.disturb(f"batch system: {fault.args[0]}")
            self._mend(fault.args[1], partial(cluster.mood, "well"))

    def network(self, fault: Fault) -> None:
        host, seconds = fault.args
        self.world.place.network(host, fault.kind)
        self.world.disturb(f"network {fault.kind} {seconds:g} s")
        self._mend(seconds, partial(self.world.place.network, host, "whole"))

    def many_pids(self, fault: Fault) -> None:
        if isinstance(self.world.place, Numbers):
            self.world.place.many()
            self.world.disturb("many pids")


PLAYED: dict[str, Callable[[Faults, Fault], None]] = {
    "kill agent": Faults.kill_agent,
    "kill agent and worker": Faults.kill_both,
    "kill worker": Faults.kill_worker,
    "kill zygote": Faults.kill_role,
    "kill keeper": Faults.kill_role,
    "kill node agent": Faults.kill_node_agent,
    "stop agent": Faults.stop_agent,
    "stop worker": Faults.stop_worker,
    "stop node agent": Faults.stop_node_agent,
    "SIGTERM": Faults.sigterm,
    "torn journal": Faults.torn,
    "power loss": Faults.power_loss,
    "suspend, then kill": Faults.suspend_and_kill,
    "suspend and resume": Faults.suspend_and_resume,
    "hold and release": Faults.hold_and_release,
    "cancel": Faults.cancel,
    "submit": Faults.submit,
    "second agent": Faults.second_agent,
    "no snapshot": Faults.no_snapshot,
    "noise in the inbox": Faults.noise,
    "clock": Faults.clock,
    "disk": Faults.disk,
    "full for jobs": Faults.disk,
    "slow disk": Faults.disk,
    "hiccup": Faults.disk,
    "stale": Faults.disk,
    "batch": Faults.batch,
    "cut": Faults.network,
    "thin": Faults.network,
    "many pids": Faults.many_pids,
}
