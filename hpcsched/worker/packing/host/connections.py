"""All who speak to the process of a pack, and what ends that when nobody does any more.

A job's own process says who the guest is, and later `{"stop": why}`, again and again; each is answered by
`{"heard": true}`. It is told `{"accepted": true}` or `{"refused": why}`, `{"building": true}` and `{"begun":
true}` when this job's training is made and when it trains, `{"busy": true}` while nobody is heard,
and at the end `{"exit": code}`, or `{"left": why}` when this process goes first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from hpcsched.errors import HpcschedError
from hpcsched.worker.background.protocol import GuestConnection, is_ours
from hpcsched.worker.packing.host.guests import PackGuest
from hpcsched.worker.process.contract import say

GREETS_WITHIN_S = 5.0
"""How long somebody who has called may take to say who it is."""
STUCK_S = 10.0
"""So long a member's code may run when its own process has gone, or that of any other member."""
BUSY_TIMES = 3
"""So many times as long while it is built, saved or evaluated."""
STUCK = 1
"""Exit code of a process that was stuck so."""


class Connections:
    """The lines to the own processes of guests; `look` hears them.

    Args:
        listener: where they call; it listens already.
        environ: what all guests have in common.
    """

    def __init__(self, listener: socket.socket, environ: Mapping[str, str]) -> None:
        self._listener, self._environ = listener, environ
        listener.setblocking(False)
        self._listens_at: int | None = listener.fileno()
        self._callers: dict[int, tuple[GuestConnection, float]] = {}
        """Who has not said yet who it is, and until when that is waited for."""
        self._guests: dict[int, PackGuest] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._alive_at = time.monotonic()
        self._busy = False
        # Processes that members start must not keep a line open after the end of this one.
        os.register_at_fork(after_in_child=self._close_all)
        threading.Thread(target=self._watch, name="watches lines", daemon=True).start()

    @property
    def quiet(self) -> bool:
        """Whether nobody is there."""
        return not (self._callers or self._guests)

    def look(self, within_s: float) -> list[PackGuest]:
        """Take in all that has come, or wait for it so long; returns new guests, who have been accepted."""
        came = []
        for descriptor, _ in self._poll.poll(within_s * 1000):
            if descriptor == self._listens_at:
                self._accept()
            elif descriptor in self._guests:
                self._hear(self._guests[descriptor])
            elif descriptor in self._callers and (guest := self._greet(descriptor)):
                came.append(guest)
        self.lives()
        for descriptor, (line, until) in list(self._callers.items()):
            if line.closed or self._alive_at >= until:
                self._drop(descriptor)
        return came

    def end(self, guest: PackGuest, word: Mapping[str, object]) -> None:
        """Tell a guest's process how it has ended."""
        descriptor = guest.line.socket.fileno()
        with contextlib.suppress(KeyError, ValueError):  # it has gone by itself
            self._poll.unregister(descriptor)
        self._guests.pop(descriptor, None)
        guest.end(dict(word))

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Meanwhile nobody is heard: those who wait for an answer are told that it may take its time."""
        self._busy = True
        self.lives()
        self._tell(True)
        try:
            yield
        finally:
            self._busy = False
            self.lives()
            self._tell(False)

    def lives(self) -> None:
        """Something has come to its end here: nobody's code is stuck."""
        self._alive_at = time.monotonic()

    def close(self) -> None:
        """Hear no new ones from now on."""
        if self._listens_at is not None:
            self._poll.unregister(self._listens_at)
            self._listener.close()
            self._listens_at = None

    def _tell(self, busy: bool) -> None:
        for guest in self._guests.values():
            if not guest.line.closed:
                guest.line.say({"busy": busy})

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # there is none any more
                return
            if is_ours(connection):
                until = time.monotonic() + GREETS_WITHIN_S
                self._callers[connection.fileno()] = GuestConnection(connection), until
                self._poll.register(connection, select.POLLIN)
            else:
                connection.close()

    def _greet(self, descriptor: int) -> PackGuest | None:
        """Somebody says who it is."""
        line, _ = self._callers[descriptor]
        greeting = line.hear(0.0)
        if greeting is None:
            return None
        try:
            guest = PackGuest(line, greeting["guest"], self._environ)
        except HpcschedError as error:
            line.say({"refused": str(error)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"somebody greets with what makes no sense: {error!r}")
        else:
            del self._callers[descriptor]
            self._guests[descriptor] = guest
            line.say({"accepted": True})
            return guest
        self._drop(descriptor)
        return None

    def _hear(self, guest: PackGuest) -> None:
        while (word := guest.line.hear(0.0)) is not None:
            if "stop" in word:
                guest.asked = True
                guest.leave(str(word["stop"]))
                guest.line.say({"heard": True})
        if guest.line.closed:
            guest.hosted.gone = True
            self._poll.unregister(guest.line.socket)

    def _drop(self, descriptor: int) -> None:
        line, _ = self._callers.pop(descriptor)
        self._poll.unregister(descriptor)
        line.close()

    # -- when nobody is there any more ---------------------------------------------------------------------

    def _watch(self) -> None:
        """In a thread: whoever could end this process, should a member's code have no end, may have gone. The
        others, who wait for it too, have no reason to."""
        while True:
            time.sleep(1.0)
            silent_s = time.monotonic() - self._alive_at
            guests = list(self._guests.values())
            lines = [*(guest.line for guest in guests), *(line for line, _ in list(self._callers.values()))]
            missed = [guest for guest in guests if guest.trains and not guest.hosted.gone]
            patience_s = STUCK_S * (BUSY_TIMES if self._busy else 1)
            if silent_s > patience_s and (
                all(line.hung_up() for line in lines) or any(guest.line.hung_up() for guest in missed)
            ):
                faulthandler.dump_traceback(file=sys.__stderr__ or 2)
                os._exit(STUCK)

    def _close_all(self) -> None:
        self._listener.close()
        for guest in self._guests.values():
            guest.line.socket.close()
        for line, _ in self._callers.values():
            line.socket.close()
