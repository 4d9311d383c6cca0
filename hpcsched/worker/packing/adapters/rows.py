"""Batches of several trainings as one, and apart again: rows one below the other, as long as the longest."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from hpcsched.compat import zip
from hpcsched.worker.packing.batches import tensors_in
from hpcsched.worker.packing.compatibility import PLAIN
from hpcsched.worker.packing.reference import NotStackable

_NOTHING_KEPT = {"use_cache": False}
"""What generating text would need, and no training."""


@dataclass(frozen=True)
class Call:
    """How a training has called the frozen model: arguments by name, and under what."""

    arguments: Mapping[str, Any]
    autocast: torch.dtype | None
    gradients: bool

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for calls that differ in nothing but numbers and sizes."""
        kinds = [(name, type(v), getattr(v, "dtype", None)) for name, v in self.arguments.items()]
        return tuple(kinds), self.autocast, self.gradients

    @classmethod
    def of(cls, takes: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call that is being made in this thread. Raises NotStackable for one that nobody understands."""
        try:
            bound = takes.bind(*args, **kwargs)
        except TypeError as error:
            raise NotStackable(f"the frozen model is called in an odd way: {error}") from error
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                raise NotStackable("the frozen model takes any number of arguments")
            arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        first = next((v for v in arguments.values() if isinstance(v, torch.Tensor)), None)
        device = "cpu" if first is None else first.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(arguments, autocast, torch.is_grad_enabled())


@dataclass(frozen=True)
class Recipe:
    """How a call follows from a batch: each argument is one of its tensors, by number, or a value.

    Where that is so, a call is known before the code that makes it has run.
    """

    tensors: Mapping[str, int]
    call: Call
    count: int

    @classmethod
    def of(cls, call: Call, batch: Any) -> Recipe | None:
        """That of a call that was made with a batch; None where it has tensors from elsewhere."""
        numbers = {id(tensor): number for number, tensor in enumerate(tensors_in(batch))}
        given = {name: v for name, v in call.arguments.items() if isinstance(v, torch.Tensor)}
        if any(id(tensor) not in numbers for tensor in given.values()):
            return None
        return cls({name: numbers[id(tensor)] for name, tensor in given.items()}, call, len(numbers))

    def followed(self, batch: Any) -> Call | None:
        """The call that will be made with a batch, to be compared with the one that is; None: who knows."""
        tensors = tensors_in(batch)
        if len(tensors) != self.count:
            return None
        arguments = {**self.call.arguments, **{name: tensors[n] for name, n in self.tensors.items()}}
        return replace(self.call, arguments=arguments)


def same_call(one: Call, other: Call, *, made_anew: bool) -> bool:
    """Whether two calls are of the same tensors and equal values.

    `made_anew`: tensors are made by code that has run once more, so that only their kinds can be compared.
    """
    if (one.autocast, one.gradients) != (other.autocast, other.gradients):
        return False
    if one.arguments.keys() != other.arguments.keys():
        return False
    pairs = [(value, other.arguments[name]) for name, value in one.arguments.items()]
    return all(a is b or _equal(a, b, made_anew) for a, b in pairs)


def _equal(one: Any, other: Any, made_anew: bool) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return made_anew and (one.shape, one.dtype) == (other.shape, other.dtype)
    return type(one) is type(other) and type(one) in PLAIN and bool(one == other)


@dataclass(frozen=True)
class Rows:
    """Which rows of the joint batch are whose, and how long theirs are.

    Attributes:
        counts: rows by member.
        lengths: tokens in a row by member; the joint batch is as long as the longest. None where rows are no
            sequences.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...] | None

    @property
    def total(self) -> int:
        """Rows of all."""
        return sum(self.counts)

    @property
    def longest(self) -> int:
        """Tokens in a row of the joint batch; 0 where rows are no sequences."""
        return max(self.lengths or (0,))

    @property
    def padded(self) -> bool:
        """Whether some rows are shorter than others."""
        return self.lengths is not None and len(set(self.lengths)) > 1

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of all members, and those of the joint batch."""
        if self.lengths is None:
            return self.total, self.total
        own = sum(count * length for count, length in zip(self.counts, self.lengths, strict=True))
        return own, self.total * self.longest

    def split(self, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each one's rows, as long as its own. Raises NotStackable for a tensor that is not made of rows."""
        pieces = value.split(self.counts_in(value))
        return [self.shortened(piece, member) for member, piece in enumerate(pieces)]

    def counts_in(self, value: torch.Tensor) -> list[int]:
        """Rows by member in a tensor, which may have several for one of the batch. Raises as `split`."""
        if not value.ndim or value.shape[0] % self.total:
            raise NotStackable(f"the frozen model makes other rows of a batch (shape {list(value.shape)})")
        times = value.shape[0] // self.total
        if self.padded and times > 1:
            raise NotStackable("the frozen model makes other rows of a batch, and they are not all as long")
        return [count * times for count in self.counts]

    def shortened(self, piece: torch.Tensor, member: int) -> torch.Tensor:
        """A member's rows without what was added to them: [rows, tokens], [rows, tokens, features], and what
        attention has, [rows, heads, tokens, tokens or features]."""
        if not self.padded or self.lengths is None:
            return piece
        length, longest = self.lengths[member], self.longest
        if piece.ndim == 4:
            piece = piece[:, :, :length] if piece.shape[2] == longest else piece
            return piece[..., :length] if piece.shape[3] == longest else piece
        if piece.ndim in (2, 3) and piece.shape[1] == longest:
            if piece.ndim == 2 and piece.is_floating_point():
                raise NotStackable("tokens and features of the frozen model cannot be told apart")
            return piece[:, :length]
        return piece

    def joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The members' rows one below the other, the shorter ones with zeros at their ends."""
        if self.padded:
            longest = [max(piece.shape[at] for piece in pieces) for at in range(pieces[0].ndim)]
            pieces = [_filled(piece, longest) for piece in pieces]
        return torch.cat(list(pieces))

    def join(self, calls: Sequence[Call], takes: inspect.Signature) -> dict[str, Any]:
        """The arguments of all as those of one call. Raises NotStackable where that cannot be."""
        names = list(dict.fromkeys(name for call in calls for name in call.arguments))
        if self.padded and "attention_mask" in takes.parameters and "attention_mask" not in names:
            names.append("attention_mask")
        joint = {name: self._joint(name, [call.arguments.get(name) for call in calls]) for name in names}
        known = (*takes.parameters, *joint)
        kept = {name: value for name, value in _NOTHING_KEPT.items() if name in known}
        return joint | kept

    def _joint(self, name: str, values: list[Any]) -> Any:
        missing = [value is None for value in values]
        if name == "attention_mask" and (any(missing) if not all(missing) else self.padded):
            like = next((v for v in values if isinstance(v, torch.Tensor)), torch.empty(0, dtype=torch.int64))
            values = [self._ones(m, like) if v is None else v for m, v in enumerate(values)]
        if all(isinstance(value, torch.Tensor) and value.ndim for value in values):
            if any(len(value) != count for value, count in zip(values, self.counts, strict=True)):
                raise NotStackable(f"{name} of the frozen model is not made of rows")
            if len({(value.ndim, value.dtype) for value in values}) > 1 or (
                self.padded and values[0].ndim > 3
            ):
                raise NotStackable(f"{name} of the frozen model is not the same kind of tensor for all")
            if not all(
                self._as_long(at, [value.shape[at] for value in values]) for at in range(1, values[0].ndim)
            ):
                raise NotStackable(f"{name} of the frozen model has a length of its own")
            return self.joined(values)
        try:
            if all(type(value) is type(values[0]) and value == values[0] for value in values):
                return values[0]
        except Exception:  # nosec B110 # whatever objects do when they are compared
            pass
        raise NotStackable(f"{name} of the frozen model is not the same for all")

    def _as_long(self, at: int, sizes: Sequence[int]) -> bool:
        """Whether a dimension is as long as each one's rows, or of one size for all that is not taken for
        theirs."""
        if tuple(sizes) == self.lengths:
            return True
        return len(set(sizes)) == 1 and not (self.padded and at == 1 and sizes[0] == self.longest)

    def _ones(self, member: int, like: torch.Tensor) -> torch.Tensor:
        assert self.lengths is not None
        return torch.ones(self.counts[member], self.lengths[member], dtype=like.dtype, device=like.device)

    def apart(self, output: Any) -> list[Any]:
        """What the frozen model gives, for each member. Raises NotStackable where it is not made of rows."""
        if isinstance(output, torch.Tensor):
            return list(self.split(output))
        members = range(len(self.counts))
        if output is None:
            return [None for _ in members]
        if isinstance(output, Mapping):
            each = {name: self.apart(value) for name, value in output.items()}
            return [
                type(output)(**{name: value[member] for name, value in each.items()}) for member in members
            ]
        if isinstance(output, (list, tuple)):
            some = [self.apart(value) for value in output]
            return [type(output)(value[member] for value in some) for member in members]
        raise NotStackable(f"the frozen model gives a {type(output).__name__}")


def rows_of(calls: Sequence[Call]) -> Rows:
    """Which rows are whose. Raises NotStackable where nothing has rows."""
    counts, lengths = [], []
    for call in calls:
        batched = [v for v in call.arguments.values() if isinstance(v, torch.Tensor) and v.ndim]
        if not batched:
            raise NotStackable("the frozen model is given no batch")
        ids = call.arguments.get("input_ids", batched[0])
        ids = batched[0] if ids is None else ids
        counts.append(len(ids))
        embedded = call.arguments.get("inputs_embeds") is not None
        sequence = (ids.ndim == 2 and not ids.is_floating_point()) or (embedded and ids.ndim == 3)
        lengths.append(ids.shape[1] if sequence else None)
    if None in lengths:
        if any(length is not None for length in lengths):
            raise NotStackable("some batches are sequences and others are not")
        return Rows(tuple(counts), None)
    return Rows(tuple(counts), tuple(length for length in lengths if length is not None))


def _filled(piece: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor with zeros behind it, up to this shape (but for its first dimension)."""
    added = [want - have for have, want in zip(piece.shape[1:], shape[1:], strict=True)]
    if not any(added):
        return piece
    return functional.pad(piece, [n for more in reversed(added) for n in (0, more)])
