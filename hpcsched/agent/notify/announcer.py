"""What of a run's events is worth a message: failures (put together), a drain, short disks, the end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from hpcsched.agent.notify.message import MOST_JOBS, JobPart, Message, RunPart, about, job_part, shown
from hpcsched.core import events as ev
from hpcsched.core.actions import Action
from hpcsched.core.machine import Machine
from hpcsched.core.states import FAILURES
from hpcsched.core.transitions.deadline import FROM_BATCH
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import iso

KINDS = ("failure", "drain", "disk", "end")
"""What there are messages about."""

GROUP_S = 10.0
"""Time in which failures are put together into one message (chosen)."""

BETWEEN_S = 60.0
"""Least time between two messages about failures (chosen): a set that fails as a whole sends few."""


class Deliverer(Protocol):
    """Takes messages and delivers them meanwhile (`delivery.Delivery`)."""

    def put(self, message: Message) -> None: ...

    def trouble(self) -> Sequence[str]: ...

    def close(self) -> None: ...


class Announcer:
    """An observer of a run that has messages delivered.

    Args:
        kinds: those of `KINDS` that are wanted.
        rundir: of the run.
        tell: shows a line to people, where a message was not delivered.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        machine: Machine,
        delivery: Deliverer,
        *,
        kinds: Collection[str],
        rundir: RunDir,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine, self._delivery, self._kinds = machine, delivery, kinds
        self._rundir, self._tell, self._clock = rundir, tell, clock
        self._draining = False
        self._failed: dict[int, JobPart] = {}
        self._more = 0
        self._since = 0.0
        self._told_at = float("-inf")

    def event(self, event: ev.Event, actions: Sequence[Action]) -> None:
        """Note what a handled event has changed."""
        job_id = getattr(event, "job_id", None)
        job = self._machine.run.jobs.get(job_id) if job_id is not None else None
        if job is not None and job.state.failed and "failure" in self._kinds:
            if not (self._failed or self._more):
                self._since = self._clock()
            if job.id in self._failed or len(self._failed) < MOST_JOBS:
                self._failed[job.id] = job_part(job, self._machine.ledger.noun)
            else:
                self._more += 1
        draining = self._machine.deadline.draining
        if draining and not self._draining and "drain" in self._kinds:
            self._send("drain", self._why_draining())
        self._draining = draining

    def tick(self) -> None:
        """The loop has gone round: send what was put together, and say what could not be delivered."""
        due = max(self._since + GROUP_S, self._told_at + BETWEEN_S)
        if (self._failed or self._more) and self._clock() >= due:
            self._send_failures()
        self._tell_trouble()

    def message(self, text: str, *, about: str = "") -> None:
        """A line that people should see; `about`: the kind of message that it makes too."""
        if about and about in self._kinds:
            self._send(about, text)

    def over(self, how: str, state: str) -> None:
        """The agent leaves; `how`: in words; `state`: the run's. Waits for what is left to be delivered, a
        bounded time."""
        if "end" in self._kinds:  # which names the failures too
            noun, jobs = self._machine.ledger.noun, self._machine.run.jobs.in_state(*FAILURES)
            failed = [job_part(job, noun) for job in jobs]
            self._send("end", how, failed[:MOST_JOBS], len(failed[MOST_JOBS:]), state)
        elif self._failed or self._more:
            self._send_failures()
        self._failed.clear()
        self._more = 0
        self._delivery.close()
        self._tell_trouble()

    def _send_failures(self) -> None:
        jobs, more = list(self._failed.values()), self._more
        self._failed, self._more, self._told_at = {}, 0, self._clock()
        number = len(jobs) + more
        self._send("failure", "a job failed" if number == 1 else f"{number} jobs failed", jobs, more)

    def _send(
        self, kind: str, what: str, jobs: Sequence[JobPart] = (), more: int = 0, state: str = ""
    ) -> None:
        counts = {str(state): number for state, number in self._machine.run.jobs.counts().items()}
        record = self._rundir.read_record()
        run = RunPart(
            id=self._machine.run.run_id,
            dir=str(self._rundir.root),
            host=socket.gethostname(),
            allocation=record.allocation if record else {},
            state=state or ("DRAINING" if self._machine.deadline.draining else "RUNNING"),
            jobs=dict(sorted(counts.items())),
        )
        lines = [f"hpcsched: {shown(what, 1000)} (run {run.dir} on {run.host})", *about(jobs, more)]
        self._delivery.put(
            Message(
                kind=kind,
                text="\n".join(lines),
                time=iso(time.time()) or "",
                run=run,
                jobs=list(jobs),
                more_jobs=more,
            )
        )

    def _why_draining(self) -> str:
        cause, run = self._machine.deadline.cause, self._machine.run
        words = {
            "deadline": "the time of the allocation is nearly up",
            "stuck": "no job that is left can run",
            "source": "the source of jobs asks for it",
        }
        if cause.startswith("inbox:"):
            why = "`hpcsched drain` asks for it"
        elif cause.startswith(FROM_BATCH):
            why = f"the batch system ends the job ({cause.removeprefix(FROM_BATCH)})"
        else:
            why = words.get(cause, cause)
        active = len(run.active)
        jobs = f"{active} running job{'s' * (active != 1)} save, nothing starts any more"
        left = self._machine.deadline.at
        ends = "" if left is None else f"; the allocation ends in {max(0.0, left - run.now) / 60:.0f} min"
        return f"draining: {why}: {jobs}{ends}"

    def _tell_trouble(self) -> None:
        for line in self._delivery.trouble():
            self._tell(line)
