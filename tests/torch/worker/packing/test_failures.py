"""Members that fail leave alone; where memory ends the last one in leaves; the others notice nothing."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
from budget import slow
from packed_trainings import (
    Augmented,
    Build,
    by_sample,
    cnn,
    distance,
    dropping,
    go,
    members,
    normed,
    one_thread,
    packed,
    same,
    separate,
    state_of,
    tensors,
    torch,
    training,
)
from torch import nn

from hpcsched.errors import StoreError
from hpcsched.worker.packed import Failed, Member, OutOfMemory, Pack, free, load, pack
from hpcsched.worker.packing import stacking as stacking_module
from hpcsched.worker.packing.stacked_optimizers import Row

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


class Trouble:
    """Raises an error the first time that it is met from when it is set on."""

    def __init__(self, error: Exception) -> None:
        self.error, self.on = error, False

    def meet(self) -> None:
        if self.on:
            self.on = False
            raise self.error


def full() -> Trouble:
    return Trouble(torch.OutOfMemoryError("CUDA out of memory"))


class Backward(torch.autograd.Function):
    """What it is given, with trouble on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trouble: Trouble) -> Any:
        ctx.trouble = trouble
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.trouble.meet()
        return gradients[0], None


class Moody(torch.optim.SGD):
    """Stochastic gradient descent that may stop when half of it is done."""

    trouble: Trouble

    def step(self, closure: Any = None) -> Any:
        if self.trouble.on:
            parameters = self.param_groups[0]["params"]
            with torch.no_grad():
                for parameter in parameters[: len(parameters) // 2]:
                    parameter.add_(parameter.grad, alpha=-0.5)
                self.state.setdefault(parameters[0], {})["momentum_buffer"] = torch.ones(1)
        self.trouble.meet()
        return super().step(closure)


def moody(seed: int, moment: str, trouble: Trouble, net: Any = cnn, **more: Any) -> Build:
    """A training that meets trouble at some moment of a step: after its forward pass has changed things."""

    def loss(model: Any, batch: Any) -> Any:
        losses = by_sample(model, batch)
        if moment == "forward":
            trouble.meet()
        return Backward.apply(losses, trouble) if moment == "backward" else losses

    def build() -> Any:
        parts = training(seed, net=net, loss=loss, **more)()
        if moment == "optimizer":
            optimizer = Moody(parts.model.parameters(), lr=0.05, momentum=0.9)
            optimizer.trouble = trouble
            parts.optimizer = optimizer
        return parts

    return build


def as_alone(member: Member, build: Build) -> bool:
    return same(state_of(member), separate(build, member.session.step))


# -- errors of members -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("when", [0, 2, 9])
def test_one_that_raises_leaves_alone(moment: str, when: int) -> None:
    trouble = Trouble(ZeroDivisionError("no luck"))
    builds = [
        training(1, net=dropping),
        moody(2, moment, trouble),
        training(3, net=cnn, batch=12),
        training(4),
    ]
    together, made = packed(*builds, mode="loop")
    go(together, when)
    trouble.on = True
    with pytest.raises(Failed, match="m1: no luck") as error:
        for _ in range(4):
            together.step()
    assert [member for member, _ in error.value.errors] == [made[1]]
    together.leave(made[1])
    go(together, 20)
    for index in (0, 2, 3):
        assert as_alone(made[index], builds[index])


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_one_that_raised_before_its_weights_changed_is_as_before_the_step(moment: str) -> None:
    trouble = Trouble(ValueError("what?"))
    build = moody(2, moment, trouble, net=lambda: nn.Sequential(cnn(), nn.Dropout(0.5)))
    together, (first, second) = packed(training(1), build, mode="loop")
    go(together, 7)
    trouble.on = True
    with pytest.raises(Failed):
        go(together, 8)
    assert (first.session.step, second.session.step) == (8, 7)
    assert not second.torn
    go(together, 12)  # it may also stay
    assert as_alone(second, build)
    assert as_alone(first, training(1))


def test_one_whose_optimizer_stopped_half_way_is_never_saved_and_begins_anew() -> None:
    trouble = Trouble(RuntimeError("half-way"))
    build = moody(2, "optimizer", trouble)
    together, (first, second) = packed(training(1), build, mode="loop")
    go(together, 10)
    saved = copy.deepcopy(second.call(second.session.state))
    go(together, 15)
    trouble.on = True
    with pytest.raises(Failed, match="half-way"):
        go(together, 16)
    assert second.torn
    with pytest.raises(StoreError, match="step 16 was left half-way: half-way"):
        second.call(second.session.state)
    with pytest.raises(StoreError, match="half-way"):
        second.step(None)
    with pytest.raises(StoreError):
        free(second, together)
    assert together.members == [first]
    again = load(build(), checkpoint=saved)
    together.join(again)
    go(together, 20)
    while again.session.step < 20:
        together.step()
    assert as_alone(again, build)
    assert as_alone(first, training(1))


def test_a_scheduler_that_raises_leaves_its_member_torn_and_the_others_in_peace() -> None:
    def factor(step: int) -> float:
        if step > 12:
            raise ValueError("the cycle is over")
        return 1.0

    def ending() -> Any:
        parts = training(2)()
        parts.scheduler = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, factor)
        return parts

    for mode in ("loop", "stacked"):
        together, made = packed(training(1), ending, training(3), mode=mode)
        with pytest.raises(Failed, match="the cycle is over") as error:
            for _ in range(20):
                together.step()
        assert [member.name for member, _ in error.value.errors] == ["m1"]
        assert made[1].torn
        assert [member.session.step for member in made] == [13, 12, 13]
        together.leave(made[1])
        go(together, 20)
        for member, seed in ((made[0], 1), (made[2], 3)):
            alone = separate(training(seed), member.session.step)
            assert distance(state_of(member)["model"], alone["model"]) <= (0 if mode == "loop" else 1e-6)


def test_data_that_fail_are_put_down_to_those_who_read_them() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise OSError("no such file")
            return super().__getitem__(index)

    builds = [training(1, data=Augmented), training(2, data=Broken), training(3, data=Augmented, net=normed)]
    together, made = packed(*builds, mode="loop")
    with pytest.raises(Failed, match="m1: no such file") as error:
        for _ in range(40):
            together.step()
    assert [member.name for member, _ in error.value.errors] == ["m1"]
    together.leave(made[1])
    go(together, 20)
    assert as_alone(made[0], builds[0])
    assert as_alone(made[2], builds[2])


def test_in_a_stack_the_one_who_fails_is_found() -> None:
    class Table(nn.Module):
        """Looks words up: one that is not there is an error."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(10, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(self.table(x.round().abs().long()).mean(1))

    def data(large: bool) -> Any:
        x, y = tensors()
        x = x.clamp(-9, 9)
        if large:
            x[50] = 1e6
        return x, y

    builds = [training(seed, net=Table, data=lambda s=seed: data(s == 1), order=seed) for seed in range(3)]
    together, made = packed(*builds, mode="auto", steps=60)
    with pytest.raises(Failed) as error:
        while not all(member.done for member in made):
            together.step()
    assert [member.name for member, _ in error.value.errors] == ["m1"]
    together.leave(made[1])
    while not (made[0].done and made[2].done):
        together.step()
    for index in (0, 2):
        assert distance(state_of(made[index])["model"], separate(builds[index], 60)["model"]) < 2e-6


def test_odd_losses_are_the_members_fault() -> None:
    odd = training(2, loss=lambda model, batch: model(batch[0]))
    together, made = packed(training(1), odd)
    with pytest.raises(Failed, match=r"losses of shape \[8, 4\] for 8 samples") as error:
        for _ in range(2):
            together.step()
    assert error.value.errors[0][0] is made[1]


# -- no memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("whose", [0, 1, 2])
def test_the_last_one_in_leaves_when_memory_ends(moment: str, whose: int) -> None:
    """Whoever it is that finds none, and wherever: after somebody has come in, all can go on."""
    trouble = full()
    builds = [training(1, net=dropping), training(2, net=cnn), training(3, net=normed, batch=12)]
    builds[whose] = moody(whose, moment, trouble, batch=12 if whose == 2 else 8)
    made = members(*builds)
    together = Pack(made[0].session.device, mode="loop")
    together.join(*made[:2])
    go(together, 5)
    together.join(made[2])
    trouble.on = True
    with pytest.raises(OutOfMemory) as error:
        for _ in range(4):
            together.step()
    assert error.value.member is made[2]
    together.leave(made[2])
    assert not any(member.torn for member in made)
    go(together, 20)
    elsewhere = pack([made[2]])
    go(elsewhere, 9)
    for member, build in zip(made, builds, strict=True):
        assert as_alone(member, build)


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_memory_may_end_at_any_time_before_the_update(moment: str) -> None:
    trouble = full()
    builds = [moody(1, moment, trouble, net=lambda: nn.Sequential(cnn(), nn.Dropout(0.2))), training(2)]
    together, made = packed(*builds, mode="loop")
    go(together, 30)
    trouble.on = True
    with pytest.raises(OutOfMemory) as error:
        together.step()
    assert error.value.member is made[1]
    saved = free(made[1], together)
    go(together, 40)
    assert as_alone(made[0], builds[0])
    again = load(builds[1](), checkpoint=saved)
    go(pack([again]), 40)
    assert as_alone(again, builds[1])


def test_memory_that_ends_in_an_update_long_after_leaves_that_one_torn() -> None:
    """Its weights are neither here nor there, and no copy was made: it is the one to leave."""
    trouble = full()
    builds = [moody(1, "optimizer", trouble), training(2)]
    together, made = packed(*builds, mode="loop")
    go(together, 30)
    trouble.on = True
    with pytest.raises(Failed) as error:
        together.step()
    assert [member for member, _ in error.value.errors] == [made[0]]
    assert made[0].torn
    together.leave(made[0])
    go(together, 40)
    assert as_alone(made[1], builds[1])


def test_a_member_with_nobody_beside_it_has_failed_itself() -> None:
    trouble = full()
    together, (only,) = packed(moody(1, "forward", trouble))
    trouble.on = True
    with pytest.raises(Failed, match="out of memory") as error:
        together.step()
    assert error.value.errors[0][0] is only


@pytest.mark.parametrize("mode", [slow("stacked"), "auto"])
@pytest.mark.parametrize("moment", ["building", "checking", "computing", "updating"])
def test_a_stack_without_memory_changes_nobody(
    mode: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name: the last one leaves; in `auto` they go on one by one, which takes less."""
    trouble = full()
    patched: Any
    if moment == "building":
        patched = Row.new
        monkeypatch.setattr(Row, "new", lambda row: (trouble.meet(), patched(row))[1])
    elif moment == "updating":
        patched = Row.spread
        monkeypatch.setattr(Row, "spread", lambda row, values: (trouble.meet(), patched(row, values))[1])
    else:
        patched = stacking_module.Stack._compute

        def compute(stack: Any, batches: Any) -> Any:
            result = patched(stack, batches)
            trouble.meet()
            return result

        monkeypatch.setattr(stacking_module.Stack, "_compute", compute)
    builds = [training(seed, net=cnn) for seed in range(3)]
    together, made = packed(*builds, mode=mode, steps=60)
    go(together, 3)
    if moment in ("computing", "updating"):
        while together.groups[0].mode != "stacked/3":
            together.step()
        for member in made:  # so that there is something new to be spread
            member.parts.optimizer.param_groups[0]["lr"] *= 0.9
    counts = [member.session.step for member in made]
    trouble.on = True
    if mode == "stacked":
        with pytest.raises(OutOfMemory) as error:
            together.step()
        assert error.value.member is made[2]
        assert [member.session.step for member in made] == counts
        together.leave(made[2])
    else:
        while trouble.on:
            together.step()
    assert not any(member.torn for member in made)
    while not all(member.done for member in together.members):
        together.step()
    for member, build, count in zip(together.members, builds, counts, strict=False):

        def slower(parts: Any, step: int, count: int = count) -> None:
            if step == count and moment in ("computing", "updating"):
                parts.optimizer.param_groups[0]["lr"] *= 0.9

        assert distance(state_of(member)["model"], separate(build, 60, before=slower)["model"]) < 5e-6


def test_own_optimizers_in_a_stack_without_memory() -> None:
    """Those before it have made the step, it and those after it have not; then the same again."""
    trouble = full()
    builds = [moody(seed, "optimizer", trouble if seed == 1 else full(), net=normed) for seed in range(3)]
    together, made = packed(*builds, mode="stacked", steps=25)
    go(together, 5)
    assert together.groups[0].mode == "stacked/3"
    together.groups[0].careful = 1
    trouble.on = True
    with pytest.raises(OutOfMemory):
        together.step()
    assert [member.session.step for member in made] == [6, 5, 5]
    assert not any(member.torn for member in made)
    while not all(member.done for member in made):
        together.step()
    for member, build in zip(made, builds, strict=True):
        assert distance(state_of(member)["model"], separate(build, 25)["model"]) < 5e-6


@pytest.mark.parametrize("ways", [1, 2])
def test_a_stack_comes_apart_where_there_is_hardly_any_memory(
    ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = [training(seed, net=cnn, optimizer="momentum") for seed in range(2)]
    together, made = packed(*builds, mode="stacked")
    go(together, 10)
    tried = []
    moves = stacking_module.Stack._move

    def move(stack: Any, way: Any) -> None:
        tried.append(way)
        if len(tried) <= ways:
            raise torch.OutOfMemoryError("CUDA out of memory")
        moves(stack, way)

    monkeypatch.setattr(stacking_module.Stack, "_move", move)
    together.mode = "loop"
    together.leave(made[1])
    assert len(tried) == 2
    go(together, 20)
    alone = pack([made[1]])
    go(alone, 20)
    for member, build in zip(made, builds, strict=True):
        assert distance(state_of(member)["model"], separate(build, 20)["model"]) < 5e-6


def test_what_a_step_had_when_memory_ended_is_freed() -> None:
    seen: list[Any] = []
    trouble = full()

    def loss(model: Any, batch: Any) -> Any:
        activations = model(batch[0])
        seen[:] = [weakref.ref(activations)]
        trouble.meet()
        return nn.functional.cross_entropy(activations, batch[1], reduction="none")

    gc.disable()
    try:
        together, _ = packed(training(1, loss=loss), training(2), mode="loop")
        go(together, 4)
        trouble.on = True
        with pytest.raises(OutOfMemory) as error:
            together.step()
        assert seen[0]() is None
        assert error.value.member.name == "m1"
    finally:
        gc.enable()


def test_host_memory_that_ends_counts_as_well() -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")):
        trouble = Trouble(error)
        together, made = packed(training(1), moody(2, "forward", trouble), mode="loop")
        trouble.on = True
        with pytest.raises(OutOfMemory) as caught:
            go(together, 1)
        assert caught.value.member is made[1]


def test_data_without_memory_move_nobody() -> None:
    trouble = full()

    class Large(Augmented):
        def __getitem__(self, index: int) -> Any:
            trouble.meet()
            return super().__getitem__(index)

    builds = [training(seed, data=Large, batch=8 + 4 * (seed == 2)) for seed in (1, 2)]
    together, made = packed(*builds, mode="loop")
    go(together, 4)
    trouble.on = True
    with pytest.raises(OutOfMemory):
        together.step()
    go(together, 12)
    for member, build in zip(made, builds, strict=True):
        assert as_alone(member, build)
