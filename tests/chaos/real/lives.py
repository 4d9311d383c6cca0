"""Plays a schedule: a run as a user starts it, what goes wrong, and `run --resume` until it is over."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from heapq import heappop

from hpcsched.patience import PASSING

from .faults import PATIENCE_S, PERIOD_S, Faults
from .world import Life

MOST_LIVES = 25
MOST_ENDS = 3
"""How many allocations end while there is work left."""


FOLLOWED_S = 30.0
"""How long another agent may take to follow one that has died."""

SHORTENED_S = 4.0
"""When the end of an allocation comes near, where it does: so long after a life began."""

CODES = (0, 1, 75)
"""Exit codes of a run that nobody has killed."""


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
        other = world.guest is not None or life.forestalled
        led = code == 2 and other and "another agent" in life.said
        run, last = world.page()["run"], life.said.strip().rpartition("\n")[2]
        led_it = (run.get("agent") or {}).get("pid") == life.process.pid and run["state"] != "FINISHED"
        if code == 1 and led_it and any(os.strerror(number) in last for number in PASSING):
            world.wrong.append(f"a hiccup of the file system ended an agent: {last[:300]}")
        if code not in CODES and not life.killed and not refused and not late and not led:
            world.wrong.append(f"an agent ended with {code}: {life.said.strip()[-300:]}")

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
