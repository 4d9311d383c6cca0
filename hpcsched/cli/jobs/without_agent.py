"""Commands where no agent runs: about jobs that wait for one, and about those of a run that has stopped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcsched.cli.common import meant, say, say_json, select
from hpcsched.client.waiting import (
    LEFT,
    outcome_of,
    read_all,
    take_back,
    taken_by,
    waiting_by_job,
    waits,
    with_untaken,
)
from hpcsched.core.reasons import Reason, Why
from hpcsched.errors import ConfigError
from hpcsched.store.run_folders import has_commands
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import JobStatus, Status


def explained(rundir: RunDir, key: str, *, as_json: bool) -> bool:
    """Explain the job of this id or name, if it is one that no agent has taken; else False."""
    if not has_commands(rundir):
        return False
    status, untaken = with_untaken(rundir)
    job = next((job for job in untaken if key in (str(job.id), job.name)), None)
    if job is None:
        return False
    why, following = Reason(Why(str(job.reason))), list[str]()
    if waits(job):
        following = [f"`{taken_by(status)}` takes it", f"`hpcsched cancel {job.name}` cancels it"]
    if as_json:
        page = {
            "schema": 1,
            "id": job.id,
            "name": job.name,
            "state": job.state,
            "reason": {"code": str(why.why), "text": str(why)},
            "next": following,
            "story": [],
        }
        say_json(page)
        return True
    say(f"job {job.id} ({job.name}) is {job.state}")
    say(f"  because: {why}")
    for text in following:
        say(f"  next: {text}")
    return True


def leave(rundir: RunDir, command: str, keys: Sequence[str]) -> int | None:
    """Leave a command about jobs to the next agent; the exit code: 1 if nothing can be done to any of them.

    Jobs that wait for an agent are cancelled now, with those that wait for them to complete, and what waits
    to be done to jobs that have ended is taken back. None: it is no such command, or there is nothing left to
    do in this run. Raises RunDirError where an agent has come meanwhile.
    """
    if command not in LEFT:
        return None
    status = read_all(rundir)
    if not has_commands(rundir) and all(job.state.final for job in status.jobs):
        return None
    chosen = meant(status, keys)
    gone, kept = _cancelled(rundir, status, chosen, keys) if command == "cancel" else (set(), set())
    waiting, targets = waiting_by_job(rundir), list[int]()
    retried = any("retry" in words for words in waiting.values())
    for job in chosen:
        if job.name in gone:
            what = "cancelled"
        elif job.name in kept:
            what = "stays as it is: what waited for it is taken back"
        else:
            done, what = outcome_of(job, command, waiting.get(job.id, ()), retried=retried)
            targets += [job.id] if done else []
        say(f"job {job.id} ({job.name}): {what}", err=True)
    for name in gone - {job.name for job in chosen}:
        say(f"job {name}: cancelled: it waited for one of these", err=True)
    if targets:
        from hpcsched.agent.inbox import Command, send  # `explain` needs neither

        send(rundir, Command(command=command, targets=targets))
        say(f"hpcsched: no agent in {rundir.root}; the next `{taken_by(status)}` does it", err=True)
    return int(not (gone or kept or targets))


def _cancelled(
    rundir: RunDir, status: Status, chosen: Sequence[JobStatus], keys: Sequence[str]
) -> tuple[set[str], set[str]]:
    """Cancel those of the chosen jobs that wait, and take back what waits for those that have ended; the
    names of the jobs that are cancelled now, and of those for which something had waited."""
    names = {job.name for job in status.jobs}
    words = {word for key in keys for word in key.split(",")} - names
    by_number = sorted(word for word in words if re.fullmatch(r"[\d-]+", word))
    if by_number and any(waits(job) for job in select(status, by_number)):
        waiting = ", ".join(job.name for job in status.jobs if waits(job))
        accepted = f"names, as ids are given when an agent takes a job: {waiting}"
        raise ConfigError(where="cancel", got=repr(by_number[0]), accepted=accepted)
    mine = [job for job in chosen if waits(job) or job.state.final]
    return take_back(rundir, mine) if mine else (set(), set())
