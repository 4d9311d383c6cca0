"""What a step of a member changes, so that one that fails can be undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import nn

from hpcsched.compat import zip

Home = tuple[dict[str, Optional[torch.Tensor]], str]
"""Where a buffer lives: among which module's, and its name there."""


@dataclass(frozen=True)
class StepEffects:
    """What is known of a member's steps: which generators they draw from, which buffers they change."""

    draws: frozenset[str] = frozenset()
    changes: tuple[Home, ...] = ()

    @property
    def draws_elsewhere(self) -> bool:
        """Whether they draw from other generators than torch's."""
        return not self.draws <= {"torch", "cuda"}

    def and_those(self, other: StepEffects) -> StepEffects:
        """Both together."""
        known = {(id(home), name) for home, name in self.changes}
        more = tuple(home for home in other.changes if (id(home[0]), home[1]) not in known)
        return StepEffects(self.draws | other.draws, self.changes + more)


class Buffers:
    """Copies of a model's buffers as they were before a step."""

    def __init__(self, homes: Sequence[Home]) -> None:
        self._kept = [
            (home, name, buffer, buffer.clone())
            for home, name in homes
            if (buffer := home.get(name)) is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Have them be what they were."""
        for home, name, buffer, copy in self._kept:
            home[name] = buffer.copy_(copy)

    def changed(self) -> tuple[Home, ...]:
        """Those that are not what they were."""
        return tuple(
            (home, name)
            for home, name, buffer, copy in self._kept
            if home.get(name) is not buffer or not torch.equal(buffer, copy)
        )


def homes_of(model: nn.Module) -> tuple[Home, ...]:
    """Where the buffers of a model live."""
    return tuple((module._buffers, name) for module in model.modules() for name in module._buffers)


class Weights:
    """A copy, on the host, of all that an optimizer changes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._states = {p: dict(state) for p, state in optimizer.state.items()}
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        for state in self._states.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Have it be what it was."""
        for tensor, copy in self._kept:
            tensor.copy_(copy)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._states)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    """The generators of which two states, as `rng.capture` gives them, differ."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, tuple) and isinstance(b, tuple):
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return bool(a == b)

    return frozenset(name for name in one if not same(one[name], other[name]))
