"""One device's two lanes together: may the background launch its next piece now?"""

from __future__ import annotations

from math import inf

from hpcsched.planning.background.feedback import Feedback
from hpcsched.planning.background.pacing import Pacer

ASSUMED_PIECE_US = 500.0
"""The time of a background piece that has not been seen yet, in microseconds (chosen)."""
NEWEST_WEIGHT = 0.25
"""The weight of the newest time in the running mean of a piece's times (chosen)."""


class Referee:
    """Joins a background lane's pacing and the feedback from the foreground's chunks.

    `feedback` None: the background is paced, and nothing else. Times of the background's pieces are learnt by
    their keys (any hashable): how long the device will be busy with what has been launched already, and with
    the next one, decides what of the foreground's it would meet.
    """

    def __init__(self, pacer: Pacer, feedback: Feedback | None = None) -> None:
        self.pacer, self.feedback = pacer, feedback
        self._needs_us: dict[object, float] = {}
        self._launched: list[tuple[object, float]] = []
        self._free_us = -inf
        self._contended = False

    # -- the background ----------------------------------------------------------------------------------

    def may_launch(self, key: object, now_us: float) -> bool:
        """Whether the background may launch the piece `key` now."""
        if not self.pacer.may_launch(now_us):
            return False
        if self.feedback is None:
            return True
        busy_us = sum(self._needs(known) for known, _ in self._launched)
        return self.feedback.may_launch(now_us, busy_us + self._needs(key))

    def _needs(self, key: object) -> float:
        return self._needs_us.get(key, ASSUMED_PIECE_US)

    def launched(self, key: object, now_us: float) -> None:
        """The piece `key` has been launched. Raises ValueError when the pacer does not allow it."""
        self.pacer.launched(now_us)
        self._launched.append((key, now_us))
        self._contended = True

    def completed(self, now_us: float, took_us: float | None = None) -> None:
        """The oldest launched piece has completed; `took_us`: its time on the device, if measured."""
        self.pacer.completed(now_us)
        key, began_us = self._launched.pop(0)
        took = now_us - max(began_us, self._free_us) if took_us is None else took_us
        known = self._needs_us.get(key)
        self._needs_us[key] = took if known is None else known + NEWEST_WEIGHT * (took - known)
        self._free_us = now_us

    # -- the foreground ----------------------------------------------------------------------------------

    def began(self, chunk: int, now_us: float) -> None:
        """The device has begun with a chunk of the foreground's."""
        self._contended = self.pacer.outstanding > 0
        if self.feedback is not None:
            self.feedback.began(chunk, now_us)

    def ended(self, chunk: int, now_us: float, took_us: float) -> None:
        """The device has ended a chunk of the foreground's."""
        if self.feedback is not None:
            self.feedback.ended(chunk, now_us, took_us, contended=self._contended)
