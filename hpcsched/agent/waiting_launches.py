"""Launches that wait for what their jobs need: modules, an interpreter's answer, the newest checkpoint.

An attempt that waits has no processes. What is told it meanwhile waits with it, but for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcsched.agent.clock import RunClock
from hpcsched.agent.deferred import Deferred
from hpcsched.agent.exits import launch_failed
from hpcsched.core import events as ev
from hpcsched.core.actions import Action, AttemptAction, Kill, Launch, Terminate
from hpcsched.core.machine import Machine
from hpcsched.core.transitions.attempts import TIME
from hpcsched.errors import LaunchError
from hpcsched.launch.base import Launcher

TOLD_TO_END = "it was told to end before it had any processes"


class WaitingLaunches:
    """The launches that wait, and how long they have. `carry_out` may put one off again."""

    def __init__(
        self,
        carry_out: Callable[[Action], list[ev.Event]],
        launcher: Launcher,
        machine: Machine,
        clock: RunClock,
    ) -> None:
        self._deferred = Deferred[AttemptAction, list[ev.Event]](carry_out)
        self._launcher, self._machine, self._clock = launcher, machine, clock
        self._since: dict[tuple[int, int], float] = {}
        """By job and attempt: when it was put off first."""

    def put_off(self, launch: Launch) -> None:
        """Have a launch wait."""
        self._since.setdefault((launch.job_id, launch.attempt), self._clock.now())
        self._deferred.put_off(launch.job_id, launch)

    def takes(self, action: AttemptAction) -> list[ev.Event] | None:
        """What comes at once of an action on an attempt that waits; None: it does not wait."""
        if isinstance(action, Terminate | Kill) and (launch := self._deferred.drop(action.job_id)):
            self._launcher.give_up(launch.job_id, launch.attempt)
            about = {"job_id": launch.job_id, "attempt": launch.attempt}
            error = LaunchError(TOLD_TO_END, transient=True)
            return [*self.over(**about), launch_failed(error, self._clock.now(), no_room="", **about)]
        return [] if self._deferred.takes(action.job_id, action) else None

    def over(self, job_id: int, attempt: int) -> list[ev.Event]:
        """That an attempt has waited, where that matters; it does not wait any longer."""
        since, needs = self._since.pop((job_id, attempt), None), self._machine.run.jobs[job_id].spec.needs
        if since is None or needs is None or needs.time_s is None:
            return []
        now = self._clock.now()
        return [ev.StartWaited(at=now, job_id=job_id, attempt=attempt, seconds=now - since)]

    def counts(self, timer: tuple[str, int, int]) -> bool:
        """Whether a timer that rings counts. That of a time limit does not while the attempt waits: it is set
        anew once that is over."""
        return timer[0] != TIME or timer[1] not in self._deferred

    def again(self) -> Iterator[list[ev.Event]]:
        """Try all of them once more; what comes of those that are carried out."""
        return self._deferred.again()

    def __bool__(self) -> bool:
        return bool(self._deferred)
