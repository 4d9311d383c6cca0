"""The numbers of a run's agents: only one has each, and one of a lower number has nothing to say any more.

A lock keeps a second agent out on one host, and on file systems whose locks reach all hosts; who creates a
file has it on any.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput, StoreError
from hpcsched.patience import patiently
from hpcsched.store.files import write_atomically
from hpcsched.store.rundir import RunDir, RunDirError, occupied, process_started

BEGINS_WITHIN_S = 120.0
"""Time from an agent's claim to its record in run.json, on another host (chosen): one that has not written it
by then has died."""

_PREFIX, OPTIONS = "agent-", "agent.options"


class _Claim(msgspec.Struct):
    host: str
    pid: int
    started: int


def claim_number(rundir: RunDir) -> int:
    """Have the number of the run's next agent, which nobody else has then; the caller holds the run's lock.

    Raises RunDirError where another agent begins right now, StoreError where the directory cannot be read or
    written.
    """
    record = rundir.read_record()
    try:
        last, claims = record.epoch if record else 0, _claims(rundir)
    except OSError as error:
        raise StoreError(f"cannot read {rundir.root}: {error.strerror}") from error
    newest = max(claims, default=0)
    if claims and newest > last and _begins(claims[newest]):
        raise RunDirError(occupied(rundir))
    number = max(last, newest) + 1
    path = rundir.root / f"{_PREFIX}{number}"
    try:
        patiently(partial(_write_claim, path))
    except FileExistsError:
        raise RunDirError(occupied(rundir)) from None
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    for old in claims.values():
        with contextlib.suppress(OSError):
            old.unlink()
    return number


def _write_claim(path: Path) -> None:
    pid = os.getpid()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(_Claim(os.uname().nodename, pid, process_started(pid) or 0)))
    except OSError:
        patiently(partial(path.unlink, missing_ok=True))  # a claim without a name keeps others out
        raise


def give_up_number(rundir: RunDir, number: int) -> None:
    """Let others claim a number that this process has claimed, and that no agent has come to use."""
    record = rundir.read_record()
    if record is None or record.epoch < number:
        with contextlib.suppress(OSError):
            patiently((rundir.root / f"{_PREFIX}{number}").unlink)


class Superseded(StoreError):
    """Another agent leads the run."""


def must_lead(rundir: RunDir, number: int) -> None:
    """Raise Superseded where a later agent than that with this number has written its record."""
    record = rundir.read_record()
    if record is not None and record.epoch > number:
        raise Superseded("another agent leads the run: this one was thought to be dead")


def keep_options(rundir: RunDir, options: Sequence[str]) -> None:
    """Keep the options of `run` with which another agent takes the run over, for this user alone: secrets may
    be among them. Raises StoreError."""
    write_atomically(rundir.root / OPTIONS, msgspec.json.encode(options), patient=True, mode=0o600)


def kept_options(rundir: RunDir) -> tuple[str, ...] | None:
    """These options; None where no other agent can take the run over."""
    with contextlib.suppress(OSError, BadInput):
        path = rundir.root / OPTIONS
        return patiently(lambda: decode_file(path, tuple[str, ...], most_bytes=SMALL_BYTES))
    return None


def _claims(rundir: RunDir) -> dict[int, Path]:
    paths = patiently(lambda: [path for path in rundir.root.iterdir() if path.name.startswith(_PREFIX)])
    found = {path.name.removeprefix(_PREFIX): path for path in paths}
    return {int(number): path for number, path in found.items() if number.isdecimal() and number.isascii()}


def _begins(path: Path) -> bool:
    """Whether the agent that has claimed a number may still be at its start."""
    with contextlib.suppress(OSError, BadInput):
        claim = patiently(lambda: decode_file(path, _Claim, most_bytes=SMALL_BYTES))
        if claim.host == os.uname().nodename:
            return process_started(claim.pid) == claim.started
    with contextlib.suppress(OSError):
        return time.time() - patiently(path.stat).st_mtime < BEGINS_WITHIN_S
    return False
