"""One training of a pack: what it is made of, its random numbers, and a step of it by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import cached_property
from typing import Any, TypeVar

import torch

from hpcsched.compat import zip
from hpcsched.errors import StoreError
from hpcsched.worker.packing import rng_hooks
from hpcsched.worker.packing.adapters.frozen import Frozen
from hpcsched.worker.packing.batches import own, private
from hpcsched.worker.packing.compatibility import Memory, architecture
from hpcsched.worker.packing.packed_session import PackedSession
from hpcsched.worker.packing.rollback import Buffers, StepEffects, Weights, differing, homes_of
from hpcsched.worker.process import rng
from hpcsched.worker.session.batches import summed
from hpcsched.worker.session.trainer import Parts, clip, evaluate

WATCHED_STEPS, WATCHED_EVERY = 3, 256
"""So many first steps of a member are watched for what they draw and change; later one of so many."""

_T = TypeVar("_T")


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
        self.source = parts
        """Whose data it reads: members of a pack that have the same data have the same one here."""
        self.clock = 0.0
        """Samples that it has had of its pack's time: all members are kept alike in this."""
        self.pace = float(self.batch)
        """What a step of it counts for in that: members that make their steps together are as fast in it."""
        self.shares = False
        """Whether others are given the same batches."""
        self.writes = False
        """Whether it writes into the batches that it is given: then it gets its own."""
        self._context = context or copy_context()
        self._device = session.device
        self._generators = rng.capture(self._device)
        self._torch = [("torch", torch.default_generator)]
        if self._device.type == "cuda":
            self._torch += [("cuda", torch.cuda.default_generators[self._device.index or 0])]
        self._gradients = True
        self._habits = StepEffects()
        self.steady = True
        """Whether its steps leave nothing behind but parameters, buffers and the optimizer's state, as far as
        they were watched: what is traced or captured once then holds for all of them."""
        self._watched = 0
        self._total: torch.Tensor | None = None
        session.heard(self._loss)

    @cached_property
    def architecture(self) -> tuple[Any, ...]:
        """What its model and loss have in common with those that it can be computed with as one."""
        return architecture(self.parts.model, self.parts.loss)

    @property
    def frozen(self) -> Frozen | None:
        """What is frozen in its model, where that has adapters on it."""
        return self.session.frozen

    @property
    def generators(self) -> dict[str, Any]:
        """Where its random numbers are, by generator."""
        return self._generators

    @generators.setter
    def generators(self, states: dict[str, Any]) -> None:
        self._generators = states

    @property
    def torch_generators(self) -> Sequence[tuple[str, torch.Generator]]:
        """Torch's generators that its code draws from, by their names in `generators`."""
        return self._torch

    @property
    def changes_buffers(self) -> bool:
        """Whether its steps change buffers, as far as they were watched."""
        return bool(self._habits.changes)

    @property
    def draws(self) -> frozenset[str] | None:
        """Which generators its steps draw from; None: not known yet."""
        return self._habits.draws if self._watched >= WATCHED_STEPS else None

    def differs_by_step(self) -> str | None:
        """Why what is traced or captured of one of its steps would not hold for all; None: it would."""
        if self.draws is None or self.draws:
            return "the models draw random numbers, each its own"
        if not _scheduled_by_torch(self.parts):
            return "a scheduler that is not torch's may change anything between two steps"
        if not self.steady:
            return "the model or its loss changes attributes of its own in a step"
        if self.parts.precision is not None:
            return "mixed precision is not traced"
        if self.writes:
            return "the models write into their batches"
        return None if self.started else "an optimizer has not made its first step yet"

    @property
    def torn(self) -> bool:
        """Whether a step was left half-way: it has to begin anew from a checkpoint."""
        return self.session.torn is not None

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

    # -- running its code ------------------------------------------------------------------------------

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run some of the member's own code: with its random numbers, and as the guest that it is."""
        before = rng.capture(self._device)
        rng.restore(self._generators, self._device)
        try:
            return self.call_without_draws(function, *args)
        finally:
            self._generators = rng.capture(self._device)
            rng.restore(before, self._device)

    def call_without_draws(self, function: Callable[..., _T], *args: Any) -> _T:
        """As `call`, for code that draws nothing: generators are left alone, as they have to be in a capture.

        Whoever switches gradients off does so for himself.
        """
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._gradients)
        try:
            return self._context.run(function, *args)
        finally:
            self._gradients = torch.is_grad_enabled()
            torch._C._set_grad_enabled(before)

    def call_quickly(self, function: Callable[..., _T], *args: Any) -> _T:
        """The same in some microseconds: of the generators only torch's are the member's from the beginning,
        the others if it draws from them by their modules' functions."""
        before = [generator.get_state() for _, generator in self._torch]
        for name, generator in self._torch:
            generator.set_state(self._generators[name])
        others: list[dict[str, Any]] = []

        def swap() -> None:
            rng_hooks.listen(None)
            others.append(rng.capture_others())
            rng.restore_others(self._generators)

        rng_hooks.listen(swap)
        try:
            return self.call_without_draws(function, *args)
        finally:
            rng_hooks.listen(None)
            now = {name: generator.get_state() for name, generator in self._torch}
            if others:
                now |= rng.capture_others()
                rng.restore_others(others[0])
            self._generators = {**self._generators, **now}
            for (_, generator), state in zip(self._torch, before, strict=True):
                generator.set_state(state)

    def rehearse(self, function: Callable[..., _T], *args: Any) -> tuple[_T, frozenset[str]]:
        """As `call`, but its generators stay as they are; also tells which of them were drawn from."""
        before = self._generators
        try:
            result = self.call(function, *args)
            return result, differing(before, self._generators)
        finally:
            self._generators = before

    # -- its steps -------------------------------------------------------------------------------------

    def step(self, batch: Any, *, careful: bool = False) -> None:
        """One step by itself: to the last bit that of a training that is alone.

        If it raises, the member is as before the step; or it is `torn`, where its optimizer or scheduler has
        raised half-way and the step was not `careful`: that copies the weights before.
        """
        if self.torn:
            raise StoreError(f"{self.name} was left half-way in a step and cannot make another")
        watched = self._watched < WATCHED_STEPS or self.session.step % WATCHED_EVERY == 0
        generators = self._generators
        buffers = Buffers(homes_of(self.parts.model) if watched else self._habits.changes)
        first = self._watched < WATCHED_STEPS
        memory = self._remember() if first and self.steady else None
        run = self.call if watched or self._habits.draws_elsewhere else self.call_quickly
        try:
            run(self._step, private(batch) if self.writes else batch, careful)
        except BaseException:
            if not self.torn:
                self._generators = generators
                buffers.put_back()
            raise
        if watched:
            seen = StepEffects(differing(generators, self._generators), buffers.changed())
            self._habits = self._habits.and_those(seen)
            self._watched += 1
        if memory is not None:
            self.steady = not memory.changed()

    def _remember(self) -> Memory | None:
        try:
            return Memory(self.parts.model, self.parts.loss)
        except Exception:  # whatever the user's own objects do when they are looked at
            self.steady = False
            return None

    def _step(self, batch: Any, careful: bool) -> None:
        self.backward(batch)
        self.update(careful)

    def backward(self, batch: Any) -> None:
        """The gradients of the mean loss over a batch, by themselves. Raises ValueError for odd losses."""
        self.parts.optimizer.zero_grad()
        total = self.losses(batch)
        (total / self.batch).backward()  # type: ignore[no-untyped-call]
        self._total = total.detach()

    def losses(self, batch: Any) -> torch.Tensor:
        """The sum of the losses of a batch's samples, shape []. Raises ValueError for odd losses."""
        return summed(self.parts.losses(own(batch) if self.shares else batch), self.batch)

    def update(self, careful: bool = False) -> None:
        """The second half of a step, when the gradients are there; if it raises, as `step`."""
        before = Weights(self.parts.optimizer) if careful else None
        try:
            clip(self.parts)
            self.parts.optimizer.step()
        except BaseException as error:
            if before is None:
                self._tear(error)
            else:
                before.put_back()
            raise
        self.stepped()

    def stepped(self) -> None:
        """Its weights have made a step: the rest of it follows. If that raises, the member is torn."""
        if self.parts.scheduler is not None:
            try:
                self.parts.scheduler.step()
            except BaseException as error:
                self._tear(error)
                raise
        self.session.count_step()
        self.clock += self.pace

    def _tear(self, error: BaseException) -> None:
        self.session.torn = str(error) or type(error).__name__

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
        return None if self._total is None else self._total / self.batch


def _scheduled_by_torch(parts: Parts) -> bool:
    """Whether nobody but schedulers of torch's does anything between two steps: these change numbers of the
    optimizer, others might change anything."""
    several = [parts.scheduler]
    for scheduler in several:  # some have others in them
        several += getattr(scheduler, "_schedulers", None) or ()
    return all(type(each).__module__ == "torch.optim.lr_scheduler" for each in several if each is not None)


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps something for each parameter."""
    if type(optimizer) is torch.optim.SGD:
        return any(group["momentum"] for group in optimizer.param_groups)
    return True
