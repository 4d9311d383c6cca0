"""Plays a schedule: a run as a user starts it, what goes wrong, and `run --resume` until it is over."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Sequence
from heapq import heappop

from hpcsched.patience import PASSING
from hpcsched.policy import make_policy
from hpcsched.store.replay import replay

from .faults import PATIENCE_S, PERIOD_S, Faults
from .world import Life, shown

MOST_LIVES = 25
MOST_ENDS = 3
"""How many allocations end while there is work left."""


FOLLOWED_S = 30.0
"""How long another agent may take to follow one that has died."""

SHORTENED_S = 4.0
"""When the end of an allocation comes near, where it does: so long after a life began."""

STOPPING = ("SIGTERM", "kill node agent", "stop node agent", "network ", " for ")
"""What may have an agent stop with work left: a wish, hosts that are lost, and disks (" for jobs")."""

FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Of these, what no patience helps against."""

COMES_OF_IT_S = 12.0
"""For how long before a life what went wrong may still be why it stops: no host may be left, or no disk."""

INVITED_AGAIN_S = 3.0
"""How long after a guest has gone in the middle of a life it comes again."""

LEAVES_WITHIN_S = 30.0
"""How long a guest may take to see that the run is over."""


class Player(Faults):
    """Plays the schedule of a world."""

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
            self._see_to_guest()
            if life.process.poll() is None:
                continue
            self._ended(life)
            if world.guest:
                self._led_by_another()
            if life.walltime and not self._over(life):
                world.note(f"life {len(world.lives)} ended with {life.process.returncode}")
            if self._over(life) and self._settled():
                self._see_guest_off()
                return
            if not world.bench.rundir.record.exists() and life.process.returncode == 2:
                world.wrong.append("not over: it has not begun")
                return
            if len(world.lives) > MOST_LIVES:
                world.wrong.append(f"not over after {MOST_LIVES} lives: {self._stands()}")
                return
            self._between_lives()
            life = world.start(*world.words(resume=True))
            self._see_to_guest()
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
            self._see_to_guest()
            world.look()
            self._faults()
            time.sleep(PERIOD_S)

    def _ended(self, life: Life) -> None:
        life.over = time.monotonic()
        code, world = life.process.returncode, self.world
        world.note(f"life {len(world.lives)} ended with {code}: {life.said.strip()[-160:]}")
        world.wrong += shown(life, "an agent")
        refused = code == 2 and "not taken from what waited: refused" in life.said and self._noisy
        run, last = world.page()["run"], life.said.strip().rpartition("\n")[2]
        late = code == -signal.SIGTERM and run["state"] == "FINISHED"  # it was over already
        moved = life.forestalled or "the run goes on in other allocations" in life.said
        led = code == 2 and (world.guest is not None or moved) and "another agent" in life.said
        led_it = (run.get("agent") or {}).get("pid") == life.process.pid and run["state"] != "FINISHED"
        if code == 1 and led_it and any(os.strerror(number) in last for number in PASSING):
            world.wrong.append(f"a hiccup of the file system ended an agent: {last[:300]}")
        if life.killed or refused or late or led:
            return
        why = wrongly_ended(code, self._final_states(), may_stop=self._may_stop(life), moved=moved)
        if why:
            world.wrong.append(f"an agent ended with {code}, {why}: {life.said.strip()[-300:]}")

    def _final_states(self) -> list[str] | None:
        """The states of all jobs of a run that is over; None where work is left."""
        path = self.world.bench.rundir.journal
        run = replay(path, make_policy).machine.run if path.exists() else None
        if run is None or not run.finished:
            return None
        states = [str(job.state) for job in run.jobs.values()]
        some_are_enough = self.schedule.flavour == "tune" and "COMPLETED" in states
        return ["COMPLETED"] if some_are_enough else states

    def _may_stop(self, life: Life) -> bool:
        """Whether anything has had a life stop with work left."""
        since, until = life.began - COMES_OF_IT_S, life.over or time.monotonic()
        happened = [what for at, what in self.world.disturbed if since <= at <= until]
        return bool(life.walltime) or any(word in what for what in happened for word in STOPPING)

    # --- guests -------------------------------------------------------------------------------------

    def _see_to_guest(self) -> None:
        """A guest that has ended is told of, and comes again after some time."""
        world, guest = self.world, self.world.guest
        if guest is None or guest.process.poll() is None:
            return
        if guest.over is None:
            guest.over = time.monotonic()
            self._guest_ended(guest)
        elif time.monotonic() > guest.over + INVITED_AGAIN_S and world.page()["run"]["state"] == "RUNNING":
            world.invite()

    def _see_guest_off(self) -> None:
        """The run is over: so is its guest."""
        deadline, guest = time.monotonic() + LEAVES_WITHIN_S, self.world.guest
        while guest and guest.process.poll() is None and time.monotonic() < deadline:
            time.sleep(PERIOD_S)
        if guest and guest.over is None:
            guest.over = time.monotonic()
            self._guest_ended(guest)

    def _guest_ended(self, guest: Life) -> None:
        """A `hpcsched join` stays until the run is over, unless node agents are ended, or a disk is full."""
        code, world = guest.process.poll(), self.world
        world.note(f"guest {len(world.guests)} ended with {code}: {guest.said.strip()[-160:]}")
        world.wrong += shown(guest, "a guest")
        since, until = guest.began - COMES_OF_IT_S, guest.over or 0.0
        happened = [what for at, what in world.disturbed if since <= at <= until]
        joined = "starts node agents" in guest.said  # it waits until a hiccup is over
        excused = any(what.startswith(FULL) or "node agent" in what for what in happened)
        excused |= not joined and any(" for " in what for what in happened)
        over = world.page()["run"]["state"] == "FINISHED"
        if not (excused or (code == 0 and over)):
            world.wrong.append(f"a guest ended with {code}: {guest.said.strip()[-300:]}")

    @property
    def _noisy(self) -> bool:
        return self.world.struck["noise in the inbox"] > 0

    def _over(self, life: Life) -> bool:
        inbox = self.world.bench.dir / "inbox" / "new"
        waits = inbox.is_dir() and any(inbox.iterdir())
        run = self.world.page()["run"]
        by_it = life.process.pid == (run.get("agent") or {}).get("pid")
        finished = run["state"] == "FINISHED" and (by_it or self.world.guest or self.world.place.prefix)
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
        """The agent has died while it wrote its next record: a part of one follows the last."""
        world, path = self.world, self.world.bench.rundir.journal
        with contextlib.suppress(OSError):
            last = path.read_bytes().splitlines()[-1:]
            with path.open("ab") as file:
                file.writelines(line[: int(part * len(line))] for line in last)
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


def wrongly_ended(code: int, states: Sequence[str] | None, *, may_stop: bool, moved: bool) -> str:
    """What an exit code that nobody has forced says that is not so; empty if it is right.

    `states`: those of all jobs after it, where the run is over; None: work is left. `moved`: another agent
    leads the run since.
    """
    failed = states is not None and any(state not in ("COMPLETED", "CANCELLED") for state in states)
    match code:
        case 0 if states is None and not moved:
            return "and work is left"
        case 0 if failed:
            return "and jobs have failed"
        case 1 if states is None and not may_stop:
            return "and nothing has gone wrong that may end it"
        case 1 if states is not None and not failed:
            return "and no job has failed"
        case 75 if states is not None and not moved:
            return "and no work is left"
        case 75 if not (may_stop or moved):
            return "and nobody has asked it to stop"
        case 0 | 1 | 75:
            return ""
    return "which says nothing of its jobs"
