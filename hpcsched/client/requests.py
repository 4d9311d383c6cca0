"""Requests to a run: through its inbox, so that they work from any host without a port."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from math import inf

from hpcsched import jobfile
from hpcsched.agent.inbox import Answer, Command, Inbox, send, wait_for_answer
from hpcsched.client import waiting
from hpcsched.core.definitions import differing
from hpcsched.core.jobs import Job
from hpcsched.errors import HpcschedError, NoSuchRun
from hpcsched.store.run_folders import begin, go_on
from hpcsched.store.rundir import RunDir, agent_alive, agent_works
from hpcsched.store.status import JobStatus, Status, is_followed, read_status

ANSWER_WITHIN_S = 10.0

LOOKS_EVERY_S = 0.2
"""Time between two looks at the status of a run that is waited for (chosen)."""


class CommandRefused(HpcschedError):
    """The agent took a command for bad input; its own words say why."""

    exit_code = 2


def ask(rundir: RunDir, command: Command) -> Answer:
    """Send a command to a living agent; its answer. Raises HpcschedError if refused."""
    answer = wait_for_answer(rundir, send(rundir, command), timeout_s=ANSWER_WITHIN_S)
    if answer is None:
        raise HpcschedError(
            f"the agent has not answered within {ANSWER_WITHIN_S:.0f} s; the command waits in {rundir.inbox}"
        )
    if answer.error:
        raise CommandRefused(answer.error)
    return answer


def ask_or_leave(rundir: RunDir, command: Command, jobs: Sequence[JobStatus]) -> int:
    """Send a command about jobs; to how many of them something is done.

    Without an agent a retry, or one of `waiting.LEFT` to whom there is something to do, is left to the next;
    others raise NoSuchRun. Raises HpcschedError.
    """
    word = command.command
    if agent_works(rundir):
        command.targets = [job.id for job in jobs]
        return sum(ask(rundir, command).done)
    if word not in (*waiting.LEFT, "retry"):
        raise NoSuchRun(f"no agent runs in {rundir.root}; go on with `{go_on(rundir.root)}`")
    before = waiting.waiting_by_job(rundir)
    retried = any("retry" in words for words in before.values())
    command.targets = [
        job.id
        for job in jobs
        if word == "retry" or waiting.outcome_of(job, word, before.get(job.id, ()), retried=retried)[0]
    ]
    if command.targets:
        send(rundir, command)
    return len(command.targets)


def leave(rundir: RunDir, command: Command, taken: list[str]) -> Answer:
    """Leave a submit to the next agent; what it will do.

    What the run has already is compared here, and left only if it is to be taken: `command.jobs` are then
    those that were left.
    """
    from hpcsched.agent.admission import edit_message

    old = {job.name for job in command.jobs if job.name in taken}
    known = definitions(rundir) if old else {}
    ids, outcomes, kept, left = [], [], [], []
    fresh = itertools.count(len(taken) + 1)
    for spec in command.jobs:
        job = known.get(spec.name)
        keys = differing(job.spec, spec, called_in=command.workdir) if job else ()
        ids.append(job.id if job else next(fresh))
        if not job:
            outcomes.append("")
        elif keys:
            outcomes.append(edit_message(job, keys, update=command.update, living=False))
            kept += [] if command.update else [job.id]
        else:
            outcomes.append("is in the run already")
        if not job or (keys and command.update):
            left.append(spec)
    if not (left or kept or command.update):
        jobfile.check_names(command.jobs, where="submit", known=taken)
    command.jobs = left
    if left:
        send(rundir, command)
    return Answer(ids=ids, outcomes=outcomes, kept=kept)


def what_begins(rundir: RunDir) -> str:
    """The command that begins the run, or goes on with it."""
    return go_on(rundir.root) if rundir.begun else begin(rundir.root)


def definitions(rundir: RunDir) -> dict[str, Job]:
    """The run's jobs by name, and those that wait in its inbox."""
    from hpcsched.policy import make_policy
    from hpcsched.store.replay import replay

    jobs: dict[str, Job] = {}
    if rundir.journal.exists():
        jobs = {job.spec.name: job for job in replay(rundir.journal, make_policy).machine.run.jobs.values()}
    for _, command in Inbox.peek(rundir):
        for spec in command.wanted:
            before = jobs.get(spec.name)
            if before is None:
                jobs[spec.name] = Job(id=len(jobs) + 1, spec=spec, submit_s=0.0)
            elif command.update:
                before.spec = spec
    return jobs


def names_in(rundir: RunDir) -> tuple[bool, list[str], dict[str, list[str]]]:
    """Whether an agent lives; the names of all jobs, the run's and those that wait in the inbox; and
    by array the names of its jobs."""
    names: list[tuple[str, str]] = []
    try:
        status = read_status(rundir)
    except NoSuchRun:
        living = agent_alive(rundir, rundir.read_record())
    else:
        names = [(job.name, job.array) for job in status.jobs]
        living = status.run.alive
    for _, command in Inbox.peek(rundir):
        names += [(spec.name, spec.array.name if spec.array else "") for spec in command.wanted]
    arrays: dict[str, list[str]] = {}
    for name, array in dict(names).items():
        if array:
            arrays.setdefault(array, []).append(name)
    return living, list(dict(names)), arrays


class StillThere(HpcschedError):
    """Jobs had not ended in time."""


def wait_for(
    rundir: RunDir,
    mine: Callable[[Status], Sequence[JobStatus]],
    *,
    only: Sequence[str] | None = None,
    timeout_s: float | None = None,
) -> Sequence[JobStatus]:
    """Wait until the jobs that `mine` finds in a status (with `only` these) have ended; what became of them.

    Raises StillThere after the time, NoSuchRun where no agent is there, or is any more, to run them.
    """
    deadline = inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        status = waiting.read_all(rundir, only)
        jobs = mine(status)
        left = sum(not job.state.final for job in jobs)
        if not left:
            return jobs
        followed = is_followed(status.run)
        if not followed and (what := waiting.what_takes_them(status)):
            raise NoSuchRun(what)
        if status.run.state in ("STOPPED", "FINISHED"):
            raise NoSuchRun(f"the run has stopped with {left} of them left")
        if status.run.stale and not followed:
            raise NoSuchRun(f"the run's agent is gone; go on with `{go_on(rundir.root)}`")
        if time.monotonic() > deadline:
            raise StillThere(f"{left} jobs had not ended after {timeout_s:g} s")
        time.sleep(LOOKS_EVERY_S)
