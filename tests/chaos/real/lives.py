"""Plays a schedule: a run as a user starts it, what goes wrong, and `run --resume` until it is over."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from . import jobs
from .places import Numbers, Process
from .schedule import Fault
from .shim import Rule
from .world import Life, World

PATIENCE_S = 240.0
"""How long a schedule may take in all, before it counts as hanging."""

MOST_LIVES = 25
MOST_ENDS = 3
"""How many allocations end while there is work left."""


SOUGHT_S = 6.0
"""How long a fault looks for what it is to strike."""

LINGERS_S = 40.0
"""How long an agent may take to end once it has let go of a run (where a machine is very busy)."""

FOLLOWED_S = 30.0
"""How long another agent may take to follow one that has died."""

SHORTENED_S = 4.0
"""When the end of an allocation comes near, where it does: so long after a life began."""

PERIOD_S = 0.03
CODES = (0, 1, 75)
"""Exit codes of a run that nobody has killed."""


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


class Player:
    """Plays the schedule of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.schedule = world, world.schedule
        self._due = [(fault.at, i, fault) for i, fault in enumerate(self.schedule.faults)]
        self._asks: list[tuple[float, int, Callable[[], None]]] = []
        self._mends: list[Mend] = []
        self._count = 0
        self._torn: tuple[float, bool] | None = None
        self._no_power = False

    def play(self) -> None:
        """Until the run is over and nothing is left to go wrong, or it takes too long."""
        world = self.world
        life = world.start(*world.words(resume=False))
        while life.process.poll() is None and not world.bench.rundir.record.exists():
            time.sleep(PERIOD_S)
        world.began = time.monotonic()
        world.invite()
        while True:
            time.sleep(PERIOD_S)
            world.look()
            if world.now > PATIENCE_S:
                world.wrong.append(f"not over after {PATIENCE_S:.0f} s: {self._stands()}")
                return
            self._faults()
            if (
                life.walltime is None
                and len(world.lives) <= MOST_ENDS
                and time.monotonic() > life.began + SHORTENED_S
            ):
                world.shorten(life)
            if life.walltime and time.monotonic() > life.walltime and life.over is None:
                self._allocation_ends(life)
            if life.process.poll() is None:
                continue
            self._ended(life)
            if world.guest:
                self._led_by_another()
            if life.walltime and not self._over(life):
                world.note(f"life {len(world.lives)} ended with {life.process.returncode}")
            if self._over(life) and self._settled():
                return
            if not world.bench.rundir.record.exists() and life.process.returncode == 2:
                world.wrong.append("not over: it has not begun")
                return
            if len(world.lives) > MOST_LIVES:
                world.wrong.append(f"not over after {MOST_LIVES} lives: {self._stands()}")
                return
            self._between_lives()
            life = world.start(*world.words(resume=True))
            world.invite()

    # --- lives --------------------------------------------------------------------------------------

    def _led_by_another(self) -> None:
        """As long as a guest's agent leads the run, or may be about to."""
        world, alone_since = self.world, time.monotonic()
        while time.monotonic() < alone_since + FOLLOWED_S and world.now < PATIENCE_S:
            if world.page()["run"]["state"] == "FINISHED" and not world.led:
                return
            if world.led:
                alone_since = time.monotonic()
            elif world.guest and world.guest.process.poll() is not None:
                return
            world.look()
            self._faults()
            time.sleep(PERIOD_S)

    def _ended(self, life: Life) -> None:
        life.over = time.monotonic()
        code, world = life.process.returncode, self.world
        world.note(f"life {len(world.lives)} ended with {code}: {life.said.strip()[-160:]}")
        if "Traceback (most recent call last)" in life.said:
            last = life.said.strip().splitlines()[-1]
            world.wrong.append(f"an agent shows a traceback: {last}")
        refused = code == 2 and "not taken from what waited: refused" in life.said and self._noisy
        late = code == -signal.SIGTERM and world.page()["run"]["state"] == "FINISHED"  # it was over already
        led = code == 2 and world.guest is not None and "another agent" in life.said
        if code not in CODES and not life.killed and not refused and not late and not led:
            world.wrong.append(f"an agent ended with {code}: {life.said.strip()[-300:]}")

    @property
    def _noisy(self) -> bool:
        return self.world.struck["noise in the inbox"] > 0

    def _over(self, life: Life) -> bool:
        inbox = self.world.bench.dir / "inbox" / "new"
        waits = inbox.is_dir() and any(inbox.iterdir())
        finished = self.world.page()["run"]["state"] == "FINISHED"
        elsewhere = life.walltime_over or self.world.guest
        over = (0, 1, 2, 75, -signal.SIGTERM, *((-signal.SIGKILL,) if elsewhere else ()))
        return (
            life.process.returncode in over
            and finished
            and not waits
            and not self._torn
            and not self._no_power
        )

    def _settled(self) -> bool:
        """Whether nothing is left to be healed; what has not gone wrong so far does not matter any more."""
        for mend in self._mends:
            mend.at_once()
        while self._asks:
            heappop(self._asks)[-1]()
        if self.schedule.later and not any(a.words[0] == "submit" for a in self.world.answers):
            self._submit(self.schedule.later[0].name)
        inbox = self.world.bench.dir / "inbox" / "new"
        return not (inbox.is_dir() and any(inbox.iterdir()))

    def _between_lives(self) -> None:
        """No agent lives: what happens to files then."""
        if self._torn:
            self._tear(*self._torn)
            self._torn = None
        if self._no_power:
            self._no_power = False
            self._lose_what_was_not_durable()

    def _lose_what_was_not_durable(self) -> None:
        shim, path = self.world.shim, self.world.bench.rundir.journal
        if shim and path.exists() and path.stat().st_size > shim.durable_bytes:
            os.truncate(path, shim.durable_bytes)

    def _tear(self, part: float, snapshot: bool) -> None:
        """Cut the journal in its last record, unless a user has been told of what is there."""
        world, path = self.world, self.world.bench.rundir.journal
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            start = data.rstrip(b"\n").rfind(b"\n") + 1
            if start < max(1, world.acknowledged_bytes) or b'"JobsSubmitted"' in data[start:]:
                return
            with path.open("r+b") as file:
                file.truncate(start + int(part * (len(data) - start)))
            if snapshot:
                world.bench.rundir.status.unlink(missing_ok=True)
            world.disturb("torn journal")

    def _allocation_ends(self, life: Life) -> None:
        """As a batch system ends it: whatever lives is killed."""
        if life.process.poll() is not None:
            return
        life.killed = True
        life.late = self.world.page()["run"]["state"] not in ("FINISHED", "STOPPED")
        self.world.note(f"the allocation ends, and it has not {'saved all' if life.late else 'left'}")
        for one in self.world.processes():
            one.kill()
        life.process.wait()
        life.walltime_over = True

    def _stands(self) -> str:
        page = self.world.page()
        told = ", ".join(
            f"{j['name']} {j['state']} ({j.get('detail') or j.get('reason')})" for j in page["jobs"]
        )
        last = self.world.lives[-1]
        code = last.process.poll()
        return (
            f"run {page['run']['state']}, life {len(self.world.lives)} ({code}): {told}; {last.said[-300:]}"
        )

    # --- faults -------------------------------------------------------------------------------------

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

    def _again_soon(self, fault: Fault) -> None:
        """What is to be struck is not there yet: it is looked for again, for some time."""
        if self.world.now < fault.at + SOUGHT_S:
            self._due.insert(0, (self.world.now + 2 * PERIOD_S, -1, fault))
            self._due.sort(key=lambda due: due[:2])

    def kill_worker(self, fault: Fault) -> None:
        found = self.world.worker(fault.args[0])
        if not found:
            self._again_soon(fault)
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
            self._again_soon(fault)

    def kill_node_agent(self, fault: Fault) -> None:
        self._kill(self._node_agent(fault.args[0]), "kill node agent")

    def _node_agent(self, host: str) -> list[Process]:
        found = self.world.processes("node agent")
        return [one for one in found if one.words[-2:-1] == (host,) or one.words[-1:] == (host,)]

    def stop_agent(self, fault: Fault) -> None:
        self._stop(self.world.agents(), "stop agent", fault.args[0])

    def stop_worker(self, fault: Fault) -> None:
        found = self.world.worker(fault.args[0])
        self._stop(found, "stop worker", fault.args[1])
        if not found:
            self._again_soon(fault)

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

    def suspend_and_kill(self, fault: Fault) -> None:
        name, pause = fault.args
        if self._ask("suspend", name):
            time.sleep(pause)
            self.kill_agent(fault)
            self._later(0.0, lambda: self._again("resume", name))

    def suspend_and_resume(self, fault: Fault) -> None:
        self._pair("suspend", "resume", *fault.args)

    def hold_and_release(self, fault: Fault) -> None:
        self._pair("hold", "release", *fault.args)

    def _pair(self, one: str, other: str, name: str, seconds: float) -> None:
        if self._ask(one, name):
            self._later(seconds, lambda: self._again(other, name))

    def _ask(self, verb: str, name: str) -> bool:
        done = self.world.command(verb, name)
        waits = "the command waits" in done.said  # nobody has answered, and it counts all the same
        self.world.struck[verb] += done.code == 0 or waits
        return done.code == 0 or waits

    def _again(self, verb: str, name: str) -> None:
        """What has been taken back has to be: where no agent takes it, it waits for the next one."""
        if not self._ask(verb, name) and self.world.page()["run"]["state"] != "FINISHED":
            self._count += 1
            if self._count < 200:
                self._later(0.5, lambda: self._again(verb, name) if not self._is_over(name) else None)

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
        if self.world.lives[-1].process.poll() is not None or not self.world.bench.rundir.begun:
            return
        mine = self.world.lives[-1].process
        done = self.world.command(*self.world.words(resume=True), real=True, timeout_s=PATIENCE_S)
        self.world.struck["second agent"] += 1
        deadline = time.monotonic() + LINGERS_S
        while done.code != 2 and mine.poll() is None:
            if time.monotonic() > deadline:  # else the run was over, or left: another agent may have it
                self.world.wrong.append(f"a second agent was let in: {done.code}, {done.said[-200:]}")
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
        self.world.shim.rules(rule)
        what = os.strerror(rule.error) if rule.error else "slow fsync"
        self.world.disturb(f"{what} for {'agents' if rule.who == 1 else 'jobs' if rule.who == 2 else 'all'}")
        self._mend(fault.args[1], self._heal_disk)

    def _heal_disk(self) -> None:
        if self.world.shim:
            self.world.shim.rules()
            self.world.disturbed.append((time.monotonic(), "healed"))
            self.world.note("the disk is well again")

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


PLAYED: dict[str, Callable[[Player, Fault], None]] = {
    "kill agent": Player.kill_agent,
    "kill agent and worker": Player.kill_both,
    "kill worker": Player.kill_worker,
    "kill zygote": Player.kill_role,
    "kill keeper": Player.kill_role,
    "kill node agent": Player.kill_node_agent,
    "stop agent": Player.stop_agent,
    "stop worker": Player.stop_worker,
    "stop node agent": Player.stop_node_agent,
    "SIGTERM": Player.sigterm,
    "torn journal": Player.torn,
    "power loss": Player.power_loss,
    "suspend, then kill": Player.suspend_and_kill,
    "suspend and resume": Player.suspend_and_resume,
    "hold and release": Player.hold_and_release,
    "cancel": Player.cancel,
    "submit": Player.submit,
    "second agent": Player.second_agent,
    "no snapshot": Player.no_snapshot,
    "noise in the inbox": Player.noise,
    "clock": Player.clock,
    "disk": Player.disk,
    "slow disk": Player.disk,
    "stale": Player.disk,
    "batch": Player.batch,
    "cut": Player.network,
    "thin": Player.network,
    "many pids": Player.many_pids,
}
