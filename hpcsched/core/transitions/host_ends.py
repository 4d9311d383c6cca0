"""Hosts that end before the run does: what time is left on them, and who is there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from hpcsched.core.events import AgentStarted
from hpcsched.core.jobs import Job
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.run import Run
from hpcsched.core.transitions.estimates import Estimates


class HostEnds:
    """How much time hosts of other allocations have. All times are in seconds of the run's clock.

    A host without an end of its own ends with the run (`Deadline`). While there is none with one, nothing
    is counted.
    """

    def __init__(self, run: Run, ledger: Ledger, estimates: Estimates) -> None:
        self._run, self._ledger, self._estimates = run, ledger, estimates
        self.at: dict[str, float] = {}
        """By host when it ends."""
        self._reserve_s = 60.0
        self._closed_at: dict[str, float] = {}
        """By host where saving has begun, and nothing starts any more, since when."""
        self._state: tuple[int, ...] = ()
        self._saves: dict[str, float] = {}

    # --- questions --------------------------------------------------------------------------

    @property
    def closing(self) -> Collection[str]:
        """The hosts where saving has begun: nothing starts there any more."""
        return self._closed_at.keys()

    def margin_s(self, host: str, *more: Job) -> float:
        """Seconds before a host's end at which saving begins there: the reserve, and the longest saves known
        of the jobs on it (and of `more`) one after the other, as of `Deadline`."""
        return self._reserve_s + self._saves_s(host) + sum(map(self._estimates.longest_save_s, more))

    def _saves_s(self, host: str) -> float:
        """The longest saves of the jobs on a host; looked at again in each event, and whenever in one jobs
        have begun or ended to use GPUs or cores."""
        state = self._ledger.moves, len(self._run.active)
        if state != self._state:
            self._state, self._saves = state, {}
        if host not in self._saves:
            self._saves[host] = sum(map(self._estimates.longest_save_s, self.jobs_on(host)))
        return self._saves[host]

    def left_s(self, host: str, *more: Job) -> float:
        """Seconds until saving begins on a host (with `more` running there too)."""
        end = self.at.get(host)
        return inf if end is None else end - self.margin_s(host, *more) - self._run.now

    def left_on(self, hosts: Collection[str]) -> float:
        """Seconds until saving begins on the first of these hosts; infinite where none ends by itself."""
        return min((self.left_s(host) for host in hosts if host in self.at), default=inf)

    def too_short(self, job: Job) -> frozenset[str]:
        """The hosts on which a waiting job would not reach its first checkpoint."""
        if not self.at:
            return frozenset()
        need_s = self._estimates.first_checkpoint_s(job)
        return frozenset(host for host in self.at if self.left_s(host, job) < need_s)

    def kill_in_s(self, job: Job) -> float:
        """Seconds until a job on a host that is about to end must be killed, for that to leave in time."""
        ends = [self.at[host] - self.window_s(host) / 3 for host in self.closing if self._is_on(job, host)]
        return max(1.0, min(ends) - self._run.now) if ends else inf

    def window_s(self, host: str) -> float:
        """Seconds at a host's end in which jobs that have not left are told to end, and are killed."""
        return min(self._reserve_s, max(0.0, (self.at[host] - self._closed_at[host]) / 2))

    def leaves(self, job: Job) -> bool:
        """Whether a job is on a host that is about to end: what it saves must be on disk."""
        return any(self._is_on(job, host) for host in self.closing)

    def jobs_on(self, host: str) -> list[Job]:
        """The jobs that use GPUs or cores of a host, or are about to."""
        active = self._run.active
        users = [active[job_id] for job_id in self._ledger.users(host) if job_id in active]
        seated = [job for job in active.values() if any(seat.host == host for seat in job.current.seats)]
        return list({job.id: job for job in (*users, *seated)}.values())

    def _is_on(self, job: Job, host: str) -> bool:
        return any(other is job for other in self.jobs_on(host))

    # --- changes ----------------------------------------------------------------------------

    def begin_event(self) -> None:
        """Believe nothing that was looked at before this event: who asks in between is not replayed."""
        self._state = ()

    def begin_life(self, event: AgentStarted) -> None:
        """Begin with the hosts of another agent, which end with the run."""
        self.at, self._closed_at, self._reserve_s = {}, {}, event.reserve_s

    def end_at(self, ends: Mapping[str, float | None]) -> None:
        """Have hosts end at these times; None: with the run."""
        for host, end in ends.items():
            if end is None:
                self.at.pop(host, None)
            else:
                self.at[host] = end

    def close(self, host: str) -> None:
        """Have nothing start on a host any more."""
        self._closed_at[host] = self._run.now

    def open(self, host: str) -> None:
        """Let jobs start on a host again."""
        self._closed_at.pop(host, None)

    def forget(self, host: str) -> None:
        """A host is gone."""
        self.at.pop(host, None)
        self.open(host)
