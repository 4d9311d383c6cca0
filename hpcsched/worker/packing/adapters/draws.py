"""Random numbers inside a joint forward pass: each member's rows draw from that member's own generators, in
the order in which it would draw them alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpcsched.worker.packing.adapters.rows import Rows
from hpcsched.worker.packing.reference import NotStackable

States = dict[str, Any]
"""Of torch's generators, by their names in a member."""

_BY_ROWS: frozenset[Callable[..., Any]] = frozenset(
    (
        *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
        *(
            functional.alpha_dropout,
            functional.feature_alpha_dropout,
            functional.scaled_dot_product_attention,
        ),
        *(torch.dropout, torch.alpha_dropout, torch.feature_dropout),
        *(torch.bernoulli, torch.Tensor.bernoulli, torch.rand_like, torch.randn_like),
    )
)
"""What draws a number for each element of rows; attention does so if it has a dropout of its own."""


class Draws(TorchFunctionMode):
    """Makes what draws do so member by member.

    Args:
        generators: of torch, by name.
        states: of these, by member; changed by what is drawn.
    """

    def __init__(
        self, rows: Rows, generators: Sequence[tuple[str, torch.Generator]], states: Sequence[States]
    ) -> None:
        super().__init__()
        self._rows, self._generators, self.states = rows, generators, [dict(state) for state in states]
        self._whose: int | None = None

    @contextlib.contextmanager
    def of(self, member: int) -> Iterator[None]:
        """All that is drawn in here is this member's."""
        before = [generator.get_state() for _, generator in self._generators]
        for name, generator in self._generators:
            generator.set_state(self.states[member][name])
        self._whose = member
        try:
            yield
        finally:
            self._whose = None
            self.states[member] = {name: generator.get_state() for name, generator in self._generators}
            for (_, generator), state in zip(self._generators, before):
                generator.set_state(state)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._whose is not None or func not in _BY_ROWS or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        pieces = []
        for member in range(len(self._rows.counts)):
            attention = func is functional.scaled_dot_product_attention
            mine = [self._part(v, member, attention and at < 3) for at, v in enumerate(args)]
            named = {name: self._part(v, member, name in _FEATURES) for name, v in kwargs.items()}
            with self.of(member):
                pieces.append(func(*mine, **named))
        return self._rows.joined(pieces)

    def _part(self, value: Any, member: int, features: bool) -> Any:
        """`features`: the last dimension is none of tokens, however large it is."""
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if features and self._rows.lengths is not None:
            first = sum(self._rows.counts[:member])
            return value[first : first + self._rows.counts[member], ..., : self._rows.lengths[member], :]
        if value.shape[0] == 1 and self._rows.total > 1:  # a mask for all
            return self._rows.shortened(value, member)
        return self._rows.split(value)[member]


_FEATURES = frozenset(("query", "key", "value"))
"""Of attention: [rows, heads, tokens, features]."""


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws anything."""
    if func is functional.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if func in (torch.bernoulli, torch.rand_like, torch.randn_like, torch.Tensor.bernoulli):
        return True
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    if kwargs.get("inplace") or (len(args) > 3 and args[3]):
        raise NotStackable("the frozen model drops out in place")
    return bool(p and training)
