"""Taking a run over: from nothing, or from the journal an earlier agent left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcsched.agent.attempts import read_record
from hpcsched.agent.job_folder import is_aside
from hpcsched.contract import files, variables
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.errors import BadInput, HpcschedError, StoreError
from hpcsched.launch.orphans import end, find_orphans
from hpcsched.store import journal
from hpcsched.store.repair import next_copy
from hpcsched.store.replay import replay
from hpcsched.store.rundir import RunDir, RunDirError, RunRecord
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


def refuse_lost_journal(rundir: RunDir) -> None:
    """Raise RunDirError where a run has been, but its journal is gone: it would begin anew, beside itself."""
    has_been = rundir.status.exists() or any((rundir.root / files.JOBS).glob("*"))
    if rundir.begun or not has_been:
        return
    living = len(living_of(rundir, rundir.read_record()))
    still = f"; {living} of its processes still live on this host" if living else ""
    raise RunDirError(
        f"{rundir.journal} is empty or gone, but a run has been here{still}; `hpcsched journal repair` puts "
        "what is left of it aside, another --dir begins elsewhere"
    )


def living_of(
    rundir: RunDir, record: RunRecord | None, known: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """The run's processes on this host: by the run's id, or where that is not known by its directory.

    And those of `known`, by pid and start time, that still live: a program may have thrown its environment
    away.
    """
    if record is not None:
        return find_orphans(record.id, known)
    return find_orphans(str(rundir.root.resolve()), known, by=variables.RUN_DIR)


def _short(host: str) -> str:
    return host.partition(".")[0]


def end_orphans(
    rundir: RunDir, machine: Machine, record: RunRecord | None, *, host: str, grace_s: float, hosts: int
) -> int:
    """End what an earlier agent started on this host and left behind; returns how many there were.

    They are asked first: a program of ours saves when it gets a SIGTERM. They are known by what the journal
    says of them, and by the run's id; where run.json is lost by the one in the journal, else by the run's
    directory. Raises StoreError if some cannot be
    ended, or not be told on `hosts` hosts: their GPUs are not free.
    """
    before = record.host if record else ""
    known = [
        process
        for job in machine.run.active.values()
        for process in job.processes
        if _short(machine.run.spawned_on.get(job.id) or before) == _short(host)
    ]
    if run_id := record.id if record else machine.run.run_id:
        orphans = find_orphans(run_id, known)
    elif not rundir.begun:
        return 0
    elif hosts > 1:
        raise StoreError(
            f"{rundir.record} is gone, and the journal does not say what the run's processes on other hosts "
            "are known by: end them, and go on with the run on one host first"
        )
    else:
        orphans = living_of(rundir, None, known)
    left = end(orphans, grace_s) if orphans else []
    if left:
        pids = ", ".join(str(pid) for pid, _ in left)
        raise StoreError(f"processes of the run's earlier agent cannot be ended: {pids}")
    return len(orphans)


def put_strangers_aside(rundir: RunDir, machine: Machine, checkpoints: Callable[[int], Path]) -> list[str]:
    """Keep what jobs have left that the journal knows nothing of, as after a repair, under other names: their
    ids are given again, and a new job would find their states. A line for each.

    `checkpoints` gives a job's folder of these. For who holds the run's lock. Raises StoreError.
    """
    names = (name for name in os.listdir(rundir.root / files.JOBS) if name.isdecimal())  # noqa: PTH208
    said = []
    for job_id in sorted(int(name) for name in names if int(name) not in machine.run.jobs):
        for path in (rundir.job(job_id), checkpoints(job_id)):
            if not path.exists():
                continue  # the checkpoints are in the job's folder, mostly
            copy = next_copy(path)
            try:
                path.rename(copy)
            except OSError as error:
                raise StoreError(f"cannot rename {path} to {copy.name}: {error.strerror}") from error
            said.append(f"the journal knows no job {job_id}: its {path} is {copy.name} now")
    return said


def saved_steps(rundir: RunDir, machine: Machine) -> dict[int, int]:
    """By job: the step of the newest checkpoint of each job that had a lease when its agent ended.

    And of each suspended one whose state was still in that agent's memory only: it is gone.
    """
    steps: dict[int, int] = {}
    for job in machine.run.jobs.values():
        if not job.state.active and not (job.state is JobState.SUSPENDED and job.saved_step):
            continue
        try:
            record = read_record(rundir.job(job.id))
        except BadInput:
            continue  # it says nothing: what is on record stands
        if job.state.active:
            if record and (not job.traits.anew or is_aside(rundir.job(job.id), job.attempt)):
                steps[job.id] = record.step
        else:
            if (step := record.step if record else 0) < (job.saved_step or 0):
                steps[job.id] = step
            for held in rundir.job(job.id).glob(f"{files.HELD}.*"):
                with contextlib.suppress(OSError):  # the job's own folder of that name
                    held.unlink(missing_ok=True)
    return steps


def seen_steps(rundir: RunDir, machine: Machine) -> dict[int, int]:
    """By job that had a lease when its agent ended: how far it was by the last snapshot, which is newer than
    what the journal holds; programs that go on without an agent are heard of no more."""
    try:
        jobs = read_status(rundir).jobs
    except HpcschedError:
        return {}
    attempts = {job.id: job.attempt for job in machine.run.active.values()}
    return {job.id: job.step for job in jobs if job.step and attempts.get(job.id) == job.attempt}
