"""What is done in a job's folder before an attempt begins: its output is marked, old states are put aside."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from hpcsched.contract import files
from hpcsched.decoding import read_tail
from hpcsched.errors import BadInput

MARK = "hpcsched: ---- attempt "
"""How the line begins that tells attempts apart in an output that has several."""

TAIL_BYTES = 4096


def mark(path: Path, attempt: int, *, where: str, step: int | None) -> None:
    """Add a line to an output that is not empty: which attempt writes from here on, when, and where it runs.

    `step` is the step that it goes on from (None: it begins). Where that cannot be written nothing is: the
    launch will say why.
    """
    start = "from its beginning" if step is None else f"from step {step}"
    line = f"{MARK}{attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {where}, {start} ----\n"
    with contextlib.suppress(OSError, BadInput):
        last = read_tail(path, 1)
        if not last:
            return
        # Others may write there too; and where it has become a pipe meanwhile, nobody waits for its reader.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "ab") as output:
            output.write((line if last == "\n" else f"\n{line}").encode())


def last_line(path: Path) -> str:
    """The last line with a word on it of a job's newest attempt, shortened; "" if there is none."""
    try:
        # Progress bars end their lines with a carriage return.
        lines = read_tail(path, TAIL_BYTES).replace("\r", "\n").split("\n")
    except (OSError, BadInput):
        return ""
    # Not one that only sets off what stands above it, as launchers end theirs.
    last = next((line.strip() for line in reversed(lines) if any(map(str.isalnum, line))), "")
    return "" if last.startswith(MARK) else last[:200]


def gpus_named(gpus: Sequence[int]) -> str:
    """Such as "GPU 0", "GPUs 0,1"; "CPU cores" without any."""
    if not gpus:
        return "CPU cores"
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {','.join(map(str, gpus))}"


def _aside(folder: Path, attempt: int) -> Path:
    """The record of what a job had saved before this attempt began it once more (empty: nothing)."""
    return folder / files.state_before(attempt)


def put_aside(folder: Path, checkpoints: Path, attempt: int) -> None:
    """Move what a job has saved to where this attempt does not find it; once done it is not done again.

    `checkpoints` stay beside where they were. Raises OSError.
    """
    aside = _aside(folder, attempt)
    if aside.exists():
        return
    if checkpoints.exists():
        checkpoints.rename(checkpoints.with_name(files.checkpoint_before(checkpoints.name, attempt)))
    try:
        (folder / files.STATE).rename(aside)
    except FileNotFoundError:
        aside.touch(mode=0o600)


def is_aside(folder: Path, attempt: int) -> bool:
    """Whether what lies in a job's folder was saved by this attempt, which began the job once more."""
    return _aside(folder, attempt).exists()
