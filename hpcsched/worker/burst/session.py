"""A training by a burst plan, which can be suspended like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch

from hpcsched.errors import ConfigError
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.burst.channels import Wires
from hpcsched.worker.burst.engine import Engine
from hpcsched.worker.burst.feedback import EVERY, FIRST, Timing
from hpcsched.worker.layers.graph import StandIn, capture_inputs
from hpcsched.worker.session.session import Session
from hpcsched.worker.session.trainer import Parts, Place, read

Replan = Callable[[list[Timing], BurstPlan, int], Optional[BurstPlan]]
"""On rank 0: of what was measured, the present plan and the steps left, a better plan, if there is one."""


class BurstSession(Session):
    """A `Session` whose steps an `Engine` computes: each rank has some layers, and samples come and go.

        session = BurstSession(model=parts.model, ...)
        session.run_by(engine, parts)
        for _ in session.steps():
            optimizer.zero_grad()
            session.compute()
            optimizer.step()
        session.finish(...)

    What other ranks train comes to rank 0 before every save. Ranks do not come and go in place.
    """

    _engine: Engine | None = None

    def run_by(self, engine: Engine, parts: Parts, wires: Wires, replan: Replan | None = None) -> None:
        """Compute with this engine from now on; `replan` is asked at periodic checkpoints, on rank 0."""
        self._engine, self._parts, self._wires, self._replan = engine, parts, wires, replan
        self._batches: tuple[Iterator[Any] | None, Iterator[Any] | None] = None, None
        self._open()

    def tell(self, item: Any, kind: Any) -> Any:
        """Rank 0's item, of this type, on every rank."""
        return self._peers.tell(item, kind)

    def compute(self) -> None:
        """Forward and backward pass of a step; then the gradients are ready for `optimizer.step`."""
        engine, loss, model = self._engine, self._parts.loss, self.model
        assert engine is not None
        engine.clock.on = self.step % EVERY == FIRST - 1
        engine.begin(self.samples)
        inputs, results = (batches and next(batches) for batches in self._batches)
        fed = () if inputs is None else capture_inputs(loss, model, inputs)
        mean = None
        if not engine.last_share:
            engine.forward(fed)
        else:
            same, calls = engine.first_share == engine.last_share, [0]

            def called(*given: Any) -> Any:
                calls[0] += 1
                _check_calls(calls[0])
                return engine.forward(given if same else fed)

            mean = self._backward_of(loss(StandIn(model, called), results), engine.last_share)
            _check_calls(calls[0])
        reported = self._bring_to_first(mean, engine.last_ranks)
        if self.world_size > 1:  # travels while the backward pass computes
            self._answer = self._peers.ask(*self._wishes())
        engine.backward()
        self._loss = reported()
        self._fed = self._share_size

    def switch(self, plan: BurstPlan) -> None:
        """Go on by another plan, between two steps, on all ranks. Raises ConfigError if it cannot be."""
        assert self._engine is not None
        self._engine.switch(plan)
        self._open()

    # How it works.

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
            self._places(share),
            device=self.device,
            loaders=self._parts.loaders,
            seeded=True,
            step=self.step,
        )

    def _places(self, share: range) -> Iterator[list[Place]]:
        """The samples of this share of all coming steps."""
        samples = self.samples
        for _ in range(self.step, self._last_step(None)):
            batch = self._sampler.batch(samples, self.global_batch).tolist()
            yield list(enumerate(batch, samples))[share.start : share.stop]
            samples += self.global_batch

    def _backward_of(self, losses: torch.Tensor, share: range) -> torch.Tensor:
        """From the losses back to the model's result; returns their mean."""
        if losses.ndim > 1 or (losses.ndim == 1 and len(losses) != len(share)):
            raise ValueError(
                f"losses of shape {list(losses.shape)} for {len(share)} samples; expected one loss a sample "
                "(shape [samples]), or their mean (shape [])"
            )
        total = losses.sum() if losses.ndim else losses * len(share)
        (total / self.global_batch).backward()  # type: ignore[no-untyped-call]
        if self._begun == 0 and any(parameter.grad is not None for parameter in self.model.parameters()):
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

    def _make_alike(self) -> None:
        """Nothing: each rank keeps what it owns."""

    def _mine(self, batch: Any) -> Any:
        assert self._engine is not None
        share = self._engine.last_share
        return batch[share.start : share.stop]

    def _gather_state(self) -> None:
        if self._engine is not None:
            self._engine.gather_state()

    def _look_back(self) -> None:
        engine = self._engine
        if engine is None or self._replan is None:
            return
        timings = self._peers.gather(engine.clock.take(), list[Timing])
        plan = None
        if self.rank == 0:
            steps_left = self._last_step(None) - self.step
            plan = self._replan([t for found in timings for t in found], engine.plan, steps_left)
        plan = self._peers.tell(plan, Optional[BurstPlan])
        if plan is not None:
            self.switch(plan)


def _check_calls(number: int) -> None:
    if number != 1:
        got = f"calls the model {number} times"
        raise ConfigError(where="loss", got=got, accepted="a loss that calls model(...) once")
