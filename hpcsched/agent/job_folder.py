"""The preparation of a job's folder for an attempt: a mark in its output, old states put aside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcsched.contract import files
from hpcsched.decoding import read_tail
from hpcsched.errors import BadInput
from hpcsched.ownership import make_private
from hpcsched.patience import kind_of
from hpcsched.watchers import PRIVATE, make_folder, mode_in

TAIL_BYTES = 4096
"""The part of an output that is searched for its last line (chosen)."""


def make_job_folder(folder: Path, checkpoints: Callable[[], Path]) -> bool:
    """Make a job's folder; whether it was not there. In a shared run that of its checkpoints is made, too:
    one that a program makes would be open. Raises OSError."""
    new = make_folder(folder)
    if new and mode_in(folder) != PRIVATE:
        make_private(checkpoints())
    return new


def mark_attempt(path: Path, attempt: int, *, where: str, resumed: bool, step: int | None) -> None:
    """Append a line to an output that is not empty: the attempt that writes from here on, time and GPUs.

    `step`: the step that it resumes from, if that is known. A line that cannot be written is left out: the
    launch reports why.
    """
    start = "from its checkpoint" if step is None else f"from step {step}"
    start = start if resumed else "from its beginning"
    line = f"{files.ATTEMPT_MARK}{attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {where}, {start} ----\n"
    with contextlib.suppress(OSError, BadInput):
        last = read_tail(path, 1)
        if not last:
            return
        # Others may write there too; and where it has become a pipe meanwhile, nobody waits for its reader.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "ab") as output:
            output.write((line if last == "\n" else f"\n{line}").encode())


def last_line(path: Path) -> str:
    """The last line with a letter or digit in the output of a job's newest attempt, shortened; "" without."""
    try:
        # Progress bars end their lines with a carriage return.
        lines = read_tail(path, TAIL_BYTES).replace("\r", "\n").split("\n")
    except (OSError, BadInput):
        return ""
    # Not one that only sets off what stands above it, as launchers end theirs.
    last = next((line.strip() for line in reversed(lines) if any(map(str.isalnum, line))), "")
    return "" if last.startswith(files.ATTEMPT_MARK) else last[:200]


def gpus_named(gpus: Sequence[int], noun: str) -> str:
    """The names of devices for people, who call each a `noun`: "GPU 0", "GPUs 0,1"; "CPU cores" for none."""
    if not gpus:
        return "CPU cores"
    return f"{noun}{'s' * (len(gpus) > 1)} {','.join(map(str, gpus))}"


def _aside(folder: Path, attempt: int) -> Path:
    """The record of what a job had saved before this attempt began it once more (empty: nothing)."""
    return folder / files.state_before(attempt)


def put_aside(folder: Path, checkpoints: Path, attempt: int) -> None:
    """Rename the saved state of a job, once, so that this attempt does not find it.

    The folder `checkpoints` is renamed in its parent folder. Raises OSError.
    """
    aside = _aside(folder, attempt)
    if kind_of(aside) is not None:
        return
    if kind_of(checkpoints) is not None:
        checkpoints.rename(checkpoints.with_name(files.checkpoint_before(checkpoints.name, attempt)))
    try:
        (folder / files.STATE).rename(aside)
    except FileNotFoundError:
        aside.touch(mode=0o600)


def is_aside(folder: Path, attempt: int) -> bool:
    """Whether the state in a job's folder was saved since this attempt began the job anew."""
    return kind_of(_aside(folder, attempt)) is not None
