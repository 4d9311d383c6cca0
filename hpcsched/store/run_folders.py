"""Run folders of a working directory: ./hpcsched-run, then ./hpcsched-run-2 and so on, one a run (ADR 49).

Only where no run directory is named: one that is named is taken as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from hpcsched.decoding import decode_file, read_file
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import but_for_lasting, kind_of, patiently
from hpcsched.store.rundir import RunDir, agent_works, last_status

USUAL = "hpcsched-run"
"""The first run's folder."""

KEPT_SEARCH, SEARCH_COMMAND = "search.toml", "search.command"
"""In the run directory of a search: what it was when the run began, and the command that goes on with it."""

MOST_COMMAND_BYTES = 8192

POOL = "pool.json"
"""In the run directory of a pool: what it has asked for."""


class _Pool(msgspec.Struct):
    file: str


class _Named(msgspec.Struct):
    name: str


class _Command(msgspec.Struct):
    """What is read of a command in the inbox."""

    command: str
    jobs: list[_Named] = []
    cancelled: list[str] = []

    @property
    def work(self) -> bool:
        """Whether it has jobs run."""
        return not self.jobs or any(job.name not in self.cancelled for job in self.jobs)


_NAME = re.compile(rf"{USUAL}(?:-(?P<number>[1-9][0-9]{{0,5}}))?")


def newest(here: Path) -> Path:
    """The folder of the run that is meant where none is named: the one that lives, else the newest.

    One in which nothing has begun, and for which nothing waits, is none. ./hpcsched-run if there is none.
    Raises OSError or StoreError where a file system does not say which there are: another one would be meant.
    """
    found = all_of(here)
    if len(found) < 2:
        return found[0] if found else here / USUAL
    rundirs = [RunDir(folder) for folder in reversed(found)]
    living = (rundir.root for rundir in rundirs if agent_works(rundir))
    used = (rundir.root for rundir in rundirs if _used(rundir))
    return next(living, None) or next(used, here / USUAL)


def all_of(here: Path) -> list[Path]:
    """The run folders of a working directory, the oldest first."""
    return [folder for _, folder in sorted(_folders(here).items())]


def of_next_run(here: Path) -> Path:
    """The folder for a run that begins: the newest one, or the next number if the run there has finished.

    One for which something waits, such as a retry, keeps its place: a number must not hide it.
    """
    folder = newest(here)
    rundir = RunDir(folder)
    word = last_status(rundir)
    if not rundir.begun or waits(rundir) or word is None or word.state != "FINISHED":
        return folder
    number = _number(folder.name) or 1
    while _used(RunDir(folder)):
        number += 1
        folder = here / f"{USUAL}-{number}"
    return folder


def waits(rundir: RunDir) -> bool:
    """Whether jobs, or jobs that are to run again, wait in a run directory for an agent."""
    return work_in(rundir.inbox)


def work_in(inbox: Path) -> bool:
    """The same of an inbox."""
    return any(command.work for command in _commands(inbox))


def has_commands(rundir: RunDir) -> bool:
    """Whether anything at all waits in a run directory for an agent."""
    return bool(_names(rundir.inbox / "new"))


def _commands(inbox: Path) -> Iterator[_Command]:
    """The submits and retries of an inbox."""
    folder = inbox / "new"
    for name in _names(folder):
        with contextlib.suppress(BadInput), but_for_lasting():
            command = patiently(partial(decode_file, folder / name, _Command))
            if command.command in ("submit", "retry"):
                yield command


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing where it is not there, or is not for us. Raises OSError where its file
    system does not say."""
    names: list[str] = []
    with but_for_lasting():
        names = patiently(lambda: os.listdir(folder))  # noqa: PTH208 - names are all that is needed
    return names


def named(root: Path, here: Path | None = None) -> str:
    """What has to be added to a command so that it means this run: nothing, or `--dir`, after a blank.

    It is `--dir` too where a file system does not say which run is meant.
    """
    try:
        meant = newest(here or Path.cwd()) == root
    except (OSError, StoreError):
        meant = False
    return "" if meant else f" --dir {shlex.quote(str(root))}"


def begin(root: Path) -> str:
    """The command that begins a run there."""
    return _pool(root) or f"hpcsched run{named(root)}"


def go_on(root: Path) -> str:
    """The command that goes on with a run, or with a search, as that has left it there."""
    if pool := _pool(root):
        return pool
    with contextlib.suppress(OSError, BadInput, UnicodeDecodeError):
        return read_file(root / SEARCH_COMMAND, most_bytes=MOST_COMMAND_BYTES).decode()
    return f"hpcsched run --resume{named(root)}"


def _pool(root: Path) -> str:
    """The command that looks after the run's allocations (`hpcsched.pool`); "": none does."""
    with contextlib.suppress(OSError, BadInput):
        return f"hpcsched pool start {shlex.quote(decode_file(root / POOL, _Pool).file)}"
    return ""


def _folders(here: Path) -> dict[int, Path]:
    numbers = [(_number(name), name) for name in _names(here) if name.startswith(USUAL)]
    found = {number: here / name for number, name in numbers if number is not None}
    return {number: folder for number, folder in found.items() if kind_of(folder) == stat.S_IFDIR}


def _number(name: str) -> int | None:
    """The number of a run folder; None for another name, such as `hpcsched-run-1`, which is never given."""
    found = _NAME.fullmatch(name)
    number = int(found["number"] or 1) if found else None
    return None if found and found["number"] == "1" else number


def _used(rundir: RunDir) -> bool:
    return rundir.begun or any(True for _ in _commands(rundir.inbox))
