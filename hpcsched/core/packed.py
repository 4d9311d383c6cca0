"""The jobs of a run, by id: those that are over can be packed, as a run may have had a hundred thousand.

Packed, a job of which nothing is unusual takes some hundred bytes instead of two thousand: its fields are
pickled, and compressed with those of a job before it as the dictionary. These bytes never leave the process;
others are of a checkpoint, which reads them itself.
A job that is asked for by its id is unpacked first and may be changed: it stays so until it is packed again.
Where all are gone through, packed ones are copies, for reading.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from dataclasses import fields
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Any

from hpcsched.core.jobs import Job, Saves, Traits
from hpcsched.core.model import Attempt, JobSpec, JobState
from hpcsched.core.reasons import Note, Reason

_SAME_FOR = 256
"""The number of jobs that are compressed with the same dictionary (chosen)."""

_RAW = -13
"""For zlib: no head and no checksum, and a window of 8 KiB, which is more than nearly all jobs take."""

_HEAD = struct.Struct("<BdI")
"""Before the bytes of a job: its state by number, when it ended, and the number of its dictionary."""

_STATES = tuple(JobState)
_NUMBERS = {state: number for number, state in enumerate(_STATES)}

_KEPT = 2**32 - 1
"""In place of the number of a dictionary: the bytes are not of this module."""

Kept = tuple[int, JobState, float, bytes]
"""A job that is over: its id, its state, when it ended, and bytes that stand for it."""


class Jobs(dict[int, Job]):
    """A dict in which those lie that are not packed: they are found as fast as in any other."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: list[bytes] = []
        """By id; b"" where there is none."""
        self._unlike: set[int] = set()
        """Those that cannot be packed, as a package has put something into them."""
        self._alike: list[bytes] = []
        """The dictionaries: a job as it is before it is compressed."""
        self._left_of_alike = 0
        self.read: Callable[[bytes], Job] | None = None
        """What makes jobs of the bytes that are kept."""
        self._packed_states = Counter[JobState]()
        self._newest_end_s = 0.0
        """When the last one ended of those that have been packed."""
        self.last_id = 0
        """The largest of all ids; 0: there is none."""

    # --- packing ----------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Take a new job in."""
        self[job.id], self.last_id = job, max(self.last_id, job.id)

    def pack(self, at_most: int | None = None) -> None:
        """Pack those that are over, or so many of them. Who has one must not change it any more."""
        over = (job for job in super().values() if job.state.final and job.id not in self._unlike)
        for job in [*islice(over, at_most)]:
            self._pack(job)

    def _pack(self, job: Job) -> None:
        if job.id > 2 * len(self) + _SAME_FOR:
            return  # ids count from 1 without a gap: not those of a journal that somebody has made up
        try:
            data = _dumped(job)
        except (pickle.PicklingError, TypeError, AttributeError):
            self._unlike.add(job.id)
            return
        if not self._left_of_alike:
            self._alike.append(data)
            self._left_of_alike = _SAME_FOR
        self._left_of_alike -= 1
        compress = zlib.compressobj(6, wbits=_RAW, memLevel=6, zdict=self._alike[-1])
        data = compress.compress(data) + compress.flush()
        self._put(job.id, job.state, job.ended_s or 0.0, len(self._alike) - 1, data)
        del self[job.id]

    def _put(self, job_id: int, state: JobState, ended_s: float, alike: int, data: bytes) -> None:
        self._packed.extend([b""] * (job_id + 1 - len(self._packed)))
        self._packed[job_id] = _HEAD.pack(_NUMBERS[state], ended_s, alike) + data
        self._packed_states[state] += 1
        self._newest_end_s = max(self._newest_end_s, ended_s)

    def keep(self, jobs: Iterable[Kept], read: Callable[[bytes], Job], *, most: int) -> None:
        """Take jobs in that are over, as bytes of which `read` makes jobs when they are asked for.

        Raises ValueError where an id is not in 1 to `most`: room is taken for all these.
        """
        self.read = read
        for job_id, state, ended_s, data in jobs:
            if not 0 < job_id <= most:
                raise ValueError(f"a job of id {job_id}")
            self._put(job_id, state, ended_s, _KEPT, data)
            self.last_id = max(self.last_id, job_id)

    def kept(self) -> Iterator[Kept]:
        """Those whose bytes are still what stands for them."""
        for job_id in self._ids():
            number, ended_s, alike = _HEAD.unpack_from(data := self._packed[job_id])
            if alike == _KEPT:
                yield job_id, _STATES[number], ended_s, data[_HEAD.size :]

    def _unpacked(self, data: bytes) -> Job:
        number = _HEAD.unpack_from(data)[2]
        if number == _KEPT and self.read:
            return self.read(data[_HEAD.size :])
        alike = self._alike[number]
        data = zlib.decompressobj(_RAW, zdict=alike).decompress(data[_HEAD.size :])
        job = pickle.loads(data)  # nosec B301 # they never left this process
        assert isinstance(job, Job)
        return job

    def _data(self, job_id: int) -> bytes:
        return self._packed[job_id] if 0 < job_id < len(self._packed) else b""

    def look(self, job_id: int) -> Job:
        """A job for reading: a copy, if it is packed."""
        return self._unpacked(data) if (data := self._data(job_id)) else self[job_id]

    def is_over(self, job_id: int) -> bool:
        """Whether a job is in a final state: one that is packed is, and stays so."""
        return bool(self._data(job_id)) or self[job_id].state.final

    def __missing__(self, job_id: int) -> Job:
        if not (data := self._data(job_id)):
            raise KeyError(job_id)
        job = self[job_id] = self._unpacked(data)
        self._packed[job_id] = b""
        self._packed_states[job.state] -= 1
        return job

    def unpack(self) -> None:
        """Unpack all of them, as they will be gone through more than once."""
        for job_id in self._ids():
            self[job_id]

    def _ids(self) -> list[int]:
        return [job_id for job_id, data in enumerate(self._packed) if data]

    # --- of some of them --------------------------------------------------------------------

    def left(self) -> list[Job]:
        """Those that are not over, in the order of ids."""
        return sorted((job for job in super().values() if not job.state.final), key=lambda job: job.id)

    def in_state(self, *states: JobState) -> Iterator[Job]:
        """Those in one of these states, in the order of ids."""
        numbers = {_NUMBERS[state] for state in states}
        packed = (job_id for job_id in self._ids() if self._packed[job_id][0] in numbers)
        return self.each([*packed, *(i for i, job in super().items() if job.state in states)])

    def since(self, at: float) -> Iterator[Job]:
        """Those that were not over before this time of the run's clock, in the order of ids."""
        ids = self._ids() if at <= self._newest_end_s else ()  # mostly none: there may be very many
        packed = (job_id for job_id in ids if _HEAD.unpack_from(self._packed[job_id])[1] >= at)
        others = (i for i, job in super().items() if not job.state.final or (job.ended_s or 0.0) >= at)
        return self.each([*packed, *others])

    def counts(self) -> Counter[JobState]:
        """How many are in each state; those in which none is are left out."""
        return +(self._packed_states + Counter(job.state for job in super().values()))

    def each(self, ids: Iterable[int]) -> Iterator[Job]:
        """Those of these ids, in order."""
        return map(self.look, sorted(ids))

    # --- what a dict has --------------------------------------------------------------------

    def __len__(self) -> int:
        return super().__len__() + self._packed_states.total()

    def __contains__(self, job_id: object) -> bool:
        return super().__contains__(job_id) or (isinstance(job_id, int) and bool(self._data(job_id)))

    def __iter__(self) -> Iterator[int]:
        return iter(sorted([*super().__iter__(), *self._ids()]))

    def get(self, job_id: int, default: Any = None) -> Any:
        """The job, or the default where there is none of this id."""
        return self[job_id] if job_id in self else default  # noqa: SIM401 - it is this

    def keys(self) -> KeysView[int]:  # type: ignore[override]
        """All ids, in order."""
        return KeysView(self)

    def values(self) -> ValuesView[Job]:  # type: ignore[override]
        """All jobs, in the order of ids."""
        return _Values(self)

    def items(self) -> ItemsView[int, Job]:  # type: ignore[override]
        """All jobs with their ids, in order."""
        return _Items(self)


class _Values(ValuesView[Job]):
    def __iter__(self) -> Iterator[Job]:
        jobs: Jobs = self._mapping  # type: ignore[attr-defined]
        return jobs.each(jobs)


class _Items(ItemsView[int, Job]):
    def __iter__(self) -> Iterator[tuple[int, Job]]:
        jobs: Jobs = self._mapping  # type: ignore[attr-defined]
        return ((job.id, job) for job in jobs.each(jobs))


# --- pickling: as usual, but records give all their fields at once ------------------------------------------


_Reduce = Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(part.name for part in fields(kind))


def _made(kind: type, values: tuple[Any, ...]) -> Any:
    record: Any = object.__new__(kind)
    for name, value in zip(_names(kind), values, strict=True):
        object.__setattr__(record, name, value)
    return record


def _reduce_of(kind: type) -> _Reduce:
    values = attrgetter(*_names(kind))
    return lambda record: (_made, (kind, values(record)))


_RECORDS = (Job, JobSpec, Traits, Saves, Attempt, Note, Reason)
_REDUCED: dict[type, _Reduce] = {kind: _reduce_of(kind) for kind in _RECORDS}


def _dumped(job: Job) -> bytes:
    into = io.BytesIO()
    pickler = pickle.Pickler(into, protocol=5)
    pickler.dispatch_table = _REDUCED
    pickler.dump(job)
    return into.getvalue()
