"""Records for a site: what the trainings of each run used, in a folder that many users write.

A file for each life of a run (one agent in one allocation), replaced as a whole: nobody writes others' files,
no lock is taken, and a reader sees no half of one. What a line holds is all that is told of a training: no
command, no path, no argument.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hpcsched.accounts import name_of
from hpcsched.decoding import decode, opened
from hpcsched.errors import BadInput, StoreError
from hpcsched.store.json_lines import encoded

SUFFIX = ".jsonl"
MOST_BYTES = 2**26
"""The longest file that is read (chosen): some 100 000 trainings in one allocation."""

_Seconds = Annotated[float, Meta(ge=0, le=1e15)]
_Time = Annotated[float, Meta(ge=0, lt=253402300800)]  # before the year 10000: datetime takes no more
_Word = Annotated[str, Meta(max_length=256)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]


class Whose(msgspec.Struct, kw_only=True):
    """Whose run it was, in which batch job. `life`: the how manieth agent of the run this was, from 1."""

    schema: Annotated[int, Meta(ge=1, le=1)] = 1
    user: _Word
    uid: _Count
    account: _Word | None = None
    partition: _Word | None = None
    cluster: _Word | None = None
    batch: _Word = "none"
    batch_job: _Word | None = None
    run: _Word
    life: _Count
    version: _Word


class Training(Whose, kw_only=True):
    """What one job had and used in one life of its run. Times are Unix times and seconds; None: not measured.

    `gpu_s`: GPU-seconds that it held; of a GPU that several jobs had at once each has an equal part. Of these
    `sampled_gpu_s` were looked at, and `busy_gpu_s` of them the GPUs were busy. `cpu_s` is CPU time of its
    processes, `max_rss_bytes` their most resident memory, `attempts` and `steps` those of this life.
    """

    kind: Literal["training"] = "training"
    job: _Count
    name: _Word
    state: _Word
    start: _Time
    end: _Time
    attempts: _Count
    steps: _Count | None = None
    gpu_s: _Seconds
    sampled_gpu_s: _Seconds = 0.0
    busy_gpu_s: _Seconds | None = None
    cpu_s: _Seconds | None = None
    max_rss_bytes: _Count | None = None


class Life(Whose, kw_only=True):
    """A life of a run as a whole: the GPU-seconds that it had, and those in which no job held them.

    `over` False: it goes on, or its agent was killed after `end`.
    """

    kind: Literal["life"] = "life"
    start: _Time
    end: _Time
    gpus: _Count
    gpu_s: _Seconds
    idle_gpu_s: _Seconds
    over: bool


class _Kind(msgspec.Struct):
    kind: str = ""


def file_name(whose: Whose) -> str:
    """The name of a life's file: nobody else has it."""
    user = re.sub(r"[^A-Za-z0-9._-]", "_", whose.user)[:64]
    return f"{user}-{whose.run[:64]}-{whose.life}{SUFFIX}"


def write(folder: Path, life: Life, trainings: Iterable[Training]) -> None:
    """Put a life's file in the place of its earlier one. Raises StoreError.

    The file is its owner's alone (0600). In a folder with the set-group-ID bit, the folder's group reads it.
    """
    target = folder / file_name(life)
    temporary = ""
    try:
        shared = folder.stat().st_mode & stat.S_ISGID
        # A name that nobody can foresee: others write this folder too.
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o640 if shared else 0o600)
            file.write(encoded([life, *trainings]))
        Path(temporary).replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            if temporary:
                Path(temporary).unlink()
        raise StoreError(f"cannot write {target}: {error.strerror}") from error


def read(folder: Path, *, wrong: list[str]) -> Iterator[Training | Life]:
    """All records in a folder, each with the name of its file's owner as `user`.

    Files of others are not trusted: what cannot be decoded, or says that it is of somebody who does not own
    the file, is left out, with a line for each file in `wrong`.

    Raises StoreError if the folder cannot be read.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX))
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror}") from error
    for name in names:
        if name.startswith("."):
            continue
        try:
            with opened(folder / name, follow=False) as (file, about):
                data = file.read(MOST_BYTES + 1)
        except (OSError, BadInput) as error:
            wrong.append(f"{name}: {getattr(error, 'strerror', None) or error}")
            continue
        if len(data) > MOST_BYTES:
            wrong.append(f"{name}: more than {MOST_BYTES} bytes")
            continue
        bad, owner = 0, name_of(about.st_uid)
        for line in filter(None, data.split(b"\n")):
            record = _decoded(line)
            if record is None or record.uid != about.st_uid:
                bad += 1
            else:
                # Whoever owns the file may have written any name into it.
                yield msgspec.structs.replace(record, user=owner)
        if bad:
            wrong.append(f"{name}: {bad} lines are left out: not records, or not of the file's owner")


def _decoded(line: bytes) -> Training | Life | None:
    try:
        kind = decode(line, _Kind).kind
        return decode(line, Life) if kind == "life" else decode(line, Training)
    except BadInput:
        return None
