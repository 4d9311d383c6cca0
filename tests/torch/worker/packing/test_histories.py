"""Whoever comes and goes, and whenever: each member is trained as if it had been alone all the time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_trainings import (
    Augmented,
    Build,
    by_sample,
    cnn,
    distance,
    dropping,
    normed,
    one_thread,
    same,
    separate,
    state_of,
    tensors,
    torch,
    training,
    with_noise,
)

from hpcsched.worker.packed import Failed, Member, Pack, free, load

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]

MOST = 40
"""Steps of the longest training."""


def writing(model: Any, batch: Any) -> Any:
    batch[0].mul_(0.9)
    return by_sample(model, batch)


KINDS: tuple[Callable[[int], Build], ...] = (
    lambda seed: training(seed),
    lambda seed: training(seed, batch=12),
    lambda seed: training(seed, net=dropping),
    lambda seed: training(seed, net=dropping, batch=5, optimizer="adam"),
    lambda seed: training(seed, net=cnn, scheduler="steps"),
    lambda seed: training(seed, net=normed, data=lambda: tensors(7)),
    lambda seed: training(seed, data=Augmented, collate=with_noise),
    lambda seed: training(seed, data=Augmented, collate=with_noise, batch=12, net=dropping),
    lambda seed: training(seed, loss=writing),
)


class Watched:
    """A member, how it was built, and what it is to be after so many steps."""

    def __init__(self, kind: int, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.member: Member = load(KINDS[kind](seed)(), name=f"{kind}.{seed}", steps=10**6)

    def check(self) -> None:
        got, wanted = state_of(self.member), alone(self.kind, self.seed, self.member.session.step)
        if got["loss"] is None:  # not a step since it was loaded
            got["loss"] = wanted["loss"]
        assert same(got, wanted), self.member.name

    def elsewhere(self, checkpoint: Any) -> None:
        self.member = load(KINDS[self.kind](self.seed)(), name="again", steps=10**6, checkpoint=checkpoint)


@cache
def alone(kind: int, seed: int, steps: int) -> Any:
    return separate(KINDS[kind](seed), steps)


@settings(max_examples=examples(25))
@given(st.data())
def test_in_a_loop_no_history_changes_a_bit(data: st.DataObject) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    packs = [Pack(device, mode="loop"), Pack(device, mode="loop")]
    inside: list[list[Watched]] = [[], []]
    seeds = 0
    for _ in range(data.draw(st.integers(3, 12), label="events")):
        here = data.draw(st.integers(0, 1), label="pack")
        event = data.draw(st.sampled_from(["join", "step", "step", "move", "again", "leave"]))
        if event == "join":
            some = [
                Watched(kind, seeds := seeds + 1)
                for kind in data.draw(st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=3))
            ]
            inside[here] += some
            packs[here].join(*(one.member for one in some))
        elif event == "step":
            for _ in range(data.draw(st.integers(1, 9))):
                if all(one.member.session.step < MOST for one in inside[here]):
                    packs[here].step()
        elif inside[here]:
            one = inside[here].pop(data.draw(st.integers(0, len(inside[here]) - 1)))
            if event == "again":
                one.elsewhere(copy.deepcopy(free(one.member, packs[here])))
            else:
                packs[here].leave(one.member)
            one.check()
            if event != "leave":
                inside[1 - here].append(one)
                packs[1 - here].join(one.member)
    for one in (*inside[0], *inside[1]):
        one.check()


@settings(max_examples=examples(12))
@given(st.data())
def test_in_any_mode_a_history_stays_within_rounding_errors(data: st.DataObject) -> None:
    """Stacks and turns are made and come apart all the time."""
    torch.set_num_threads(1)
    now = [0.0]

    def clock() -> float:
        now[0] += data.draw(st.sampled_from([0.5, 1.0, 2.0]))
        return now[0]

    together = Pack(torch.device("cpu"), mode="auto", clock=clock)
    inside: list[Watched] = []
    for seeds in range(data.draw(st.integers(4, 9), label="events")):
        event = data.draw(st.sampled_from(["join", "join", "step", "step", "leave"]))
        if event == "join":
            kinds = data.draw(st.lists(st.sampled_from([0, 0, 1, 4, 5]), min_size=1, max_size=3))
            some = [Watched(kind, 10 * seeds + i) for i, kind in enumerate(kinds)]
            inside += some
            together.join(*(one.member for one in some))
        elif event == "step":
            for _ in range(data.draw(st.integers(10, 40))):
                together.step()
        elif inside:
            together.leave(inside.pop(data.draw(st.integers(0, len(inside) - 1))).member)
    together.settle()
    together.write_back()
    for one in inside:
        wanted = alone(one.kind, one.seed, one.member.session.step)
        assert distance(state_of(one.member)["model"], wanted["model"]) < 1e-4


@settings(max_examples=examples(15))
@given(st.data())
def test_failures_at_any_time_change_no_bit_of_the_others(data: st.DataObject) -> None:
    torch.set_num_threads(1)
    kinds = data.draw(st.lists(st.integers(0, len(KINDS) - 1), min_size=2, max_size=4))
    inside = [Watched(kind, seed) for seed, kind in enumerate(kinds)]
    together = Pack(torch.device("cpu"), mode="loop")
    together.join(*(one.member for one in inside))
    for _ in range(data.draw(st.integers(0, 12))):
        together.step()
    victim = inside[data.draw(st.integers(0, len(inside) - 1))]
    victim.member.parts.loss = lambda model, batch: 1 / 0
    with pytest.raises(Failed) as error:
        for _ in range(10):
            together.step()
    assert [member for member, _ in error.value.errors] == [victim.member]
    together.leave(victim.member)
    inside.remove(victim)
    for _ in range(data.draw(st.integers(0, 12))):
        together.step()
    for one in inside:
        one.check()


def test_an_empty_pack_makes_no_step() -> None:
    together = Pack(torch.device("cpu"))
    assert together.step() == ()
    one = Watched(0, 1)
    together.join(one.member)
    together.leave(one.member)
    assert together.step() == ()


def test_members_of_one_architecture_catch_up_with_one_another() -> None:
    """Who has failed to make a step makes it later; from then on all of them go together again."""
    seen: list[int] = []

    def sometimes(model: Any, batch: Any) -> Any:
        seen.append(1)
        if len(seen) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return by_sample(model, batch)

    together = Pack(torch.device("cpu"), mode="loop")
    made = [load(training(seed, loss=sometimes)(), name=str(seed), steps=10**6) for seed in range(3)]
    together.join(*made)
    together.step()
    with pytest.raises(Exception, match="out of memory"):
        together.step()
    assert [member.session.step for member in made] == [2, 1, 1]
    together.step()
    assert [member.session.step for member in made] == [2, 2, 2]
    assert len(together.step()) == 3
    assert len(together.groups) == 1
