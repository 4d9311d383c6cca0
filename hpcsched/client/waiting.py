"""Jobs that were submitted where no agent runs: they wait in the run directory, and can be taken back."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcsched.core.reasons import Why
from hpcsched.core.states import JobState
from hpcsched.errors import HpcschedError, NoSuchRun
from hpcsched.store import run_folders
from hpcsched.store.rundir import RunDir, RunLock
from hpcsched.store.status import JobStatus, RunStatus, Status, iso, read_status

if TYPE_CHECKING:
    from hpcsched.core.model import JobSpec

PENDING = "PENDING"
"""The state of a run directory in which no run has begun, and for which jobs wait."""


LEFT = ("cancel", "hold", "release", "resume")
"""Commands that are left to the next agent, which carries them out before it starts anything."""


def read_all(rundir: RunDir, only: Sequence[str] | None = None) -> Status:
    """The newest snapshot, and after its jobs those that wait for an agent, or were cancelled before one took
    them. `only`: as of `read_status`, which it raises as."""
    status, untaken = with_untaken(rundir, only)
    status.jobs += untaken
    return status


def with_untaken(rundir: RunDir, only: Sequence[str] | None = None) -> tuple[Status, list[JobStatus]]:
    """The same apart: the snapshot, and the jobs that no agent has taken."""
    try:
        status = read_status(rundir, only)
    except NoSuchRun:
        untaken = _untaken(rundir, ())
        if not untaken:
            raise
        return Status(run=_not_begun(rundir), gpus=[], jobs=[]), untaken
    if status.run.alive or not run_folders.has_commands(rundir):
        return status, []
    if only is not None:  # the names of all are taken
        status = read_status(rundir)
    return status, _untaken(rundir, status.jobs)


def _untaken(rundir: RunDir, known: Sequence[JobStatus]) -> list[JobStatus]:
    """The new jobs of the submits in the inbox, in the order in which an agent takes them, with ids behind
    those of the `known` ones."""
    if not run_folders.has_commands(rundir):
        return []
    from hpcsched.accounts import user_name
    from hpcsched.agent.inbox import Inbox

    names = {job.name for job in known}
    found: dict[str, tuple[JobSpec, bool]] = {}
    for _, command in Inbox.peek(rundir):
        if command.command == "submit":
            new = (spec for spec in command.jobs if spec.name not in names)
            found.update((spec.name, (spec, spec.name in command.cancelled)) for spec in new)
    first, user = max((job.id for job in known), default=0) + 1, user_name()
    return [_as_status(i, *what, user) for i, what in enumerate(found.values(), first)]


def what_takes_them(status: Status) -> str | None:
    """A line about jobs that wait for an agent; None if there are none."""
    if status.run.alive:
        return None
    waiting = sum(waits(job) for job in status.jobs)
    if not waiting:
        return None
    what = "the job that waits" if waiting == 1 else f"the {waiting} jobs that wait"
    return f"no agent runs: `{taken_by(status)}` takes {what}"


def what_else_waits(rundir: RunDir, status: Status) -> list[str]:
    """A line for each other command that waits for an agent, such as a retry."""
    if status.run.alive or not run_folders.has_commands(rundir):
        return []
    from hpcsched.agent.inbox import Inbox

    names = {job.id: job.name for job in status.jobs if not waits(job)}
    lines = []
    for _, command in Inbox.peek(rundir):
        about = [names[job_id] for job_id in command.targets if job_id in names]
        what = command.command
        if command.command == "submit":
            about = [spec.name for spec in command.wanted if spec.name in names.values()]
            what = "change"
        if about:
            of = ", ".join(about[:3]) + (f" and {len(about) - 3} more" if len(about) > 3 else "")
            lines.append(f"a {what} of {of} waits: `{taken_by(status)}` does it")
    return lines


def waiting_by_job(rundir: RunDir) -> dict[int, list[str]]:
    """By job id the commands about it that wait for an agent, oldest first."""
    found: dict[int, list[str]] = {}
    if run_folders.has_commands(rundir):
        from hpcsched.agent.inbox import Inbox

        for _, command in Inbox.peek(rundir):
            for job_id in command.targets:
                found.setdefault(job_id, []).append(command.command)
    return found


def taken_by(status: Status) -> str:
    """The command that takes what waits."""
    root = Path(status.run.dir)
    begins = status.run.state == PENDING
    return run_folders.begin(root) if begins else run_folders.go_on(root)


def waits(job: JobStatus) -> bool:
    """Whether a job waits for an agent."""
    return job.reason == Why.NO_AGENT


def outcome_of(
    job: JobStatus, command: str, waits_for_it: Sequence[str], *, retried: bool
) -> tuple[bool, str]:
    """Whether the next agent will do something to the job, after what `waits_for_it`, and what.

    `retried`: a retry waits for some job. Those that were cancelled with that one run again, too.
    """
    if "cancel" in waits_for_it:
        return False, "is to be cancelled already"
    back = "retry" in waits_for_it or (job.state == JobState.CANCELLED and retried)
    if job.state.final and back and command in ("cancel", "hold"):
        return True, f"is {job.state}: {command} follows the retry that waits, if that brings it back"
    if job.state.final:
        again = "" if command == "cancel" else f"; `hpcsched retry {job.name}` runs it again"
        return False, f"is {job.state} already: nothing to {command}{again}"
    if waits(job):
        return False, f"waits for an agent: it can be cancelled, but not told to {command}"
    if command == "cancel":
        return True, "is to be cancelled"
    held = job.state == JobState.HELD or job.reason == Why.USER_SUSPENDED
    for word in waits_for_it:
        held = word == "hold" if word in LEFT else held
    if command == "hold":
        return not held, "is held already" if held else "is to be held"
    if held or job.state.active:  # one that ran may have been told to stay away
        return True, "is to go on"
    return False, "is neither held nor suspended by you"


def take_back(rundir: RunDir, chosen: Collection[JobStatus]) -> tuple[set[str], set[str]]:
    """Cancel jobs that wait for an agent, with those that wait for them to complete, and take back what waits
    to be done to the others of `chosen`.

    The cancelled ones stay in the inbox as such, for the agent to take them so. Returns the names of these,
    and of those of which a retry or a change was taken back. Raises RunDirError where an agent has come
    meanwhile.
    """
    lock = RunLock(rundir)
    try:
        gone = _cancel(rundir, {job.name for job in chosen if waits(job)})
        kept = _take_back_changes(rundir, {job.id: job.name for job in chosen if not waits(job)})
    finally:
        lock.release()
    return gone, kept


def _cancel(rundir: RunDir, names: set[str]) -> set[str]:
    """Cancel new jobs in the inbox, with those that wait for them; the names of all of these."""
    from hpcsched.agent.inbox import Inbox, put_back

    gone = set(names)
    commands = [(name, command) for name, command in Inbox.peek(rundir) if command.command == "submit"]
    specs = [spec for _, command in commands for spec in command.wanted]
    while more := {spec.name for spec in specs if spec.name not in gone and gone.intersection(spec.after)}:
        gone |= more
    for name, command in commands:
        if theirs := [spec.name for spec in command.wanted if spec.name in gone]:
            command.cancelled += theirs
            put_back(rundir, name, command)
    return gone


def _take_back_changes(rundir: RunDir, jobs: dict[int, str]) -> set[str]:
    """Take retries and changes of jobs that the run has out of the inbox; the names of those that had one."""
    from hpcsched.agent.inbox import Inbox, put_back

    had: set[str] = set()
    for name, command in Inbox.peek(rundir):
        about = {jobs[job_id] for job_id in command.targets if job_id in jobs}
        about |= {spec.name for spec in command.jobs} & set(jobs.values())
        if about and command.command in ("submit", "retry"):
            command.targets = [job_id for job_id in command.targets if job_id not in jobs]
            command.jobs = [spec for spec in command.jobs if spec.name not in about]
            put_back(rundir, name, command if command.targets or command.jobs else None)
            had |= about
    return had


def waiting_names(rundir: RunDir) -> set[str]:
    """Names of jobs that wait in the inbox, and are new; not of changes to jobs that the run has."""
    try:
        known = read_status(rundir).jobs
    except HpcschedError:
        known = []
    return {job.name for job in _untaken(rundir, known) if waits(job)}


def _as_status(job_id: int, spec: JobSpec, cancelled: bool, user: str) -> JobStatus:
    return JobStatus(
        id=job_id,
        name=spec.name,
        state=JobState.CANCELLED if cancelled else JobState.PENDING,
        reason=str(Why.CANCELLED if cancelled else Why.NO_AGENT),
        role=None,
        gpus=[],
        hosts=[],
        step=None,
        steps=spec.steps,
        elapsed_s=0.0,
        eta_s=None,
        attempt=0,
        suspensions=0,
        exit=None,
        model=spec.model,
        user=user,
        priority=spec.priority,
        array=spec.array.name if spec.array else "",
        array_index=spec.array.index if spec.array else None,
        nodes=spec.nodes,
        time_limit_s=spec.needs.time_s if spec.needs else None,
    )


def _not_begun(rundir: RunDir) -> RunStatus:
    return RunStatus(
        dir=str(rundir.root),
        state=PENDING,
        stale=False,
        seq=0,
        written_at=iso(time.time()) or "",
        policy="",
        agent=None,
        allocation={"kind": "none", "id": None},
    )
