"""The mode `adapters`: members with adapters on the same frozen model make their steps on one pass of it.

Each member's loss is its own code, run up to where it calls the frozen model (or that call is foreseen, where
it is made of the batch's tensors); then that runs once for all, and each one's code is run with what it gets.
So a member's batch, loss, head, optimizer and learning rate are its own, and so are its random numbers. It is
used only if on real batches it gives each member the loss and the gradients that it has by itself: once for
each form that their calls have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcsched.compat import zip
from hpcsched.worker.packing.adapters.draws import Draws
from hpcsched.worker.packing.adapters.frozen import Frozen
from hpcsched.worker.packing.adapters.joint import JointForward, forward_replaced
from hpcsched.worker.packing.adapters.rows import Call, Recipe, Rows, rows_of, same_call
from hpcsched.worker.packing.batches import own, private, writes_in
from hpcsched.worker.packing.compatibility import Memory
from hpcsched.worker.packing.failures import (
    Failures,
    MemberExited,
    SharedBatchChanged,
    line_of,
    out_of_memory,
)
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


class _Foreseen(Exception):
    """A member has called the frozen model in another way than was foreseen."""


@dataclass(frozen=True)
class _Asked:
    """How a member's code calls the frozen model, and where torch's generators are then, by their names."""

    call: Call
    states: dict[str, Any]
    foreseen: bool = False


@dataclass(frozen=True)
class _Answer:
    """What a member is given when it calls the frozen model so, and where its generators are then."""

    asked: _Asked
    output: Any
    after: dict[str, Any] | None


@dataclass(frozen=True)
class _Alone:
    """What a member gets by itself: the sum of its losses, and the gradient of their mean.

    `reached` tells which parameters have a gradient at all: to an optimizer, zero is not the same as none.
    """

    total: torch.Tensor
    gradients: list[torch.Tensor]
    reached: list[bool]


class AdaptersMode(Runner):
    """Raises NotStackable where the members cannot make their steps in this way."""

    as_one = True

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
        self._checked: set[Any] = set()
        self._check(batches)

    @property
    def padding(self) -> float:
        """The part of the frozen model's work that was for nothing: all rows are as long as the longest."""
        wanted, computed = self._tokens
        return 1 - wanted / computed if computed else 0.0

    def step(self, batches: Batches, *, careful: bool = False) -> None:
        before = [member.generators for member in self.members]
        asked = self._ask(batches)
        if _form(asked) not in self._checked:
            self._check(batches)
        totals = self._compute(batches, asked)
        failures = Failures()
        for member, total, states in zip(self.members, totals, before, strict=True):
            if not failures.full:
                try:
                    member.call_quickly(member.update, careful)
                    member.has_lost(total)
                    continue
                except (Exception, SystemExit) as error:
                    failures.add(member, error)
            if not member.torn:
                member.generators = states
        failures.check()

    def _ask(self, batches: Batches) -> list[_Asked]:
        """How all call the frozen model; raises as `_compute`."""
        with _nobody_exits():
            return [self._call_of(index, batch) for index, batch in enumerate(batches)]

    def _compute(self, batches: Batches, asked: Sequence[_Asked]) -> list[torch.Tensor]:
        """Have the gradients in the members' parameters; returns the sums of their losses.

        If it raises, all members are as before. Whose code has raised makes its step by itself then, where
        that is found out again.
        """
        generators = [member.generators for member in self.members]
        process = [(generator, generator.get_state()) for _, generator in self.members[0].torch_generators]
        try:
            with _nobody_exits():
                try:
                    totals = self._forward_and_backward(batches, asked)
                except _Foreseen:
                    self._recipes = [None for _ in self.members]
                    self._foresees = False
                    self._put_back(generators)
                    asked = self._ask(batches)
                    if _form(asked) not in self._checked:
                        raise NotStackable("the frozen model is asked for something else") from None
                    totals = self._forward_and_backward(batches, asked)
            if not all(torch.equal(generator.get_state(), state) for generator, state in process):
                raise NotStackable("the frozen model draws random numbers that are nobody's")
            return totals
        except BaseException:
            self._put_back(generators)
            for generator, state in process:
                generator.set_state(state)
            raise

    def _put_back(self, generators: Sequence[dict[str, Any]]) -> None:
        for member, states in zip(self.members, generators, strict=True):
            member.generators = states

    def _forward_and_backward(self, batches: Batches, asked: Sequence[_Asked]) -> list[torch.Tensor]:
        self._autocast = asked[0].call.autocast
        states = [one.states for one in asked]
        draws: Draws | None = None

        def drawing(rows: Rows) -> Draws:
            nonlocal draws
            draws = Draws(rows, self.members[0].torch_generators, states)
            return draws

        with self._forward.laid_over():
            outputs = self._forward([one.call for one in asked], drawing if self._draw else None)
            wanted, computed = self._forward.rows.tokens
            self._tokens = [self._tokens[0] + wanted, self._tokens[1] + computed]
            totals = []
            for index, member in enumerate(self.members):
                after = None if draws is None else draws.states[index]
                answer = _Answer(asked[index], outputs[index], after)
                totals.append(member.call_quickly(self._finish, index, batches[index], answer))
            torch.autograd.backward(
                [total / member.batch for member, total in zip(self.members, totals, strict=True)]
            )
        return [total.detach() for total in totals]

    def _call_of(self, index: int, batch: Any) -> _Asked:
        """How a member calls the frozen model with a batch: foreseen, or by running its loss up to there."""
        recipe, member = self._recipes[index], self.members[index]
        call = None if recipe is None else recipe.followed(batch)
        if call is not None:
            return _Asked(call, member.generators, foreseen=True)
        asked = self._reach(member, self._frozen[index], batch)
        if self._foresees and _same_states(asked.states, member.generators, member):
            self._recipes[index] = Recipe.of(asked.call, batch)
        return asked

    def _reach(self, member: Member, frozen: Frozen, batch: Any) -> _Asked:
        """Run a member's loss up to its call of the frozen model; its generators stay as they are."""
        before = member.generators
        # Not in the exception: what its frames hold would stay until the garbage is collected.
        asked: list[_Asked] = []

        def reached(*args: Any, **kwargs: Any) -> Any:
            states = {name: generator.get_state() for name, generator in member.torch_generators}
            asked.append(_Asked(Call.of(self._forward.takes, args, kwargs), states))
            raise _Reached

        try:
            with forward_replaced(frozen.backbone, reached):
                member.call_quickly(_losses, member, batch)
        except _Reached:
            return asked[0]
        finally:
            member.generators = before
        raise NotStackable("its loss does not ask the frozen model")

    def _finish(self, index: int, batch: Any, answer: _Answer) -> torch.Tensor:
        """A member's loss with what the frozen model gives it."""
        member, asked = self.members[index], answer.asked
        times = 0

        def answered(*args: Any, **kwargs: Any) -> Any:
            nonlocal times
            times += 1
            if times > 1:
                raise NotStackable("its loss asks the frozen model more than once")
            call = Call.of(self._forward.takes, args, kwargs)
            states = {name: generator.get_state() for name, generator in member.torch_generators}
            if not (
                same_call(asked.call, call, made_anew=not asked.foreseen)
                and _same_states(states, asked.states, member)
            ):
                if asked.foreseen:
                    raise _Foreseen
                raise NotStackable("its loss asks the frozen model for something else when it runs again")
            for name, generator in member.torch_generators:
                if answer.after is not None:
                    generator.set_state(answer.after[name])
            return answer.output

        member.parts.optimizer.zero_grad()
        with forward_replaced(self._frozen[index].backbone, answered):
            total = _losses(member, batch)
        if asked.foreseen and not times:
            raise NotStackable("its loss does not ask the frozen model")
        return total

    # -- whether it is right -----------------------------------------------------------------------------

    def _check(self, batches: Batches) -> None:
        """Raise NotStackable unless all get what they get by themselves; no member is changed by it."""
        batches = [private(batch) for batch in batches]
        self._recipes = [None for _ in self.members]  # nothing is foreseen here
        pairs = list(zip(self.members, batches, strict=True))
        written = list(map(writes_in, batches))
        expected = [_rehearsed(member, _alone, member, batch, 0.0) for member, batch in pairs]
        generators = [member.generators for member in self.members]
        tokens = self._tokens
        try:
            asked = self._ask(batches)
            totals = self._compute(batches, asked)
            got = [_got(member, total) for member, total in zip(self.members, totals, strict=True)]
        except NotStackable:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise NotStackable(f"it cannot be computed: {line_of(error)}") from error
        finally:
            self._tokens = tokens
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
            if result.reached != wanted[0].reached:
                raise NotStackable("as one, other parameters have a gradient than by themselves")
            if not _same_states(ended, wanted[1], member):
                raise NotStackable("the models draw random numbers in a way that cannot be told apart")
        if written != list(map(writes_in, batches)):
            raise NotStackable("the models write into their batches")
        self._checked.add(_form(asked))

    def _last_digit(self, member: Member) -> float:
        return last_digit(member) if self._autocast is None else torch.finfo(self._autocast).eps


def _form(asked: Sequence[_Asked]) -> Any:
    """What decides how the frozen model computes, besides numbers and sizes: the arguments that it is given,
    and whether rows are filled up."""
    calls = [one.call for one in asked]
    return rows_of(calls).padded, tuple(call.form for call in calls)


@contextlib.contextmanager
def _nobody_exits() -> Iterator[None]:
    """Whose code ends the process is found out when each makes its step by itself."""
    try:
        yield
    except SystemExit as end:
        raise MemberExited(end) from end


def _losses(member: Member, batch: Any) -> torch.Tensor:
    """The sum of a member's losses. Raises SharedBatchChanged if it has written into its batch."""
    if member.writes:
        return member.losses(private(batch))
    before = writes_in(batch)
    try:
        return member.losses(own(batch))
    finally:
        if writes_in(batch) != before:
            member.writes = True
            raise SharedBatchChanged(batch)


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
    records = getattr(member.parts.loss, "keeps_records_only", False)
    memory = Memory(member.parts.model, len if records else member.parts.loss)
    try:
        with torch.no_grad():
            for parameter in trained if nudge else ():
                part = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0))
                parameter.mul_((part * (2 * nudge) + (1 - nudge)).to(parameter))
        total = member.losses(batch)
        found = torch.autograd.grad(total / member.batch, trained, allow_unused=True)
        if memory.changed():  # up to where it calls the frozen model, a loss is run twice in a step
            raise NotStackable("the model or its loss changes attributes of its own in a step")
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
        return _Alone(total.detach(), gradients, [g is not None for g in found])
    finally:
        memory.put_back()
        buffers.put_back()
        put_back([p.detach() for p in trained], copies)


def _trained(member: Member) -> list[torch.Tensor]:
    return [p for p in member.parts.model.parameters() if p.requires_grad]


def _got(member: Member, total: torch.Tensor) -> _Alone:
    """The same as one: what it has got in its parameters."""
    trained = _trained(member)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained]
    return _Alone(total, gradients, [p.grad is not None for p in trained])


def _distance(one: _Alone, other: _Alone) -> float:
    return max(difference([one.total], [other.total]), difference(one.gradients, other.gradients))
