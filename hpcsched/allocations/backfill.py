"""Slurm's queue simulated: its main scheduler, and sched/backfill as it does it.

One partition. What is modelled, and what was found to be so in Slurm:

- The main scheduler looks at the queue after each submission and each end, in the order of priority, and
  stops at the first job that cannot start. A job that waits for a cap or for its array is passed over.
- Backfill comes at most every `interval_s`, and only when something has changed. It goes through the queue
  in the same order; a job that can start now starts, for any other it looks up when it can, by the *limits*
  of what runs, and reserves the **whole nodes** that it would get, from then until its own limit, also for a
  job that wants one GPU. Later jobs may use these nodes only if their limit ends before.
- The look-up lets running jobs go in groups, within 30 s of each other, then 60, 120 and so on: the further
  away a start is, the later it is guessed.
- Reservations begin and end at multiples of `resolution_s`, and none begins later than `window_s` from now. A
  job that a cap holds back gets none; an array gets `array_reservations` at most.
- A job that reaches its limit is ended there (Slurm looks every half minute or so).

Left out: partitions, fair share, preemption, reservations by administrators, topology, the time that a pass
takes. No clock, no file, no chance.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from hpcsched.allocations.cluster import BatchJob, Cluster, Held, Nodes, neighbours
from hpcsched.errors import ConfigError

FIRST_GROUP_S = 30.0
"""Jobs that end within so many seconds are let go together by the first look-up; twice as many each time."""
_LOOK_AGAIN = 2
"""After so many reservations backfill looks whether anybody is left that could start now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the batch system schedules, by the defaults of Slurm's SchedulerParameters (`bf_*`).

    `gpus_per_user`, `jobs_per_user`: caps on what runs (MaxTRESPerUser, MaxJobsPerUser of a QOS), for the
    `capped` users, for all if none is named; 0: no cap.
    """

    interval_s: float = 30.0
    resolution_s: float = 60.0
    window_s: float = 86_400.0
    max_job_test: int = 500
    max_job_user: int = 0
    array_reservations: int = 20
    gpus_per_user: int = 0
    jobs_per_user: int = 0
    capped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Ran:
    """When and where a job ran. `end_s` is when it will end as long as it runs."""

    job: BatchJob
    start_s: float
    end_s: float
    held: Held
    on: int
    """A bit for each of its nodes."""
    by_backfill: bool

    @property
    def limit_ends_s(self) -> float:
        return self.start_s + self.job.limit_s

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(node for node, _ in self.held)

    @property
    def waited_s(self) -> float:
        return self.start_s - self.job.submit_s


@dataclass(slots=True)
class _Reserved:
    begin_s: float
    end_s: float
    nodes: int


class Queue:
    """A batch system's queue on a virtual clock.

    Submit jobs, let time go on with `run`, read `ran`. A copy goes on by itself: it tells what would
    become of jobs.
    """

    def __init__(self, cluster: Cluster, settings: Settings | None = None) -> None:
        self.cluster, self.settings = cluster, settings or Settings()
        self.now = 0.0
        self.ran: dict[str, Ran] = {}
        """By name, each job that has started."""
        self.names: set[str] = set()
        self._nodes = Nodes(cluster)
        self._pending: list[tuple[float, int, BatchJob]] = []
        self._running: dict[str, Ran] = {}
        self._agenda: list[tuple[float, int, BatchJob, bool]] = []
        """What comes: a job's submission, or its end (True)."""
        self._sequence = 0
        self._cycle_s = math.inf
        self._last_cycle_s = -math.inf
        self._jobs_of: Counter[str] = Counter()
        self._gpus_of: defaultdict[str, float] = defaultdict(float)
        self._tasks_of: Counter[str] = Counter()

    def copy(self) -> Queue:
        """The same queue, which changes no more with this one."""
        new = Queue(self.cluster, self.settings)
        new.now, new.ran, new.names = self.now, self.ran.copy(), self.names.copy()
        new._nodes, new._pending, new._running = (
            self._nodes.copy(),
            self._pending.copy(),
            self._running.copy(),
        )
        new._agenda, new._sequence = self._agenda.copy(), self._sequence
        new._cycle_s, new._last_cycle_s = self._cycle_s, self._last_cycle_s
        new._jobs_of, new._tasks_of = self._jobs_of.copy(), self._tasks_of.copy()
        new._gpus_of = self._gpus_of.copy()
        return new

    @property
    def waiting(self) -> tuple[BatchJob, ...]:
        """The jobs that have come and not started, first to last."""
        return tuple(job for _, _, job in self._pending)

    @property
    def gpus_in_use(self) -> int:
        """GPUs that somebody holds now, in whole or in part."""
        return self.cluster.nodes * self.cluster.gpus - sum(self._nodes.free)

    def submit(self, *jobs: BatchJob) -> None:
        """Have jobs come at their time, at once if that is over.

        Raises ConfigError for a name that was there before, and for a job that the cluster can never run.
        """
        for job in jobs:
            if job.name in self.names:
                raise ConfigError(where="batch job", got=f"{job.name} again", accepted="a name of its own")
            self._nodes.check(job)
            self.names.add(job.name)
            self._later(max(self.now, job.submit_s), job, ends=False)

    def run(self, *, until: float = math.inf, done: Iterable[str] = ()) -> None:
        """Let time go on until then, or until the jobs named in `done` have all ended."""
        wanted = set(done)
        wanted -= {name for name in wanted if name in self.ran and name not in self._running}
        while (at := min(self._agenda[0][0] if self._agenda else math.inf, self._cycle_s)) <= until:
            if at == math.inf:
                return
            self.now = at
            changed = False
            while self._agenda and self._agenda[0][0] == at:
                _, _, job, ends = heappop(self._agenda)
                changed = True
                if ends:
                    self._end(job)
                    wanted.discard(job.name)
                else:
                    self._come(job)
            if changed:
                self._main_pass()
            if self._cycle_s <= at:
                self._cycle_s, self._last_cycle_s = math.inf, at
                self._backfill()
            elif changed and self._pending and self._cycle_s == math.inf:
                self._cycle_s = max(at, self._last_cycle_s + self.settings.interval_s)
                if self._cycle_s == at:
                    self._cycle_s, self._last_cycle_s = math.inf, at
                    self._backfill()
            if done and not wanted:
                return
        if until != math.inf:
            self.now = max(self.now, until)

    # --- what happens to a job ----------------------------------------------------------------------

    def _later(self, at: float, job: BatchJob, *, ends: bool) -> None:
        self._sequence += 1
        heappush(self._agenda, (at, self._sequence, job, ends))

    def _come(self, job: BatchJob) -> None:
        self._sequence += 1
        insort(self._pending, (-job.priority, self._sequence, job))

    def _start(self, entry: tuple[float, int, BatchJob], nodes: list[int], *, by_backfill: bool) -> None:
        job = entry[2]
        held = self._nodes.take(job, nodes)
        on = sum(1 << node for node in nodes)
        ran = Ran(job, self.now, self.now + min(job.runs_s, job.limit_s), held, on, by_backfill)
        self.ran[job.name] = self._running[job.name] = ran
        self._jobs_of[job.user] += 1
        self._gpus_of[job.user] += self.cluster.gpus_of(job)
        self._tasks_of[job.array] += 1
        self._later(ran.end_s, job, ends=True)

    def _end(self, job: BatchJob) -> None:
        self._nodes.give_back(job, self._running.pop(job.name).held)
        self._jobs_of[job.user] -= 1
        self._gpus_of[job.user] -= self.cluster.gpus_of(job)
        self._tasks_of[job.array] -= 1
        if job.follow is not None:
            self.submit(replace(job.follow, submit_s=self.now))

    def _held_back(self, job: BatchJob) -> bool:
        """Whether a cap or its array keeps a job from starting, whatever is free."""
        if job.array and job.at_once and self._tasks_of[job.array] >= job.at_once:
            return True
        rules = self.settings
        if rules.capped and job.user not in rules.capped:
            return False
        if rules.jobs_per_user and self._jobs_of[job.user] >= rules.jobs_per_user:
            return True
        return (
            bool(rules.gpus_per_user)
            and self._gpus_of[job.user] + self.cluster.gpus_of(job) > rules.gpus_per_user
        )

    def _main_pass(self) -> None:
        started = set()
        for entry in self._pending:
            if self._held_back(entry[2]):
                continue
            nodes = self._nodes.choose(entry[2])
            if nodes is None:
                break
            self._start(entry, nodes, by_backfill=False)
            started.add(entry[1])
        if started:
            self._pending = [entry for entry in self._pending if entry[1] not in started]

    # --- backfill -----------------------------------------------------------------------------------

    def _backfill(self) -> None:
        hopeful = self._hopeful(range(len(self._pending)), [])
        if not hopeful:
            return  # reservations that nobody would run into
        rules, reserved = self.settings, list[_Reserved]()
        last, started, tested, planned = hopeful[-1], set[int](), 0, 0
        of_user: Counter[str] = Counter()
        of_array: Counter[str] = Counter()
        ends = sorted(self._running.values(), key=lambda ran: (ran.limit_ends_s, ran.start_s))
        free_at = self._free_at(ends)
        for index, entry in enumerate(self._pending):
            job = entry[2]
            if index > last or tested >= rules.max_job_test:
                break
            if self._held_back(job) or (job.array and of_array[job.array] >= self._tasks_reserved(job)):
                continue
            of_user[job.user] += 1
            if rules.max_job_user and of_user[job.user] > rules.max_job_user:
                continue
            tested += 1
            if nodes := self._plan(job, ends, free_at, reserved):
                self._start(entry, nodes, by_backfill=True)
                started.add(entry[1])
                insort(ends, self.ran[job.name], key=lambda ran: (ran.limit_ends_s, ran.start_s))
                free_at = self._free_at(ends)
                continue
            of_array[job.array] += 1
            planned += 1
            if planned % _LOOK_AGAIN == 0:
                hopeful = self._hopeful([at for at in hopeful if at > index], reserved)
                last = hopeful[-1] if hopeful else -1
        if started:
            self._pending = [entry for entry in self._pending if entry[1] not in started]

    def _tasks_reserved(self, job: BatchJob) -> int:
        """How many reservations the tasks of its array may have."""
        most = self.settings.array_reservations
        return min(most, max(1, job.at_once - self._tasks_of[job.array])) if job.at_once else most

    def _hopeful(self, places: Iterable[int], reserved: list[_Reserved]) -> list[int]:
        """Those of the places in the queue whose jobs could start now beside the reservations."""
        known: dict[tuple[tuple[int, int, int], float], bool] = {}
        found = []
        for at in places:
            job = self._pending[at][2]
            what = (job.shape, job.limit_s if reserved else 0.0)
            if (could := known.get(what)) is None:
                allowed = self._unreserved(reserved, self.now, self.now + job.limit_s)
                could = known[what] = self._nodes.choose(job, allowed) is not None
            if could:
                found.append(at)
        return found

    def _unreserved(self, reserved: list[_Reserved], start_s: float, end_s: float) -> int:
        """A bit for each node that nobody has reserved any of that time."""
        taken = 0
        for one in reserved:
            if one.end_s > start_s and one.begin_s <= end_s:
                taken |= one.nodes
        return ~taken & ((1 << self.cluster.nodes) - 1)

    def _free_at(self, ends: list[Ran]) -> list[list[float]]:
        """For each node the time from which 0, 1, 2 ... of its GPUs are free, by the limits of what runs."""
        times = [[self.now] * (1 + free) for free in self._nodes.free]
        for ran in ends:
            for node, gpus in ran.held:  # a shard's GPU may be free then, no sooner
                times[node].extend([ran.limit_ends_s] * (1 if ran.job.shards else gpus))
        return times

    def _plan(
        self, job: BatchJob, ends: list[Ran], free_at: list[list[float]], reserved: list[_Reserved]
    ) -> list[int] | None:
        """The nodes on which the job starts now; else None, and its reservation is made, if it gets one."""
        rules, now = self.settings, self.now
        from_s = now
        while from_s <= now + rules.window_s:
            allowed = self._unreserved(reserved, from_s, from_s + job.limit_s)
            later_s = min((one.end_s for one in reserved if one.end_s > from_s), default=math.inf)
            if not job.shards:  # the look-up takes long, and never says less than this
                least = sorted(at[job.gpus] for node, at in enumerate(free_at) if allowed >> node & 1)
                if len(least) < job.nodes or later_s < least[job.nodes - 1]:
                    from_s = later_s
                    continue
            found = self._first_start(job, ends, allowed) if allowed.bit_count() >= job.nodes else None
            if found is None:
                from_s = later_s
                continue
            start_s, nodes = max(found[0], from_s), found[1]
            if start_s <= now:
                return nodes
            if start_s > later_s:
                from_s = later_s
                continue
            begin_s = math.floor(start_s / rules.resolution_s) * rules.resolution_s
            end_s = math.ceil((start_s + job.limit_s) / rules.resolution_s) * rules.resolution_s
            mask = sum(1 << node for node in nodes)
            if any(one.nodes & mask and one.begin_s < end_s and one.end_s > begin_s for one in reserved):
                from_s = start_s + rules.resolution_s if start_s == from_s else start_s
                continue
            if start_s <= now + rules.window_s:
                reserved.append(_Reserved(begin_s, end_s, mask))
            return None
        return None

    def _first_start(self, job: BatchJob, ends: list[Ran], allowed: int) -> tuple[float, list[int]] | None:
        """When the job can start on these nodes, by the limits of what runs; and on which it would."""
        nodes = self._nodes.choose(job, allowed)
        if nodes is not None:
            return self.now, nodes
        future, group_s, latest_s, until_s = self._nodes.copy(), FIRST_GROUP_S, self.now, 0.0
        for ran in ends:
            if not ran.on & allowed:
                continue
            ends_s = ran.limit_ends_s
            if ends_s > until_s:  # the next group begins: were those before it enough?
                if until_s and (nodes := neighbours(future.fitting(job, allowed), job.nodes)) is not None:
                    break
                while until_s and ends_s > until_s:
                    until_s, group_s = until_s + group_s, group_s * 2
                until_s = ends_s - ends_s % group_s + 2 * group_s
            future.give_back(ran.job, ran.held)
            latest_s = ends_s
        else:
            nodes = neighbours(future.fitting(job, allowed), job.nodes)
        return None if nodes is None else (max(latest_s, self.now + 1), nodes)
