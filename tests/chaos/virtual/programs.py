"""Programs of jobs that speak the contract, on the virtual clock; their ledger says what they have done."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from signal import Signals

from hpcsched.contract import files, orders, variables
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.progress import Line
from hpcsched.contract.state import State
from hpcsched.contract.words import Held, Ready
from hpcsched.launch.base import LaunchPlan, attempt_code

from .clock import VirtualClock
from .schedule import Habits

FIRST_PID = 2**22 + 1
"""Beyond the kernel's largest: a pid that leaks harms nobody."""
TELLS_EVERY_S = 1.0


@dataclass
class Trained:
    """What one process group has trained, as it knows itself: the steps after `begin` up to `end`.

    `saved`: the step of the newest state on disk; `held`: of the one in memory that it has begun with;
    `told`: that it has told last, and when. `in_memory`: it has left its state in memory alone.
    """

    job: str
    attempt: int
    began: float
    begin: int
    end: int
    ended: float | None = None
    saved: int = 0
    held: int = 0
    told: int = 0
    told_at: float = 0.0
    in_memory: bool = False


@dataclass
class Ledger:
    """What all programs have done, and with which states their jobs have gone on; all by job."""

    _trained: dict[str, list[Trained]] = field(default_factory=dict)
    launched: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """When processes were started."""

    finished: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """When its program has come to its end."""

    failures: Counter[str] = field(default_factory=Counter)
    """How often its program has failed, or somebody else than the agent has killed some of it."""

    left_in_vain: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The attempts that have left unsaved as the agent has told them to, or that it has killed."""

    def add(self, account: Trained) -> None:
        self._trained.setdefault(account.job, []).append(account)

    def of(self, job: str) -> Sequence[Trained]:
        return self._trained.get(job, ())


class SharedMemory:
    """States that quick suspends have left in the agent's shared memory; they are gone when it dies.

    A keeper brings each to disk after a while.
    """

    def __init__(self, clock: VirtualClock, ledger: Ledger) -> None:
        self._clock, self._ledger = clock, ledger
        self._held: dict[int, State] = {}
        self._keeps: dict[int, tuple[State, Path]] = {}

    def hold(self, job: str, job_id: int, folder: Path, state: State, seconds: float) -> None:
        """Hold a state, which is on disk in so many seconds."""
        held = folder / files.held(state.attempt or 0)
        if job_id in self._keeps:
            self._keeps[job_id][1].unlink(missing_ok=True)
        self._held[job_id], self._keeps[job_id] = state, (state, held)

        def kept() -> None:
            if self._keeps.get(job_id) != (state, held):
                return
            del self._keeps[job_id]
            newer = recorded(folder)
            if newer is None or newer.step < state.step:
                write(folder, files.STATE, state.encode())
                last = self._ledger.of(job)[-1]
                last.saved = max(last.saved, state.step)
            held.unlink(missing_ok=True)

        self._clock.after(seconds, kept)

    def step(self, job_id: int) -> int:
        """The step of the state that is held; 0 for none."""
        return self._held[job_id].step if job_id in self._held else 0

    def keeping(self) -> set[int]:
        """The jobs whose states are not on disk yet."""
        return set(self._keeps)

    def forget(self, job_id: int) -> None:
        """The job needs none any more; who is bringing it to disk goes on with that."""
        self._held.pop(job_id, None)

    def lost(self) -> None:
        """The agent has died."""
        self._held.clear()
        self._keeps.clear()


def recorded(folder: Path) -> State | None:
    """What a job's program has said last of its checkpoints."""
    try:
        return State.decode((folder / files.STATE).read_bytes())
    except OSError:
        return None


def write(folder: Path, name: str, data: bytes) -> None:
    """Put a file into a job's folder, whole or not at all."""
    if folder.is_dir():
        path = folder / f".{name}.program.tmp"
        path.write_bytes(data)
        path.replace(folder / name)


class Program:
    """The ranks of one launch: `Workers` for the agent, and a training that goes on without it."""

    def __init__(
        self,
        plan: LaunchPlan,
        pids: Sequence[int],
        habits: Habits,
        clock: VirtualClock,
        ledger: Ledger,
        others: Callable[[], list[Program]],
        memory: SharedMemory,
    ) -> None:
        self._plan, self._habits, self._clock, self._ledger = plan, habits, clock, ledger
        self._others, self._memory, self._quick = others, memory, False
        self.job, self.attempt = plan.env[variables.JOB_NAME], plan.attempt
        self.job_id, self.folder = plan.job_id, plan.folder
        self.joins = plan.joins is not None
        self.processes = tuple((pid, pid - FIRST_PID + 1000) for pid in pids)
        self.pidfds = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in pids)
        self.progress_fd: int | None
        self.progress_fd, self._pipe = os.pipe()
        os.set_blocking(self.progress_fd, False)
        os.set_blocking(self._pipe, False)
        self.where = plan.joins or "127.0.0.1:29500"
        self.ready = self.refused = self.held = self.record = None
        self.told_after_s, self.oom, self.over_limit = 0.0, "", False
        self.saved_by: tuple[int, str] | None = None
        self._codes: dict[int, int] = {}
        self._closed = False
        self._leaving = False
        self.ranks = len(pids)
        self._steps = int(plan.env[variables.STEPS])
        self._trains_since: float | None = None
        self._from = 0
        self._generation = 0
        self.joined: list[Program] = []
        """The groups that have joined these."""
        self.account: Trained | None = None
        if not self.joins:
            clock.after(habits.start_s, self._begin)

    # --- what it does -----------------------------------------------------------------------

    @property
    def living(self) -> int:
        return len(self.processes) - len(self._codes)

    @property
    def alive(self) -> bool:
        return self.living > 0

    @property
    def over(self) -> bool:
        """Nobody will ask for it any more."""
        return self._closed and not self.alive

    @property
    def step(self) -> int:
        """Steps done until now."""
        if self._trains_since is None:
            return self._from
        trained_s = self._clock.monotonic - self._trains_since
        done = self._from + floor(trained_s * self._habits.rate * self.ranks + 1e-9)
        return min(done, self._steps, self._fails_at or self._steps)

    @property
    def _fails_at(self) -> int | None:
        at = self._habits.fails_at
        failed = sum(1 for one in self._ledger.of(self.job) if one.end == at and one is not self.account)
        return at if at is not None and at > self._from and failed < self._habits.times else None

    def _begin(self) -> None:
        if not self.alive or self._leaving:
            return
        if self._plan.env.get(variables.RESUME) == "1":
            self._from = self._saved_step()
        elif (state := recorded(self.folder)) is not None:
            raise AssertionError(f"job {self.job}: attempt {self.attempt} starts anew beside {state}")
        self._trains()
        if self._habits.back_s is not None:
            self._in(self._habits.back_s, self._goes_back)

    def _trains(self) -> None:
        on_disk = state.step if (state := recorded(self.folder)) else 0
        held = max(self._from, self._memory.step(self.job_id))
        now, begin = self._clock.monotonic, self._from
        self.account = Trained(self.job, self.attempt, now, begin, begin, saved=on_disk, held=held)
        self._ledger.add(self.account)
        self._goes_on(Ready(in_place=self._habits.in_place, parallel=True))

    def _goes_back(self) -> None:
        """What trains is killed, and another one goes on from the newest checkpoint."""
        if self._leaving:
            return
        self._stops()
        self._from = state.step if (state := recorded(self.folder)) else 0
        with suppress(OSError):
            os.write(self._pipe, Line(step=self._from, t=self._clock.wall, resumed=True).encode())
        self._trains()

    def _saved_step(self) -> int:
        state = recorded(self.folder)
        return max(state.step if state else 0, self._memory.step(self.job_id))

    def _goes_on(self, word: Ready) -> None:
        """Train with the ranks that there are now, and say so."""
        self._trains_since = self._clock.monotonic
        self._generation += 1
        self._write(files.ready(self.attempt), word.encode())
        self._tell(self._generation)
        end = self._fails_at or self._steps
        self._in((end - self._from) / (self._habits.rate * self.ranks), self._ends)
        self._in(self._habits.save_every_s, self._saves)

    def _in(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something in so many seconds, if it still trains with the same ranks."""
        generation = self._generation

        def then() -> None:
            if self.alive and generation == self._generation and self._trains_since is not None:
                what()

        self._clock.after(seconds, then)

    @property
    def would_save(self) -> bool:
        """It saves when it is asked to, and has been at it for long enough to do so."""
        return not self._habits.deaf and self._habits.saves and self.account is not None

    def agent_is_gone(self) -> None:
        """Nobody would keep what is left in shared memory."""
        self._quick = False

    def stood_still(self, seconds: float) -> None:
        """It was stopped for so long."""
        if self._trains_since is not None:
            self._trains_since += seconds

    def _tell(self, generation: int) -> None:
        if not self.alive or generation != self._generation or self._trains_since is None:
            return
        if not self._closed:
            with suppress(OSError):
                os.write(self._pipe, Line(step=self.step, t=self._clock.wall, total=self._steps).encode())
                if self.account:
                    self.account.told, self.account.told_at = self.step, self._clock.monotonic
        self._clock.after(TELLS_EVERY_S, lambda: self._tell(generation))

    def _saves(self) -> None:
        self._save()
        self._in(self._habits.save_every_s, self._saves)

    def _save(self) -> None:
        step = self.step
        self._write(files.STATE, State(step=step, samples=step, attempt=self.attempt).encode())
        if self.account:
            self.account.saved = self.account.end = step

    def _write(self, name: str, data: bytes) -> None:
        write(self.folder, name, data)

    def _ends(self) -> None:
        if self.step == self._steps:
            self._save()
            self._ledger.finished[self.job].append(self._clock.monotonic)
            self._leave(0)
        else:
            self._ledger.failures[self.job] += 1
            self._leave(1)

    def _stops(self) -> None:
        """No step is done any more by these ranks."""
        if self.account:
            self.account.end, self.account.ended = self.step, self._clock.monotonic
            self.account = None
        self._trains_since = None
        self._generation += 1

    def _leave(self, code: int) -> None:
        """All ranks end, also those that have joined."""
        self._stops()
        for group in (self, *self.joined):
            for rank in range(len(group.processes)):
                group.end(rank, code)

    def end(self, rank: int, code: int) -> None:
        """A rank's process ends."""
        if rank not in self._codes:
            self._codes[rank] = code
            if not self._closed:
                os.eventfd_write(self.pidfds[rank], 1)

    def killed(self) -> None:
        """These processes are gone at once; those that train with them wait for them for ever."""
        self._lose(range(len(self.processes)))

    def loses(self, rank: int) -> None:
        """A rank is killed by somebody else than the agent."""
        self._ledger.failures[self.job] += 1
        self._lose([rank])

    def _lose(self, ranks: Iterable[int]) -> None:
        for main in (self, *(one for one in self._others() if self in one.joined)):
            main._stops()
        for rank in ranks:
            self.end(rank, 128 + signal.SIGKILL)

    # --- what the agent asks ----------------------------------------------------------------

    def signal(self, sig: Signals) -> None:
        if not self.alive:
            return
        if sig is signal.SIGKILL:
            self._ledger.left_in_vain[self.job].add(self.attempt)
            self.killed()
        elif sig in (signal.SIGTSTP, signal.SIGTERM) and not self._habits.deaf and not self._leaving:
            self._leaving = True
            if self.account is not None:
                self._in(self._habits.suspend_s, self._saves_and_leaves)
            elif not any(self in one.joined and one.account for one in self._others()):
                self._leaves_unsaved(sig)  # else rank 0 tells them when

    def _leaves_unsaved(self, sig: Signals) -> None:
        self._ledger.left_in_vain[self.job].add(self.attempt)
        self._leave(128 + sig)

    def _saves_and_leaves(self) -> None:
        if self._quick and self._habits.keeps_s is not None:
            state = State(step=self.step, samples=self.step, attempt=self.attempt)
            self._write(files.held(self.attempt), Held(step=state.step).encode())
            self._memory.hold(self.job, self.job_id, self.folder, state, self._habits.keeps_s)
            if self.account:
                self.account.in_memory = True
            self._leave(SUSPENDED)
        elif self._habits.saves:
            self._save()
            self._leave(SUSPENDED)
        else:
            self._leaves_unsaved(signal.SIGTERM)

    def tell(self, order: orders.Order) -> None:
        if isinstance(order, orders.Suspend):
            self._quick = order.quick
        if isinstance(order, orders.Resize) and not self._leaving:
            self._in(0.2, lambda: self._resizes(order))

    def _resizes(self, order: orders.Resize) -> None:
        """Ranks come and go, and the training goes on where it was."""
        if self._leaving:
            return
        if not self._habits.in_place:
            self._write(files.refused(order.attempt), b"not me")
            return
        joining = [one for one in self._others() if one.joins and one.job == self.job and one.alive]
        if order.joining and not any(one.attempt == order.attempt for one in joining):
            return  # those who were to join are gone
        step, before = self.step, self.account
        saved, held = (before.saved, before.held) if before else (0, 0)
        self._stops()
        self.attempt, self._from = order.attempt, step
        now = self._clock.monotonic
        self.account = Trained(self.job, self.attempt, now, step, step, saved=saved, held=held)
        self._ledger.add(self.account)
        self.joined += [one for one in joining if one.attempt == order.attempt]
        places = [(group, rank) for group in (self, *self.joined) for rank in range(len(group.processes))]
        there = [(group, rank) for group, rank in places if rank not in group._codes]
        there, new = there[: self.ranks], there[self.ranks :]
        for number, (group, rank) in enumerate(there):
            if number not in order.keep:
                group.end(rank, 0)
        self.ranks = len(order.keep) + len(new)
        self._goes_on(Ready(in_place=True, parallel=True, step=step, stopped_s=0.1))

    def expect(self, attempt: int) -> None: ...

    def catches(self, sig: Signals) -> bool:
        return False

    def ask_to_save(self, sig: Signals) -> None:
        self.signal(sig)

    def save_by(self, command: Sequence[str], within_s: float) -> None: ...

    def failed_early(self) -> bool:
        return self.alive and any(code not in (0, SUSPENDED) for code in self._codes.values())

    def reap(self) -> int | None:
        return None if self.alive else attempt_code(list(self._codes.values()))

    def left(self) -> int:
        return 0

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for fd in (*self.pidfds, self._pipe, *([self.progress_fd] if self.progress_fd else [])):
                os.close(fd)
            self.pidfds, self.progress_fd = (), None
