"""Where the foreground stands still between two steps while a guest is built: once for each, not for long."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import field
from types import FrameType
from typing import Any

from hpcsched.compat import dataclass
from hpcsched.worker.background.rng_isolation import NotHostable, process_settings, put_back

STANDS_WITHIN_S = 110.0
"""How long a guest waits for the foreground to stand still; its own process waits a little longer."""
BUILT_WITHIN_S = 60.0
"""How long the foreground stands still for a guest to be built; one that takes longer is sent away."""
TRACED_WITHIN_S = 30.0
"""How long the foreground still waits for a model that is being traced: no other may be called meanwhile."""
_LOOK_S = 0.05


@dataclass(eq=False, slots=True)
class GuestBuild:
    """One guest's being built, while the foreground stands still.

    `given_up`: whether the guest is wanted no more. `sent_away`: the foreground has gone on without it.
    """

    given_up: Callable[[], bool]
    sent_away: bool = False
    stands: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    _tracing: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """In here the foreground does not go on. Raises NotHostable if it has before, or wanted to."""
        with self._tracing:
            self._check()
            yield
            self._check()

    def _check(self) -> None:
        if self.sent_away:
            raise NotHostable("building it takes longer than its foreground can stand still")

    def send_away(self) -> None:
        """The foreground goes on; not before what is being traced has been."""
        self.sent_away = True
        if self._tracing.acquire(timeout=TRACED_WITHIN_S):
            self._tracing.release()


class BuildGate:
    """Shared by the foreground's thread, which comes by between its steps, and one waiting guest's."""

    def __init__(self) -> None:
        self._visit: GuestBuild | None = None

    def stand_still(self) -> None:
        """Of the foreground: if a guest waits to be built, wait until it is.

        Not for long, not when a signal comes, and not for a guest that is wanted no more: that is sent away.
        """
        visit, self._visit = self._visit, None
        if visit is None:
            return
        before, deadline = process_settings(), time.monotonic() + BUILT_WITHIN_S
        visit.stands.set()
        with noting_signals() as signals:
            while not visit.over.wait(_LOOK_S):
                if signals or visit.given_up() or time.monotonic() > deadline:
                    visit.send_away()
                    break
        with contextlib.suppress(NotHostable):  # the guest, if it is at it still, learns that we have gone on
            put_back(before)

    def wait(self, visit: GuestBuild) -> bool:
        """Of a guest: wait until the foreground stands still; False if the guest is wanted no more.

        What is the process's may be used until `visit.over` is set, to be done in any case. Raises
        NotHostable when the foreground makes no step for long.
        """
        self._visit, deadline = visit, time.monotonic() + STANDS_WITHIN_S
        while not visit.stands.wait(_LOOK_S):
            if visit.given_up() or time.monotonic() > deadline:
                self._visit = None
                visit.over.set()  # the foreground may have come by at this moment
                if visit.given_up():
                    return False
                raise NotHostable("its foreground is in no state to take it in, and has not been for long")
        return True


@contextlib.contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Signals are handled as ever in here, and noted in what comes back."""
    noted: list[int] = []

    def noting(handler: Any) -> Any:
        def note(number: int, frame: FrameType | None) -> None:
            noted.append(number)
            handler(number, frame)

        return note

    former = {number: signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGTERM)}
    ours = {number: handler for number, handler in former.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        ours = {}
    for number, handler in ours.items():
        signal.signal(number, noting(handler))
    try:
        yield noted
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
