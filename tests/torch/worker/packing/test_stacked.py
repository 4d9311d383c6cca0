"""Models computed as one: within rounding errors of what each is alone; what cannot be is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from budget import slow
from packed_trainings import (
    OPTIMIZERS,
    Augmented,
    Recurrent,
    Residual,
    Words,
    as_dict,
    by_mean,
    by_sample,
    cnn,
    distance,
    dropping,
    from_dict,
    frozen,
    go,
    members,
    mlp,
    normed,
    one_thread,
    packed,
    same,
    separate,
    squared,
    state_of,
    tensors,
    torch,
    training,
    with_noise,
)
from torch import nn
from torch.nn.functional import cross_entropy

from hpcsched.errors import ConfigError
from hpcsched.examples.models import make
from hpcsched.worker.packed import free, load
from hpcsched.worker.packing import compatibility
from hpcsched.worker.packing.modes import LoopMode, Stacks
from hpcsched.worker.packing.stacking import Stack

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]

STEPS, CLOSE = 30, 1e-6


def stacked(*builds: Any, steps: int = STEPS) -> list[Any]:
    together, made = packed(*builds, mode="stacked", steps=steps)
    while not all(member.done for member in made):
        together.step()
    assert {group.mode for group in together.groups} == {f"stacked/{len(builds)}"}
    together.write_back()
    return made


def check(*builds: Any, steps: int = STEPS, close: float = CLOSE) -> None:
    for member, build in zip(stacked(*builds, steps=steps), builds, strict=True):
        alone = separate(build, steps)
        assert distance(member.parts.model.state_dict(), alone["model"]) <= close
        assert state_of(member)["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert member.session.step == alone["step"]
        assert same(state_of(member)["scheduler"], alone["scheduler"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_any_optimizer(optimizer: str) -> None:
    check(*(training(seed, optimizer=optimizer) for seed in range(3)), close=5e-6)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw", "adagrad"])
@pytest.mark.parametrize("scheduler", ["steps", "cosine", "cycle"])
def test_with_schedules_that_change_rates_momentum_and_betas(scheduler: str, optimizer: str) -> None:
    schedulers = [scheduler, "none", "cycle"]
    builds = (training(s, optimizer=optimizer, scheduler=name) for s, name in enumerate(schedulers))
    check(*builds, close=5e-6)


@pytest.mark.parametrize("net", [normed, cnn, Residual, frozen, Words, lambda: Words(tied=False)])
def test_with_any_network(net: Any) -> None:
    check(*(training(seed, net=net) for seed in range(3)), close=5e-6)


def test_with_means_and_other_losses() -> None:
    check(*(training(seed, loss=by_mean) for seed in range(2)))
    check(*(training(seed, loss=squared, net=normed) for seed in range(2)))


def test_with_samples_that_are_drawn_in_dicts_and_named_tuples() -> None:
    check(*(training(seed, data=Augmented, collate=as_dict, loss=from_dict) for seed in range(2)))


def test_with_data_of_their_own() -> None:
    check(*(training(seed, data=lambda seed=seed: tensors(seed), net=cnn) for seed in range(3)), close=5e-6)
    check(training(1, order=1), training(2, order=2), training(3, order=1))


def test_with_different_settings_of_one_optimizer() -> None:
    def adam(seed: int) -> Any:
        def build() -> Any:
            parts = training(seed, optimizer="adam")()
            group = parts.optimizer.param_groups[0]
            group["betas"], group["weight_decay"] = (0.8 + seed / 20, 0.99 + seed / 1000), seed / 100
            return parts

        return build

    check(*(adam(seed) for seed in range(3)), close=5e-6)


def test_optimizers_that_cannot_be_stepped_as_one_are_stepped_by_themselves() -> None:
    check(training(1, optimizer="adam"), training(2, optimizer="momentum"), training(3, optimizer="rmsprop"))
    check(training(1, optimizer="sgd"), training(2, optimizer="momentum"))
    check(training(1, optimizer="momentum"), training(2, optimizer="nesterov"))

    def one_has_made_more_steps() -> Any:
        first, second = members(training(1, optimizer="adam"), training(2, optimizer="adam"))
        return first, second

    first, second = one_has_made_more_steps()
    together, _ = packed(training(3, optimizer="adam"), mode="loop")
    together.join(first)
    for _ in range(7):
        together.step()
    together.mode = "stacked"
    together.join(second)
    go(together, 20)
    for member, seed in ((first, 1), (second, 2)):
        alone = separate(training(seed, optimizer="adam"), member.session.step)
        assert distance(member.parts.model.state_dict(), alone["model"]) < 5e-6


def test_members_at_other_places_of_the_data_are_stacked_with_inputs_of_their_own() -> None:
    first = load(training(1)(), steps=40)
    alone, _ = packed(training(9), mode="loop")
    alone.join(first)
    for _ in range(10):
        alone.step()
    alone.leave(first)
    together, (second,) = packed(training(2), mode="stacked", steps=30)
    together.join(first)
    while not second.done:
        together.step()
    assert together.groups[0].mode == "stacked/2"
    assert (first.session.step, second.session.step) == (40, 30)
    for member, seed in ((first, 1), (second, 2)):
        alone_state = separate(training(seed), member.session.step)["model"]
        assert distance(member.parts.model.state_dict(), alone_state) < 5e-6


# -- refusals -----------------------------------------------------------------------------------------------


def refusal(*builds: Any, steps: int = 8, close: float = 0.0) -> str:
    """Why these cannot be stacked; in `auto` they are trained all the same, as alone."""
    together, made = packed(*builds, mode="stacked")
    with pytest.raises(ConfigError) as error:
        for _ in range(steps):
            together.step()
    done, made = packed(*builds, mode="auto", steps=40)
    while not all(member.done for member in made):
        done.step()
    for member, build in zip(made, builds, strict=True):
        assert distance(state_of(member)["model"], separate(build, 40)["model"]) <= close
    return error.value.got


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        return y if y.sum() > 0 else 2 * y


class Counting(Deciding):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.body(x) * (1 + self.calls % 3)


class Remembering(Deciding):
    """Keeps a tensor that is no buffer from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        result = y + 0.1 * self.last
        self.last = y.detach().mean(0)
        return result


class Replacing(Deciding):
    """Its buffer is another tensor after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Clamping(Deciding):
    """Writes into its parameters before it uses them."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.body[0].weight.clamp_(-0.05, 0.05)
        return self.body(x)


class Sharing(Deciding):
    """One buffer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.body.register_buffer("seen", self.seen)

    def forward(self, x: torch.Tensor) -> Any:
        self.seen += 1
        return self.body(x) / self.body.seen.sqrt()


class Spare(Deciding):
    """Some of its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (dropping, "draw random numbers"),
        (Deciding, "cannot be traced"),
        (Counting, "changes attributes"),
        (Remembering, "changes attributes"),
        (Replacing, "replaces its buffers"),
        (Clamping, "switches gradients off"),
        (Sharing, "in several places"),
        (Spare, "gets no gradient"),
    ],
)
def test_networks_that_cannot_be_stacked_are_refused_and_are_as_they_were(net: Any, why: str) -> None:
    assert why in refusal(*(training(seed, net=net) for seed in range(2)))


def test_models_of_two_architectures_go_each_with_their_own() -> None:
    together, _ = packed(training(1), training(2, net=normed), training(3), mode="stacked")
    for _ in range(20):
        together.step()
    assert sorted(group.mode for group in together.groups) == ["loop", "stacked/2"]


def test_deep_networks_are_known_to_be_alike() -> None:
    def described() -> tuple[Any, ...]:
        model, _ = make("densenet121", {"width": 0.05, "image": 32})
        return compatibility.architecture(model, cross_entropy)

    assert described() == described()


def test_a_loss_that_changes_what_it_is_made_of_is_refused() -> None:
    class Curriculum:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def __call__(self, model: Any, batch: Any) -> Any:
            self.steps.append(1)
            return by_sample(model, batch) / len(self.steps)

    def build(seed: int) -> Any:
        return lambda: training(seed, loss=Curriculum())()

    together, _ = packed(build(1), build(2), mode="stacked")
    with pytest.raises(ConfigError, match="changes attributes"):
        for _ in range(5):
            together.step()


def test_hooks_on_gradients_are_refused() -> None:
    def hooked() -> nn.Module:
        model = mlp()
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model

    assert "hooks" in refusal(*(training(seed, net=hooked) for seed in range(2)))


def test_a_gradient_of_rounding_errors_is_refused_where_it_is_enlarged() -> None:
    def biased() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    assert "rounding errors" in refusal(*(training(seed, net=biased, optimizer="adam") for seed in range(2)))
    check(*(training(seed, net=biased) for seed in range(2)), close=5e-6)


def test_batches_with_other_things_than_tensors_are_refused() -> None:
    def named(samples: Any) -> Any:
        x, y = with_noise(samples)
        return [x, y, 1.0 + len(samples)]

    def loss(model: Any, batch: Any) -> Any:
        return by_sample(model, batch) * batch[2]

    builds = [training(seed, data=Augmented, collate=named, loss=loss) for seed in range(2)]
    assert "more in a batch than tensors" in refusal(*builds)


def test_batches_of_changing_shapes_are_refused_when_they_change() -> None:
    def ragged(samples: Any) -> Any:
        x, y = with_noise(samples)
        long = 16 + int(float(x[0, 0].abs()) * 100) % 2 * 4
        return nn.functional.pad(x, (0, long - 16)), y

    class Mean(Deciding):
        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x[:, :16]) * (x.sum(1, keepdim=True) / x.shape[1])

    assert "not of one shape" in refusal(
        *(training(seed, net=Mean, data=Augmented, collate=ragged) for seed in range(2)),
        steps=60,
        close=CLOSE,
    )


@pytest.fixture
def losses_look_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody could see that two losses are not the same: then it shows in what they give."""
    real = compatibility.architecture
    monkeypatch.setattr("hpcsched.worker.packing.member.architecture", lambda model, loss: real(model, len))


@pytest.mark.usefixtures("losses_look_alike")
def test_losses_with_other_constants_are_not_taken_for_the_same() -> None:
    def weighted(weights: list[float]) -> Any:
        constant = torch.tensor(weights)

        def loss(model: Any, batch: Any) -> Any:
            return cross_entropy(model(batch[0]), batch[1], weight=constant, reduction="none")

        return loss

    builds = [training(1, loss=weighted([1.0, 2, 3, 4])), training(2, loss=weighted([4.0, 3, 2, 1]))]
    assert "do not give what they give by themselves" in refusal(*builds)
    check(*(training(seed, loss=weighted([1.0, 2, 3, 4])) for seed in range(2)))


@pytest.mark.parametrize("depth", [2, 12])
def test_models_that_enlarge_rounding_errors_are_compared_with_what_they_are_worth(depth: int) -> None:
    """Deep batch norm of few samples: a last digit more here and there comes to 1e-4 in a gradient."""

    def deep() -> nn.Module:
        layers = [
            nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(depth)
        ]
        return nn.Sequential(*layers, nn.Linear(16, 4))

    together, made = packed(*(training(seed, net=deep, batch=5) for seed in range(2)), mode="stacked")
    go(together, 6)
    assert together.groups[0].mode == "stacked/2"
    assert all(member.session.step == 6 for member in made)


@pytest.mark.usefixtures("losses_look_alike")
def test_what_is_wrong_is_not_taken_for_rounding_errors() -> None:
    """A model that is stacked with another one's constants is far from itself, whatever it enlarges."""

    def scaled(by: float) -> Any:
        constant = torch.tensor(by)
        return lambda model, batch: by_sample(model, batch) * constant

    builds = [training(seed, loss=scaled(1 + seed / 100), net=normed) for seed in range(2)]
    assert "do not give what they give by themselves" in refusal(*builds)


def test_a_gru_is_stacked_or_refused() -> None:
    builds = [training(seed, net=Recurrent) for seed in range(2)]
    together, made = packed(*builds, mode="auto", steps=60)
    while not all(member.done for member in made):
        together.step()
    for member, build in zip(made, builds, strict=True):
        assert distance(member.parts.model.state_dict(), separate(build, 60)["model"]) < 5e-6


# -- one model has nothing to do with another ----------------------------------------------------------------


ADAGRAD = [slow(net, "adagrad") for net in (mlp, cnn, Residual)]


@pytest.mark.parametrize("mode", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("net", "optimizer"),
    [(mlp, "momentum"), (Residual, "momentum"), (Words, "momentum"), slow(cnn, "momentum"), *ADAGRAD],
)
def test_numbers_that_are_none_stay_with_whom_they_are(mode: str, net: Any, optimizer: str) -> None:
    """The same pack with and without a member whose loss is not finite: the others do not differ in a bit."""

    def build(seed: int) -> Any:
        return training(seed, net=net, optimizer=optimizer)

    def run(value: float | None) -> list[Any]:
        together, made = packed(*(build(seed) for seed in range(3)), mode=mode)
        go(together, 6)
        if value is not None:
            with torch.no_grad():
                next(iter(made[1].parts.model.parameters())).view(-1)[0] = value
        go(together, 14)
        assert together.groups[0].mode == ("loop" if mode == "loop" else "stacked/3")
        return [state_of(member) for member in (made[0], made[2])]

    untouched = run(None)
    for value in (float("nan"), float("inf")):
        assert same(run(value), untouched)


# -- saving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "rmsprop"])
@pytest.mark.parametrize("net", [mlp, cnn])
def test_checkpoints_of_stacked_members_are_like_those_of_others(net: Any, optimizer: str) -> None:
    builds = [training(seed, net=net, optimizer=optimizer) for seed in range(3)]
    if net is cnn and optimizer != "momentum":
        builds = [training(seed, optimizer=optimizer) for seed in range(3)]
    together, made = packed(*builds, mode="stacked")
    alone, (other,) = packed(builds[0], mode="loop")
    go(together, 15)
    go(alone, 15)
    size = len(pickle.dumps(other.call(other.session.state)))
    inside = made[0].call(made[0].session.state)
    assert len(pickle.dumps(inside)) <= 1.02 * size
    saved = free(made[0], together)
    assert len(pickle.dumps(saved)) <= 1.02 * size
    assert same(saved["model"], inside["model"])
    assert same(saved["optimizer"], inside["optimizer"])
    again = load(builds[0](), checkpoint=saved)
    assert same(state_of(again)["model"], saved["model"])
    resumed, _ = packed(builds[1], mode="loop")
    resumed.join(again)
    go(resumed, 15)
    go(together, 30)
    while again.session.step < 30:
        resumed.step()
    for member, build in ((again, builds[0]), (made[1], builds[1]), (made[2], builds[2])):
        assert distance(state_of(member)["model"], separate(build, member.session.step)["model"]) < 5e-6


def test_a_pack_of_one_left_over_goes_by_itself_and_keeps_no_memory_of_others() -> None:
    together, made = packed(*(training(seed) for seed in range(3)), mode="stacked")
    go(together, 8)
    together.leave(made[0], made[1])
    together.step()
    weight = made[2].parts.model[0].weight
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    moved = made[2].parts.optimizer.state[weight]["momentum_buffer"]
    assert moved.untyped_storage().nbytes() == moved.numel() * moved.element_size()


def test_an_odd_one_beside_stacks_of_two_goes_by_itself() -> None:
    made = members(*(training(seed) for seed in range(3)))
    together, _ = packed(training(5), mode="loop")
    together.join(*made)
    go(together, 4)
    together.leave(*made)
    batches = [tuple(t[:8] for t in tensors())] * 3
    runner = Stacks(made, 2, batches, {})
    before = [member.session.step for member in made]
    runner.step(batches)
    runner.apart()
    assert [member.session.step for member in made] == [step + 1 for step in before]
    assert [type(one) for _, one in runner._runners] == [Stack, LoopMode]
