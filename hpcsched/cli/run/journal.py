"""`hpcsched journal check|repair`: what is wrong with a run's journal, and how to go on with the run."""

from __future__ import annotations

import click

from hpcsched.cli.common import dir_option, find_run, say
from hpcsched.contract import files
from hpcsched.errors import StoreError
from hpcsched.store.rundir import ENDED, RunDir, RunLock


@click.group("journal")
def journal_group() -> None:
    """A run's journal: what is wrong with it, and how it is mended."""


@journal_group.command()
@dir_option
@click.pass_context
def check(ctx: click.Context, dir_: str | None) -> int:
    """Say what is wrong with the journal, a line each. Exit code 1: something is."""
    from hpcsched.policy import make_policy
    from hpcsched.store.repair import check as check_journal

    rundir = find_run(ctx, dir_)
    rundir.require()
    if not rundir.begun:
        return _lost(rundir)
    found = check_journal(rundir.journal, make_policy)
    for line in (*found.wrong, *found.notes):
        say(line)
    if found.wrong:
        say("`hpcsched journal repair` mends it, and keeps a copy")
        return 1
    say(f"{found.records} records, nothing is wrong")
    return 0


@journal_group.command()
@dir_option
@click.pass_context
def repair(ctx: click.Context, dir_: str | None) -> int:
    """Mend the journal, with a copy kept: void or cut what cannot be used. Not while an agent works."""
    from hpcsched.policy import make_policy
    from hpcsched.store.repair import repair as repair_journal

    rundir = find_run(ctx, dir_)
    rundir.require()
    lock = RunLock(rundir)
    try:
        if not rundir.begun:
            return _put_aside(rundir)
        for line in repair_journal(rundir.journal, make_policy) or ["nothing is wrong"]:
            say(line)
        return 0 if rundir.begun else _put_aside(rundir)  # nothing could be kept of it
    finally:
        lock.release()


def _has_been(rundir: RunDir) -> bool:
    jobs = rundir.root / files.JOBS
    return rundir.record.exists() or rundir.status.exists() or any(jobs.glob("*"))


def _lost(rundir: RunDir) -> int:
    if not _has_been(rundir):
        say("no run has begun here")
        return 0
    say("the journal is empty or gone, but a run has been here: what it did cannot be known any more")
    say("`hpcsched journal repair` puts what is left aside, so that a run can begin here anew")
    return 1


def _put_aside(rundir: RunDir) -> int:
    """Nothing can be known of a run without a journal: what it left is kept under other names."""
    from hpcsched.agent.recovery import living_processes
    from hpcsched.store.repair import next_copy

    if living := living_processes(rundir, rundir.read_record()):
        pids = ", ".join(str(pid) for pid, _ in living)
        raise StoreError(f"processes of the run still live on this host: {pids}; end them first")
    left = [rundir.record, rundir.status, *rundir.root.glob(ENDED), rundir.root / files.JOBS]
    moved = [(path, next_copy(path)) for path in left if path.exists()] if _has_been(rundir) else []
    for path, copy in moved:
        path.rename(copy)
        say(f"{path.name} is {copy.name} now")
    say("a run can begin here anew" if moved else "nothing is wrong")
    return 0
