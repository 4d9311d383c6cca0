"""`hpcsched pool`: allocations asked for while a run has work for them, within caps."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcsched.cli.common import database_path, dir_option, find_run, json_option, say, say_json
from hpcsched.cli.pool.enter import enter
from hpcsched.cli.run.staying import in_foreground
from hpcsched.errors import BatchError, ConfigError, HpcschedError, NoSuchRun

if TYPE_CHECKING:
    from hpcsched.batch.submissions import Submissions
    from hpcsched.pool.poolfile import Pool
    from hpcsched.pool.record import PoolFiles, Record
    from hpcsched.pool.rounds import Rounds

JITTER = 0.2
"""A round comes up to this share of a period later: pools of many users do not ask at once (chosen)."""
QUIET = 4
"""While nothing changes the period grows up to so many times (chosen)."""
LOOKS_EVERY_S = 1.0
SETTLES, SETTLES_EVERY_S = 8, 4.0
"""Looks at what was cancelled, until it has ended, and the time between two (chosen)."""
LOCK_S = 2.0
"""For so long a lock is waited for: `pool status` may hold it for a moment (chosen)."""
STOPS_WITHIN_S = 90.0
SAVES_WITHIN_S = 600.0

_FILE = click.argument("file", metavar="[POOL.toml]", required=False, type=click.Path(path_type=Path))


@click.group()
def pool() -> None:
    """Ask for allocations as a run needs them, and give them back."""


pool.add_command(enter)


@pool.command()
@click.argument("file", metavar="POOL.toml", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="One round, for cron.")
@click.option("--detach", is_flag=True, help="Run in the background, printing to pool.log.")
@click.option("--until-done", is_flag=True, help="End when the run's queue has, and all has been given back.")
@click.option("--dry-run", is_flag=True, help="Say what one round would ask for, and why; ask for nothing.")
@click.pass_context
def start(ctx: click.Context, file: Path, once: bool, detach: bool, until_done: bool, dry_run: bool) -> int:
    """Look after the allocations of the run in POOL.toml: ask for one where simulated waiting pays.

    The hosts of all of them work for one run, which any of them may lead. Jobs come by `submit`.
    Ctrl-C ends this command; what was asked for stays, and the next `pool start` finds it again.
    """
    from hpcsched.pool.poolfile import read_pool
    from hpcsched.pool.record import PoolBusy, PoolFiles, Wanted
    from hpcsched.store.rundir import RunDir

    found = read_pool(file)
    ctx.obj.rules.check("dir", found.dir, where=f"{file}: dir")
    files = PoolFiles(found.dir)
    rounds = _rounds(ctx, found)
    if dry_run:
        from hpcsched.cli.pool.text import dry_text

        say(dry_text(rounds.once(dry=True).decisions), lines=True)
        return 0
    RunDir(found.dir).make()
    if files.wanted() is Wanted.STOP:
        say(f"hpcsched: the pool was stopped; `hpcsched pool resume {file}` lets it go on", err=True)
        return 0 if once else 1
    if detach:
        return _detached(files)
    try:
        with files.locked(wait_s=LOCK_S):
            _refuse_elsewhere(files, found)
            try:
                return _one(rounds) if once else _loop(rounds, files, found, until_done=until_done)
            finally:
                rounds.leave()
    except PoolBusy as error:
        if not once:
            raise
        say(f"hpcsched: {error}", err=True)  # cron: that is as well
        return 0


def _one(rounds: Rounds) -> int:
    rounds.once()
    return 0


def _loop(rounds: Rounds, files: PoolFiles, found: Pool, *, until_done: bool) -> int:
    from hpcsched.pool.record import Wanted

    quiet, wrong = 0, ""
    while True:
        try:
            outcome = rounds.once()
        except (HpcschedError, OSError) as error:  # a full disk, half a page: the next round may do
            if str(error) != wrong:
                say(f"hpcsched: {error}", err=True)
            wrong, outcome = str(error), None
        if until_done and outcome and outcome.over:
            say("hpcsched: the run's queue has ended, and all has been given back", err=True)
            return 0
        quiet = 0 if outcome and outcome.changed else min(quiet + 1, 2 * QUIET)
        period_s = found.period_s * max(1.0, min(QUIET, quiet / 2))
        until = time.monotonic() + period_s * (1 + random.uniform(0, JITTER))
        before = files.wanted()
        while time.monotonic() < until and (wanted := files.wanted()) is before:
            if wanted is Wanted.STOP:
                break
            time.sleep(LOOKS_EVERY_S)
        if files.wanted() is Wanted.STOP:
            say("hpcsched: the pool was stopped", err=True)
            return 0


def _refuse_elsewhere(files: PoolFiles, found: Pool) -> None:
    """Locks do not always reach across hosts of a shared filesystem: look for signs of life too."""
    import socket

    from hpcsched.pool.record import PoolBusy

    record = files.read()
    if record is None or record.round is None or record.host in ("", socket.gethostname()):
        return
    if time.time() - record.round < 2 * found.period_s and record.pid:
        raise PoolBusy(f"host {record.host} looked after this pool {time.time() - record.round:.0f} s ago: "
                       "end that one, or wait for two periods")  # fmt: skip


def _rounds(ctx: click.Context, found: Pool) -> Rounds:
    import re

    from hpcsched import config
    from hpcsched.batch import queue_of
    from hpcsched.cli.pool.scripts import script_of
    from hpcsched.cli.profile.lookup import profile_finder
    from hpcsched.pool.rounds import Rounds

    submissions, queue = _submissions(), queue_of("slurm", environ=os.environ)
    assert queue is not None
    store = database_path(None)
    given = found.run.get("profiles") or os.environ.get(config.environment_name("profiles"), "").split()
    find = profile_finder(tuple(given), store)
    devices = found.run.get("devices") or os.environ.get(config.environment_name("devices"), "")
    speed = re.search(r"@(\d+(?:\.\d+)?)$", str(devices))
    return Rounds(
        found,
        submissions,
        queue,
        script_of=lambda template, name: script_of(found, template, name),
        profiles_of=lambda models: find(models, str(found.run.get("device_type", ""))),
        tell=lambda line: say(f"hpcsched: {time.strftime('%Y-%m-%d %H:%M:%S')} {line}", err=True),
        speed=max(float(speed[1]), 1e-6) if speed else 1.0,
    )


def _submissions() -> Submissions:
    import shutil

    from hpcsched.batch.slurm_submissions import SlurmSubmissions

    if not shutil.which("sbatch"):
        got = "no sbatch on the PATH"
        raise ConfigError(where="pool", got=got, accepted="Slurm's commands: a pool asks no other system yet")
    return SlurmSubmissions(os.environ)


def _detached(files: PoolFiles) -> int:
    """Start this command again in the background; returns when its first round is over, or it has ended."""
    before = files.read()
    with files.log.open("ab") as output:
        process = subprocess.Popen(  # -P: not with the user's own queue.py or types.py in place of Python's
            [sys.executable, "-P", "-m", "hpcsched", *in_foreground(sys.argv[1:])],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    last = before.round if before else None
    deadline = time.monotonic() + STOPS_WITHIN_S
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            from hpcsched.decoding import read_tail

            say(read_tail(files.log, 4096).rstrip("\n"), lines=True, err=True)
            return code if code >= 0 else 128 - code
        record = files.read()
        if record and record.pid == process.pid and record.round != last:
            break
        time.sleep(0.1)
    say(
        f"hpcsched: the pool is looked after in the background (pid {process.pid}), which prints to "
        f"{os.path.relpath(files.log)}; `hpcsched pool status` shows it, `hpcsched pool stop` ends it",
        err=True,
    )
    return 0


def _files(ctx: click.Context, file: Path | None, dir_: str | None) -> tuple[PoolFiles, Record]:
    """The files and the record of the pool meant. Raises NoSuchRun."""
    from hpcsched.pool.poolfile import read_pool
    from hpcsched.pool.record import PoolFiles

    root = read_pool(file).dir if file else find_run(ctx, dir_).root
    files = PoolFiles(root)
    record = files.read()
    if record is None:
        way = (
            "name one by its POOL.toml, or with --dir"
            if file is None
            else f"`hpcsched pool start {file}` does"
        )
        raise NoSuchRun(f"no pool has been started for {root}; {way}")
    return files, record


def _works(files: PoolFiles) -> bool:
    from hpcsched.pool.record import PoolBusy

    try:
        with files.locked():
            return False
    except PoolBusy:
        return True


@pool.command()
@_FILE
@dir_option
@json_option
@click.pass_context
def status(ctx: click.Context, file: Path | None, dir_: str | None, as_json: bool) -> int:
    """The pool's allocations, caps and budget, and why nothing is asked for at the moment.

    As it was at the last round: the batch system is not asked.
    """
    from hpcsched.cli.pool.text import status_json, status_text
    from hpcsched.store.rundir import RunDir, agent_works

    files, record = _files(ctx, file, dir_)
    rundir = RunDir(files.record.parent)
    led_by = rundir.read_record() if agent_works(rundir) else None
    leader = (led_by.allocation.get("id") if led_by else None) or ""
    works, wanted, now = _works(files), files.wanted(), time.time()
    if as_json:
        say_json(status_json(record, wanted, now, works=works, leader=leader))
    else:
        say(status_text(record, wanted, now, works=works, leader=leader), lines=True)
    return 0


@pool.command()
@_FILE
@dir_option
@click.pass_context
def pause(ctx: click.Context, file: Path | None, dir_: str | None) -> int:
    """Ask for nothing more; what is there goes on."""
    from hpcsched.pool.record import Wanted

    files, _ = _files(ctx, file, dir_)
    files.want(Wanted.PAUSE)
    say("hpcsched: the pool asks for nothing more; `hpcsched pool resume` lets it go on", err=True)
    return 0


@pool.command()
@_FILE
@dir_option
@click.pass_context
def resume(ctx: click.Context, file: Path | None, dir_: str | None) -> int:
    """Let a paused or stopped pool ask again, also with templates that were set aside."""
    from hpcsched.pool.record import Wanted

    files, record = _files(ctx, file, dir_)
    files.want(Wanted.RUN)
    by = "" if _works(files) else f" when `hpcsched pool start {record.file}` runs"
    say(f"hpcsched: the pool asks again{by}", err=True)
    return 0


@pool.command()
@_FILE
@dir_option
@click.option("--now", "at_once", is_flag=True, help="Cancel what runs too, without waiting for the run.")
@click.pass_context
def stop(ctx: click.Context, file: Path | None, dir_: str | None, at_once: bool) -> int:
    """Ask for nothing more, cancel what waits, have the run save all its jobs and end, and give all back."""
    from hpcsched.agent.inbox import Command
    from hpcsched.client.requests import ask
    from hpcsched.pool.record import State, Wanted
    from hpcsched.pool.rounds import settle
    from hpcsched.store.rundir import RunDir, agent_works

    files, _ = _files(ctx, file, dir_)
    files.want(Wanted.STOP)
    _until_free(files)
    submissions = _submissions()
    with files.locked(wait_s=LOCK_S):
        record = files.read()
        assert record is not None
        live = record.live()
        shown = {one.name: one for one in submissions.found([one.name for one in live])} if live else {}
        for one in live:
            if row := shown.get(one.name):
                one.job_id = row.job_id
            one.given_up = True
        files.write(record)
        waiting = [one for one in live if one.state is not State.RUNNING or at_once]
        _cancelled(submissions, [one.job_id for one in waiting if one.job_id])
        rundir = RunDir(files.record.parent)
        if not at_once and agent_works(rundir):
            ask(rundir, Command(command="drain"))
            say("hpcsched: the run saves its jobs", err=True)
            until = time.monotonic() + SAVES_WITHIN_S
            while agent_works(rundir) and time.monotonic() < until:
                time.sleep(0.2)
        rest = [one.job_id for one in live if one not in waiting and one.job_id]
        _cancelled(submissions, rest)
        record.words = ["stopped"]
        for _ in range(SETTLES):
            done = settle(record, submissions)
            files.write(record)
            if done:
                say("hpcsched: the pool is stopped, and all has been given back", err=True)
                return 0
            time.sleep(SETTLES_EVERY_S)
        left = len(record.live())
        what = "1 batch job is" if left == 1 else f"{left} batch jobs are"
        say(f"hpcsched: {what} still ending (see `squeue --me`)", err=True)
    return 0


def _until_free(files: PoolFiles) -> None:
    """Wait until no process looks after a pool that was stopped. Raises BatchError."""
    until = time.monotonic() + STOPS_WITHIN_S
    while _works(files):
        if time.monotonic() > until:
            raise BatchError(f"the process that looks after the pool has not ended in {STOPS_WITHIN_S:.0f} s")
        time.sleep(0.2)


def _cancelled(submissions: Submissions, ids: list[str]) -> None:
    if ids:
        submissions.cancel(ids)
        what = f"job {ids[0]}" if len(ids) == 1 else f"{len(ids)} batch jobs"
        say(f"hpcsched: cancelled {what}", err=True)
