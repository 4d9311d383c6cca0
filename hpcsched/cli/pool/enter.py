"""What the batch jobs of a pool do: lead the run, or join it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from hpcsched.cli.common import dir_option, find_run
from hpcsched.contract.exits import WORK_LEFT
from hpcsched.errors import NoSuchRun
from hpcsched.store.heads import BEGINS_WITHIN_S
from hpcsched.store.rundir import RunDirError, agent_works


@click.command
@dir_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- OPTIONS OF RUN...")
@click.pass_context
def enter(ctx: click.Context, dir_: str | None, words: tuple[str, ...]) -> int:
    """Join the run with the hosts of this allocation, or lead it where no agent does.

    So the batch jobs of a pool are all alike, and none has to be the first. What is left when this one ends
    is not its failure: another one goes on.
    """
    from hpcsched.pool.record import PoolFiles, Wanted

    rundir = find_run(ctx, dir_)
    where = ("--dir", str(rundir.root))
    while True:
        refused: RunDirError | None = None
        if not agent_works(rundir):
            try:
                code = _call(ctx, "run", (*where, "--resume", "--joinable", *words))
                return 0 if code == WORK_LEFT else code  # the pool sees to what is left
            except RunDirError as error:
                refused = error  # another allocation was faster, and its agent is at its start
        began = time.monotonic()
        try:
            return _call(ctx, "join", (*where, "--wait", f"{BEGINS_WITHIN_S:g}s"))
        except NoSuchRun:
            if refused and time.monotonic() - began < 2 * BEGINS_WITHIN_S:
                raise refused from None  # it was for another reason
            if PoolFiles(rundir.root).wanted() is not Wanted.RUN:
                raise  # the run was to end


def _call(ctx: click.Context, name: str, words: Sequence[str]) -> int:
    """Call another command as from the command line; its exit code."""
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    command = root.command.get_command(root, name)
    assert command is not None
    with command.make_context(name, list(words), parent=root) as below:
        code: Any = command.invoke(below)
        return int(code or 0)
