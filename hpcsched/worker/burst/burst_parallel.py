"""The burst-parallel strategy: every layer has ranks of its own (DeepPool, section 4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpcsched.errors import ConfigError
from hpcsched.planning.burst.plan import BurstPlan
from hpcsched.worker.burst.channels import Channels
from hpcsched.worker.burst.choose import Chooser
from hpcsched.worker.burst.compare import Pace, PlanTrial
from hpcsched.worker.burst.engine import Engine
from hpcsched.worker.burst.feedback import EVERY, FIRST, LOSS, UPDATE, Timing
from hpcsched.worker.layers.graph import TracedModel, capture_inputs
from hpcsched.worker.ranks.gradient_sum import GradientSum
from hpcsched.worker.session.batches import coming_places, summed
from hpcsched.worker.session.replicated import NO_INDICES, Replicated
from hpcsched.worker.session.trainer import Parts, read


class BurstParallel(Replicated):
    """A strategy whose steps an `Engine` computes: each rank has some layers, and samples come and go.

        strategy = BurstParallel(parts)
        session = session_of(parts, strategy)
        strategy.run_by(engine, wires)
        session.train(...)

    What other ranks train comes to rank 0 before every save. Ranks do not come and go in place.

    With a chooser, its plan and the plain alternatives take turns at the start, and the fastest is kept. So
    again after a checkpoint, when there is a better plan, or when steps take another time than they did.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._engine: Engine | None = None
        self._chooser: Chooser | None = None
        self._trial: PlanTrial | None = None
        self._plans: dict[str, BurstPlan] = {}
        self._kept = ""
        self._pace = Pace()
        self._batches: tuple[Iterator[Any] | None, Iterator[Any] | None] = None, None

    def run_by(self, engine: Engine, wires: Channels, chooser: Chooser | None = None) -> None:
        """Compute with this engine from now on. The chooser, which works on rank 0, knows alternatives to its
        plan; without one the plan is never changed."""
        self._engine, self._wires, self._chooser = engine, wires, chooser
        self._gradients = GradientSum(self.training.model.parameters(), self.context.peers)
        self._open()
        if chooser is not None:
            self._compare(chooser.alternatives(engine.plan) if self.rank == 0 else {})

    @property
    def running(self) -> str:
        """The name of the plan that is kept; empty: there is only one, or they are being compared."""
        return self._kept

    def switch(self, plan: BurstPlan) -> None:
        """Go on by another plan, between two steps, on all ranks. Raises ConfigError if it cannot be."""
        assert self._engine is not None
        self._engine.switch(plan)
        self._open()

    # -- plans -----------------------------------------------------------------------------------------

    def _compare(self, plans: dict[str, BurstPlan]) -> None:
        """Begin to compare those that rank 0 names, if there are several."""
        plans = self.context.peers.tell(plans, dict[str, BurstPlan])
        if len(plans) > 1:
            self._plans, self._kept = plans, ""
            self._trial = PlanTrial(self.context.peers, plans, self._go_over, self._decided)

    def _go_over(self, plan: BurstPlan) -> None:
        assert self._engine is not None
        if plan.placement != self._engine.plan.placement:
            self.switch(plan)

    def _decided(self, trial: PlanTrial) -> None:
        assert self._chooser is not None
        self._chooser.decided(trial)
        self._pace.decided(trial.times)

    def _between_plans(self) -> None:
        """Before each step: whose turn it is."""
        if self._trial is None:
            self._pace.passed()
            return
        self._trial.between_steps()
        if self._trial.over:
            self._kept, self._trial = self._trial.now, None

    # -- a step ----------------------------------------------------------------------------------------

    def begin_step(self) -> torch.Tensor:
        """Each rank keeps what it owns: there is nothing to make alike."""
        return NO_INDICES

    def train_step(self) -> None:
        engine, training = self._engine, self.training
        assert engine is not None
        self._between_plans()
        engine.clock.on = training.step % EVERY == FIRST - 1
        if engine.clock.on and self._trial is not None:
            self._trial.disturbed()  # it takes longer
        self._parts.optimizer.zero_grad()
        if engine.whole is not None and training.made and not engine.clock.on:
            self._compute_whole(engine, engine.whole)
        else:
            self._compute(engine)
        with self._timed_update(engine):
            self._parts.optimizer.step()
        if self._parts.scheduler is not None:
            self._parts.scheduler.step()

    def _timed_update(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        """Times the optimizer's step, where layers are timed and this rank has parameters to update."""
        if not engine.clock.on:
            return contextlib.nullcontext()
        updated = [p for group in self._parts.optimizer.param_groups for p in group["params"]]
        size = sum(p.numel() * p.element_size() for p in updated if p.grad is not None)
        return engine.clock.forward(UPDATE, size) if size else contextlib.nullcontext()

    def _compute_whole(self, engine: Engine, model: torch.nn.Module) -> None:
        """The same where a rank has all layers or none: by the model itself, which costs less than layer by
        layer. The first step of a process is not made so, as `_compute` checks more."""
        engine.begin_whole(self.training.samples)
        training, share, total = self.training, engine.last_share, None
        if share:
            (_, results), together = self._batches, len(engine.last_ranks) > 1
            assert results is not None
            total = summed(self._parts.loss(model, next(results)), len(share))
        if self.world_size > 1:  # travels while the backward pass computes
            self.agreement.ask()
        training.loss = None
        if total is not None:
            if together:
                self._gradients.expect()
            (total / training.global_batch).backward()  # type: ignore[no-untyped-call]
            if together:
                self._gradients.complete()
            training.loss = (total / len(share)).detach()

    def _compute(self, engine: Engine) -> None:
        """Forward and backward pass of a step; then the gradients are ready for `optimizer.step`."""
        loss, training = self._parts.loss, self.training
        engine.begin(training.samples)
        inputs, results = (batches and next(batches) for batches in self._batches)
        fed = () if inputs is None else capture_inputs(loss, training.model, inputs)
        mean = None
        if not engine.last_share:
            engine.forward(fed)
        else:
            same, calls = engine.first_share == engine.last_share, [0]
            timing = contextlib.ExitStack()

            def called(*given: Any) -> Any:
                calls[0] += 1
                _check_calls(calls[0])
                result = engine.forward(given if same else fed)
                timing.enter_context(engine.clock.forward(LOSS, len(engine.last_share)))
                return result

            with timing:
                losses = loss(TracedModel(training.model, called), results)
                mean = self._backward_of(losses, engine.last_share)
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
        engine, chooser, peers = self._engine, self._chooser, self.context.peers
        if engine is None or chooser is None:
            return
        if self._trial is not None:
            self._trial.disturbed()
            return
        timings = peers.gather(engine.clock.take(), list[Timing])
        plans: dict[str, BurstPlan] = {}
        if self.rank == 0:
            steps_left = self.training.last_step() - self.training.step
            new = chooser.again([t for found in timings for t in found], engine.plan, steps_left)
            if new is not None and new.placement not in [plan.placement for plan in self._plans.values()]:
                plans = chooser.alternatives(new)
            elif self._pace.due(self._kept, steps_left):
                plans = self._plans
        self._pace.disturbed()
        self._compare(plans)


def _check_calls(number: int) -> None:
    if number != 1:
        got = f"calls the model {number} times"
        raise ConfigError(where="loss", got=got, accepted="a loss that calls model(...) once")
