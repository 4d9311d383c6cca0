"""Which plan a burst training keeps: the fastest of it and its plain alternatives, as measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.planning.burst.costs import Interconnect  # noqa: E402
from hpcsched.planning.burst.graph import LayerProfile, ProfiledLayer  # noqa: E402
from hpcsched.planning.burst.plan import BurstPlan, PlannedLayer  # noqa: E402
from hpcsched.worker.burst import compare  # noqa: E402
from hpcsched.worker.burst.channels import Channels  # noqa: E402
from hpcsched.worker.burst.choose import Chooser  # noqa: E402
from hpcsched.worker.burst.compare import (  # noqa: E402
    ALONE,
    LEAST_LEFT,
    PLANNED,
    SHARE,
    SPREAD,
    VISIT,
    Pace,
    PlanTrial,
)
from hpcsched.worker.burst.engine import Engine  # noqa: E402
from hpcsched.worker.layers.graph import trace  # noqa: E402
from hpcsched.worker.ranks.process_group import Peers  # noqa: E402

CPU = torch.device("cpu")


class Clock:
    """Stands still but for what steps take."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(compare, "time", clock)
    yield clock


def plan(*ranks: tuple[int, ...]) -> BurstPlan:
    layers = tuple(PlannedLayer(id=i, name=str(i), ranks=r) for i, r in enumerate(ranks))
    return BurstPlan(model="m", gpus=2, global_batch=8, layers=layers)


PLANS = {SPREAD: plan((0, 1), (0, 1)), PLANNED: plan((0, 1), (0,)), ALONE: plan((0,), (0,))}


# -- turns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_s", "kept"),
    [
        ({SPREAD: 18.0, PLANNED: 30.0, ALONE: 16.0}, ALONE),
        ({SPREAD: 18.0, PLANNED: 15.0, ALONE: 40.0}, PLANNED),
        ({SPREAD: 18.0, PLANNED: 17.9, ALONE: 17.8}, SPREAD),
    ],
    ids=["one rank", "the plan", "what is alike"],
)
def test_plans_take_turns_and_the_fastest_is_kept(clock: Clock, step_s: dict[str, float], kept: str) -> None:
    runs: list[BurstPlan] = []
    decided: list[str] = []
    trial = PlanTrial(Peers(0, 1, CPU), PLANS, runs.append, lambda trial: decided.append(trial.now))
    names = {id(each): name for name, each in PLANS.items()}
    steps = 0
    while not trial.over:
        trial.between_steps()
        clock.now += step_s[names[id(runs[-1])]]
        steps += 1
    assert decided == [trial.now] == [kept]
    assert runs[-1] is PLANS[kept]
    assert trial.times == pytest.approx(step_s)
    assert steps <= 9 * VISIT + 1


@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_what_happens_between_two_steps_counts_for_none(clock: Clock, every: int) -> None:
    trial = PlanTrial(Peers(0, 1, CPU), PLANS, lambda plan: None, lambda trial: None)
    for step in range(20 * VISIT):
        if trial.over:
            break
        trial.between_steps()
        clock.now += 1.0
        if step % every == every - 1:
            clock.now += 100.0
            trial.disturbed()
    assert trial.over == (every > 1)
    assert set(trial.times.values()) <= {1.0}


# -- once more -----------------------------------------------------------------------------------------


def at_pace(clock: Clock, step_s: float, wait_s: float = 0.0) -> Pace:
    """After steps of so many seconds, where ten were known, and so long a time."""
    pace = Pace()
    pace.decided({SPREAD: 10.0, ALONE: 12.0})
    for _ in range(VISIT + 1):
        pace.passed()
        clock.now += step_s
    clock.now += wait_s
    return pace


def test_plans_are_compared_again_when_steps_take_another_time(clock: Clock) -> None:
    assert not at_pace(clock, 10.0).due(SPREAD, 10**6)
    assert at_pace(clock, 13.0).due(SPREAD, 10**6)
    assert at_pace(clock, 7.0).due(SPREAD, 10**6)
    assert not at_pace(clock, 13.0).due(SPREAD, LEAST_LEFT - 1)
    assert not at_pace(clock, 13.0).due("", 10**6)


def test_plans_are_compared_again_when_that_costs_next_to_nothing(clock: Clock) -> None:
    lost_s = VISIT * 2.0 + 2 * (10.0 + 12.0)
    assert not at_pace(clock, 10.0, 0.8 * lost_s / SHARE - 10 * VISIT).due(SPREAD, 10**6)
    assert at_pace(clock, 10.0, 1.1 * lost_s / SHARE).due(SPREAD, 10**6)


# -- alternatives --------------------------------------------------------------------------------------


def chooser(
    folder: Path, *, gpus: int = 2, amplification: float = math.inf, latency_s: float = 0.0
) -> Chooser:
    times = {4: 600.0, 8: 1000.0}
    layers = tuple(
        ProfiledLayer(
            id=i,
            name=str(i),
            prev=tuple(range(i)),
            parameter_bytes=1000,
            activation_bytes=4,
            forward_us=times,
            backward_us=times,
        )
        for i in range(2)
    )
    profile = LayerProfile(model="m", device="cpu", layers=layers)
    return Chooser(
        folder=folder,
        gpus=gpus,
        global_batch=8,
        network=Interconnect(bandwidth_bytes_s=1e9, latency_s=latency_s),
        amplification=amplification,
        measure=lambda: profile,
        shape=[(layer.name, layer.prev) for layer in layers],
    )


def test_the_plain_alternatives_are_all_ranks_and_one(tmp_path: Path) -> None:
    found = chooser(tmp_path)
    assert {at.ranks for at in found.first().layers} == {(0, 1)}
    assert list(found.alternatives(PLANS[PLANNED])) == [SPREAD, PLANNED, ALONE]
    assert list(found.alternatives(PLANS[SPREAD])) == [SPREAD, ALONE]
    assert list(found.alternatives(PLANS[ALONE])) == [SPREAD, ALONE]


def test_what_limit_or_model_forbid_is_no_alternative(tmp_path: Path) -> None:
    found = chooser(tmp_path, amplification=1.1)
    found.first()
    assert list(found.alternatives(PLANS[PLANNED])) == [PLANNED, ALONE]

    def fits(plan: BurstPlan) -> None:
        if any(len(at.ranks) == 1 for at in plan.layers):
            raise ConfigError(where="plan", got="one", accepted="two")

    found = chooser(tmp_path)
    found.first()
    found.fits = fits
    assert list(found.alternatives(PLANS[SPREAD])) == [SPREAD]


def test_on_one_rank_there_is_nothing_to_compare(tmp_path: Path) -> None:
    found = chooser(tmp_path, gpus=1)
    assert list(found.alternatives(found.first())) == [ALONE]


def test_what_plans_take_is_written_down(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    found = chooser(tmp_path)
    plans = found.alternatives(found.first())
    runs: list[BurstPlan] = []
    trial = PlanTrial(Peers(0, 1, CPU), plans, runs.append, found.decided)
    while not trial.over:
        trial.between_steps()
        clock.now += 0.018 if runs[-1] is plans[SPREAD] else 0.016
    page = json.loads((tmp_path / "plan.json").read_text())
    assert page["kept"] == ALONE
    assert [layer["ranks"] for layer in page["layers"]] == [[0], [0]]
    assert [each["name"] for each in page["compared"]] == [SPREAD, ALONE]
    assert [each["measured_s"] for each in page["compared"]] == pytest.approx([0.018, 0.016])
    assert [each["predicted_s"] for each in page["compared"]] == pytest.approx([0.0024, 0.004], rel=0.01)
    assert "one rank is kept: a step takes data parallel 18 ms, one rank 16 ms" in capsys.readouterr().err
    assert BurstPlan.parse(page, where="plan.json").placement == plans[ALONE].placement


# -- the model itself ----------------------------------------------------------------------------------


class Draws(nn.Module):
    """Dropout as modules, one of them inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.second = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.first(x)))  # type: ignore[no-any-return]


class ByFunction(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.second(self.first(x)), 0.25, self.training)


class Twice(Draws):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.second(self.drop(self.first(x))))  # type: ignore[no-any-return]


class Hidden(Draws):
    """Calls its dropout by a name that is none of its modules'."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [self.drop]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](self.second(self.first(x)))  # type: ignore[no-any-return]


def engine_of(model: nn.Module) -> Engine:
    example = (torch.randn(2, 4),)
    layers = trace(model, example)
    ranks = tuple(PlannedLayer(id=layer.id, name=layer.name, ranks=(0,)) for layer in layers.layers)
    return Engine(
        layers,
        example,
        BurstPlan(model="m", gpus=1, global_batch=8, layers=ranks),
        batch=8,
        seed=3,
        wires=Channels(0, 1, CPU),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


@pytest.mark.parametrize("kind", [Draws, Twice])
def test_the_whole_model_draws_as_its_layers_do(kind: type[Draws]) -> None:
    torch.manual_seed(0)
    model = kind()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    engine = engine_of(model)
    x, results, gradients = torch.randn(8, 4), [], []
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for whole in (False, True):
        model.load_state_dict(state)
        model.zero_grad()
        if whole:
            engine.begin_whole(40)
            assert engine.whole is not None
            result: Any = engine.whole(x)
            result.sum().backward()
        else:
            engine.begin(40)
            result = engine.forward((x,))
            result.sum().backward()
            engine.backward()
        results.append(result.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert torch.equal(*results)
    assert (results[0] == 0).float().mean() > 0.1
    assert all(map(torch.equal, *gradients))
    model.eval()
    engine.begin_whole(40)
    assert (engine.whole(x) != 0).all()  # type: ignore[misc]


@pytest.mark.parametrize("kind", [ByFunction, Hidden])
def test_a_model_whose_dropout_cannot_be_told_apart_is_computed_by_its_layers(kind: type[nn.Module]) -> None:
    before = torch.get_rng_state()
    torch.manual_seed(0)
    engine = engine_of(kind())
    assert engine.whole is None
    torch.set_rng_state(before)
