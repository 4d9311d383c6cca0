"""A packed job's own process while the job trains in its pack's. No torch.

For the agent it is the job: it has the job's pid, signals, output and exit code. Whoever comes first starts
the pack's process, the host, in which all trainings of a device are members. When the host dies, each job
hands itself over to the next one, from its newest checkpoint; the agent sees nothing of that but steps that
are done twice. A host that does not answer is ended by the first job that cannot wait for it any longer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import MutableMapping
from math import inf
from types import FrameType
from typing import Any

from hpcsched.compat import dataclass
from hpcsched.contract import exits, files
from hpcsched.contract.state import State
from hpcsched.errors import BadInput
from hpcsched.worker.background.protocol import GuestConnection, connect, peer, take
from hpcsched.worker.background.proxy import Proxy
from hpcsched.worker.packing.host_start import address_of, start_host
from hpcsched.worker.process.contract import JobEnv, say

HOST_WITHIN_S = 20.0
"""How long to look for a host that can be spoken to."""
ACCEPTED_WITHIN_S = 120.0
"""How long a host may take to answer: it imports torch, or is in the middle of other members' work."""
BEGUN_WITHIN_S = 300.0
"""How long a host may take until the job trains there: others may be built before it."""
ANSWERS_WITHIN_S = 8.0
"""How long a job that was told to end waits for a sign of life from its host, before it ends that."""
AGENT_GONE_WITHIN_S = 30.0
"""The same for a job whose agent is gone, which nobody hurries."""
MOST_STARTS = 3
"""Of hosts that nobody could speak to."""
MOST_LOSSES = 2
"""Of hosts, without a new checkpoint between them: from then on the job trains by itself."""
BUSY_TIMES = 3
"""So much longer it waits while the host has said that it is about something that takes its time."""
_LOOK_S = 0.02
_ASK_AGAIN_S = 1.0

Word = dict[str, Any]


def be_member(environ: MutableMapping[str, str]) -> int | None:
    """Have the job trained by its pack's process, to its end; None: it is to go on in this process.

    Returns the job's exit code. In the case of None `environ` says where to go on from. Raises ConfigError
    when the environment makes no sense.
    """
    env = JobEnv.from_environ(environ)
    address = address_of(environ)
    if env is None or address is None or env.world_size > 1 or env.strategy.get("kind") != "packed":
        return None
    return _Guest(env, address, environ).run()


@dataclass(slots=True)
class _Host:
    """The pack's process, as it is spoken to, and as it can be ended without mistaking it for another."""

    line: GuestConnection
    pidfd: int

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.line.close()
        os.close(self.pidfd)


class HostLink:
    """What a job knows of how it stands with its host, from what it hears and when. Times are in seconds.

    `begun`: it trains there. `ends_host`: who gives up waiting must not leave the host as it is, for the
    other members wait too, and nobody else can help them.
    """

    def __init__(self, now: float) -> None:
        self.begun = self.ends_host = False
        self._building = False
        self._due = now + ACCEPTED_WITHIN_S
        self._heard = now
        self._busy = False
        self._hurry_s = inf
        self._hurried = inf
        self._asked, self._asked_at = "", -inf

    def hears(self, word: Word, now: float) -> bool:
        """Take a word of the host's in; whether it is the last one."""
        self._heard = now
        if "busy" in word:
            self._busy = bool(word["busy"])
        if "accepted" in word:
            self._due = now + BEGUN_WITHIN_S
        if "building" in word:
            self._due, self._building = now + BEGUN_WITHIN_S, True
        if "begun" in word:
            self.begun, self._building, self._due = True, False, inf
        return bool(word.keys() & {"exit", "refused", "left"})

    def asks(self, now: float, stop: str, hurry_s: float) -> str | None:
        """What to ask for, if that is due: whoever answers is alive.

        `hurry_s`: how long the host may be silent, once it matters.
        """
        if hurry_s < inf and self._hurried == inf:
            self._hurried = now
        self._hurry_s = hurry_s
        if stop == self._asked and now < self._asked_at + _ASK_AGAIN_S:
            return None
        self._asked, self._asked_at = stop, now
        return stop

    def over(self, now: float) -> str | None:
        """Why not to wait any longer; None: wait."""
        if now >= self._due:
            self.ends_host = self._building
            return "the process of its pack does not come to take it in"
        patience_s = self._hurry_s * (BUSY_TIMES if self._busy else 1)
        if now < max(self._heard, self._hurried) + patience_s or self._hurried == inf:
            return None
        self.ends_host = self.begun  # before that it has nothing to lose, and leaves
        return "the process of its pack does not answer"

    def sleep_s(self, now: float) -> float:
        """How long nothing has to be done unless something is heard."""
        return max(0.0, min(self._due - now, _ASK_AGAIN_S if self._asked else inf))


class _Guest(Proxy):
    def __init__(self, env: JobEnv, address: str, environ: MutableMapping[str, str]) -> None:
        super().__init__(env, environ)
        self._address = address
        self._hurry_s = inf
        """How long the host may be silent from now on."""
        self._begun = False
        self._losses = 0
        self._saved = self._saved_step()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        super()._note(number, _frame)
        if number == signal.SIGTERM:
            self._hurry_s = ANSWERS_WITHIN_S

    def _run(self) -> int | None:
        while True:
            host = self._reach()
            if host is None:
                return None if self._stop is None else exits.SUSPENDED
            try:
                word = self._follow(host)
            finally:
                host.close()
            if self._begun:
                self._resume_from_newest()
            if "exit" in word:
                return int(word["exit"])
            if self._stop is not None:  # all that there is of it is saved
                return exits.SUSPENDED
            if "refused" in word:
                say(f"in a process of its own: {word['refused']}")
                return None
            if "left" in word:
                say(f"{word['left']}: looking for another one")
            elif self._lost():
                say("in a process of its own: the process of its pack has died again and again")
                return None
            elif self._begun:
                say("the process of its pack has died: another one goes on from the newest checkpoint")

    # -- finding a host ----------------------------------------------------------------------------------

    def _reach(self) -> _Host | None:
        """A host to speak to, started if there is none; None: told to stop, or there is none to be had."""
        deadline = time.monotonic() + HOST_WITHIN_S
        starts = 0
        why = "no process for its pack answers"
        while self._stop is None and time.monotonic() < deadline and starts <= MOST_STARTS:
            if (host := self._connect()) is not None:
                return host
            try:
                starts += self._start()
            except OSError as error:
                why = f"no process for its pack can be started: {error}"
                break
            self._await((), _LOOK_S)
            _reap()
        if self._stop is None:
            say(f"in a process of its own: {why}")
        return None

    def _connect(self) -> _Host | None:
        line = connect(self._address)
        if line is None:
            return None
        try:
            host = _Host(line, os.pidfd_open(peer(line.socket)[0]))
        except OSError:
            line.close()
            return None
        if line.hung_up():  # so that may have been somebody else by now
            host.close()
            return None
        return host

    def _start(self) -> bool:
        """Start a host if nobody else has done so. Raises OSError."""
        listener = take(self._address)
        if listener is None:
            return False
        with listener:
            start_host(listener, self._environ)
        return True

    # -- being a member ----------------------------------------------------------------------------------

    def _follow(self, host: _Host) -> Word:
        """Be a member to the end: the host's last word; {} if it has died, or had to be ended."""
        line = host.line
        if not line.say({"guest": self._guest()}, self._descriptors()):
            return {}
        stay = HostLink(time.monotonic())
        while True:
            now = time.monotonic()
            if self._agent_gone:
                self._hurry_s = min(self._hurry_s, AGENT_GONE_WITHIN_S)
            if self._stop is not None and (ask := stay.asks(now, self._stop, self._hurry_s)):
                line.say({"stop": ask})
            if (why := stay.over(now)) is not None:
                if stay.ends_host:
                    host.end()
                    say("the process of its pack does not answer, and was ended")
                return {"refused": why}
            readable = self._await([line.socket.fileno(), host.pidfd], stay.sleep_s(now))
            # All that was said before an end that has been seen is there to be heard.
            while (word := line.hear(0.0)) is not None:
                if stay.hears(word, time.monotonic()):
                    return word
                self._begun = self._begun or stay.begun
            if line.closed or host.pidfd in readable:
                return {}

    def _lost(self) -> bool:
        """Note that the host has died; whether that is enough."""
        saved = self._saved_step()
        self._losses = self._losses + 1 if saved == self._saved else 1
        self._saved = saved
        _reap()
        return self._losses >= MOST_LOSSES

    def _saved_step(self) -> int:
        try:
            return State.decode((self._env.job_dir / files.STATE).read_bytes()).step
        except (OSError, BadInput):
            return 0


def _reap() -> None:
    """Clear a host away that was started here and has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
