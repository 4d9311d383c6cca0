"""What ordinary trainings do besides computing: in any mode each gets what it gets alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packed_trainings import (
    Build,
    Words,
    by_sample,
    go,
    mlp,
    one_thread,
    packed,
    same,
    separate,
    state_of,
    tensors,
    torch,
    train,
    training,
)
from torch import nn
from torch.nn.functional import cross_entropy, huber_loss

from hpcsched.errors import ConfigError
from hpcsched.worker.packed import Failed
from hpcsched.worker.packing import rng_hooks
from hpcsched.worker.packing.failures import MemberExited
from hpcsched.worker.packing.stacked_optimizers import NotTogether, Row, update_for
from hpcsched.worker.session.trainer import Parts

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


def each_as_alone(builds: list[Build], mode: str, steps: int = 60) -> None:
    """To the last bit: these loop, whatever is tried with them."""
    for got, build in zip(train(builds, steps, mode), builds, strict=True):
        assert same(got, separate(build, steps))


class Samples:
    """In a module of its own name: so two of them can be seen to be the same."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in tensors())


def test_who_changes_the_batch_as_such_changes_it_for_himself() -> None:
    def as_dict(samples: list[Any]) -> Any:
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def popping(model: nn.Module, batch: Any) -> torch.Tensor:
        y, batch["x"] = batch.pop("y"), batch["x"] * 1.1
        return cross_entropy(model(batch["x"]), y, reduction="none")

    builds = [training(seed, data=Samples, collate=as_dict, loss=popping) for seed in range(3)]
    for got, build in zip(train(builds, 12, "loop"), builds, strict=True):
        assert same(got, separate(build, 12))


# -- what models are told apart by ---------------------------------------------------------------------------


class Huber:
    """A trainer whose loss is a method, with a number of its own."""

    def __init__(self, delta: float) -> None:
        self.delta, self.args = delta, {"lr": delta}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return huber_loss(model(batch[0]), self._target(batch), reduction="none", delta=self.delta).mean(1)

    def _target(self, batch: Any) -> torch.Tensor:
        outliers = torch.where(batch[1][:, None] == 0, 50.0, 1.0)
        return batch[0][:, :4] * outliers


def clamped(model: nn.Module, batch: Any, most: float) -> torch.Tensor:
    return by_sample(model, batch).clamp(max=most)


def configured(config: Any) -> Callable[..., torch.Tensor]:
    return lambda model, batch: by_sample(model, batch).clamp(max=config.most)


@pytest.mark.parametrize(
    "losses",
    [
        [Huber(delta).loss for delta in (0.5, 100.0, 1.0)],
        [partial(clamped, most=most) for most in (5.0, 0.5, 1.0)],
        [configured(SimpleNamespace(most=most)) for most in (5.0, 0.5, 1.0)],
    ],
    ids=["method", "partial", "closure"],
)
def test_losses_with_other_numbers_anywhere_are_other_losses(losses: list[Any]) -> None:
    each_as_alone([training(seed, loss=loss) for seed, loss in enumerate(losses)], "auto", 100)


class Annealed:
    """Its number grows with each step, in a method that only `super()` knows."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        return by_sample(model, batch) * min(1.0, self.calls / 50)


class Scaled(Annealed):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * 2.0


def annealed(trainer: Annealed, model: nn.Module, batch: Any) -> torch.Tensor:
    return Annealed.loss(trainer, model, batch)


class Handing(Annealed):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return annealed(self, model, batch)


@pytest.mark.parametrize("kind", [Annealed, Scaled, Handing])
def test_numbers_that_change_are_found_wherever_a_method_gets_them_from(kind: type[Annealed]) -> None:
    def build(seed: int) -> Build:
        return lambda: training(seed, loss=kind().loss)()

    each_as_alone([build(seed) for seed in range(2)], "auto", 100)


def test_things_that_cannot_be_looked_at_do_no_harm() -> None:
    class Lazy:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("not yet")

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.lazy = mlp(), [Lazy()]
            self.sparse = {"adjacent": torch.eye(3).to_sparse()}
            with torch.inference_mode():
                self.known = [torch.ones(3)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.net(x)
            return result

    for mode in ("loop", "auto"):
        each_as_alone([training(seed, net=Odd) for seed in range(2)], mode)


def test_what_a_loss_does_not_use_of_its_trainer_makes_no_difference() -> None:
    builds = []
    for seed in range(3):
        trainer = Huber(1.0)
        trainer.args = {"lr": seed}
        builds.append(training(seed, loss=trainer.loss))
    together, _ = packed(*builds, mode="stacked")
    assert len(together.groups) == 1


# -- what is not seen in a trace -----------------------------------------------------------------------------


class Limited(nn.Module):
    """Norms that are used without their gradients, and only where they are large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.no_grad():
            size = (h.norm(dim=1, keepdim=True) / 8).clamp(min=1)
        result: torch.Tensor = self.b(torch.tanh(h / size))
        return result


def outlying() -> Any:
    x, y = tensors()
    x[40:44] *= 50
    return x, y


class Counting(nn.Module):
    """Something of its own goes on with each step, in a place that is not looked at when it is saved."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = mlp(), kind
        self.kept: Any = {
            "numpy": lambda: np.random.default_rng(0),
            "torch": lambda: torch.Generator().manual_seed(0),
            "python": lambda: random.Random(0),
            "bank": lambda: deque([0.0], maxlen=4),
            "table": lambda: {"n": 0.0},
            "iterator": lambda: iter(range(10**6)),
        }[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.kept
        if self.kind == "numpy":
            more = float(kept.standard_normal())
        elif self.kind == "torch":
            more = float(torch.rand((), generator=kept))
        elif self.kind == "python":
            more = kept.random()
        elif self.kind == "bank":
            kept.append(kept[-1] + 0.1)
            more = kept[0]
        elif self.kind == "table":
            kept["n"] += 0.1
            more = kept["n"]
        else:
            more = next(kept) / 100
        result: torch.Tensor = self.net(x * (1 + more))
        return result


def test_gradients_that_are_switched_off_in_between_are_not_stacked() -> None:
    builds = [training(seed, net=Limited, data=outlying, lr=0.01) for seed in range(3)]
    each_as_alone(builds, "auto", 100)


@pytest.mark.parametrize("kind", ["numpy", "torch", "python", "bank", "table", "iterator"])
def test_trying_a_mode_changes_nobody(kind: str) -> None:
    each_as_alone([training(seed, net=partial(Counting, kind)) for seed in range(2)], "auto")


@pytest.mark.parametrize("draw", [random.random, np.random.rand, np.random.randn])
@pytest.mark.parametrize("mode", ["loop", "auto"])
def test_a_member_that_begins_to_draw_late_draws_its_own_numbers(draw: Any, mode: str) -> None:
    name, module = draw.__name__, random if draw is random.random else np.random

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.steps = mlp(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            more = float(getattr(module, name)()) if self.steps > 10 else 0.0
            result: torch.Tensor = self.net(x * (1 + more))
            return result

    each_as_alone([training(seed, net=Late) for seed in range(3)], mode, 30)


def test_another_thread_draws_from_what_the_process_has() -> None:
    told: list[int] = []
    rng_hooks.prepare()
    rng_hooks.listen(lambda: told.append(1))
    try:
        other = Thread(target=random.random)
        other.start()
        other.join()
        assert not told
        np.random.rand()
        assert told == [1]
    finally:
        rng_hooks.listen(None)


def test_the_biases_of_attention_s_keys_are_not_stacked_where_they_would_be_enlarged() -> None:
    together, _ = packed(*(training(seed, net=Words, optimizer="adam") for seed in range(2)), mode="stacked")
    with pytest.raises(ConfigError, match="in_proj_bias is rounding errors"):
        go(together, 20)


def test_half_precision_is_left_to_the_optimizers_of_their_own() -> None:
    optimizers, slices = [], []
    for rate in (0.1, 0.0300001):
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizers.append(torch.optim.SGD([parameter], lr=rate))
        slices.append([parameter])
    with pytest.raises(NotTogether, match="half precision"):
        update_for(Row(slices[0], 2), optimizers, slices)


# -- what happens between two steps --------------------------------------------------------------------------


class Between:
    """A scheduler of one's own, which may do anything."""

    def __init__(self, parts: Parts, act: Callable[[Parts, int], object]) -> None:
        self.parts, self.act, self.steps = parts, act, 0

    def step(self) -> None:
        self.steps += 1
        self.act(self.parts, self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def clamp(parts: Parts, step: int) -> None:
    for p in parts.model.parameters():
        p.data = p.data.clamp(-0.2, 0.2)


def freeze(parts: Parts, step: int) -> None:
    if step == 20:
        parts.model[0].weight.requires_grad_(False)


def forget(parts: Parts, step: int) -> None:
    if step == 20:
        parts.optimizer.state.clear()


@pytest.mark.parametrize("act", [clamp, freeze, forget])
def test_whoever_does_something_between_steps_is_not_stacked(act: Any) -> None:
    def build(seed: int) -> Build:
        def made() -> Parts:
            parts = training(seed)()
            parts.scheduler = Between(parts, act)
            return parts

        return made

    each_as_alone([build(seed) for seed in range(2)], "auto")


def test_whoever_switches_gradients_off_for_good_does_so_for_himself() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = by_sample(model, batch)
        torch.set_grad_enabled(False)
        return losses

    builds = [training(0), training(1), training(2, loss=loss)]
    together, made = packed(*builds, mode="loop")
    with pytest.raises(Failed, match=r"m2.*does not require grad"):
        for _ in range(9):
            together.step()
    assert torch.is_grad_enabled()
    together.leave(made[2])
    go(together, 20)
    for number in (0, 1):
        assert same(state_of(made[number]), separate(builds[number], made[number].session.step))


# -- leaving -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["data", "loss"])
def test_exit_is_the_end_of_whose_code_calls_it(where: str) -> None:
    class Ending:
        def __init__(self) -> None:
            self.reads = 0

        def __len__(self) -> int:
            return 96

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            if where == "data" and self.reads > 60:
                raise SystemExit(5)
            return tuple(tensor[index] for tensor in tensors())

    calls = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if where == "loss" and len(calls) > 7:
            raise SystemExit(5)
        return by_sample(model, batch)

    together, made = packed(training(0), training(1, data=Ending, loss=loss), mode="loop")
    with pytest.raises(Failed) as failed:
        for _ in range(40):
            together.step()
    ((member, error),) = failed.value.errors
    assert member is made[1]
    assert isinstance(error, MemberExited)
    assert error.end.code == 5
