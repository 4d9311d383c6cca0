"""Delivery of messages, in a thread of its own and by processes with a deadline: the agent never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, Full, Queue, SimpleQueue

from hpcsched.agent.notify.channels import Channel
from hpcsched.agent.notify.message import Message, shown
from hpcsched.launch.bounded_run import Stopped, run_bounded

WITHIN_S = 10.0
"""Time that a command, or a webhook, may take (chosen)."""

CLOSES_WITHIN_S = 15.0
"""Time in which what is left may be delivered at the end (chosen)."""

MOST_WAITING = 100
"""Messages that may wait; more are dropped, and counted (chosen)."""

RunProgram = Callable[..., tuple[int, bytes, bytes]]


class Delivery:
    """Delivers each message by each channel, one after the other.

    Args:
        environ: the environment of what is started; `cwd`: its working directory.
        run: runs a program, as `run_bounded` does; `within_s`: the time that it may take.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        *,
        environ: Mapping[str, str],
        cwd: str,
        run: RunProgram = run_bounded,
        within_s: float = WITHIN_S,
    ) -> None:
        self._within_s = within_s
        self._channels, self._environ, self._cwd, self._run = channels, dict(environ), cwd, run
        self._queue: Queue[Message | None] = Queue(MOST_WAITING)
        self._trouble: SimpleQueue[str] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._deliver_all, name="notifications", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Have a message delivered; never waits."""
        try:
            self._queue.put_nowait(message)
        except Full:
            self._trouble.put(f"a message ({message.kind}) is dropped: {MOST_WAITING} wait already")

    def trouble(self) -> list[str]:
        """What could not be delivered since this was last called, a line each."""
        lines = []
        while True:
            try:
                lines.append(self._trouble.get_nowait())
            except Empty:
                return lines

    def close(self, within_s: float = CLOSES_WITHIN_S) -> None:
        """Deliver what is left, within this time; then end what still runs."""
        try:
            self._queue.put_nowait(None)
        except Full:
            self._stop.set()
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._trouble.put(f"messages were not delivered within {within_s:g} s: left")
            self._stop.set()
            self._thread.join(self._within_s)

    def _deliver_all(self) -> None:
        while (message := self._queue.get()) is not None and not self._stop.is_set():
            for channel in self._channels:
                if why := self._why_not_delivered(channel, message):
                    self._trouble.put(f"message ({message.kind}) not delivered: {channel.name}: {why}")

    def _why_not_delivered(self, channel: Channel, message: Message) -> str:
        """Deliver a message by a channel; returns why that failed, or nothing."""
        try:
            code, _, said = self._run(
                channel.argv,
                environ={**self._environ, **channel.environ(message)},
                within_s=self._within_s,
                cwd=self._cwd,
                stop=self._stop,
                given=channel.stdin(message),
                spares_children=channel.spares_children,
            )
        except TimeoutError:
            return f"not done within {self._within_s:g} s"
        except Stopped:
            return "ended, as the agent leaves"
        except (OSError, ValueError) as error:
            return shown(getattr(error, "strerror", None) or str(error))
        if code == 0:
            return ""
        lines = said.decode(errors="replace").strip().splitlines()
        return channel.failure(code, shown(lines[-1]) if lines else "")
