"""An agent that takes a run over in an allocation that only lent it hosts (`hpcsched join`)."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from hpcsched.contract.variables import NOTIFY_WEBHOOK
from hpcsched.errors import StoreError
from hpcsched.store.heads import claim_number, give_up_number, kept_options
from hpcsched.store.rundir import RunDir, RunDirError, agent_works, last_status

AGAIN_S = 15.0
"""Time until it is tried again after an agent that was started here has ended (chosen)."""

NOT_ALL_AT_ONCE_S = 1.0
"""Time over which the allocations of a run are spread that could take it over (chosen)."""

_WEBHOOK = "--notify-webhook="

KILLED_WITHIN_S = 5.0
"""Time that a process has to end after SIGKILL (chosen)."""


class NextHead:
    """Starts an agent in a process of its own, and watches it.

    Args:
        token: that of this `hpcsched join`.
        batch_words: the options by which it finds this allocation.
    """

    def __init__(
        self, rundir: RunDir, token: str, batch_words: Sequence[str], tell: Callable[[str], None]
    ) -> None:
        self._rundir, self._token, self._batch_words, self._tell = rundir, token, tuple(batch_words), tell
        self._process: subprocess.Popen[bytes] | None = None
        self.hosts = tuple[str, ...]()
        """Those of this allocation that are in the run, by their names there."""
        self.number = 0
        """Its number (`store.heads`)."""
        self._not_before: float | None = None

    @property
    def leads(self) -> bool:
        """Whether an agent that was started here lives."""
        if self._process is None:
            return False
        if self._process.poll() is None:
            return True
        give_up_number(self._rundir, self.number)
        self._process, self._not_before = None, time.monotonic() + AGAIN_S
        return False

    def look(self) -> None:
        """Start an agent if the run has none, unless it was stopped or has ended."""
        now, status, record = time.monotonic(), last_status(self._rundir), self._rundir.read_record()
        options = kept_options(self._rundir)
        if status is None or record is None or options is None:
            return
        if status.state != "RUNNING" and not (status.state == "STOPPED" and record.left):
            return
        if self.leads or agent_works(self._rundir):
            self._not_before = None if self._process else self._not_before
            return
        if self._not_before is None:
            self._not_before = now + random.uniform(0.0, NOT_ALL_AT_ONCE_S)
        if now < self._not_before:
            return
        try:
            self.number = claim_number(self._rundir)
        except (RunDirError, StoreError):
            return  # another allocation is faster; or nothing can be written there now
        self._tell(f"no agent leads the run in {self._rundir.root} any more: starts one here")
        env = dict(os.environ)
        if webhook := next((one for one in options if one.startswith(_WEBHOOK)), None):  # others see an argv
            options = tuple(one for one in options if one != webhook)
            env[NOTIFY_WEBHOOK] = webhook.removeprefix(_WEBHOOK)
        words = ["run", "--dir", str(self._rundir.root), "--resume", *self._batch_words, *options]
        words += ["--lead", self._token, str(self.number), ",".join(self.hosts)]
        argv = [sys.executable, "-P", "-m", "hpcsched", *words]
        try:
            # In a session of its own: what is said to this command is not said to the run.
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=env, start_new_session=True)
        except OSError as error:
            self._tell(f"it cannot be started: {error}")
            give_up_number(self._rundir, self.number)
            self._not_before = now + AGAIN_S

    def end(self) -> None:
        """Kill the agent, if it lives: another allocation takes the run over."""
        if self.leads and self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_WITHIN_S)
