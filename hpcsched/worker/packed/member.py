"""One training of a pack: what it is made of, its random numbers, and a step of it by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from functools import cached_property
from typing import Any, TypeVar

import torch

from hpcsched.worker import rng
from hpcsched.worker.packed.likeness import architecture
from hpcsched.worker.sampler import Sampler
from hpcsched.worker.session import Session
from hpcsched.worker.trainer import Parts, evaluate

WATCHED_STEPS = 3
"""So many steps of a member are watched for random numbers that they draw."""

_T = TypeVar("_T")


class PackedSession(Session):
    """A `Session` whose steps somebody else makes: it only keeps count, saves and leaves."""

    @property
    def sampler(self) -> Sampler:
        """Which samples it trains on."""
        return self._sampler

    def count_step(self) -> None:
        """A step has been made."""
        self.step += 1
        self.samples += self.global_batch
        self._begun += 1

    def look(self) -> None:
        """Between two steps, now and then: report, save if that is due, leave if that is wanted.

        Raises SystemExit(75) when it has saved and left, (74) when it could not save.
        """
        self._report(force=False)
        self._boundary()

    def heard(self, loss: Callable[[], torch.Tensor | None]) -> None:
        """The loss of its newest step, asked for when somebody wants to know."""
        self._newest_loss = loss

    _newest_loss: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)

    def _last_loss(self) -> float | None:
        self._loss = self._newest_loss()
        return super()._last_loss()

    def state(self) -> dict[str, Any]:
        """What a checkpoint of this step holds."""
        return self._state([rng.capture(self.device)])

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. Raises ConfigError when it is another training's."""
        self._take(dict(state), "checkpoint")

    def _state(self, generators: list[Any]) -> dict[str, Any]:
        state = super()._state(generators)
        # A member's tensors may lie inside its pack's: a file would hold all of these.
        state["model"] = {name: _own(value) for name, value in state["model"].items()}
        optimizer = state["optimizer"]
        kept = {key: _own(value) for key, value in optimizer["state"].items()}
        return {**state, "optimizer": {**optimizer, "state": kept}}


def _own(value: Any) -> Any:
    """The same with tensors that are all of the memory they lie in."""
    if isinstance(value, torch.Tensor):
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.detach().clone()
    if isinstance(value, dict):
        return {key: _own(inner) for key, inner in value.items()}
    return value


class Member:
    """A training that has been brought to a device (the paper's `load`).

    Its code runs with its own random numbers and, where it is a guest in a process, as that guest: `call`.

    Args:
        parts: what it is made of; its generators are as they are now.
        context: in which its code is called; default: one of its own.
    """

    def __init__(
        self, parts: Parts, session: PackedSession, *, name: str = "", context: Context | None = None
    ) -> None:
        self.parts, self.session, self.name = parts, session, name
        self.batch = parts.global_batch
        self.clock = 0.0
        """Samples that it has had of its pack's time: all members are kept alike in this."""
        self.draws: frozenset[str] | None = None
        """Which generators its steps draw from; None: not known yet."""
        self._context = context or copy_context()
        self._device = session.device
        self._generators = rng.capture(self._device)
        self._watched = 0
        self._total: torch.Tensor | None = None
        session.heard(self._loss)

    @cached_property
    def architecture(self) -> tuple[Any, ...]:
        """What its model and loss have in common with those that it can be computed with as one."""
        return architecture(self.parts.model, self.parts.loss)

    @property
    def done(self) -> bool:
        """Whether it has made all its steps."""
        return self.ends_after(0)

    def ends_after(self, steps: int) -> bool:
        """Whether these are the last ones that it has to make."""
        total = self.session.total_steps
        return total is not None and self.session.step + steps >= total

    @property
    def started(self) -> bool:
        """Whether its optimizer has the state that it gets in a first step."""
        return bool(self.parts.optimizer.state) or not _has_state(self.parts.optimizer)

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run some of the member's own code: with its random numbers, and as the guest that it is."""
        before = rng.capture(self._device)
        rng.restore(self._generators, self._device)
        try:
            return self._context.run(function, *args)
        finally:
            self._generators = rng.capture(self._device)
            rng.restore(before, self._device)

    def step(self, batch: Any) -> None:
        """One step by itself: to the last bit that of a training that is alone."""
        if self.draws is None:
            self._step_watched(batch)
        elif self.draws:
            self.call(self._step, batch)
        else:
            self._context.run(self._step, batch)

    def _step(self, batch: Any) -> None:
        self.backward(batch)
        self.parts.optimizer.step()
        self.stepped()

    def backward(self, batch: Any) -> None:
        """The gradients of the mean loss over a batch, by themselves. Raises ValueError for odd losses."""
        self.parts.optimizer.zero_grad()
        self._total = total = self.losses(batch)
        (total / self.batch).backward()  # type: ignore[no-untyped-call]

    def losses(self, batch: Any) -> torch.Tensor:
        """The sum of the losses of a batch's samples, shape []. Raises ValueError for odd losses."""
        losses = self.parts.loss(self.parts.model, batch)
        if losses.ndim > 1 or (losses.ndim == 1 and len(losses) != self.batch):
            raise ValueError(
                f"losses of shape {list(losses.shape)} for {self.batch} samples; expected one loss a sample "
                "(shape [samples]), or their mean (shape [])"
            )
        return losses.sum() if losses.ndim else losses * self.batch

    def stepped(self) -> None:
        """Its weights have made a step: the rest of it follows."""
        if self.parts.scheduler is not None:
            self.parts.scheduler.step()
        self.session.count_step()
        self.clock += self.batch

    def has_lost(self, total: torch.Tensor) -> None:
        """The sum of the losses in its newest step, which somebody else has computed."""
        self._total = total

    def evaluate(self) -> Mapping[str, float]:
        """What it is asked for at the end."""
        try:
            return self.call(evaluate, self.parts)
        finally:
            self.parts.model.train()

    def _loss(self) -> torch.Tensor | None:
        return None if self._total is None else (self._total / self.batch).detach()

    def _step_watched(self, batch: Any) -> None:
        before = self._generators
        self.call(self._step, batch)
        drawn = _differ(before, self._generators)
        self._watched += 1
        if drawn or self._watched >= WATCHED_STEPS:
            self.draws = drawn


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    """The generators of which two states differ."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a, b)
        if isinstance(a, tuple) and isinstance(b, tuple):
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return bool(a == b)

    return frozenset(name for name in one if not same(one[name], other[name]))


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps something for each parameter."""
    if type(optimizer) is torch.optim.SGD:
        return any(group["momentum"] for group in optimizer.param_groups)
    return True
