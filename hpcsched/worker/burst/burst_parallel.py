"""The burst-parallel strategy: every layer has ranks of its own (DeepPool, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch

from hpcsched.errors import ConfigError
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.burst.channels import Channels
from hpcsched.worker.burst.engine import Engine
from hpcsched.worker.burst.feedback import EVERY, FIRST, Timing
from hpcsched.worker.layers.graph import TracedModel, capture_inputs
from hpcsched.worker.session.batches import coming_places, summed
from hpcsched.worker.session.replicated import NO_INDICES, Replicated
from hpcsched.worker.session.trainer import Parts, read

Replan = Callable[[list[Timing], BurstPlan, int], Optional[BurstPlan]]
"""On rank 0: of what was measured, the present plan and the steps left, a better plan, if there is one."""


class BurstParallel(Replicated):
    """A strategy whose steps an `Engine` computes: each rank has some layers, and samples come and go.

        strategy = BurstParallel(parts)
        session = session_of(parts, strategy)
        strategy.run_by(engine, wires)
        session.train(...)

    What other ranks train comes to rank 0 before every save. Ranks do not come and go in place.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._engine: Engine | None = None
        self._batches: tuple[Iterator[Any] | None, Iterator[Any] | None] = None, None

    def run_by(self, engine: Engine, wires: Channels, replan: Replan | None = None) -> None:
        """Compute with this engine from now on; `replan` is asked at periodic checkpoints, on rank 0."""
        self._engine, self._wires, self._replan = engine, wires, replan
        self._open()

    def switch(self, plan: BurstPlan) -> None:
        """Go on by another plan, between two steps, on all ranks. Raises ConfigError if it cannot be."""
        assert self._engine is not None
        self._engine.switch(plan)
        self._open()

    # -- a step ----------------------------------------------------------------------------------------

    def begin_step(self) -> torch.Tensor:
        """Each rank keeps what it owns: there is nothing to make alike."""
        return NO_INDICES

    def train_step(self) -> None:
        self._parts.optimizer.zero_grad()
        self._compute()
        self._parts.optimizer.step()
        if self._parts.scheduler is not None:
            self._parts.scheduler.step()

    def _compute(self) -> None:
        """Forward and backward pass of a step; then the gradients are ready for `optimizer.step`."""
        engine, loss, training = self._engine, self._parts.loss, self.training
        assert engine is not None
        engine.clock.on = training.step % EVERY == FIRST - 1
        engine.begin(training.samples)
        inputs, results = (batches and next(batches) for batches in self._batches)
        fed = () if inputs is None else capture_inputs(loss, training.model, inputs)
        mean = None
        if not engine.last_share:
            engine.forward(fed)
        else:
            same, calls = engine.first_share == engine.last_share, [0]

            def called(*given: Any) -> Any:
                calls[0] += 1
                _check_calls(calls[0])
                return engine.forward(given if same else fed)

            mean = self._backward_of(loss(TracedModel(training.model, called), results), engine.last_share)
            _check_calls(calls[0])
        reported = self._bring_to_first(mean, engine.last_ranks)
        if self.world_size > 1:  # travels while the backward pass computes
            self.agreement.ask()
        engine.backward()
        training.loss = reported()

    def _open(self) -> None:
        """Begin to read batches: for the first layer's inputs, and for the last one's losses."""
        engine = self._engine
        assert engine is not None
        first, last = engine.first_share, engine.last_share
        same = first == last  # then one batch does for both
        self._batches = self._read(range(0) if same else first), self._read(last)

    def _read(self, share: range) -> Iterator[Any] | None:
        if not share:
            return None
        return read(
            self._parts,
            coming_places(self.training, share),
            device=self.device,
            loaders=self._parts.loaders,
            seeded=True,
            step=self.training.step,
        )

    def _backward_of(self, losses: torch.Tensor, share: range) -> torch.Tensor:
        """From the losses back to the model's result; returns their mean."""
        total, training = summed(losses, len(share)), self.training
        (total / training.global_batch).backward()  # type: ignore[no-untyped-call]
        if training.made == 0 and any(p.grad is not None for p in training.model.parameters()):
            raise ConfigError(
                where="loss",
                got="uses parameters of the model by itself",
                accepted="a loss of the model's result alone, as no rank has the whole model",
            )
        return (total / len(share)).detach()

    def _bring_to_first(self, mean: torch.Tensor | None, ranks: tuple[int, ...]) -> Callable[[], Any]:
        """Send the loss to rank 0, which reports it, if it does not have one; call the result for it."""
        if 0 in ranks or self.rank not in (0, ranks[0]):
            return lambda: mean
        room = torch.zeros(1, dtype=torch.float64, device=self.device)
        if mean is not None:
            room[0] = mean
            wait = self._wires.post([(0, room)], [])
        else:
            wait = self._wires.post([], [(ranks[0], room)])

        def reported() -> torch.Tensor:
            wait()
            return room[0]

        return reported

    # -- its state -------------------------------------------------------------------------------------

    def gather_state(self) -> None:
        if self._engine is not None:
            self._engine.gather_state()

    def checkpointed(self) -> None:
        engine, peers = self._engine, self.context.peers
        if engine is None or self._replan is None:
            return
        timings = peers.gather(engine.clock.take(), list[Timing])
        plan = None
        if self.rank == 0:
            steps_left = self.training.last_step() - self.training.step
            plan = self._replan([t for found in timings for t in found], engine.plan, steps_left)
        plan = peers.tell(plan, Optional[BurstPlan])
        if plan is not None:
            self.switch(plan)


def _check_calls(number: int) -> None:
    if number != 1:
        got = f"calls the model {number} times"
        raise ConfigError(where="loss", got=got, accepted="a loss that calls model(...) once")
