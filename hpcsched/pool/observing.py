"""What a run has to do, read from its directory; nothing is written there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hpcsched.agent.inbox import Inbox
from hpcsched.client.waiting import with_untaken
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Why
from hpcsched.core.states import JobState
from hpcsched.errors import HpcschedError, NoSuchRun
from hpcsched.pool.deciding import Work
from hpcsched.pool.foresight import Rest, rest_of
from hpcsched.pool.poolfile import Pool
from hpcsched.sim.blocks import Block
from hpcsched.store import run_folders
from hpcsched.store.rundir import RunDir, agent_works
from hpcsched.store.status import JobStatus, Status, seconds_until

MOST_JOURNAL_BYTES = 256 * 2**20
"""A longer journal is not read in each round (chosen): it is not known then when the queue ends."""

_NOT_FOR_GPUS = (Why.DEPENDENCY, Why.USER_SUSPENDED)
"""A job that waits for this is not helped by more GPUs."""

ProfilesOf = Callable[[set[str]], Sequence[Profile]]


@dataclass(kw_only=True)
class Seen:
    """A run: what it has to do, the hosts that it has (`blocks`), and the rest of its work, where that is
    known. `leader`: the batch job of its agent ("": none), `own`: the number of hosts that have not joined
    from other allocations, `joined`: of those that have."""

    work: Work
    blocks: list[Block] = field(default_factory=list)
    leader: str = ""
    own: int = 0
    joined: int = 0
    rest: Rest | None = None


def look(pool: Pool, profiles_of: ProfilesOf, speed: float = 1.0) -> Seen:
    """Look at the pool's run. Raises StoreError for a status that cannot be read. `speed`: of stand-ins in a
    run that has not begun."""
    rundir = RunDir(pool.dir)
    try:
        status, untaken = with_untaken(rundir, only=())
    except NoSuchRun:
        return Seen(work=Work())
    leads = status.run.alive and agent_works(rundir)
    waiting = [job for job in status.jobs if _waits(job, leads)]
    running = sum(job.state.active for job in status.jobs) if leads else 0
    waiting += [job for job in untaken if not job.state.final]
    others = 0 if leads or waiting else int(run_folders.waits(rundir))  # such as a retry
    seen = Seen(work=Work(leads=leads, running=running, waiting=len(waiting) + others))
    if leads:
        seen.leader = status.run.allocation.get("id") or ""
        own, joined = _blocks(status)
        seen.blocks, seen.own, seen.joined = own + joined, len(own), len(joined)
    if not seen.work.waiting:
        return seen
    machine = _machine(rundir)
    free = sum(gpu.job is None and gpu.lane == "foreground" for gpu in status.gpus) if leads else 0
    wanted = sum(_least(job, machine) for job in waiting) + others
    seen.work = replace(seen.work, free_gpus=free, wanted_gpus=wanted)
    if not others:
        seen.rest = _rest(
            pool, rundir, machine, leads, status.run.speed if rundir.begun else speed, profiles_of
        )
    return seen


def _waits(job: JobStatus, leads: bool) -> bool:
    if job.state.final or job.state is JobState.HELD or job.reason == Why.USER_SUSPENDED:
        return False
    return not (leads and (job.state.active or job.reason in _NOT_FOR_GPUS))


def _least(job: JobStatus, machine: Machine | None) -> int:
    known = machine.run.jobs.get(job.id) if machine else None
    gpus = known.spec.gpus_min if known and known.spec.name == job.name else 0
    return max(1, gpus) * job.nodes


def _blocks(status: Status) -> tuple[list[Block], list[Block]]:
    """The hosts of a run that goes on: those that have not joined from other allocations, and those that
    have."""
    counts = Counter(gpu.host for gpu in status.gpus if gpu.lane == "foreground")
    guests = {one.host: one for one in status.run.joined if one.left_s is None and not one.closing}
    away = {one.host for one in status.run.joined} - guests.keys() | set(status.run.given_back)
    end = status.run.allocation.get("deadline")
    ends = {host: end for host in counts if host not in away}
    ends |= {host: one.end for host, one in guests.items()}
    own, joined = list[Block](), list[Block]()
    for host, end in ends.items():
        left_s = seconds_until(end)
        if counts.get(host) and (left_s is None or left_s > 0):
            block = Block(gpus=counts[host], lasts_s=math.inf if left_s is None else left_s)
            (joined if host in guests else own).append(block)
    return own, joined


def _machine(rundir: RunDir) -> Machine | None:
    from hpcsched.policy import make_policy
    from hpcsched.store.replay import replay

    try:
        if rundir.begun and rundir.journal.stat().st_size <= MOST_JOURNAL_BYTES:
            return replay(rundir.journal, make_policy).machine
    except (OSError, HpcschedError):
        pass  # its end may just be written; the next round reads it again
    return None


def _rest(
    pool: Pool,
    rundir: RunDir,
    machine: Machine | None,
    leads: bool,
    speed: float,
    profiles_of: ProfilesOf,
) -> Rest | None:
    """The work that is left, with what waits in the inbox; None where it is not known of all jobs."""
    if machine is None and rundir.begun:
        return None
    rest = rest_of(machine, speed) if machine else _nothing(pool, speed)
    if rest is None or leads:
        return rest
    names = {job.name for job in rest.jobs}
    known = {job.spec.name for job in machine.run.jobs.values()} if machine else set()
    found: dict[str, JobSpec] = {}
    for _, command in Inbox.peek(rundir):
        if command.command == "submit":
            found.update((spec.name, spec) for spec in command.wanted if spec.name not in known)
    models = {profile.model for profile in rest.profiles}
    profiles = profiles_of({spec.model for spec in found.values()} - models)
    models |= {profile.model for profile in profiles}
    if any(one.steps is None or one.model not in models or one.cpus is not None for one in found.values()):
        return None
    names |= found.keys()
    new = [
        replace(one, submit_at=0.0, after=tuple(name for name in one.after if name in names))
        for one in found.values()
    ]
    return replace(rest, jobs=(*rest.jobs, *new), profiles=(*rest.profiles, *profiles))


def _nothing(pool: Pool, speed: float) -> Rest:
    policy, options = str(pool.run.get("policy", "marble")), pool.run.get("policy_option", {})
    return Rest(jobs=(), profiles=(), policy=policy, options=options, speed=speed)
