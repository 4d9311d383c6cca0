"""What a server has of a training: pieces of parameters, their state, and the user's own optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpcsched.compat import dataclass, zip
from hpcsched.errors import ConfigError
from hpcsched.worker.ps.placement import ParameterPiece, Size
from hpcsched.worker.vsw.updates import can_be_split


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece's values and optimizer state: what there is one of for each element, flat, and the rest."""

    piece: ParameterPiece
    values: torch.Tensor
    elements: dict[str, torch.Tensor]
    rest: dict[str, Any]

    def part(self, piece: ParameterPiece) -> Fragment:
        """Some of it."""
        start, stop = piece.start - self.piece.start, piece.stop - self.piece.start
        elements = {key: value[start:stop] for key, value in self.elements.items()}
        return Fragment(piece, self.values[start:stop], elements, self.rest)


def check(optimizer: torch.optim.Optimizer, servers: int) -> None:
    """Raise ConfigError for an optimizer that cannot take its steps on so many servers."""
    if why := cannot_be_on(optimizer, servers):
        raise ConfigError(where="optimizer", got=why, accepted="one that treats each parameter by itself")


def cannot_be_on(optimizer: torch.optim.Optimizer, servers: int) -> str:
    """Why an optimizer cannot take its steps on so many servers; empty if it can."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "SparseAdam, but the gradients that servers add up are dense"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS, which needs all gradients at once"
    if servers > 1 and (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks):
        return "has hooks at its step (clipping by the norm of all gradients?)"
    return ""


class ServerShard:
    """The optimizer's parameters that are trained, as far as they are here; whole at first.

    `optimizer` stays the user's own object: its parameters become the pieces, which are the model's memory,
    and its state is theirs. Parameters are made contiguous.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.parameters: list[nn.Parameter] = [p for group in self._groups for p in group if p.requires_grad]
        for parameter in self.parameters:
            parameter.data = parameter.data.contiguous()
        self.sizes = [Size(p.numel(), p.element_size()) for p in self.parameters]
        self.cut = can_be_split(optimizer)
        self._frozen = {p: s for p, s in optimizer.state.items() if not p.requires_grad}
        self.pieces = tuple(
            ParameterPiece(i, 0, p.numel()) for i, p in enumerate(self.parameters) if p.numel()
        )
        self.tensors = [self.parameters[piece.parameter] for piece in self.pieces]

    def forget(self) -> None:
        """Have nothing of it here any more."""
        self.optimizer.state.clear()
        self.pieces, self.tensors = (), []
        self._arrange()

    def flat(self, piece: ParameterPiece) -> torch.Tensor:
        """The piece's elements in the model's own memory."""
        return self.parameters[piece.parameter].detach().view(-1)[piece.start : piece.stop]

    def fragments(self) -> list[Fragment]:
        """What is here, as it is: views."""
        found = []
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            state = self.optimizer.state.get(tensor, {})
            of_elements = {
                key: value.view(-1)
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape
            }
            rest = {key: value for key, value in state.items() if key not in of_elements}
            found.append(Fragment(piece, self.flat(piece), of_elements, rest))
        return found

    @torch.no_grad()
    def install(self, pieces: Sequence[ParameterPiece], fragments: Iterable[Fragment]) -> None:
        """From now on have `pieces`, made of these fragments; what was here already stays where it is."""
        had = dict(zip(self.pieces, self.tensors, strict=True))
        kept = {piece: self.optimizer.state.get(tensor) for piece, tensor in had.items()}
        states: dict[torch.Tensor, dict[str, Any]] = {}
        tensors = []
        found = list(fragments)
        for piece in pieces:
            tensor = had.get(piece)
            if tensor is None:
                tensor, state = self._made(piece, found)
            else:
                state = kept[piece] or {}
            tensors.append(tensor)
            if state:
                states[tensor] = state
        self.optimizer.state.clear()
        self.optimizer.state.update(states)
        self.pieces, self.tensors = tuple(pieces), tensors
        self._arrange()

    def _made(self, piece: ParameterPiece, fragments: list[Fragment]) -> tuple[nn.Parameter, dict[str, Any]]:
        whole = self.parameters[piece.parameter]
        room = self.flat(piece)
        tensor = whole if piece.size == whole.numel() else nn.Parameter(room)
        elements, rest = joined(piece, fragments, room)
        state: dict[str, Any] = {key: value.view(tensor.shape) for key, value in elements.items()}
        return tensor, state | rest

    def _arrange(self) -> None:
        """Give each of the optimizer's groups its parameters that are here."""
        home = {p: number for number, group in enumerate(self._groups) for p in group}
        for group in self.optimizer.param_groups:
            group["params"] = []
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            group = self.optimizer.param_groups[home[self.parameters[piece.parameter]]]
            group["params"].append(tensor)

    def step(self) -> None:
        """The optimizer's step of what is here."""
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [group for group in groups if group["params"]]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups

    @contextmanager
    def whole(self, others: Sequence[Fragment]) -> Iterator[None]:
        """Inside, the optimizer is as the user has made it, with the fragments of `others` besides ours.

        Parameters of which not all is known have no state in there.
        """
        optimizer = self.optimizer
        state, groups = dict(optimizer.state), [group["params"] for group in optimizer.param_groups]
        fragments = [*self.fragments(), *others]
        known = [0] * len(self.parameters)
        for fragment in fragments:
            known[fragment.piece.parameter] += fragment.piece.size
        optimizer.state.update(self._frozen)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                if 0 < known[number] == parameter.numel() and parameter not in state:
                    _, found = self._made(ParameterPiece(number, 0, parameter.numel()), fragments)
                    if found:
                        optimizer.state[parameter] = found
        for tensor in self.tensors:
            if not any(tensor is parameter for parameter in self.parameters):
                optimizer.state.pop(tensor, None)
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = params
        try:
            yield
        finally:
            for group, params in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = params
            optimizer.state.clear()
            optimizer.state.update(state)


def joined(
    piece: ParameterPiece, fragments: Sequence[Fragment], room: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer state of a piece, made of fragments that cover it; their values go into `room`."""
    parts = sorted(
        ((both, fragment) for fragment in fragments if (both := piece.both(fragment.piece)) is not None),
        key=lambda found: found[0],
    )
    elements: dict[str, list[torch.Tensor]] = {}
    for both, fragment in parts:
        part = fragment.part(both)
        target = room[both.start - piece.start : both.stop - piece.start]
        if target.data_ptr() != part.values.data_ptr():
            target.copy_(part.values)
        for key, value in part.elements.items():
            elements.setdefault(key, []).append(value)
    rest = parts[0][1].rest if parts else {}
    return (
        {key: torch.cat(values) for key, values in elements.items()},
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in rest.items()},
    )
