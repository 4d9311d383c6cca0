"""A checkpoint: the state of the machine after so many records of a run, so that they need not be replayed.

It is a short cut and never the truth: one of other code, one that is damaged, or one that is of other
records is ignored. Jobs that are over are each a graph of its own in it.
"""

from __future__ import annotations

import gc
import sys
import zlib
from collections.abc import Collection
from copy import deepcopy
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

import hpcsched
from hpcsched.core.environments import PythonEnvironment
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.registry import added
from hpcsched.core.model import Array, Container, JobState, Restart
from hpcsched.core.needs import Needs
from hpcsched.core.packed import Jobs, Kept
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.decoding import decode_message, read_file
from hpcsched.errors import BadInput
from hpcsched.patience import patiently
from hpcsched.store.archive import Mark
from hpcsched.store.files import write_atomically
from hpcsched.store.graph import Decoder, Encoder, NotPlain, Tables

MOST_BYTES = 2**33
"""The longest checkpoint that is read (chosen)."""

SHARED = (PythonEnvironment, Container, Restart, Needs, Array)
"""What jobs of one file share."""

_ROOMS = ("core", "policy", "planning", "contract")
"""Where the code is that says what a state means."""

_MAGIC = b"hpcsched checkpoint 1\n"


class Head(msgspec.Struct, array_like=True):
    """Of which code a checkpoint is, and after which records of the run; the checksum of what follows."""

    code: str
    mark: Mark
    crc: int


class _Body(msgspec.Struct, array_like=True):
    tables: Tables
    commands: list[str]
    machine: Any
    """And the jobs that are not over."""
    jobs: list[tuple[int, JobState, float, bytes]]
    """Those that are: see `core.packed.Kept`."""


_HEAD, _BODY = msgspec.msgpack.Decoder(Head), msgspec.msgpack.Decoder(_Body)
_ANY = msgspec.msgpack.Decoder()


@cache
def code() -> str:
    """What is another for each code that gives another meaning to a state."""
    digest = blake2b(f"{hpcsched.__version__} {sys.version_info[:2]}".encode(), digest_size=16)
    root = Path(hpcsched.__file__).parent
    for path in sorted(path for room in _ROOMS for path in (root / room).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Reader:
    """Makes jobs of what a checkpoint has of those that are over, when they are asked for."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._decoder = Decoder(tables, {})

    def __call__(self, data: bytes) -> Job:
        job = self._decoder.graph(decode_message(_ANY, data))
        if not isinstance(job, Job):
            raise BadInput("it is no job")
        return job


def encode(
    machine: Machine, make_policy: PolicyMaker, commands: Collection[str], *, again: bool = False
) -> bytes:
    """The state of a machine, and the inbox commands that were carried out. Raises NotPlain.

    `again`: jobs that came out of a checkpoint and have not changed go into this one as they are.
    """
    if added():
        raise NotPlain("a mechanism of another package")
    jobs = machine.run.jobs
    reader = jobs.read if again and isinstance(jobs.read, _Reader) else None
    tables = deepcopy(reader.tables) if reader else Tables()
    kept = {one[0]: one for one in jobs.kept()} if reader else {}
    left = jobs.left()
    unfinished = {job.id for job in left}

    def number_of(job: Job) -> int | None:
        return job.id if job.id in jobs and job.id not in unfinished else None

    externals = {"make_policy": make_policy, "jobs": jobs}
    encoder = Encoder(tables, externals, shared=SHARED, apart={Job: number_of})
    rest = encoder.graph((machine, left))
    over = list[Kept]()
    for job_id in jobs:
        if job_id in unfinished:
            continue
        if (one := kept.get(job_id)) is None:
            job = jobs.look(job_id)
            one = (job.id, job.state, job.ended_s or 0.0, msgspec.msgpack.encode(encoder.graph(job)))
        over.append(one)
    return msgspec.msgpack.encode(_Body(tables, sorted(commands), rest, over))


def decode(body: bytes, make_policy: PolicyMaker) -> tuple[Machine, set[str]]:
    """A machine in this state, and the commands. Raises BadInput."""
    found, jobs = decode_message(_BODY, body, most_bytes=MOST_BYTES), Jobs()
    collects = gc.isenabled()
    gc.disable()  # all that is made here is kept: to look for garbage in it takes longer than to make it
    try:
        jobs.keep(found.jobs, _Reader(found.tables), most=len(body))  # no job takes less than a byte
        externals = {"make_policy": make_policy, "jobs": jobs}
        root = Decoder(found.tables, externals, apart=jobs.__getitem__).graph(found.machine)
    except ValueError as error:
        raise BadInput(str(error)) from error
    finally:
        if collects:
            gc.enable()
    match root:
        case (Machine() as machine, [*left]) if all(isinstance(job, Job) for job in left):
            for job in left:
                jobs.add(job)
            return machine, set(found.commands)
    raise BadInput("it is no state of a run")


def write(path: Path, body: bytes, mark: Mark) -> None:
    """Write the checkpoint of this place in the run, durable. Raises StoreError."""
    packed = zlib.compress(body, 1)
    head = msgspec.msgpack.encode(Head(code(), mark, zlib.crc32(packed)))
    write_atomically(path, b"".join((_MAGIC, len(head).to_bytes(4, "big"), head, packed)), durable=True)


class Checkpoint:
    """A checkpoint of this code that is whole."""

    def __init__(self, head: Head, packed: bytes) -> None:
        self.mark, self._packed = head.mark, packed

    def load(self, make_policy: PolicyMaker) -> tuple[Machine, set[str]]:
        """The machine, and the commands that were carried out. Raises BadInput."""
        unpacker = zlib.decompressobj()
        try:
            body = unpacker.decompress(self._packed, MOST_BYTES)
        except zlib.error as error:
            raise BadInput(str(error)) from error
        if not unpacker.eof:
            raise BadInput(f"longer than {MOST_BYTES} bytes")
        return decode(body, make_policy)


def read(path: Path) -> Checkpoint | None:
    """The checkpoint in a file; None if there is none that this code can go by."""
    try:
        data = patiently(lambda: read_file(path, most_bytes=MOST_BYTES))
        this_code = patiently(code)
    except (OSError, BadInput):
        return None
    first = len(_MAGIC) + 4
    length = int.from_bytes(data[len(_MAGIC) : first], "big")
    if not data.startswith(_MAGIC) or added():
        return None
    try:
        head = decode_message(_HEAD, data[first : first + length])
    except BadInput:
        return None
    packed = data[first + length :]
    if head.code != this_code or head.crc != zlib.crc32(packed):
        return None
    return Checkpoint(head, packed)
