"""The process of a pack: all trainings of one device that are packed are members here.

Each belongs to a job whose own process (`guest`) is at the other end of a line. Nothing of one member reaches
another but the time that its steps take: not its random numbers, not its errors, not its end. When the last
one has left, the process waits a while for the next and goes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from hpcsched.contract import exits
from hpcsched.errors import ConfigError
from hpcsched.worker.background.output import divide_output
from hpcsched.worker.load import load_trainer
from hpcsched.worker.packing.engine import Pack
from hpcsched.worker.packing.environment import common
from hpcsched.worker.packing.failures import Failed, OutOfMemory, out_of_memory
from hpcsched.worker.packing.host.connections import Connections
from hpcsched.worker.packing.host.guests import NOTHING, Load, PackGuest, Word
from hpcsched.worker.packing.host.session import LOOK_S
from hpcsched.worker.packing.member import Member
from hpcsched.worker.process.contract import say
from hpcsched.worker.process.guest import GuestGone
from hpcsched.worker.process.startup import fewer_collections, leave_torch_as_it_is
from hpcsched.worker.ranks.process_group import own_device

_PADDING = 0.01
"""What is said of rows that are filled up, from this part of the work on."""
LINGER_S = 3.0
"""How long to wait for the next member: what comes right after finds everything warm."""
REPORT_S = 0.1
"""How often members tell how far they are."""
GATHER_S = 0.1
"""How long newcomers wait for more who come with them: together, they read their samples once."""
GATHER_MOST_S = 2.0
"""How long they do so at most, when one comes after the other."""
IDLE_S = 0.2
DEVICE_FAILED = 1
_TOLD_TO_END = "the process of its pack was told to end"

End = Callable[[], Word]
"""The last thing that is done for a guest which is out of the pack; gives what its own process is told."""


def serve(listener: socket.socket) -> int:
    """Be the process of a pack; returns its exit code."""
    environ = common(os.environ)
    divide_output()
    with fewer_collections():
        leave_torch_as_it_is()
    gc.collect()
    gc.freeze()  # what is collected each time a member leaves is to be what members are made of
    host = PackHost(Connections(listener, environ), load=load_trainer)
    signal.signal(signal.SIGTERM, lambda number, frame: host.end())
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    say(f"process {os.getpid()} is here for a pack")
    host.run()
    _end_children()
    return 0


def _end_children() -> None:
    """What members have started and left behind ends with the last of them."""
    if os.getpgid(0) == os.getpid():  # nobody else is in this group
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


class PackHost:
    """Trains all who come, until nobody does any more.

    Args:
        load: makes a trainer of its name.
    """

    def __init__(self, lines: Connections, *, load: Load) -> None:
        self._lines, self._load = lines, load
        self._device = own_device(None)
        self._pack = Pack(self._device)
        self._guests: dict[Member, PackGuest] = {}
        """Who is in the pack."""
        self._ends: dict[PackGuest, End] = {}
        """Who is to leave it before anybody makes another step."""
        self._waiting: deque[PackGuest] = deque()
        self._built: list[PackGuest] = []
        """Who is to join it."""
        self._came_at = self._built_at = 0.0
        self._agent: int | None = None
        self._next_look = self._next_report = 0.0
        self._modes: list[str] = []
        """How they make their steps, as it was said last."""
        self._used_at = time.monotonic()
        self._told_to_end = False

    def run(self) -> None:
        """Serve to the end."""
        while True:
            if self._guests:
                self._step()
                if time.monotonic() < self._next_look:
                    continue
            self._look(0.0 if self._guests or self._waiting else LOOK_S if self._built else IDLE_S)
            self._next_look = time.monotonic() + LOOK_S
            if self._lines.quiet and self._enough():
                self._lines.close()
                return

    def end(self) -> None:
        """Have all members save, and end."""
        self._told_to_end = True

    def _enough(self) -> bool:
        """Whether nobody is to be waited for any more."""
        agent_gone = self._agent is not None and not _lives(self._agent)
        return self._told_to_end or agent_gone or time.monotonic() >= self._used_at + LINGER_S

    # -- steps -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self._sound(self._advance):
            self._note_done(self._guests)  # who has come to its end in that step was not told
        if self._ends:
            self._let_go()

    def _advance(self) -> None:
        members = self._pack.step()
        for member in members:
            if member.done:
                self._note_done(members)
                break

    def _note_done(self, members: Iterable[Member]) -> None:
        for member in members:
            guest = self._guests[member]
            if member.done and guest not in self._ends:
                self._ends[guest] = partial(guest.finish, crowded=len(self._guests) > 1)

    def _sound(self, act: Callable[[], object]) -> bool:
        """Do something in which steps are made; False if it has brought members to an end."""
        crowded = len(self._guests) > 1
        try:
            act()
            return True
        except Failed as failed:
            for member, error in failed.errors:
                self._check_device(error)
                guest = self._guests[member]
                self._ends[guest] = partial(guest.failed, error, crowded=crowded)
        except OutOfMemory as full:
            guest = self._guests[full.member]
            self._ends[guest] = partial(guest.make_room, full.why)
        except ConfigError as error:  # they cannot train in the way that they are to
            for member in min(self._pack.groups, key=lambda group: group.clock).members:
                guest = self._guests[member]
                self._ends[guest] = partial(guest.failed, error, crowded=crowded)
        return False

    def _let_go(self) -> None:
        """Take those out of the pack who are to leave, and have each come to its end."""
        self._say_padding()
        while not self._sound(lambda: self._pack.leave(*(guest.member for guest in self._ends))):
            pass  # steps that were made for that have brought others to an end too
        ends, self._ends = self._ends, {}
        for guest in ends:
            del self._guests[guest.member]
        with self._lines.busy():
            for guest, end in ends.items():
                self._dismiss(guest, end())
        ends.clear()
        self._clear_away()

    def _dismiss(self, guest: PackGuest, word: Word) -> None:
        if self._told_to_end and word.get("exit") == exits.SUSPENDED and not guest.asked:
            word = {"left": _TOLD_TO_END}
        say(f"{guest.name} leaves: {word or 'its own process has gone'}")
        self._lines.end(guest, word)
        self._used_at = time.monotonic()

    def _clear_away(self) -> None:
        gc.collect()  # member, session and model know each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_device(self, error: BaseException) -> None:
        """End at once if the device has failed: all that is on it is lost, and who is to blame not known."""
        if self._device.type != "cuda" or out_of_memory(error):
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            traceback.print_exception(type(error), error, error.__traceback__, file=sys.__stderr__)
            os._exit(DEVICE_FAILED)

    # -- between steps -----------------------------------------------------------------------------------

    def _look(self, within_s: float) -> None:
        """Hear what there is to hear, do what is due for members, see to newcomers."""
        for guest in self._lines.look(within_s):
            self._agent, self._came_at = guest.env.notify_pid, time.monotonic()
            self._waiting.append(guest)
        if self._told_to_end:
            self._lines.close()
            for guest in (*self._guests.values(), *self._waiting, *self._built):
                guest.leave(_TOLD_TO_END)
        self._report()
        self._attend()
        self._take_in()

    def _report(self) -> None:
        if time.monotonic() >= self._next_report:
            for guest in self._guests.values():
                guest.member.session.report()
            self._next_report = time.monotonic() + REPORT_S
            self._say_modes()

    def _say_modes(self) -> None:
        groups = self._pack.groups
        if any(group.first or group.trial is not None or group.wanted is None for group in groups):
            return  # it is being found out
        modes = [f"{len(group.members)} {group.mode}" for group in groups if len(group.members) > 1]
        if modes and modes != self._modes:
            say(f"steps of those that are alike: {', '.join(modes)}")
        self._modes = modes

    def _say_padding(self) -> None:
        for part in [group.runner.padding for group in self._pack.groups]:
            if part >= _PADDING:
                say(f"{part:.0%} of the frozen model's work was for rows that are shorter than others")

    def _attend(self) -> None:
        """Have members saved, and leave, who are to."""
        if any(self._is_due(guest) for guest in self._guests.values()):
            while not self._sound(self._pack.write_back):
                self._let_go()
        for guest in [guest for guest in self._guests.values() if self._is_due(guest)]:
            if guest.member.session.leaving:
                self._ends[guest] = guest.save_and_leave
                continue
            with self._lines.busy():
                word = guest.after(guest.member.look)
            if word is not None:
                self._ends[guest] = partial(dict, word)
        if self._ends:
            self._let_go()

    def _is_due(self, guest: PackGuest) -> bool:
        """Whether there is something to do for a guest; one that has gone is brought to its end."""
        with contextlib.suppress(GuestGone):
            return guest.member.session.due
        self._ends[guest] = partial(dict, NOTHING)
        return False

    # -- newcomers ---------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Build one of those who wait; when all are built, let them join."""
        if self._waiting:
            guest = self._waiting.popleft()
            word = self._build(guest)
            if word is None:
                self._built_at = self._built_at if self._built else time.monotonic()
                self._built.append(guest)
            else:
                self._dismiss(guest, word)
                self._clear_away()
        elif self._built and time.monotonic() >= min(
            self._came_at + GATHER_S, self._built_at + GATHER_MOST_S
        ):
            built, self._built = self._built, []
            self._join([guest for guest in built if not self._gives_up(guest)])

    def _build(self, guest: PackGuest) -> Word | None:
        """Make a guest's training; None, or how it has ended."""
        crowded = bool(self._guests or self._built)
        if guest.hosted.gone:
            return NOTHING
        if guest.hosted.stop is not None:  # all there is of it is saved
            return {"exit": exits.SUSPENDED}
        if guest.mode != self._pack.mode:
            if crowded:
                return {"refused": f"the pack on this device is of the mode {self._pack.mode!r}"}
            self._pack = Pack(self._device, mode=guest.mode)
        guest.line.say({"building": True})
        with self._lines.busy():
            word = guest.after(partial(guest.build, self._load, self._device), crowded=crowded)
            if word is None and guest.member.done:
                word = guest.finish(crowded=crowded)
        return word

    def _gives_up(self, guest: PackGuest) -> bool:
        """Whether a guest that was built is not to train any more."""
        if guest.hosted.gone:
            self._dismiss(guest, NOTHING)
        elif guest.hosted.stop is not None:
            self._dismiss(guest, guest.save_and_leave())
        else:
            return False
        return True

    def _join(self, guests: Sequence[PackGuest]) -> None:
        """Let guests join the others, together: those that begin at the same place read the same samples."""
        members = [guest.member for guest in guests]
        try:
            while not self._sound(partial(self._pack.join, *members)):
                self._let_go()
        except Exception as error:
            self._pack.leave(*members)
            if len(guests) == 1:
                self._dismiss(guests[0], guests[0].failed(error, crowded=bool(self._guests)))
                self._clear_away()
            else:
                for guest in guests:
                    self._join([guest])
            return
        for guest in guests:
            self._guests[guest.member], guest.trains = guest, True
            guest.member.session.on_step = self._lines.lives
            say(f"{guest.name} trains here")
            guest.line.say({"begun": True})


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
