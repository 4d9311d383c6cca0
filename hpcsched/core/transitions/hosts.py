"""Hosts come and go: they join a run that lives, end before it does, or are given back."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import floor, inf

from hpcsched.core import events as ev
from hpcsched.core.actions import ReleaseHosts
from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.base import Handlers
from hpcsched.core.model import Device, JobState, Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.resources.rooms import Rooms
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import Attempts
from hpcsched.core.transitions.deadline import Deadline
from hpcsched.core.transitions.host_ends import HostEnds
from hpcsched.core.transitions.outcome import HOSTS, Outcome

REOPENS_S = 30.0
"""Seconds that there must be until saving begins on a host about to end, for it to be used again (chosen)."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A host that joined the run at `at` (seconds of the run's clock), with its GPUs, and `left` it then.

    `left` None: not yet, or with the last agent that had it.
    """

    host: str
    gpus: tuple[int, ...]
    at: float
    left: float | None = None


@dataclass(frozen=True, slots=True)
class GivenBack:
    """A host that its batch system has back since `at` (seconds of the run's clock), with its GPUs."""

    host: str
    gpus: tuple[int, ...]
    at: float


class Hosts:
    """Knows which hosts the run has and had, and has jobs leave those that end before it does.

    On a host that ends saving begins as at the end of the allocation (`Deadline`), for the jobs there alone:
    they go on elsewhere, in place where their first rank stays and other hosts have the GPUs. When nothing is
    left there, the host is given back.
    """

    def __init__(
        self,
        run: Run,
        out: Outcome,
        ledger: Ledger,
        *,
        rooms: Rooms,
        ends: HostEnds,
        deadline: Deadline,
        attempts: Attempts,
    ) -> None:
        self._run, self._out, self._ledger, self._rooms = run, out, ledger, rooms
        self._ends, self._deadline, self._attempts = ends, deadline, attempts
        self.devices: list[tuple[Device, ...]] = []
        """The devices of each life of the run, those that joined later too."""
        self.joined: list[Joined] = []
        """All hosts that joined, in all lives."""
        self._guests: list[int] = []
        """Which of them were in the run in this life."""
        self.given_back: list[GivenBack] = []
        """All hosts that were given back, in all lives."""
        self._leaving: dict[str, tuple[int, ...]] = {}
        """Hosts that are being given back, and their GPUs."""
        self._away: dict[str, tuple[int, ...]] = {}
        """Hosts that are about to end, and their GPUs."""
        self._at_first = 0
        self._hurried: set[str] = set()
        """The hosts at whose end jobs were told to end."""
        self._due: float | None = None

    def handlers(self) -> Handlers:
        """The events that it handles."""
        return {
            ev.HostsJoined: self._joined,
            ev.HostEndMoved: self._end_moved,
            ev.HostsReleased: self._released,
            ev.ReleaseFailed: self._failed,
        }

    # --- questions --------------------------------------------------------------------------

    @property
    def leaving(self) -> Collection[str]:
        """The hosts that are being given back."""
        return self._leaving.keys()

    @property
    def closing(self) -> Collection[str]:
        """The hosts that are about to end, on which nothing starts any more."""
        return self._ends.closing

    @property
    def some_end(self) -> bool:
        """Whether a host ends before the run does."""
        return bool(self._ends.at)

    @property
    def there_at_first(self) -> tuple[Device, ...]:
        """The devices with which this life began."""
        return self.devices[-1][: self._at_first] if self.devices else ()

    @property
    def gone(self) -> list[GivenBack]:
        """The hosts that were given back in this life."""
        return [back for back in self.given_back if back.at >= self._run.lives[-1].at]

    @property
    def guests(self) -> list[Joined]:
        """The hosts that joined in this life, or in an earlier one and went on in this."""
        return [self.joined[number] for number in self._guests]

    def end_of(self, host: str) -> float | None:
        """When a host ends that does so before the run; None: it does not, or nobody knows."""
        return self._ends.at.get(host)

    # --- changes ----------------------------------------------------------------------------

    def begin_life(self, event: ev.AgentStarted) -> None:
        """Begin with the hosts of another agent."""
        self.devices.append(event.devices)
        self._at_first, self._leaving, self._away, self._hurried = len(event.devices), {}, {}, set()
        self._due = None
        self._ends.begin_life(event)
        self._guests = [number for number in self._guests if _goes_on(self.joined[number], event)]

    def give_back(self, hosts: Iterable[str]) -> None:
        """Give hosts back that no job uses."""
        hosts = tuple(hosts)
        self._leaving.update((host, self._put_away(host)) for host in hosts)
        self._changed()
        self._out.ask(ReleaseHosts, hosts=hosts)

    def watch(self) -> None:
        """Have saving begin in time on each host that ends, and give those back that nothing is left on."""
        ends = self._ends
        if not ends.at or self._deadline.draining:
            return
        if empty := [host for host in sorted(ends.closing) if not ends.jobs_on(host)]:
            for host in empty:
                ends.open(host)
                self._leaving[host] = self._away.pop(host)
            self._out.ask(ReleaseHosts, hosts=tuple(empty))
        due = min((self._next(host) for host in ends.at if host not in self._leaving), default=inf)
        if due != self._due and due < inf:
            self._out.set_timer(HOSTS, due)
        self._due = due

    def due(self) -> None:
        """A timer has run out: saving begins where it is time, and who still saves at an end is told to."""
        if self._deadline.draining:
            return
        for host in [host for host in self._ends.at if host not in self._leaving]:
            if self._next(host) > self._run.now:
                continue
            if host in self._ends.closing:
                self._hurry(host)
            else:
                self._close(host)

    def _next(self, host: str) -> float:
        """When something is to be done about the end of a host."""
        end = self._ends.at[host]
        if host not in self._ends.closing:
            # In whole seconds, so that it seldom changes.
            return max(self._run.now, float(floor(end - self._ends.margin_s(host))))
        return inf if host in self._hurried else end - self._ends.window_s(host) * 2 / 3

    # --- hosts that join --------------------------------------------------------------------

    def _joined(self, event: ev.HostsJoined) -> None:
        if taken := sorted({d.index for d in event.devices} & {d.index for d in self.devices[-1]}):
            raise ValueError(f"devices {taken} are there already")
        self.devices[-1] += event.devices
        gpus: dict[str, list[int]] = {one.host: [] for one in event.cores}
        for device in event.devices:
            gpus.setdefault(device.host, []).append(device.index)
        self.joined += [Joined(host, tuple(on_it), event.at) for host, on_it in gpus.items()]
        self._guests += range(len(self.joined) - len(gpus), len(self.joined))
        self._ends.end_at(event.ends)
        self._ledger.add(event.devices, event.cores)
        for joined in self._ledger.hooks("hosts_joined"):
            joined(event.cores)
        self._changed()

    def _changed(self) -> None:
        self._run.count_news()
        self._out.ask_policy()

    # --- hosts that end ---------------------------------------------------------------------

    def _end_moved(self, event: ev.HostEndMoved) -> None:
        host, guests = (
            event.host,
            {one.host for one in self.guests if one.left is None} - self._leaving.keys(),
        )
        if host not in (*self._ledger.host_names, *self._away, *guests):
            return
        self._ends.end_at({host: event.end})
        self._hurried.discard(host)
        if host in self._ends.closing and self._ends.left_s(host) > REOPENS_S:
            self._ends.open(host)
            self._use_again(host, self._away.pop(host))
        self._changed()

    def _close(self, host: str) -> None:
        jobs = self._ends.jobs_on(host)
        self._ends.close(host)
        self._away[host] = self._put_away(host)
        for job in jobs:
            self._leave(job, host)
        self._changed()

    def _put_away(self, host: str) -> tuple[int, ...]:
        gpus = tuple(gpu for gpu, device in self._ledger.devices.items() if device.host == host)
        self._ledger.put_away(gpus)
        for away in self._ledger.hooks("host_away"):
            away(host)
        return gpus

    def _use_again(self, host: str, gpus: tuple[int, ...]) -> None:
        self._ledger.take_back(gpus)
        for back in self._ledger.hooks("host_back"):
            back(host)

    def _leave(self, job: Job, host: str) -> None:
        """Have a job leave a host that is about to end."""
        facts = {"host": host, "left": max(0.0, self._ends.at[host] - self._run.now)}
        self._out.note(job, Reason(Why.HOST_ENDS, facts))
        if job.target and host in self._hosts_of(job.target):
            self._attempts.drop_target(job)
        here = host in {self._ledger.host_of(gpu) for gpu in job.current.gpus}
        if not here and all(seat.host != host for seat in job.current.seats):
            if job.resizing and job.state is JobState.RUNNING and not job.wanted:
                self._attempts.suspend(job)  # ranks that were to join it are on that host
        elif job.state is JobState.SUSPENDING or job.wanted not in ("", "suspend"):
            return
        elif (target := self._elsewhere(job, host)) is not None:
            self._attempts.resize(job, target)
        else:
            self._attempts.leave(job, "drain")

    def _hosts_of(self, target: Target) -> set[str]:
        return {self._ledger.host_of(gpu) for gpu in target.gpus} | {seat.host for seat in target.seats}

    def _elsewhere(self, job: Job, host: str) -> Target | None:
        """The GPUs with which a job on several hosts can go on in place without one of these."""
        if not (job.settled and job.in_place and self._ledger.owns(job)):
            return None
        where = {gpu: self._ledger.host_of(gpu) for gpu in job.current.gpus}
        staying = [gpu for gpu in job.current.gpus if where[gpu] != host]
        if not staying or staying[0] != job.current.gpus[0]:
            return None
        need = len(job.current.gpus) - len(staying)
        free, room = self._ledger.free_by_host().by_host(), self._rooms.now(job)
        short = self._ends.too_short(job)
        for other, count in free.items():
            enough = min(count, count if room is None else room[other]) >= need
            if enough and other not in where.values() and other not in short:
                more = self._rooms.usable(job, other)[:need]
                return Target((*staying, *more), job.role or Role.PRIMARY, self._run.now)
        return None

    def _hurry(self, host: str) -> None:
        """The end of a host is near: jobs that still save there are told to end."""
        self._hurried.add(host)
        facts = {"left": max(0.0, self._ends.at[host] - self._run.now), "how": "SIGTERM"}
        for job in self._ends.jobs_on(host):
            if job.timers.get("term", -1.0) < self._run.now:
                self._out.note(job, Reason(Why.TIME_IS_UP, facts))
                self._attempts.terminate(job)

    # --- hosts that are gone ----------------------------------------------------------------

    def _released(self, event: ev.HostsReleased) -> None:
        for host in event.hosts:
            if (gpus := self._leaving.pop(host, None)) is None:
                continue
            self._ends.forget(host)
            joined = [number for number in self._guests if self.joined[number].host == host]
            if joined:
                self.joined[joined[-1]] = replace(self.joined[joined[-1]], left=event.at)
            else:
                self.given_back.append(GivenBack(host, gpus, event.at))

    def _failed(self, event: ev.ReleaseFailed) -> None:
        for host in event.hosts:
            if (gpus := self._leaving.pop(host, None)) is not None:
                self._use_again(host, gpus)
        self._changed()


def _goes_on(one: Joined, event: ev.AgentStarted) -> bool:
    """Whether a host that had joined another agent is in the life that begins now, with the same GPUs."""
    if one.left is not None or not event.epoch:
        return False
    there = {device.index for device in event.devices if device.host == one.host}
    return set(one.gpus) == there and (bool(there) or one.host in {cores.host for cores in event.cores})
