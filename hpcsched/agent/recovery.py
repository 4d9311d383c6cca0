"""Recovery of a run from the journal of an earlier agent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hpcsched import mechanisms
from hpcsched.agent.allocation.release import KEPT_WITHIN_S
from hpcsched.agent.attempts import read_record
from hpcsched.agent.job_folder import is_aside
from hpcsched.agent.node.guard import marked
from hpcsched.agent.resuming import Search, own_checkpoints
from hpcsched.contract import files, variables
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobState
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.errors import BadInput, HpcschedError, StoreError
from hpcsched.launch.caught import catchers, send
from hpcsched.launch.orphans import Process, end_processes, find_orphans, wait_for_end
from hpcsched.patience import but_for_lasting, kind_of, move, patiently
from hpcsched.store import compaction, journal
from hpcsched.store.repair import next_copy
from hpcsched.store.replay import replay
from hpcsched.store.rundir import RunDir, RunDirError, RunRecord
from hpcsched.store.status import read_status


class Recovered(NamedTuple):
    """The machine after the replay, and the journal, open for writing.

    `commands`: names of the inbox commands that earlier agents carried out.
    """

    machine: Machine
    journal: journal.Journal
    commands: set[str]


def open_run(rundir: RunDir, make_policy: PolicyMaker, *, detach: bool = False) -> Recovered:
    """Replay the journal, cut a torn tail off, and open it for writing. `detach`: an agent on another host
    may still have it open."""
    mechanisms.load()
    if detach and rundir.begun:
        journal.detach(rundir.journal)
    if not rundir.begun:
        return Recovered(Machine(make_policy), journal.Journal(rundir.journal), set())
    machine, length, records, commands, _ = replay(rundir.journal, make_policy)
    writer = journal.Journal(rundir.journal, length=length, records=records)
    compaction.tidy(rundir.journal)
    if length >= compaction.COMPACTED_BYTES:
        with contextlib.suppress(StoreError):  # a full disk: a later agent then
            compaction.finish(rundir.journal, writer)
    return Recovered(machine, writer, commands)


def refuse_lost_journal(rundir: RunDir) -> None:
    """Raise RunDirError for a run directory whose journal is lost: the run would begin anew beside itself."""
    jobs = rundir.root / files.JOBS
    has_been = kind_of(rundir.status) is not None or patiently(lambda: [*jobs.iterdir()])
    if rundir.begun or not has_been:
        return
    living = len(living_processes(rundir, rundir.read_record()))
    still = f"; {living} of its processes still live on this host" if living else ""
    raise RunDirError(
        f"{rundir.journal} is empty or gone, but a run has been here{still}; `hpcsched journal repair` puts "
        "what is left of it aside, another --dir begins elsewhere"
    )


def living_processes(
    rundir: RunDir, record: RunRecord | None, known: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """The run's processes on this host, as (pid, start time): by the run's id, else by its directory.

    Processes of `known` that still live are added: a program may have cleared its environment.
    """
    if record is not None:
        return find_orphans(record.id, known)
    return find_orphans(str(rundir.root.resolve()), known, by=variables.RUN_DIR)


def _short(host: str) -> str:
    return host.partition(".")[0]


class Left(NamedTuple):
    """How the processes of a job have ended that an earlier agent had left: `by_itself`, as they were asked
    to save; what they had written by `until` (Unix time) they had written undisturbed."""

    by_itself: bool
    until: float


def end_orphans(
    rundir: RunDir,
    machine: Machine,
    record: RunRecord | None,
    *,
    host: str,
    grace_s: float,
    hosts: int,
    left: dict[int, Left] | None = None,
    spared: Collection[str] = (),
) -> int:
    """End the processes that an earlier agent left on this host, SIGTERM first; returns their number. Those
    with one of the marks in `spared` run on for node agents.

    Programs that save by themselves are asked to by their own signal before; how each job's have ended is put
    into `left`, by job id. Processes are found by the journal and by the run's id (of run.json,
    else of the journal), else by the run's directory. Raises StoreError if some cannot be ended, or cannot be
    found on `hosts` hosts: their GPUs are not free then.
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
        orphans = living_processes(rundir, None, known)
    orphans = sorted({*orphans} - marked(orphans, spared)) if spared else orphans
    now, living = time.time(), {*orphans}
    saving, killed = _asked_to_save(machine, orphans, grace_s), list[Process]()
    stay = end_processes(orphans, grace_s, killed=killed) if orphans else []
    for job in machine.run.active.values():
        if left is not None and living & {*job.processes}:
            theirs = saving.get(job.id)
            left[job.id] = Left(theirs is not None and not theirs & {*killed, *stay}, now)
    if stay:
        pids = ", ".join(str(pid) for pid, _ in stay)
        raise StoreError(f"processes of the run's earlier agent cannot be ended: {pids}")
    return len(orphans)


def _asked_to_save(machine: Machine, orphans: Sequence[Process], grace_s: float) -> dict[int, set[Process]]:
    """The processes of each job that saves by itself and catches the signal to do so, by job id.

    They get it here, each once, and have had their time to leave: what is around them, as a pipe to `tee`,
    gets its SIGTERM later.
    """
    found, asked = dict[int, set[Process]](), dict[int, list[Process]]()
    for job in machine.run.active.values():
        theirs, restart = set(job.processes) & set(orphans), job.spec.restart
        if not (theirs and job.saves_by_itself and restart and restart.signal):
            continue
        number = signal.Signals[restart.signal]
        if told := catchers(theirs, number):
            found[job.id] = theirs | set(told)
            send(told, number)
            asked[job.id] = told
    late = set(wait_for_end((one for told in asked.values() for one in told), grace_s))
    return {job_id: theirs for job_id, theirs in found.items() if not late & theirs}


def put_unknown_jobs_aside(rundir: RunDir, machine: Machine, checkpoints: Callable[[int], Path]) -> list[str]:
    """Rename folders of jobs that the journal does not know, as after a repair; returns a line for each.

    Their ids are given again, and a new job would find their states. `checkpoints` gives a job's folder of
    checkpoints. The caller holds the run's lock. Raises StoreError.
    """
    jobs = rundir.root / files.JOBS
    names = (name for name in patiently(lambda: os.listdir(jobs)) if name.isdecimal())  # noqa: PTH208
    said = []
    for job_id in sorted(int(name) for name in names if int(name) not in machine.run.jobs):
        for path in (rundir.job(job_id), checkpoints(job_id)):
            if kind_of(path) is None:
                continue  # the checkpoints are in the job's folder, mostly
            copy = next_copy(path)
            try:
                move(path, copy)
            except OSError as error:
                raise StoreError(f"cannot rename {path} to {copy.name}: {error.strerror}") from error
            said.append(f"the journal knows no job {job_id}: its {path} is {copy.name} now")
    return said


def saved_steps(
    rundir: RunDir,
    machine: Machine,
    *,
    left: Mapping[int, Left] | None = None,
    alone: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> dict[int, int]:
    """The step of the newest checkpoint, by job id, of each job that had a lease when its agent ended.

    Suspended jobs whose state was only in that agent's memory are included: that state is lost. `left`: the
    jobs whose programs have ended just now. `alone`: there are no node agents, so nobody makes what was
    in memory durable any more. What does not count of what they have saved is said.
    """
    steps: dict[int, int] = {}
    for job in machine.run.jobs.left():
        if not job.state.active and job.state is not JobState.SUSPENDED:
            continue
        if job.saves_by_itself:
            anew = job.traits.anew and not is_aside(rundir.job(job.id), job.attempt)
            if job.state.active and not anew:
                found, not_taken = _found_after_a_crash(job, rundir.job(job.id), (left or {}).get(job.id))
                steps |= {} if found is None else {job.id: found}
                if not_taken:
                    say(f"job {job.id} ({job.spec.name}): its checkpoint {not_taken}")
            continue
        if alone or not job.state.active:
            _forget_held(rundir.job(job.id))
        try:
            record = patiently(partial(read_record, rundir.job(job.id)))
        except BadInput:
            continue  # it says nothing: what is on record stands
        if job.state.active:
            counts = not job.traits.anew or is_aside(rundir.job(job.id), job.attempt)
            lost = alone and bool(job.saved_step)  # where no record is on disk it was in memory
            if counts and (record or lost):
                steps[job.id] = record.step if record else 0
        elif (step := record.step if record else 0) < (job.saved_step or 0):
            steps[job.id] = step
    for job in machine.run.jobs.since(machine.run.now - KEPT_WITHIN_S) if alone else ():
        if job.state.final:  # it has left by its time limit, say, and its keeper has gone with the agent
            _forget_held(rundir.job(job.id))
    return steps


def _forget_held(folder: Path) -> None:
    """What was in memory is lost: nobody is to wait for it."""
    for held in patiently(partial(_held_files, folder)):
        with contextlib.suppress(OSError):  # the job's own folder of that name
            held.unlink(missing_ok=True)


def _held_files(folder: Path) -> list[Path]:
    with but_for_lasting():  # `glob` may take an error for nothing
        return [path for path in folder.iterdir() if path.name.startswith(f"{files.HELD}.")]
    return []


def _found_after_a_crash(job: Job, folder: Path, left: Left | None) -> tuple[int | None, str]:
    """The step of the newest checkpoint of a job that saves by itself, as far as that is known, and its file
    system answers; and which one does not count, and why."""
    restart = job.spec.restart
    assert restart is not None
    checkpoints = own_checkpoints(job, restart, folder)
    by_itself, until = left or (False, None)
    search = Search(checkpoints, lambda: checkpoints.after_a_crash(by_itself=by_itself, ended=until))
    if not search.wait():
        return None, ""
    return checkpoints.newest.step if checkpoints.newest else None, checkpoints.not_taken


def seen_steps(rundir: RunDir, machine: Machine) -> dict[int, int]:
    """The step in the last snapshot, by job id, of each job that had a lease when its agent ended.

    The snapshot is newer than the journal; programs that go on without an agent are not seen.
    """
    try:
        jobs = read_status(rundir, only=()).jobs
    except HpcschedError:
        return {}
    attempts = {job.id: job.attempt for job in machine.run.active.values()}
    return {job.id: job.step for job in jobs if job.step and attempts.get(job.id) == job.attempt}
