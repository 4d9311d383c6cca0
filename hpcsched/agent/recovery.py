"""Taking a run over: from nothing, or from the journal an earlier agent left behind."""

from __future__ import annotations

from typing import NamedTuple

from hpcsched.agent.attempts import read_record
from hpcsched.agent.beginnings import is_aside
from hpcsched.core.deciding import PolicyMaker
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.errors import HpcschedError, StoreError
from hpcsched.launch.orphans import end, find_orphans
from hpcsched.store import journal
from hpcsched.store.replay import replay
from hpcsched.store.rundir import RunDir, RunRecord
from hpcsched.store.status import read_status


class Recovered(NamedTuple):
    """A machine brought up to date, and the journal to go on with.

    `commands` are the inbox commands that earlier agents carried out.
    """

    machine: Machine
    journal: journal.Journal
    commands: set[str]


def open_run(rundir: RunDir, make_policy: PolicyMaker) -> Recovered:
    """Read what is there, cut a torn tail off, and open the journal for writing."""
    if not rundir.journal.exists():
        return Recovered(Machine(make_policy), journal.Journal(rundir.journal), set())
    machine, length, records, commands = replay(rundir.journal, make_policy)
    writer = journal.Journal(rundir.journal, length=length, records=records)
    return Recovered(machine, writer, commands)


def end_orphans(machine: Machine, record: RunRecord | None, *, host: str, grace_s: float) -> int:
    """End what an earlier agent started on this host and left behind; returns how many there were.

    They are asked first: a program of ours saves when it gets a SIGTERM. Raises StoreError if some
    cannot be ended: their GPUs are not free.
    """
    if record is None:
        return 0
    known = [process for job in machine.active.values() for process in job.processes]
    orphans = find_orphans(record.id, known if record.host == host else [])
    left = end(orphans, grace_s) if orphans else []
    if left:
        pids = ", ".join(str(pid) for pid, _ in left)
        raise StoreError(f"processes of the run's earlier agent cannot be ended: {pids}")
    return len(orphans)


def saved_steps(rundir: RunDir, machine: Machine) -> dict[int, int]:
    """By job: the step of the newest checkpoint of each job that had a lease when its agent ended.

    And of each suspended one whose state was still in that agent's memory only: it is gone.
    """
    steps = {}
    for job in machine.active.values():
        record = read_record(rundir.job(job.id))
        if record and (not job.traits.anew or is_aside(rundir.job(job.id), job.attempt)):
            steps[job.id] = record.step
    for job in machine.jobs.values():
        if job.state is JobState.SUSPENDED and job.saved_step:
            record = read_record(rundir.job(job.id))
            if (step := record.step if record else 0) < job.saved_step:
                steps[job.id] = step
            for held in rundir.job(job.id).glob("held.*"):
                held.unlink(missing_ok=True)
    return steps


def seen_steps(rundir: RunDir, machine: Machine) -> dict[int, int]:
    """By job that had a lease when its agent ended: how far it was by the last snapshot, which is newer than
    what the journal holds; programs that go on without an agent are heard of no more."""
    try:
        jobs = read_status(rundir).jobs
    except HpcschedError:
        return {}
    attempts = {job.id: job.attempt for job in machine.active.values()}
    return {job.id: job.step for job in jobs if job.step and attempts.get(job.id) == job.attempt}
