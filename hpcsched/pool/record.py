"""What a pool has asked for, on disk beside its run: written before each submission, so that none is lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from hpcsched.decoding import decode_file
from hpcsched.errors import BadInput, HpcschedError, StoreError
from hpcsched.store.files import write_atomically
from hpcsched.store.run_folders import POOL

MOST_ENDED = 200
"""Allocations that are over and still listed (chosen): of older ones only their GPU-hours are kept."""


class State(StrEnum):
    """Where an allocation is. ASKED: on record, and whether it was submitted is not known yet."""

    ASKED = "asked"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (State.ENDED, State.FAILED)


class Wanted(StrEnum):
    """What the user wants of a pool."""

    RUN = "run"
    PAUSE = "pause"
    STOP = "stop"


class Allocation(msgspec.Struct, kw_only=True):
    """An allocation. `name` is that of its batch job, by which it is found; times are Unix times, `began` of
    one that waits None. `given_up`: the pool has cancelled it. `word`: the batch system's word for its state,
    `note`: why it waits, or has failed."""

    name: str
    template: str
    gpus: int
    limit_s: float
    asked: float
    why: str = ""
    job_id: str = ""
    state: State = State.ASKED
    word: str = ""
    note: str = ""
    planned: float | None = None
    began: float | None = None
    ended: float | None = None
    given_up: bool = False

    def held_s(self, now: float) -> float:
        """Seconds for which it has had its GPUs."""
        if self.began is None:
            return 0.0
        end = self.ended if self.ended is not None else min(now, self.began + self.limit_s)
        return max(0.0, end - self.began)


class Trouble(msgspec.Struct, kw_only=True):
    """Failures in a row of a template: how many, when the last one was, and why."""

    count: int
    last: float
    why: str


class Record(msgspec.Struct, kw_only=True):
    """pool.json. `number`: of allocations asked for so far. `before_gpu_s`: GPU-seconds of those that are no
    longer listed. `words`: why nothing is asked for at the moment. `resumed`: since when the user lets it ask
    again. `round`: when it was last looked at."""

    schema: int = 1
    id: str
    file: str
    max_allocations: int
    max_gpus: int
    gpu_hours: float
    number: int = 0
    before_gpu_s: float = 0.0
    allocations: list[Allocation] = []
    troubles: dict[str, Trouble] = {}
    words: list[str] = []
    resumed: float = 0.0
    round: float | None = None
    host: str = ""
    pid: int = 0

    def live(self) -> list[Allocation]:
        """Those that are not over."""
        return [one for one in self.allocations if not one.state.over]

    def used_gpu_s(self, now: float) -> float:
        """GPU-seconds charged so far."""
        return self.before_gpu_s + sum(one.gpus * one.held_s(now) for one in self.allocations)

    def promised_gpu_s(self, now: float) -> float:
        """GPU-seconds that those that wait or run may still be charged at most."""
        return sum(one.gpus * (one.limit_s - one.held_s(now)) for one in self.live())

    def forget(self) -> None:
        """Keep of the oldest ones that are over only what they cost."""
        over = [one for one in self.allocations if one.state.over]
        for one in over[: max(0, len(over) - MOST_ENDED)]:
            self.before_gpu_s += one.gpus * one.held_s(one.ended or one.asked)
            self.allocations.remove(one)


class Order(msgspec.Struct, kw_only=True):
    """pool.order.json: what the user wants, and since when (Unix time)."""

    wanted: Wanted = Wanted.RUN
    since: float = 0.0


class PoolBusy(HpcschedError):
    """Another process looks after this pool."""

    exit_code = 2


class PoolFiles:
    """The files of a pool in its run's directory."""

    def __init__(self, root: Path) -> None:
        self.record, self.lock = root / POOL, root / "pool.lock"
        self.order, self.output = root / "pool.order.json", root / "pool"
        self.log = root / "pool.log"

    def read(self) -> Record | None:
        """The record; None if there is none. Raises StoreError for one that cannot be read."""
        try:
            return decode_file(self.record, Record)
        except FileNotFoundError:
            return None
        except (OSError, BadInput) as error:
            # To begin anew would forget allocations that are there.
            raise StoreError(f"{self.record} cannot be understood: {error}") from error

    def write(self, record: Record) -> None:
        """Replace the record; on disk when this returns. Raises StoreError."""
        write_atomically(self.record, msgspec.json.encode(record), durable=True)

    def ordered(self) -> Order:
        """What the user has last asked for; a file that cannot be read pauses the pool."""
        try:
            return decode_file(self.order, Order)
        except FileNotFoundError:
            return Order()
        except (OSError, BadInput):
            return Order(wanted=Wanted.PAUSE)

    def wanted(self) -> Wanted:
        """The same without the time."""
        return self.ordered().wanted

    def want(self, wanted: Wanted) -> None:
        """Ask for something. Raises StoreError."""
        order = Order(wanted=wanted, since=time.time())
        write_atomically(self.order, msgspec.json.encode(order), durable=True)

    @contextlib.contextmanager
    def locked(self, *, wait_s: float = 0.0) -> Iterator[None]:
        """Be the only process that looks after this pool, on this host, after waiting so long at most.

        Raises PoolBusy, StoreError.
        """
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot write {self.lock}: {error.strerror}") from error
        try:
            until = time.monotonic() + wait_s
            while not _flocked(descriptor):
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                who = self.read()
                by = f" (host {who.host}, pid {who.pid})" if who and who.pid else ""
                raise PoolBusy(
                    f"another process{by} looks after the pool in {self.lock.parent}; "
                    "`hpcsched pool status` shows it, `hpcsched pool stop` ends it"
                )
            yield
        finally:
            os.close(descriptor)


def _flocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def new_id() -> str:
    """A name for a pool that no other one of the user's has."""
    return secrets.token_hex(3)
