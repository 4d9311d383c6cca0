"""The end of a set: GPUs that nothing can use any more, and hosts that are given back for it."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.core import events as ev
from hpcsched.core.jobs import Job
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.model import JobState
from hpcsched.core.resources.gpus import FreeGpus, GpusByHost
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.resources.queue import Asked
from hpcsched.core.resources.rooms import Rooms
from hpcsched.core.run import Run
from hpcsched.core.transitions.deadline import Deadline
from hpcsched.core.transitions.hosts import Hosts
from hpcsched.core.transitions.outcome import RELEASE, Outcome

READY_WITHIN_S = 60.0
"""Time in which a program says that it can be suspended, if it ever does (chosen): then it may get more."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Free GPUs of a host, and since when (seconds of the run's clock) no job that waits can use them.

    `whole`: they are all of a host that could be given back.
    """

    host: str
    gpus: tuple[int, ...]
    since: float
    whole: bool


class Leftover:
    """Knows which GPUs are left over, and gives hosts of such GPUs alone back where the run may do that.

    A GPU is left over when it is free and no job that waits could ever have it here: jobs that wait for
    anything else than GPUs (their time, another job, their user, time in this allocation) may yet.
    """

    def __init__(
        self,
        run: Run,
        out: Outcome,
        ledger: Ledger,
        *,
        own: Mechanism,
        rooms: Rooms,
        deadline: Deadline,
        hosts: Hosts,
    ) -> None:
        self._run, self._out, self._ledger, self._own, self._rooms = run, out, ledger, own, rooms
        self._deadline, self._hosts = deadline, hosts
        self.after_s: float | None = None
        """Seconds for which a host must have been left over to be given back; None: none ever is."""
        self.stays = ""
        """The host that cannot be given back."""
        self._idle: dict[str, Idle] = {}
        self._past_s: dict[tuple[str, bool], float] = {}
        """The GPU-seconds that were left over before what is now, by host and whether all of it was."""
        self._seen: tuple[int, ...] = ()
        self._free: FreeGpus | None = None
        self._wanted: frozenset[str] | None = None
        """The hosts that jobs in the queue could have; None: jobs wait for other things than GPUs."""
        self._could: dict[tuple[Asked, bool], frozenset[str]] = {}
        """By what a job asks for the hosts that it could have, as long as the devices are the same."""
        self._due = -1.0

    # --- questions --------------------------------------------------------------------------

    def idle(self) -> list[Idle]:
        """What is left over, host by host; nothing while a running job may still come to use it."""
        if not self._idle or any(map(self.may_grow, self._run.active.values())):
            return []
        return [self._idle[host] for host in self._ledger.host_names if host in self._idle]

    def gpu_seconds(self, *, whole: bool = False) -> dict[str, float]:
        """By host for how many GPU-seconds of the run GPUs have been left over, until now.

        `whole`: only while all of the host was, and it could have been given back.
        """
        total: dict[str, float] = {}
        now = [((idle.host, idle.whole), self._lasted_s(idle)) for idle in self._idle.values()]
        for (host, all_of_it), seconds in [*self._past_s.items(), *now]:
            if all_of_it or not whole:
                total[host] = total.get(host, 0.0) + seconds
        return total

    def could_go(self) -> list[Idle]:
        """The hosts of these that have nothing to do at all; one host, and the one that stays, never go."""
        whole = [idle for idle in self.idle() if self._whole(idle)]
        return whole if len(whole) < len(self._ledger.host_names) else whole[1:]

    def may_grow(self, job: Job) -> bool:
        """Whether a running job may still get more GPUs than it has, though the policy has left them free."""
        if job.spec.cpus is not None or job.width >= job.limits(self._rooms.most_for(job))[1]:
            return False
        if job.state is not JobState.RUNNING or job.target or job.wanted:
            return True
        if not job.ready:
            return self._run.now < job.current.start_s + READY_WITHIN_S
        return self._planned_to_grow(job) or any(grows(job) for grows in self._ledger.hooks("may_grow"))

    def _planned_to_grow(self, job: Job) -> bool:
        plan = self._run.plan
        if plan is None or plan.news != self._run.news:
            return False
        return any(
            stage.until > self._run.now and stage.gpus.get(job.id, 0) > job.width for stage in plan.stages
        )

    def _whole(self, idle: Idle) -> bool:
        """Whether all of a host is left over, and it can be given back."""
        host, active = idle.host, self._run.active.values()
        if not idle.whole or self._ledger.in_use(host):
            return False
        return not any(seat.host == host for job in active for seat in job.current.seats)

    # --- changes ----------------------------------------------------------------------------

    def begin_life(self, event: ev.AgentStarted) -> None:
        """Begin with the hosts of another agent."""
        self.after_s, self.stays = event.release_after_s, event.stays
        for host in list(self._idle):
            self._note(host, ())
        self._seen, self._due = (), -1.0

    def watch(self) -> None:
        """Note what is left over now; called after each event. It costs time in what has changed."""
        run, queue, ledger = self._run, self._own.queue, self._ledger
        seen = (ledger.moves, queue.changes, run.unfinished, len(run.active), self._deadline.draining)
        if seen == self._seen:
            return
        self._seen = seen
        before, changed = self._wanted, ledger.free.take_changed()
        if ledger.free is not self._free:
            self._free, self._could, before = ledger.free, {}, None
            changed.update(self._idle)  # hosts that are there no more
        self._wanted = self._wanted_hosts()
        for host in changed if self._wanted == before else {*ledger.host_names, *changed}:
            kept = self._wanted is None or host in self._wanted
            self._note(host, () if kept else tuple(ledger.free.on(host)))
        if self.after_s is not None:
            self._look_in_time(self.after_s)

    def _wanted_hosts(self) -> frozenset[str] | None:
        """The hosts that a job in the queue could have, were all others over; None: all may be wanted."""
        run, queue = self._run, self._own.queue
        if run.finished or self._deadline.draining or run.unfinished - len(run.active) > len(queue):
            return None
        wanted = [self._could_use(asked) for asked in queue.asked()] if queue else []
        return frozenset[str]().union(*wanted)

    def _could_use(self, asked: Asked) -> frozenset[str]:
        key = asked, self._ledger.counts_cores
        if key not in self._could:
            # Of an uneven job each host may be one, as long as enough others have more.
            uneven = asked.uneven and self._ledger.spreads
            least = 1 if uneven else asked.gpus
            hosts = [
                frozenset(host for host, gpus in room.items() if gpus >= least)
                for room in self._rooms.rooms_for(asked)
                if GpusByHost(room, spreads=uneven).fits(asked.gpus, asked.nodes, uneven)
            ]
            self._could[key] = frozenset[str]().union(*hosts)
        return self._could[key]

    def _note(self, host: str, gpus: tuple[int, ...]) -> None:
        """From now on these GPUs of a host are left over."""
        known = self._idle.get(host)
        if gpus == (known.gpus if known else ()):
            return
        if known:
            del self._idle[host]
            key = host, known.whole
            self._past_s[key] = self._past_s.get(key, 0.0) + self._lasted_s(known)
        if gpus:
            whole = host != self.stays and len(gpus) == self._ledger.gpus_on(host)
            self._idle[host] = Idle(host, gpus, self._run.now, whole)

    def _lasted_s(self, idle: Idle) -> float:
        return len(idle.gpus) * (self._run.now - idle.since)

    def _look_in_time(self, after_s: float) -> None:
        """Have `due` called when the next host has been left over for long enough."""
        now = self._run.now
        whole = (idle for idle in self._idle.values() if self._whole(idle))
        at = min((idle.since + after_s for idle in whole), default=None)
        # What was left over for longer is looked at when that look comes.
        if at is not None and not (self._due > now and not now < at < self._due):
            self._look_at(max(at, now))

    def _look_at(self, at: float) -> None:
        self._due = at
        self._out.set_timer(RELEASE, at)

    def due(self) -> None:
        """A timer has run out: give back what has been left over for long enough."""
        after_s, now = self.after_s, self._run.now
        if after_s is None or self._deadline.draining or now < self._due:
            return
        if hosts := [idle for idle in self.could_go() if idle.since + after_s <= now]:
            self._hosts.give_back(idle.host for idle in hosts)
        elif self._idle and self._run.active:  # somebody may still grow
            self._look_at(now + max(after_s, READY_WITHIN_S))
