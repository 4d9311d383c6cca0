"""The samples of a pack: read, preprocessed and brought to the device once for all members that want them.

The paper's pack gives every model the first samples of one batch and drops the rest (pack, section 3.1.1).
Here every member walks the same stream of samples at its own batch size, so each sees what it would see
alone, nothing is dropped, and all come to the end of an epoch together.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch

from hpcsched.compat import zip
from hpcsched.worker.packing.compatibility import PLAIN
from hpcsched.worker.packing.member import Member
from hpcsched.worker.ranks.reproducible import Seeded
from hpcsched.worker.session.batches import places_of
from hpcsched.worker.session.sampler import Sampler
from hpcsched.worker.session.trainer import Parts, Place, read, to_device

MOST_BYTES_COMPARED = 64 << 20
"""Datasets that are larger than this as a pickle are the same only if they are named so (`Parts.data`)."""


class Feed:
    """The stream of samples of one dataset, from the places where members are.

    Args:
        parts: of one member; its dataset and seed are all members'.
        batch: of all members, if they have the same; else None: samples are then kept one by one, and each
            member's batch is made of them.
    """

    def __init__(self, parts: Parts, sampler: Sampler, device: torch.device, *, batch: int | None) -> None:
        self.parts, self.sampler, self.device, self.size = parts, sampler, device, batch
        self.place: Any = None
        """Whence its readers read: two that are the same read the same."""
        self.readers: Sequence[Member] = ()
        self._batches: dict[tuple[int, int], Any] = {}
        self._samples: dict[int, Any] = {}
        self._tensors = parts.tensors
        self._seeded = Seeded(parts.dataset, parts.seed, parts.collate)
        self._ahead: Iterator[Any] | None = None
        self._next = -1

    def batch(self, position: int, count: int) -> Any:
        """The `count` samples of the stream from `position` on as one batch on the device: the same object
        for whoever asks, so nobody may write into it."""
        key = (position, count)
        if (found := self._batches.get(key)) is None:
            # First of all: the new one then gets the memory of an old one, which is still in the caches.
            self._forget(min((member.session.samples for member in self.readers), default=0))
            found = self._batches[key] = self._make(position, count)
        return found

    def drop(self, batch: Any) -> None:
        """Somebody has written into this batch: whoever asks for it again gets another one."""
        self._batches = {key: kept for key, kept in self._batches.items() if kept is not batch}
        self._samples.clear()  # parts of it may lie in there

    def close(self) -> None:
        """Nobody reads any more: the processes that read ahead end now, not when somebody tidies up."""
        self._ahead = None

    def _make(self, position: int, count: int) -> Any:
        if self._tensors is not None:
            chosen = torch.from_numpy(self.sampler.batch(position, count))
            return tuple(to_device(t[chosen.to(t.device)], self.device) for t in self._tensors)
        if self.size == count:
            ahead, self._ahead = self._ahead, None  # whoever reads ahead and raises is done with
            if ahead is None or self._next != position:
                ahead = self._read(position, count)
            batch = next(ahead)
            self._ahead, self._next = ahead, position + count
            return batch
        return to_device(self._seeded.collate(self._one_by_one(position, count)), self.device)

    def _places(self, position: int, count: int) -> Iterator[list[Place]]:
        while True:
            yield places_of(self.sampler, position, range(count))
            position += count

    def _read(self, position: int, count: int) -> Iterator[Any]:
        return read(
            self.parts,
            self._places(position, count),
            device=self.device,
            loaders=self.parts.loaders,
            seeded=True,
            step=position // count,
        )

    def _one_by_one(self, position: int, count: int) -> list[Any]:
        """Samples with their places, each of them preprocessed once, whoever wants it."""
        found = []
        indices = self.sampler.batch(position, count).tolist()
        for place in enumerate(indices, position):
            if place[0] not in self._samples:
                self._samples[place[0]] = self._seeded[place]
            found.append(self._samples[place[0]])
        return found

    def _forget(self, position: int) -> None:
        """No member will ask for samples before `position` again."""
        self._batches = {key: batch for key, batch in self._batches.items() if key[0] >= position}
        self._samples = {at: sample for at, sample in self._samples.items() if at >= position}


def same_data(one: Parts, other: Parts) -> bool:
    """Whether two trainings read the same samples in the same order, so that one reading serves both.

    By their name, where they have one (`Parts.data`); else by their content.
    """
    if one is other:
        return True
    if (one.seed, one.size) != (other.seed, other.size) or not _same(one.collate, other.collate):
        return False
    if one.data is not None or other.data is not None:
        return one.data == other.data
    if one.tensors is not None and other.tensors is not None:
        pairs = zip(one.tensors, other.tensors, strict=False)
        return len(one.tensors) == len(other.tensors) and all(_equal(a, b) for a, b in pairs)
    if one.dataset is other.dataset:
        return True
    if type(one.dataset) is not type(other.dataset):
        return False
    with contextlib.suppress(Exception):  # whatever a user's class does when it is pickled
        return _pickled(one.dataset) == _pickled(other.dataset)
    return False


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return one is other or (alike and torch.equal(one, other))


def _same(one: Any, other: Any) -> bool:
    """Whether two functions do the same for certain: of the same code, with the same plain values."""
    if one is other:
        return True
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return False
    if one.__code__ != other.__code__ or one.__globals__ is not other.__globals__:
        return False
    pairs = zip(_values(one), _values(other), strict=True)
    return all(a is b or (type(a) is type(b) and type(a) in PLAIN and a == b) for a, b in pairs)


def _values(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [*cells, *(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]


# -- comparing -----------------------------------------------------------------------------------------


class _TooLarge(Exception):
    pass


class _Bounded(bytearray):
    """A file for pickle that takes no more than can be compared in a moment."""

    def write(self, data: Any) -> int:
        if len(self) + len(data) > MOST_BYTES_COMPARED:
            raise _TooLarge
        self.extend(data)
        return len(data)


class _Pickler(pickle.Pickler):
    """Writes tensors by what they hold; torch writes where they lie in memory, too."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if content.nbytes > MOST_BYTES_COMPARED:
            raise _TooLarge
        return torch.empty, (tuple(value.shape), str(value.dtype), str(value.device), content.tobytes())


def _pickled(dataset: Any) -> bytes:
    into = _Bounded()
    _Pickler(into, protocol=pickle.HIGHEST_PROTOCOL).dump(dataset)  # type: ignore[arg-type]
    return bytes(into)
