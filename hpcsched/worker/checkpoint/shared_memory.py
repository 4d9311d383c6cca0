"""A job's state in memory that outlives its processes: rank 0 saves in milliseconds, and leaves.

The memory is a memfd that the launcher holds open and every rank inherits. It has two slots, written in
turn, so that one always holds a whole state, whenever the writer dies:

    0            head: which generation is the newest (they are counted from 1), how large the slots are
    512 (1 + s)  record of slot s: what it holds, and its checksum
    2^40 (1 + s) slot s: the tensors' bytes, each tensor at a multiple of 64, then the rest as a pickle

Slots lie so far apart that each can grow where it is; the file is sparse. The user's tensors are copied in
and out: they stay where the user has put them. One process writes; any may read.

A save is one pass over the bytes: behind the copy of each piece its checksum is taken, on the CPU while the
piece is in the cache, or while a GPU copies the next ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcsched.compat import dataclass
from hpcsched.errors import StoreError
from hpcsched.worker.checkpoint.copying import copy_all
from hpcsched.worker.checkpoint.layout import (
    BLOCK,
    Copies,
    FlatState,
    batches,
    bytes_of,
    flatten,
    pieces,
    round_up,
    to_copy,
    views,
)
from hpcsched.worker.checkpoint.pinning import PINNED_AT_ONCE, Cuda, Pins
from hpcsched.worker.process.contract import say
from hpcsched.worker.process.memory import admits, alone_on_host, available
from hpcsched.worker.process.storable import storable

_MAGIC = b"hpcsched"
_HEAD = struct.Struct("<8sQQ")  # magic, generation, capacity of a slot
_RECORD = struct.Struct("<QQQQQI")
_SLACK = 1 << 20
"""Room for the pickle to grow, e.g. by the random generators of more ranks."""
_PATIENCE_S = 3.0
"""How long to wait for a slot that someone else uses, or for memory: the devices are wanted."""
_STATE_FILE_PATIENCE_S = 60.0
_STATE_FILE_LOCK = 2  # bytes 0 and 1 are the locks of the slots


@dataclass(frozen=True, slots=True)
class Held:
    """Which state an arena holds."""

    step: int
    samples: int
    generation: int


class Arena:
    """Two copies of a job's state in a memfd; get one with `Arena.open`."""

    def __init__(self, descriptor: int, cuda: Cuda) -> None:
        self._descriptor, self._cuda = descriptor, cuda
        self._slots: list[mmap.mmap | None] = [None, None]  # as far as mapped
        self._pins = Pins(cuda)
        self._busy = threading.RLock()  # room may be made by another thread than the one that saves
        self._saves = 0  # as many as have begun: what is done ahead ends when there is one more

    @classmethod
    def open(cls, descriptor: int | None, cuda: Cuda | None = None) -> Arena | None:
        """The arena behind an inherited descriptor; None if there is none."""
        if descriptor is None:
            return None
        # Opened anew: our locks belong to this opening of the file, so they exclude those of other processes,
        # which an inherited descriptor would share; and no close of another descriptor lets go of them.
        try:
            return cls(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), cuda or Cuda())
        except OSError as error:
            say(f"the arena cannot be used: descriptor {descriptor}: {error.strerror}")
            return None

    def close(self) -> None:
        """Let go of it in this process; tensors that are views of it stay valid."""
        self._saves += 1  # what is done ahead ends
        with self._busy:
            self._pins.unpin(0)
            self._pins.unpin(1)
            self._slots = [None, None]
        os.close(self._descriptor)

    # Writing.

    def reserve(self, state: Mapping[str, Any]) -> bool:
        """Make room for two copies of `state`, so that saving it takes no new memory; False if it cannot be.

        Its pages are looked at once, or the first save would pay for that, and what the next save writes is
        pinned where tensors are on a GPU; until somebody saves. May be called in a thread of its own.
        """
        before = self._saves
        try:
            packed = flatten(storable(state))
        except StoreError:
            return False
        with self._busy:
            if not self._reserve(packed):
                return False
        self._touch_pages(before)
        device = next((tensor.device for tensor, _ in packed.tensors if self._cuda.has(tensor)), None)
        if device is not None:
            self._pin(device, before)
        return True

    def save(self, state: Mapping[str, Any]) -> int:
        """Copy `state` in, as the newest; returns its generation.

        Raises StoreError when there is no room, someone still reads the older copy, or `state` holds what
        cannot be saved. A process that dies in here leaves the newest state as it was.
        """
        state = storable(state)
        packed = flatten(state)
        self._saves += 1  # what is not pinned by now is copied more slowly, and no less right
        with self._busy:
            if not self._reserve(packed):
                raise StoreError(f"not enough memory for two copies of {packed.size} bytes")
            former, capacity = self._head()
            generation = former + 1
            slot = generation % 2
            record = _Record(generation, state["step"], state["samples"], packed.area, len(packed.skeleton))
            with self._locked(slot, fcntl.F_WRLCK, _PATIENCE_S):
                self._write(bytes(_RECORD.size), _record_offset(slot))
                self._write(packed.skeleton, _slot_offset(slot) + packed.area)
                sums = self._copy_in(self._memory(slot, capacity), packed)
                self._write(record.pack(record.checksum(packed.skeleton, sums)), _record_offset(slot))
                self._write(_HEAD.pack(_MAGIC, generation, capacity), 0)
        return generation

    def clear(self) -> None:
        """Forget the states, for a job that starts over; their room stays."""
        capacity = self._head()[1]
        if capacity:
            self._write(_HEAD.pack(_MAGIC, 0, capacity), 0)

    def _reserve(self, packed: FlatState) -> bool:
        generation, capacity = self._head()
        if packed.size <= capacity:
            return True
        wanted = round_up(packed.size + _SLACK, BLOCK)
        # Other jobs look only once ours is taken, and shows: or all would take what each saw.
        with alone_on_host(_PATIENCE_S) as alone:
            if not alone or not admits(2 * (wanted - capacity), available()):
                return False
            try:
                for slot in (1, 0):
                    os.posix_fallocate(self._descriptor, _slot_offset(slot), wanted)
            except OSError:  # no memory after all: give back what came behind the second slot
                os.ftruncate(self._descriptor, _slot_offset(1) + capacity if capacity else 0)
                return False
        self._write(_HEAD.pack(_MAGIC, generation, wanted), 0)
        return True

    def _copy_in(self, memory: mmap.mmap, packed: FlatState) -> torch.Tensor:
        """Copy the tensors in; returns the sums of the blocks, as they are in memory."""
        blocks = _blocks(memory, packed.area)
        sums = torch.empty(len(blocks), dtype=torch.int64)
        for device in {tensor.device for tensor, _ in packed.tensors if self._cuda.has(tensor)}:
            self._cuda.synchronize(device)  # a loop of the user's may have its steps on a stream of its own

        def copies() -> Iterator[tuple[Copies, Callable[[], object]]]:
            begin = 0
            for end, piece in pieces(packed, memory):
                part = slice(begin // BLOCK, end // BLOCK)
                # By NumPy: one thread, whichever it is.
                yield piece, partial(np.sum, blocks[part].numpy(), axis=1, out=sums[part].numpy())
                begin = end

        with torch.no_grad():
            copy_all(self._cuda, copies())
        return sums

    def _touch_pages(self, saves: int) -> None:
        """Of both slots, the next one first, until somebody saves."""
        generation, capacity = self._head()
        for slot in ((generation + 1) % 2, generation % 2):
            for begin in range(0, capacity, PINNED_AT_ONCE):
                with self._busy:
                    if self._saves != saves:
                        return
                    part = bytes_of(self._memory(slot, capacity))[begin : begin + PINNED_AT_ONCE]
                    # One write a page: in torch, which lets go of the interpreter meanwhile, unlike
                    # MAP_POPULATE. Who reads the slot now sees the same bytes.
                    part[:: mmap.PAGESIZE].bitwise_or_(0)

    def _pin(self, device: torch.device, saves: int) -> None:
        """Pin the slot that is saved to next, as far as that goes, and until somebody saves."""
        if not self._cuda.can_pin():
            return
        with self._pins.pinning(device):
            more = True
            while more:
                with self._busy:
                    generation, capacity = self._head()
                    if self._saves != saves or not capacity:
                        return
                    slot = (generation + 1) % 2
                    more = self._pins.pin(slot, self._memory(slot, capacity))

    # Reading.

    def newest(self) -> Held | None:
        """The newest state that was saved whole, without a look at its bytes; None: nothing was saved."""
        for record in self._records():
            return Held(record.step, record.samples, record.generation)
        return None

    def load(self, generation: int | None = None, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The newest good state, or that of one `generation`, copied out.

        A tensor that has its like at the same place of `into` is copied there, and that is what comes back;
        all others are new, on the device that is at this place of `into` or above it, else on the CPU. Raises
        StoreError when there is no good state; a damaged one is passed over with one warning.
        """
        with self._good(generation) as record:
            memory = self._memory(record.slot, record.area + record.skeleton)
            # Copied: optimizers, and modules that load in their own way, keep the very tensors they get.
            state, copies = to_copy(views(memory, self._skeleton(record)), into or {})
            with torch.no_grad():
                copy_all(self._cuda, batches(copies, memory))
            return state

    def touch(self, device: torch.device) -> None:
        """Pay now for what the first look at the memory costs more, by the page; of a rank on this device."""
        for slot in (0, 1):
            if capacity := self._head()[1]:
                int(bytes_of(self._memory(slot, capacity))[:: mmap.PAGESIZE].sum())
        if device.type == "cuda":
            self._pin(device, self._saves)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[dict[str, Any]]:
        """The newest good state, uncopied, as it is while inside the `with`: nothing is saved over it."""
        with self._good(None) as record:
            memory = self._memory(record.slot, record.area + record.skeleton)
            yield views(memory, self._skeleton(record))

    @contextlib.contextmanager
    def alone_with_state_file(self) -> Iterator[None]:
        """Exclude the others on this host that write STATE.json: rank 0 of an attempt, the keeper of another.

        Raises StoreError when it takes them too long.
        """
        with self._locked(_STATE_FILE_LOCK, fcntl.F_WRLCK, _STATE_FILE_PATIENCE_S):
            yield

    @contextlib.contextmanager
    def _good(self, generation: int | None) -> Iterator[_Record]:
        """The record of the newest state whose checksum is right, with its slot locked."""
        for record in self._records():
            if generation not in (None, record.generation):
                continue
            with self._locked(record.slot, fcntl.F_RDLCK, _PATIENCE_S):
                if self._is_good(record):
                    yield record
                    return
            say(f"the arena's state of step {record.step} is damaged")
        raise StoreError("the arena holds no good state" + (f" {generation}" if generation else ""))

    def _is_good(self, record: _Record) -> bool:
        data = self._read(_RECORD.size, _record_offset(record.slot))
        try:
            memory = self._memory(record.slot, record.area + record.skeleton)
        except (ValueError, OverflowError):  # a damaged record: the slot ends before
            return False
        sums = _blocks(memory, record.area).sum(1)
        return data == record.pack(record.checksum(self._skeleton(record), sums))

    def _skeleton(self, record: _Record) -> bytes:
        return self._read(record.skeleton, _slot_offset(record.slot) + record.area)

    # The file.

    def _head(self) -> tuple[int, int]:
        """The newest generation, and how many bytes each slot has."""
        data = self._read(_HEAD.size, 0)
        if len(data) < _HEAD.size:
            return 0, 0
        magic, generation, capacity = _HEAD.unpack(data)
        return (generation, capacity) if magic == _MAGIC else (0, 0)

    def _records(self) -> Iterator[_Record]:
        """Of the slots that hold a state, the newest first."""
        newest = self._head()[0]
        for generation in range(newest, max(newest - 2, 0), -1):
            data = self._read(_RECORD.size, _record_offset(generation % 2))
            record = _Record(*_RECORD.unpack(data)[:-1])
            if record.generation == generation:
                yield record

    def _memory(self, slot: int, size: int) -> mmap.mmap:
        """The first bytes of a slot, `size` or more. Raises ValueError when it is not so long."""
        with self._busy:
            memory = self._slots[slot]
            if memory is None or len(memory) < size:
                self._pins.unpin(slot)
                memory = self._slots[slot] = mmap.mmap(self._descriptor, size, offset=_slot_offset(slot))
            return memory

    def _read(self, size: int, offset: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def _write(self, data: bytes, offset: int) -> None:
        os.pwrite(self._descriptor, data, offset)

    @contextlib.contextmanager
    def _locked(self, byte: int, kind: int, patience_s: float) -> Iterator[None]:
        """Hold a lock of which the kernel knows: it ends with this process, however that ends."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _flock(kind, byte))
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreError("someone else uses this part of the arena") from None
            time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))


@dataclass(frozen=True, slots=True)
class _Record:
    """What a slot holds: of `area` bytes of tensors and `skeleton` bytes of pickle."""

    generation: int
    step: int
    samples: int
    area: int
    skeleton: int

    @property
    def slot(self) -> int:
        return self.generation % 2

    def pack(self, checksum: int) -> bytes:
        numbers = (self.generation, self.step, self.samples, self.area, self.skeleton)
        return _RECORD.pack(*numbers, checksum)

    def checksum(self, skeleton: bytes, sums: torch.Tensor) -> int:
        """CRC-32 of this record, the pickle, and the sums of the tensors' blocks: as fast as memory is."""
        return zlib.crc32(sums.numpy().data, zlib.crc32(skeleton, zlib.crc32(self.pack(0))))


def _blocks(memory: mmap.mmap, area: int) -> torch.Tensor:
    """The first `area` bytes of memory, as int64, shape [blocks, integers of a block]."""
    return bytes_of(memory)[:area].view(torch.int64).view(area // BLOCK, BLOCK // 8)


def _slot_offset(slot: int) -> int:
    return (1 + slot) << 40


def _record_offset(slot: int) -> int:
    return 512 * (1 + slot)


def _flock(kind: int, byte: int) -> bytes:
    """C's `struct flock`: kind, whence, start, length, pid."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)
