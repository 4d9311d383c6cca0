"""Runs training steps of a model by a burst plan, as one of its ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hpcsched.errors import ConfigError
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.burst.channels import Channels, as_it_lies
from hpcsched.worker.burst.feedback import LayerClock
from hpcsched.worker.burst.ownership import OwnerSums, belongings, check_norms
from hpcsched.worker.burst.prepare import ValueShape, describe, prepare
from hpcsched.worker.burst.program import Key, Program, ProgramStage, ValueExchange, check, program
from hpcsched.worker.burst.state_transfer import hand_over, to_first, to_new_owners
from hpcsched.worker.burst.transfers import SampleTransfers, share_of
from hpcsched.worker.burst.whole import WholeModel
from hpcsched.worker.layers.graph import Layers, Value

_Wait = Callable[[], None]


class Engine:
    """A model on the ranks of a plan.

    A step is, on every rank, at the same time:

        engine.begin(samples)                    # seen before this step
        result = engine.forward(inputs)          # inputs of `first_share`, where this rank has one
        (loss(result).sum() / batch).backward()  # on ranks with a `last_share`
        engine.backward()
        optimizer.step()

    Then each rank's owned parameters have the gradient of the whole batch, the others none.

    Args:
        layers: the traced model.
        example: inputs of a few samples, on the device; no real data is needed.
        plan: which ranks compute what; `where` says where it came from.
        batch: samples in a global batch.
        seed: of dropout.
        local_norms: batch norm over each rank's own samples, as by data parallelism, not over the batch.

    Raises ConfigError naming the layer that does not fit the plan, or cannot run by one.
    """

    def __init__(
        self,
        layers: Layers,
        example: tuple[torch.Tensor, ...],
        plan: BurstPlan,
        *,
        batch: int,
        seed: int,
        wires: Channels,
        optimizer: torch.optim.Optimizer,
        local_norms: bool = False,
        where: str = "plan",
    ) -> None:
        self._layers = layers
        self._batch = batch
        self._wires = wires
        self._optimizer = optimizer
        self._local_norms = local_norms
        self._units = prepare(layers, wires, seed, local_norms=local_norms)
        self._forms = describe(self._units, example)
        self._model = WholeModel(layers, self._units, example)
        self._things = belongings(self._units)
        self._trained = tuple(thing.tensor.requires_grad for thing in self._things)
        self.clock = LayerClock(wires.device)
        self._adopt(plan, where)

    def _adopt(self, plan: BurstPlan, where: str) -> None:
        check(plan, self._layers, world_size=self._wires.world_size, batch=self._batch, where=where)
        norms = [(unit.id, unit.name, unit.norms) for unit in self._units]
        check_norms(norms, plan, where, alone_of=self._batch if self._local_norms else None)
        self.plan = plan
        reads = [(unit.id, unit.inputs) for unit in self._units]
        self._sums = OwnerSums(self._things, plan, self._wires)
        self._whole, self._apart = (
            program(reads, plan, self._batch, self._wires.rank, cuts=cuts)
            for cuts in (self._sums.turns, range(len(plan.layers)))
        )
        self._program: Program = self._whole
        self._wires.connect(self._sums.ranks)
        for at in plan.layers:
            seat = self._units[at.id].seat
            seat.ranks, seat.batch = at.ranks, self._batch
        ranks = {at.ranks for at in plan.layers}
        alone, everyone = ranks == {(0,)}, ranks == {tuple(range(self._wires.world_size))}
        apart = self._local_norms or not any(unit.norms for unit in self._units)
        self._alike = alone or (everyone and apart)

    @property
    def whole(self) -> nn.Module | None:
        """The model, where rank 0 or all ranks have all layers, and it gives a rank's samples the results
        that its layers do: no batch norm is shared. Else None."""
        return self._model.module if self._alike else None

    def begin_whole(self, samples: int) -> None:
        """Begin a step that `whole` computes; `samples` were seen before. Raises as `check_trained`."""
        self.check_trained()
        share = self.last_share
        self._model.begin(range(samples + share.start, samples + share.stop))

    @property
    def first_share(self) -> range:
        """The places in a global batch of the samples whose inputs this rank brings in; maybe none."""
        return share_of(self._batch, self._program.home, self._wires.rank)

    @property
    def last_share(self) -> range:
        """The places in a global batch of the samples whose results this rank gets; maybe none."""
        return share_of(self._batch, self._program.last, self._wires.rank)

    @property
    def last_ranks(self) -> tuple[int, ...]:
        """The ranks that get results."""
        return self._program.last

    def switch(self, plan: BurstPlan) -> None:
        """Go on by another plan, at a step boundary: layers go to their new owners. All ranks call this.

        Raises ConfigError, before anything has changed, for a plan that does not fit.
        """
        old = self.plan
        self._adopt(plan, "plan")
        hand_over(to_new_owners(self._things, old, plan), self._optimizer, self._wires)

    def gather_state(self) -> None:
        """Bring all that is trained to rank 0, to be saved or evaluated there. All ranks call this."""
        hand_over(to_first(self._things, self.plan), self._optimizer, self._wires)

    # -- a step ----------------------------------------------------------------------------------------

    def begin(self, samples: int) -> None:
        """Begin a step; `samples` were seen before. Raises as `check_trained`."""
        self.check_trained()
        self._held: dict[Key, torch.Tensor] = {}
        self._made: dict[Value, torch.Tensor] = {}
        self._coming: dict[Key, tuple[torch.Tensor | None, _Wait]] = {}
        self._leaving: list[_Wait] = []
        self._program = self._apart if self.clock.on else self._whole
        for unit in self._units:
            places = share_of(self._batch, unit.seat.ranks, self._wires.rank)
            unit.seat.places = range(samples + places.start, samples + places.stop)

    def check_trained(self) -> None:
        """Raise ConfigError if other parameters are trained than at the start."""
        if tuple(thing.tensor.requires_grad for thing in self._things) != self._trained:
            raise ConfigError(
                where="training",
                got="parameters that were frozen, or thawed, since the start",
                accepted="the same trained parameters in all steps",
            )

    def forward(self, inputs: tuple[torch.Tensor, ...] = ()) -> torch.Tensor | None:
        """This rank's share of the model's result, a leaf; None if it has none."""
        for i, tensor in enumerate(inputs):
            self._check_input(i, tensor)
            self._made[Value(-1, i)] = tensor
            self._hold((Value(-1, i), self._program.home), tensor)
        for exchange in self._program.enters:
            self._depart(exchange)
        for stage in self._program.stages:
            if stage.mine:
                self._forward_of(stage)
            for exchange in stage.departs:
                self._depart(exchange)
        return self._held.get((Value(self._units[-1].id, 0), self._program.last))

    def backward(self) -> None:
        """From the result's gradient to those of all parameters, summed over their owners."""
        self._sums.begin()
        for stage in reversed(self._program.stages):
            if stage.mine:
                self._backward_of(stage)
            for exchange in stage.returns:
                self._return(exchange)
            self._sums.passed(stage.turns)
        for wait in self._leaving:
            wait()
        self._sums.complete()
        self._held.clear()
        self._made.clear()

    def _forward_of(self, stage: ProgramStage) -> None:
        """Compute the stage's layers, of which those within read each other's outputs themselves."""
        made: dict[Value, torch.Tensor] = {}
        for layer in stage.layers:
            unit = self._units[layer]
            tensors = [made[v] if v in made else self._read((v, stage.ranks)) for v in unit.inputs]
            with self.clock.forward(layer, len(unit.seat.places)):
                outputs = unit(*tensors)
            made.update((Value(layer, i), tensor) for i, tensor in enumerate(outputs))
        for value in stage.exports:
            self._check_output(value, made[value])
            self._made[value] = made[value]
            self._hold((value, stage.ranks), made[value])

    def _backward_of(self, stage: ProgramStage) -> None:
        """The backward pass of a stage, from what its readers here, and exchanges, have added up."""
        returned = [(exchange.value, self._wait_for(exchange.key)) for exchange in stage.departs]
        outputs, gradients = [], []
        for value in stage.exports:
            output = self._made.pop(value)
            parts = [self._held.pop((value, stage.ranks)).grad]
            parts += [gradient for of, gradient in returned if of == value]
            known = [part for part in parts if part is not None]
            if known and output.requires_grad:
                outputs.append(output)
                gradients.append(sum(known[1:], known[0]))
        if outputs:
            layer = stage.layers[0]
            with self.clock.backward(layer, len(self._units[layer].seat.places)):
                torch.autograd.backward(outputs, gradients)

    def _check_input(self, number: int, tensor: torch.Tensor) -> None:
        """Raise ConfigError for an input of another form than the example's, which all ranks count on."""
        form, samples = self._forms[Value(-1, number)], len(self.first_share)
        if (tuple(tensor.shape), tensor.dtype) != ((samples, *form.shape), form.dtype):
            raise ConfigError(
                where="training",
                key=f"input {number} of the model",
                got=f"{list(tensor.shape)}, {tensor.dtype}",
                accepted=f"{[samples, *form.shape]}, {form.dtype}, as at the start",
            )

    def _check_output(self, value: Value, tensor: torch.Tensor) -> None:
        """Raise ConfigError for an output of another form than the example's, which its readers expect."""
        form = self._forms[value]
        if (tuple(tensor.shape[1:]), tensor.dtype) != (form.shape, form.dtype):
            raise ConfigError(
                where=f"layer {self._units[value.layer].name}",
                got=f"gives {list(tensor.shape[1:])}, {tensor.dtype} for a sample",
                accepted=f"{list(form.shape)}, {form.dtype}, as at the start (no autocast)",
            )

    # -- values on their way -----------------------------------------------------------------------------

    def _hold(self, key: Key, tensor: torch.Tensor) -> None:
        """Keep a value for its readers on these ranks, whose gradients add up in it."""
        self._held[key] = tensor.detach().requires_grad_(self._forms[key[0]].differentiable)

    def _read(self, key: Key) -> torch.Tensor:
        if key not in self._held:
            tensor = self._wait_for(key)
            assert tensor is not None
            self._hold(key, tensor)
        return self._held[key]

    def _wait_for(self, key: Key) -> torch.Tensor | None:
        """What an exchange brings to this rank, once it is there."""
        tensor, wait = self._coming.pop(key, (None, None))
        if wait is not None:
            wait()
        return tensor

    def _depart(self, exchange: ValueExchange) -> None:
        if not exchange.out.idle:
            tensor = self._made[exchange.value].detach() if exchange.out.had else None
            self._coming[exchange.key] = self._carry(exchange.out, tensor, self._forms[exchange.value])

    def _return(self, exchange: ValueExchange) -> None:
        """Send the gradient of what an exchange has brought the other way."""
        form = self._forms[exchange.value]
        if exchange.back.idle or not form.differentiable:
            return
        gradient = None
        if exchange.back.had:
            held = self._held.pop(exchange.key)
            gradient = torch.zeros_like(held) if held.grad is None else held.grad
        self._coming[exchange.key] = self._carry(exchange.back, gradient, form)

    def _carry(
        self, moves: SampleTransfers, tensor: torch.Tensor | None, form: ValueShape
    ) -> tuple[torch.Tensor | None, _Wait]:
        """Start to carry samples as `moves` says; returns what comes, and how to wait for it."""
        sends, kept = [], None
        if tensor is not None:
            tensor = tensor.contiguous(memory_format=form.layout)
            kept = tensor[moves.kept_from : moves.kept_from + moves.kept]
            sends = [(piece.peer, as_it_lies(tensor[piece.start : piece.stop])) for piece in moves.sends]
        if not moves.receives:
            self._leaving.append(self._wires.post(sends, []))
            return kept if moves.gets else None, _at_once
        room = form.room(moves.gets, self._wires.device)
        if kept is not None:
            room[moves.kept_at : moves.kept_at + moves.kept] = kept
        receives = [(piece.peer, as_it_lies(room[piece.start : piece.stop])) for piece in moves.receives]
        return room, self._wires.post(sends, receives)


def _at_once() -> None:
    """There is nothing to wait for."""
