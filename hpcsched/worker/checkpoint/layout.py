"""A state as bytes in a row: its tensors, and a pickle of the rest. And back, as views or as copies."""

from __future__ import annotations

import io
import mmap
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hpcsched.compat import dataclass, zip
from hpcsched.errors import StoreError

_ALIGNMENT = 64
BLOCK = 1 << 16
"""The tensors' bytes end at a multiple of this."""
PIECE = 4 << 20
"""Bytes that are copied at once (chosen: 1 to 4 MiB were the quickest on a CPU): a checksum of them is taken
while they are in the cache, and the next are on their way from a GPU meanwhile."""

Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Where a tensor's bytes are, and how to read them: offset, type, shape, strides."""

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Targets and sources, of equal shapes."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state taken apart: where its tensors go, and the pickle of the rest."""

    tensors: list[tuple[torch.Tensor, Place]]
    skeleton: bytes
    area: int

    @property
    def size(self) -> int:
        return self.area + len(self.skeleton)


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Raises StoreError for tensors that are more than bytes in a row."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(dict(state))
    return FlatState(pickler.tensors, file.getvalue(), round_up(pickler.end, BLOCK))


class _Pickler(pickle.Pickler):
    """Writes places in place of tensors; tensors that are the same memory get the same place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[tuple[torch.Tensor, Place]] = []
        self.end = 0
        self._places: dict[Any, Place] = {}

    def persistent_id(self, item: Any) -> Place | None:
        if not isinstance(item, torch.Tensor):
            return None
        if type(item) not in (torch.Tensor, torch.nn.Parameter) or item.layout is not torch.strided:
            raise StoreError(f"an arena cannot hold a {type(item).__name__} of layout {item.layout}")
        if item.is_quantized:
            raise StoreError("an arena cannot hold quantized tensors")
        same = (item.data_ptr(), item.dtype, item.shape, item.stride(), item.is_conj(), item.is_neg())
        key = same if item.numel() else id(item)
        if key not in self._places:
            stride = item.stride() if item.is_contiguous() else torch.empty_like(item, device="meta").stride()
            self._places[key] = (self.end, item.dtype, tuple(item.shape), stride)
            self.tensors.append((item, self._places[key]))
            self.end = round_up(self.end + item.numel() * item.element_size(), _ALIGNMENT)
        return self._places[key]


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote; no code in it is run."""

    def __init__(self, memory: mmap.mmap, skeleton: bytes) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._memory = memory
        self._known: dict[Place, torch.Tensor] = {}

    def persistent_load(self, place: Place) -> torch.Tensor:
        if place not in self._known:
            self._known[place] = window(self._memory, place)
        return self._known[place]

    def find_class(self, module: str, name: str) -> Any:
        known = {"OrderedDict": OrderedDict, "Counter": Counter, "complex": complex, "device": torch.device}
        if name in known:
            return known[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise StoreError(f"the arena holds a {module}.{name}")


def views(memory: mmap.mmap, skeleton: bytes) -> dict[str, Any]:
    """The state, its tensors as views of `memory`."""
    state: dict[str, Any] = _Unpickler(memory, skeleton).load()
    return state


def pieces(state: FlatState, memory: mmap.mmap) -> Iterator[tuple[int, Copies]]:
    """The copies that bring a state's tensors into memory, `PIECE` by `PIECE`, each with where it ends."""
    end = PIECE
    copies: Copies = []
    for tensor, place in state.tensors:
        for offset, target, source in parts(window(memory, place), dense(tensor, place), place[0]):
            if offset == end:
                yield end, copies
                end, copies = end + PIECE, []
            copies.append((target, source))
    yield state.area, copies


def batches(copies: Copies, memory: mmap.mmap) -> Iterator[tuple[Copies, Callable[[], object]]]:
    """Copies out of memory, in batches of about a `PIECE`, behind which there is nothing to do."""
    start = bytes_of(memory).data_ptr()
    batch: Copies = []
    size = 0
    for whole, view in copies:
        for _, target, source in parts(whole, view, view.data_ptr() - start):
            batch.append((target, source))
            size += source.numel() * source.element_size()
            if size >= PIECE:
                yield batch, _nothing
                batch, size = [], 0
    yield batch, _nothing


def _nothing() -> None:
    pass


def parts(
    target: torch.Tensor, source: torch.Tensor, offset: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Two tensors of equal strides without gaps, cut where a `PIECE` ends; the first byte is at `offset`."""
    count, size = source.numel(), source.element_size()
    one, other = target.as_strided((count,), (1,)), source.as_strided((count,), (1,))
    begin = 0
    while begin < count:
        end = min(count, begin + (PIECE - offset % PIECE) // size)
        yield offset, one[begin:end], other[begin:end]
        offset, begin = offset + (end - begin) * size, end


def dense(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor with the strides of its place: itself, or a copy where it lies otherwise."""
    _, dtype, shape, stride = place
    if tensor.stride() == stride and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device).copy_(tensor)


def to_copy(state: dict[str, Any], into: Mapping[str, Any]) -> tuple[dict[str, Any], Copies]:
    """The same state with tensors that are yet to be filled, and the copies that fill them.

    A tensor that has its like at the same place of `into` is copied there: new memory costs more than a copy.
    All others are new, and nobody else's: on the device that is at this place of `into`, or above it, and on
    the CPU where there is none. Single numbers are on the CPU anyway: optimizers count their steps there.
    Takes `state` over.
    """
    targets = _Targets()
    filled: dict[str, Any] = targets.of(state, into)
    return filled, targets.copies


class _Targets:
    def __init__(self) -> None:
        self.copies: Copies = []
        self._new: dict[torch.Tensor, torch.Tensor] = {}
        self._filled: dict[int, tuple[torch.Tensor, int]] = {}  # by storage: what is there, and where

    def of(self, item: Any, own: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if _alike(item, own) and self._fills(item, own):
                return own
            if item not in self._new:
                device = own if isinstance(own, torch.device) and item.ndim else "cpu"
                new = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device)
                self._new[item] = new
                self.copies.append((new, item))
            return self._new[item]
        if isinstance(item, dict):
            for key, value in item.items():
                item[key] = self.of(value, own.get(key) if isinstance(own, Mapping) else _device(own))
            return item
        if isinstance(item, (list, tuple)):
            fits = isinstance(own, (list, tuple)) and len(own) == len(item)
            owned = own if fits else [_device(own)] * len(item)
            return type(item)(self.of(*pair) for pair in zip(item, owned, strict=True))
        return item

    def _fills(self, view: torch.Tensor, own: torch.Tensor) -> bool:
        """Copy it there, unless something else is there: what shares memory here need not be the same."""
        address = own.untyped_storage().data_ptr()
        if address in self._filled:
            former, where = self._filled[address]
            return former is view and where == own.data_ptr()
        self._filled[address] = view, own.data_ptr()
        self.copies.append((own, view))
        return True


def _device(own: Any) -> torch.device | None:
    return own if isinstance(own, torch.device) else None


def _alike(view: torch.Tensor, own: Any) -> bool:
    if type(own) not in (torch.Tensor, torch.nn.Parameter) or own.layout is not torch.strided:
        return False
    if own.is_conj() or own.is_neg():  # its bytes are not its numbers
        return False
    return (own.dtype, own.shape, own.stride()) == (view.dtype, view.shape, view.stride())


def window(memory: mmap.mmap, place: Place) -> torch.Tensor:
    """The tensor at this place, as a view; its storage is its own, or saving it would save them all."""
    offset, dtype, shape, stride = place
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).as_strided(shape, stride)


def bytes_of(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
