"""Workers on this host from their start to their end: signals, orders, exit codes, processes left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from signal import Signals

from hpcsched.contract import files, variables
from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.contract.exits import SUSPENDED
from hpcsched.contract.orders import Order, encode
from hpcsched.contract.words import Stop
from hpcsched.core.processes import KnownLauncher, launcher_of
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput
from hpcsched.launch import caught
from hpcsched.launch.base import LOST, LaunchPlan, RankPlacement, attempt_code
from hpcsched.launch.orphans import Process
from hpcsched.launch.proc import group_exists, living, signal_followers, start_ticks
from hpcsched.launch.saved_outside import SaveCommand
from hpcsched.launch.spawn import lift_idle_priority
from hpcsched.patience import patiently

LEAVE_SIGNALS = (signal.SIGTSTP, signal.SIGTERM)
"""The signals that ask a program to save and leave."""

KILLED_WITHIN_S = 5.0
"""Time that a launch that failed half-way waits for the ranks that it killed (chosen)."""

RANK_0_FDS = (variables.PROGRESS_FD, variables.CONTROL_FD)
"""The variables that give rank 0 its ends of the pipes."""


class LocalWorkers:
    """The child processes of one attempt, by rank. Those that have ended stay zombies until all have, so that
    every pid and process group remains theirs as long as it may be signalled."""

    def __init__(
        self,
        plan: LaunchPlan | None = None,
        placement: RankPlacement | None = None,
        free_port: Callable[[], int] = lambda: 0,
    ) -> None:
        placement = placement or RankPlacement()
        self.processes: tuple[tuple[int, int], ...] = ()
        self.pidfds: tuple[int, ...] = ()
        self.progress_fd: int | None = None
        self.ready: bytes | None = None
        self.refused: bytes | None = None
        self.record: bytes | None = None
        self.held: bytes | None = None
        self.told_after_s = 0.0
        self.address = placement.address
        """The host of the ranks' rendezvous."""
        self._port, self._free_port = placement.port, free_port
        self.oom, self.over_limit = "", False
        self.on_failed: Callable[[bool], tuple[str, bool]] = lambda killed: ("", False)
        """Called when a rank has failed, with whether by a SIGKILL that is not ours: how memory ran out ("":
        it did not), and whether that was the job's own limit."""
        self.on_held: Callable[[int], object] | None = None
        """Called, once all have ended, with the attempt that has left its state in shared memory."""
        self.before_leaving: list[Callable[[], object]] = []
        """Called when they are about to be asked to save and leave, and when they have all ended."""
        self.kill_left: list[Callable[[], list[tuple[int, int]]]] = []
        """Called once all have ended, unless they are done (0, and not asked to leave): kill what they left
        in other sessions, and return that."""
        self.at_end: list[Callable[[], object]] = []
        """Called once, when all have ended."""
        self.leaders_pass_signals = True
        """Whether the ranks' leaders live on when they get a signal; else only what they started gets it."""
        self.kill: Callable[[Collection[int], Collection[int]], object] | None = None
        """Sends SIGKILL, soon, to leaders that have to be prepared for it: by their pids and pidfds."""
        if plan and plan.joins:
            self.address, _, port = plan.joins.rpartition(":")
            self._port = int(port)
        self.environ: Mapping[str, str] = {}
        """The environment that they were started with."""
        self._cwd = str(plan.cwd) if plan else "/"
        self._saves: SaveCommand | None = None
        self._folder = plan.folder if plan else None
        self._idle = plan is not None and plan.idle
        self._mpi = plan is not None and launcher_of(plan.argv) is KnownLauncher.MPIRUN
        self._attempts = [plan.attempt] if plan else []  # newest last
        self._control: int | None = None
        self._theirs: list[int] = []
        self._permits: list[int] = []
        self._catchers: list[Process] = []
        """Who caught the signal that asks to save when that was last seen."""
        self._running: dict[int, None] = {}  # by rank
        self._ended: list[int] = []  # exit codes in order of time
        self._ours: set[int] = set()  # leaders not reaped: nobody else can have their pids
        self._code: int | None = None
        self._killing = self._asked = self._unanswered = False
        self._killed: list[tuple[int, int]] = []
        """Processes outside of the ranks' groups that were killed when all had ended."""

    @property
    def port(self) -> int:
        """The port of the ranks' rendezvous: the placement's, or a free one, looked for when it is asked for
        first. Most programs need none."""
        if self._port is None:
            self._port = self._free_port()
        return self._port

    @property
    def where(self) -> str:
        """The rendezvous of the ranks, "host:port"."""
        return f"{self.address}:{self.port}"

    @property
    def living(self) -> int:
        """The number of processes that live."""
        self._look()
        return len(self._running)

    @property
    def ended(self) -> list[int]:
        """Which ranks have ended, the first of this host being 0."""
        return [rank for rank, (pid, _) in enumerate(self.processes) if pid not in self._running]

    # -- being started -------------------------------------------------------------------------------

    def pipes(self, *, control: bool) -> dict[str, int]:
        """Make the pipes of rank 0; returns its ends by variable, to be closed by `close_theirs`."""
        self.progress_fd, progress = os.pipe()
        os.set_blocking(self.progress_fd, False)
        self._theirs.append(progress)
        if not control:
            return dict(zip(RANK_0_FDS, self._theirs, strict=False))
        orders, self._control = os.pipe()
        os.set_blocking(self._control, False)
        self._theirs.append(orders)
        return dict(zip(RANK_0_FDS, self._theirs, strict=True))

    def close_theirs(self) -> None:
        """Close our copies of rank 0's ends, so that the pipes end with the programs that have them."""
        for descriptor in self._theirs:
            os.close(descriptor)
        self._theirs.clear()

    def add(self, pid: int, permit: int | None = None, *, began: Callable[[int], int] = start_ticks) -> None:
        """Add a child, the next rank. `permit`: a descriptor on which it awaits a byte before it begins.
        `began`: says of a pid when it began, see `start_ticks`."""
        if permit is not None:
            self._permits.append(permit)
        self._running[pid] = None
        self._ours.add(pid)
        self.pidfds += (os.pidfd_open(pid),)
        self.processes += ((pid, began(pid)),)

    def go(self) -> None:
        """Let the children that wait for a permit begin."""
        for permit in self._permits:
            with contextlib.suppress(OSError):  # it has been killed meanwhile
                os.write(permit, b".")
        self._close_permits()

    def abandon(self) -> None:
        """End a launch that failed half-way: kill what was started, wait for it, close everything."""
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + KILLED_WITHIN_S
        while self.reap() is None and time.monotonic() < deadline:
            time.sleep(0.001)  # not by pidfd: having none left may be why we are here
        self.close()

    # -- running -------------------------------------------------------------------------------------

    def signal(self, sig: signal.Signals) -> None:
        """Send `sig` to each rank's process group whose leader is still our unreaped child.

        The order to save and leave is put into the job's folder too: behind a launcher that has started ranks
        in sessions of their own, no rank hears the signal. An mpirun gets no SIGTSTP at all: Open MPI's would
        stop its ranks (SIGSTOP), and they could not save.
        """
        self._look()
        leaving = sig in LEAVE_SIGNALS
        self._asked |= leaving
        self._killing |= sig is signal.SIGKILL
        for call in self.before_leaving if leaving else ():
            call()
        # To die takes processor time, too.
        for pid in self._ours if self._idle and (leaving or sig is signal.SIGKILL) else ():
            lift_idle_priority(pid)
        if sig is signal.SIGKILL and self.kill is not None and self._ours:
            self.kill(self._ours, self.pidfds)
            return
        for pid in self._ours:
            if self._mpi and sig is signal.SIGTSTP:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self.leaders_pass_signals or sig is signal.SIGKILL:
                    os.killpg(pid, sig)
                else:
                    signal_followers(pid, sig)
        if leaving and self._ours:
            self._write_stop(sig.name)

    def catches(self, sig: Signals) -> bool:
        """Whether a program of them catches `sig`, as far as could be seen last. Any thread may ask."""
        with contextlib.suppress(OSError):
            self._catchers = caught.catchers(self.processes, sig)
        return bool(self._catchers)

    def ask_to_save(self, sig: Signals) -> None:
        """Send `sig` to those programs that catch it; if none does, SIGTERM to all."""
        self._look()
        self._asked = True
        ours = [process for process in self.processes if process[0] in self._ours]
        try:
            # Twice: to be wrong here costs all that it has not saved.
            told = caught.catchers(ours, sig) or caught.catchers(ours, sig)
        except OSError:
            told = self._catchers if ours else []
        if not told:
            self.signal(signal.SIGTERM)
            return
        for call in self.before_leaving:
            call()
        for pid in self._ours if self._idle else ():
            lift_idle_priority(pid)
        caught.send(told, sig)
        self._write_stop(sig.name)

    def save_by(self, command: Sequence[str], within_s: float) -> None:
        """Run a command that saves them from outside: `saved_by` has what came of it, once it is over."""
        self._look()
        if self._saves is None and self.processes and self._running:
            self._asked = True
            for call in self.before_leaving:
                call()
            self._saves = SaveCommand(command, self.processes[0][0], self.environ, self._cwd, within_s)

    @property
    def saving(self) -> bool:
        """Whether the command of `save_by` is not over yet."""
        return self._saves is not None and self._saves.result is None

    @property
    def saved_by(self) -> tuple[int, str] | None:
        """Exit code and last words of the command of `save_by`; None: there is none, or it is not over."""
        return self._saves.result if self._saves else None

    def remove_attempt_files(self) -> None:
        """Remove the stop and left files of this attempt's number, before it starts. Raises OSError."""
        for name in (files.stop, files.left) if self._folder else ():
            assert self._folder
            (self._folder / name(self._attempts[0])).unlink(missing_ok=True)

    def _write_stop(self, name: str) -> None:
        """Write the stop files, of the attempt that they were started as and of the one that they may be now.

        Each host writes them for itself, as it may see another's only after a while. A failure does not
        matter: the signal has been sent.
        """
        for attempt in {self._attempts[0], self._attempts[-1]} if self._folder else ():
            with contextlib.suppress(OSError):
                assert self._folder
                stop = files.stop(attempt)
                temporary = self._folder / files.temporary(stop, socket.gethostname(), os.getpid())
                try:
                    temporary.write_bytes(Stop(name).encode())
                    temporary.replace(self._folder / stop)
                except OSError:
                    temporary.unlink(missing_ok=True)
                    raise

    def _has_left(self) -> bool:
        """Whether rank 0 has made its left file (the attempt is saved): a launcher's exit code is its own."""
        if self._folder is None or self._unanswered:
            return False
        try:
            return patiently((self._folder / files.left(self._attempts[0])).exists)
        except OSError:
            self._unanswered = True
            return False

    def tell(self, order: Order) -> None:
        """Give rank 0 an order; it is lost if rank 0 is gone, or does not read."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                os.write(self._control, encode(order))

    def expect(self, attempt: int) -> None:
        """Read the files of `attempt` from now on too."""
        self._attempts.append(attempt)

    def failed_early(self) -> bool:
        """Whether a rank has ended with other than 0 or 75 while others live."""
        self._look()
        return bool(self._running) and any(code not in (0, SUSPENDED) for code in self._ended)

    def reap(self) -> int | None:
        """The attempt's exit code, once no process of its groups is left; None while a rank lives."""
        self._look()
        if self._running:
            return None
        if self._code is None:
            for call in self.before_leaving:
                call()
            for pid in self._ours:  # the leader, and what of its group has become ours (see `warm`)
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-pid, os.WNOHANG)[0]:
                        pass
            self._ours.clear()
            self._code = attempt_code(self._ended)
            if (self._code or self._asked) and not self.saving:  # a command that saves it is marked as it is
                for kill in self.kill_left:
                    self._killed += kill()
            if self._code == SUSPENDED:  # its keeper is marked, too
                self._find_held()
            elif self.on_held and self._folder:
                self._forget_held(self._folder)
            for call in self.at_end:
                call()
        return self._code

    def left(self) -> int:
        """How many processes have not ended yet that were killed as their rank had. Any thread may ask."""
        groups = [self.processes[rank][0] for rank in self.ended]
        return living({group for group in groups if group_exists(group)}, self._killed)

    def close(self) -> None:
        """Close the descriptors; ends no process."""
        self.close_theirs()
        self._close_permits()
        for fd in (*self.pidfds, self.progress_fd, self._control):
            if fd is not None:
                os.close(fd)
        self.pidfds, self.progress_fd, self._control = (), None, None

    def _close_permits(self) -> None:
        for permit in self._permits:
            os.close(permit)
        self._permits.clear()

    def _find_held(self) -> None:
        for attempt in reversed(self._attempts):
            with contextlib.suppress(OSError, BadInput):
                held = self._folder / files.held(attempt) if self._folder else None
                self.held = patiently(partial(read_file, held, most_bytes=SMALL_BYTES)) if held else None
                self._have_it_kept(attempt)
                return

    def _have_it_kept(self, attempt: int) -> None:
        try:
            if self.on_held:
                self.on_held(attempt)
        except OSError:  # without a descriptor for its memory nobody can
            self.held = None
            if self._folder:
                self._forget_held(self._folder)

    def _forget_held(self, folder: Path) -> None:
        """What one has said that was killed as it left: nobody keeps its state, none may wait for that."""
        for attempt in self._attempts:
            with contextlib.suppress(OSError):
                (folder / files.held(attempt)).unlink(missing_ok=True)

    def _look(self) -> None:
        """Note the ranks that have ended, without reaping them, and kill what they have left behind.

        Other ranks may live on for long, while the devices of one that left go to another job soon.
        """
        for pid in list(self._running):
            try:
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._ours.discard(pid)
                code = LOST
            else:
                if found is None:
                    continue
                code = found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
                code = SUSPENDED if self._has_left() else code
                if code not in (0, SUSPENDED) and not self.oom:
                    by_others = code == 128 + signal.SIGKILL and not self._killing
                    self.oom, self.over_limit = self.on_failed(by_others)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            del self._running[pid]
            self._ended.append(code)
