"""Which way the steps of a pack are made: the fastest one, as measured in steps that are made anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_trainings import (
    cnn,
    dropping,
    go,
    members,
    normed,
    one_thread,
    packed,
    same,
    separate,
    state_of,
    torch,
    training,
)

from hpcsched.errors import ConfigError
from hpcsched.worker.packed import Pack
from hpcsched.worker.packing.group import CAREFUL_STEPS, FIRST_STEPS
from hpcsched.worker.packing.modes import LoopMode, Stacks, TurnsMode, widths
from hpcsched.worker.session.mode_trial import TURN, VISITS, WARM_UP, WORTH, ModeTrial

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


class Hours:
    """A clock that stands still but for what steps of each kind take."""

    def __init__(self, patch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.now, self.seconds, self.made = 0.0, seconds, []  # type: ignore[var-annotated]
        for kind in (LoopMode, Stacks, TurnsMode):
            patch.setattr(kind, "step", self._timed(kind, kind.step))

    def _timed(self, kind: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(runner: Any, *args: Any, **options: Any) -> None:
            name = kind.__name__.removesuffix("Mode").lower()
            if kind is Stacks:
                name += str(len(runner._runners[0][0]))
            ahead = runner.ahead
            inside, self.now = self.now, self.now
            step(runner, *args, **options)
            self.now = inside  # what a stack's parts have added
            if kind is not TurnsMode:
                self.now += self.seconds[name]
            elif runner.ahead <= ahead:
                self.now += TURN * self.seconds[name]
            self.made.append(name)

        return timed

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"loop": 4.0, "stacks4": 1.0, "stacks2": 2.0, "turns": 5.0}, "stacked/4"),
        ({"loop": 4.0, "stacks4": 9.0, "stacks2": 3.5, "turns": 5.0}, "stacked/2"),
        ({"loop": 4.0, "stacks4": 9.0, "stacks2": 8.0, "turns": 3.0}, "turns"),
        ({"loop": 4.0, "stacks4": 3.95, "stacks2": 3.97, "turns": 3.96}, "loop"),
        ({"loop": 4.0, "stacks4": 5.0, "stacks2": 6.0, "turns": 7.0}, "loop"),
    ],
)
def test_the_fastest_is_taken_and_what_is_alike_stays_simple(
    seconds: dict[str, float], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = Hours(monkeypatch, **seconds)
    together, made = packed(*(training(seed) for seed in range(4)), clock=hours)
    while together.groups[0].wanted is None:
        together.step()
    for _ in range(TURN):
        together.step()
    together.settle()
    assert together.groups[0].mode == together.groups[0].wanted == best
    assert len({member.session.step for member in made}) == 1


def test_one_that_is_clearly_better_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = Hours(monkeypatch, loop=4.0, stacks4=1.0, stacks2=2.0, turns=5.0)
    together, _ = packed(*(training(seed) for seed in range(4)), clock=hours)
    for _ in range(60):
        together.step()
    assert set(hours.made) == {"loop", "stacks4"}


def test_what_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = Hours(monkeypatch, loop=4.0, turns=3.0)
    together, made = packed(*(training(seed, net=dropping) for seed in range(3)), clock=hours, steps=50)
    while not all(member.done for member in made):
        together.step()
    assert together.groups[0].mode == "turns"
    assert set(hours.made) == {"loop", "turns"}
    for seed, member in enumerate(made):
        assert same(state_of(member), separate(training(seed, net=dropping), 50))


def test_what_is_known_is_used_for_packs_of_nearly_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {f"stacks{width}": 1.0 + width / 10 for width in range(2, 9)}
    hours = Hours(monkeypatch, loop=40.0, turns=5.0, **seconds)
    together, made = packed(*(training(seed) for seed in range(4)), clock=hours)
    go(together, 40)
    assert together.groups[0].mode == "stacked/4"
    loops = hours.made.count("loop")
    together.leave(made[3])
    together.step()
    assert together.groups[0].mode == "stacked/3"
    assert hours.made.count("loop") == loops
    together.leave(made[2])  # 2 of 4 is another matter
    together.step()
    assert together.groups[0].trial is not None
    more = members(training(7), training(8, net=normed))
    together.join(*more)
    while together.groups[0].wanted is None:
        together.step()
    assert more[1] not in together.groups[0].members


def test_what_was_the_best_but_cannot_be_had_now_is_done_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `auto` nobody hears of it."""
    hours = Hours(monkeypatch, loop=40.0, stacks3=1.0, stacks2=1.5, turns=50.0)
    together, made = packed(*(training(seed) for seed in range(3)), clock=hours)
    go(together, 30)
    assert together.groups[0].mode == "stacked/3"
    more = members(training(9))[0]
    more.writes = True
    together.leave(made[0])
    together.join(more)
    go(together, 10)
    assert together.groups[0].mode == "loop"


def test_a_group_of_one_needs_no_trial() -> None:
    together, (only,) = packed(training(1))
    go(together, 40)
    assert (together.groups[0].mode, together.groups[0].trial) == ("loop", None)
    assert same(state_of(only), separate(training(1), 40))


def test_turns_end_where_a_member_ends_and_when_somebody_comes() -> None:
    builds = [training(1, net=cnn), training(2, net=cnn, optimizer="adam")]
    together, made = packed(*builds, mode="loop", steps=37)
    go(together, 5)
    group = together.groups[0]
    group.runner, group.mode, group.wanted = TurnsMode(group.members), "turns", "turns"
    for _ in range(7):
        together.step()
    assert [member.session.step for member in made] == [5, 5]
    assert group.clock == 12 * 8
    together.join(*members(training(3)))
    assert [member.session.step for member in made] == [12, 12]
    while not all(member.done for member in made):
        together.step()
    for member, build in zip(made, builds, strict=True):
        assert same(state_of(member), separate(build, 37))


def test_names_that_are_no_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="auto, loop, stacked"):
        Pack(torch.device("cpu"), mode="fast")


def test_modes_of_gpus_are_refused_by_name_elsewhere() -> None:
    for mode in ("streams", "graph"):
        together, _ = packed(training(1), training(2), mode=mode)
        with pytest.raises(ConfigError, match="needs a GPU"):
            go(together, 6)


@pytest.mark.parametrize(
    ("members", "expected"), [(2, [2]), (3, [3, 2]), (4, [4, 2]), (5, [5, 3, 2]), (8, [8, 4, 2])]
)
def test_widths_of_stacks(members: int, expected: list[int]) -> None:
    assert widths(members) == expected


@given(
    st.dictionaries(st.sampled_from(["loop", "a", "b", "c"]), st.floats(1e-6, 10), min_size=1),
    st.sets(st.sampled_from(["a", "b", "c"])),
)
def test_a_trial_ends_with_something_that_nothing_known_is_clearly_faster_than(
    seconds: dict[str, float], refused: set[str]
) -> None:
    seconds = {"loop": 1.0, **{name: s for name, s in seconds.items() if name not in refused}}
    trial = ModeTrial(["loop", "a", "b", "c"], refused=dict.fromkeys({"a", "b", "c"} - seconds.keys(), ""))
    steps: Counter[str] = Counter()
    before = ""
    while (name := trial.current) is not None:
        fresh = name != before
        first = steps[name] if not fresh else 0
        trial.took(name, seconds[name] * (50 if fresh or first == 0 else 1))
        steps[name] += 1
        before = name
        assert steps[name] <= VISITS * (WARM_UP + TURN)
    assert trial.best in seconds
    assert trial.times.items() <= seconds.items()
    assert all(seconds[trial.best] <= time / WORTH**3 for time in trial.times.values())
    assert all(count >= WARM_UP + TURN for count in steps.values())


def test_what_is_close_is_measured_again_in_turns() -> None:
    """A machine that was busy for a while does not decide."""
    trial = ModeTrial(["loop", "stacked/2", "turns"])
    order: list[str] = []
    while (name := trial.current) is not None:
        if order[-1:] != [name]:
            order.append(name)
        disturbed = 1.05 if name == "turns" and order.count("turns") == 1 else 1.0
        trial.took(name, {"loop": 1.0, "stacked/2": 3.0, "turns": 0.95}[name] * disturbed)
    assert order == ["loop", "stacked/2", "turns", "loop", "turns", "loop", "turns"]
    assert trial.best == "turns"


def test_first_steps_and_careful_steps_are_so_many() -> None:
    together, _ = packed(training(1), training(2), mode="loop")
    group = together.groups[0]
    assert (group.first, group.careful) == (FIRST_STEPS, CAREFUL_STEPS)
    go(together, 3)
    assert (group.first, group.careful) == (0, 0)
