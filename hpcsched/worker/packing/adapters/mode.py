"""The mode `adapters`: members with adapters on the same frozen model make their steps on one pass of it.

Each member's loss is its own code, run up to where it calls the frozen model (or that call is foreseen, where
it is made of the batch's tensors); then that runs once for all, and each one's code is run with what it gets.
So a member's batch, loss, head, optimizer and learning rate are its own, and so are its random numbers. It is
used only if on real batches it gives each member the loss and the gradients that it has by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcsched.compat import zip
from hpcsched.worker.packing.adapters.draws import Draws
from hpcsched.worker.packing.adapters.frozen import Frozen
from hpcsched.worker.packing.adapters.joint import JointForward, forward_replaced
from hpcsched.worker.packing.adapters.rows import Call, Recipe, Rows, same_call
from hpcsched.worker.packing.batches import own
from hpcsched.worker.packing.failures import Failures, line_of, out_of_memory
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.modes import Batches, Runner
from hpcsched.worker.packing.reference import (
    CLOSE,
    FARTHEST,
    TOUCHY,
    NotStackable,
    difference,
    last_digit,
    put_back,
)
from hpcsched.worker.packing.rollback import Buffers, homes_of


class _Reached(BaseException):
    """A member's code has come to where it calls the frozen model."""

    def __init__(self, call: Call, states: dict[str, Any], *, foreseen: bool = False) -> None:
        super().__init__()
        self.call, self.states, self.foreseen = call, states, foreseen


class _Foreseen(Exception):
    """A member has called the frozen model in another way than was foreseen."""


@dataclass(frozen=True)
class _Answer:
    """What a member is given when it calls the frozen model so, and where its generators are then."""

    call: Call
    foreseen: bool
    output: Any
    after: dict[str, Any] | None


@dataclass(frozen=True)
class _Alone:
    """What a member gets by itself: the sum of its losses, and the gradient of their mean."""

    total: torch.Tensor
    gradients: list[torch.Tensor]


class AdaptersMode(Runner):
    """Raises NotStackable where the members cannot make their steps in this way."""

    def __init__(self, members: Sequence[Member], batches: Batches) -> None:
        super().__init__(members)
        self._frozen = [frozen for member in members if (frozen := member.frozen) is not None]
        if len(self._frozen) != len(members) or len({frozen.key for frozen in self._frozen}) > 1:
            raise NotStackable("the models have no adapters on the same frozen model")
        if why := next(filter(None, map(_cannot, members)), None):
            raise NotStackable(why)
        self._forward = JointForward(self._frozen)
        self._draw = any(member.draws for member in members)
        self._tokens = [0, 0]
        self._autocast: torch.dtype | None = None
        self._recipes: list[Recipe | None] = [None for _ in members]
        self._foresees = True
        self._check(batches)

    @property
    def padding(self) -> float:
        """The part of the frozen model's work that was for nothing: all rows are as long as the longest."""
        wanted, computed = self._tokens
        return 1 - wanted / computed if computed else 0.0

    def step(self, batches: Batches, *, careful: bool = False) -> None:
        failures = Failures()
        totals = self._compute(batches, failures)
        for member, total in totals:
            if not failures.full:
                try:
                    member.call_quickly(member.update, careful)
                    member.has_lost(total)
                except (Exception, SystemExit) as error:
                    failures.add(member, error)
        failures.check()

    def _compute(self, batches: Batches, failures: Failures) -> list[tuple[Member, torch.Tensor]]:
        """Have the gradients in the members' parameters; returns the sums of losses of who did not fail.

        If it raises, all members are as before.
        """
        generators = [member.generators for member in self.members]
        try:
            try:
                return self._forward_and_backward(batches, failures)
            except _Foreseen:
                self._recipes = [None for _ in self.members]
                self._foresees = False
                self._put_back(generators)
                return self._forward_and_backward(batches, failures)
        except BaseException:
            self._put_back(generators)
            raise

    def _put_back(self, generators: Sequence[dict[str, Any]]) -> None:
        for member, states in zip(self.members, generators, strict=True):
            member.generators = states

    def _forward_and_backward(
        self, batches: Batches, failures: Failures
    ) -> list[tuple[Member, torch.Tensor]]:
        reached = [self._call_of(index, batch) for index, batch in enumerate(batches)]
        self._autocast = reached[0].call.autocast
        states = [one.states for one in reached]
        draws: Draws | None = None

        def drawing(rows: Rows) -> Draws:
            nonlocal draws
            draws = Draws(rows, self.members[0].torch_generators, states)
            return draws

        with self._forward.laid_over():
            outputs = self._forward([one.call for one in reached], drawing if self._draw else None)
            wanted, computed = self._forward.rows.tokens
            self._tokens = [self._tokens[0] + wanted, self._tokens[1] + computed]
            found: list[tuple[Member, torch.Tensor]] = []
            for index, member in enumerate(self.members):
                before = member.generators
                after = None if draws is None else draws.states[index]
                one = reached[index]
                answer = _Answer(one.call, one.foreseen, outputs[index], after)
                try:
                    found.append((member, member.call_quickly(self._finish, index, batches[index], answer)))
                except (NotStackable, _Foreseen):
                    raise
                except (Exception, SystemExit) as error:
                    member.generators = before
                    failures.add(member, error)
            if found:
                torch.autograd.backward([total / member.batch for member, total in found])
        return [(member, total.detach()) for member, total in found]

    def _call_of(self, index: int, batch: Any) -> _Reached:
        """How a member calls the frozen model with a batch: foreseen, or by running its loss up to there."""
        recipe, member = self._recipes[index], self.members[index]
        call = None if recipe is None else recipe.followed(batch)
        if call is not None:
            return _Reached(call, member.generators, foreseen=True)
        reached = self._reach(member, self._frozen[index], batch)
        if self._foresees and _same_states(reached.states, member.generators, member):
            self._recipes[index] = Recipe.of(reached.call, batch)
        return reached

    def _reach(self, member: Member, frozen: Frozen, batch: Any) -> _Reached:
        """Run a member's loss up to its call of the frozen model; its generators stay as they are."""
        before = member.generators

        def reached(*args: Any, **kwargs: Any) -> Any:
            states = {name: generator.get_state() for name, generator in member.torch_generators}
            raise _Reached(Call.of(self._forward.takes, args, kwargs), states)

        try:
            with forward_replaced(frozen.backbone, reached):
                member.call_quickly(member.losses, own(batch))
        except _Reached as here:
            return here
        finally:
            member.generators = before
        raise NotStackable("its loss does not ask the frozen model")

    def _finish(self, index: int, batch: Any, answer: _Answer) -> torch.Tensor:
        """A member's loss with what the frozen model gives it."""
        member = self.members[index]
        asked = 0

        def answered(*args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked > 1:
                raise NotStackable("its loss asks the frozen model more than once")
            call, foreseen = Call.of(self._forward.takes, args, kwargs), answer.foreseen
            if not same_call(answer.call, call, made_anew=not foreseen):
                if foreseen:
                    raise _Foreseen
                raise NotStackable("its loss asks the frozen model for something else when it runs again")
            for name, generator in member.torch_generators:
                if answer.after is not None:
                    generator.set_state(answer.after[name])
            return answer.output

        member.parts.optimizer.zero_grad()
        with forward_replaced(self._frozen[index].backbone, answered):
            return member.losses(own(batch))

    # -- whether it is right -----------------------------------------------------------------------------

    def _check(self, batches: Batches) -> None:
        """Raise NotStackable unless all get what they get by themselves; no member is changed by it."""
        pairs = list(zip(self.members, batches, strict=True))
        expected = [_rehearsed(member, _alone, member, batch, 0.0) for member, batch in pairs]
        generators = [member.generators for member in self.members]
        failures = Failures()
        try:
            totals = self._compute(batches, failures)
            failures.check()
            got = [_Alone(total, _gradients(member)) for member, total in totals]
        except NotStackable:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise NotStackable(f"it cannot be computed: {line_of(error)}") from error
        finally:
            self._tokens = [0, 0]
            after = [member.generators for member in self.members]
            for member, states in zip(self.members, generators, strict=True):
                member.generators = states
                member.parts.optimizer.zero_grad()
        for (member, batch), wanted, result, ended in zip(pairs, expected, got, after, strict=True):
            far = _distance(result, wanted[0])
            if far > CLOSE:
                nudged, _ = _rehearsed(member, _alone, member, batch, self._last_digit(member))
                if far > min(FARTHEST, TOUCHY * _distance(nudged, wanted[0])):
                    raise NotStackable("as one, the models do not give what they give by themselves")
            if not _same_states(ended, wanted[1], member):
                raise NotStackable("the models draw random numbers in a way that cannot be told apart")

    def _last_digit(self, member: Member) -> float:
        return last_digit(member) if self._autocast is None else torch.finfo(self._autocast).eps


def _same_states(one: dict[str, Any], other: dict[str, Any], member: Member) -> bool:
    """Whether torch's generators of a member are at the same place in both."""
    return all(torch.equal(one[name], other[name]) for name, _ in member.torch_generators)


def _cannot(member: Member) -> str | None:
    """Why a member cannot take part; None: it can."""
    if member.draws is None or not member.started:
        return "an optimizer has not made its first step yet"
    if not member.draws <= {name for name, _ in member.torch_generators}:
        return "the models draw random numbers that are not torch's"
    if member.writes:
        return "the models write into their batches"
    if member.changes_buffers:
        return "the models change their buffers in a step"
    return None


def _rehearsed(member: Member, function: Callable[..., _Alone], *args: Any) -> tuple[_Alone, dict[str, Any]]:
    """As the member's code is run, and where its generators are then; they stay where they were."""
    before = member.generators
    try:
        result = member.call(function, *args)
        return result, member.generators
    except NotStackable:
        raise
    except (Exception, SystemExit) as error:  # it will be heard when the member makes a step
        if out_of_memory(error):
            raise
        raise NotStackable(f"{member.name} fails: {line_of(error)}") from error
    finally:
        member.generators = before


def _alone(member: Member, batch: Any, nudge: float) -> _Alone:
    """What a member gets by itself, with each trained weight changed by up to this part of it meanwhile."""
    trained = _trained(member)
    copies = [p.detach().clone() for p in trained]
    buffers = Buffers(homes_of(member.parts.model))
    try:
        with torch.no_grad():
            for parameter in trained if nudge else ():
                part = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0))
                parameter.mul_((part * (2 * nudge) + (1 - nudge)).to(parameter))
        total = member.losses(batch)
        found = torch.autograd.grad(total / member.batch, trained, allow_unused=True)
        none = (torch.zeros_like(p) for p in trained)
        return _Alone(total.detach(), [z if g is None else g for g, z in zip(found, none, strict=True)])
    finally:
        buffers.put_back()
        put_back([p.detach() for p in trained], copies)


def _trained(member: Member) -> list[torch.Tensor]:
    return [p for p in member.parts.model.parameters() if p.requires_grad]


def _gradients(member: Member) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in _trained(member)]


def _distance(one: _Alone, other: _Alone) -> float:
    return max(difference([one.total], [other.total]), difference(one.gradients, other.gradients))
