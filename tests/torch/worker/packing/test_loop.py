"""In a loop, every member of a pack is trained to the last bit as it would be alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from packed_trainings import (
    OPTIMIZERS,
    SCHEDULERS,
    Augmented,
    Build,
    Recurrent,
    Residual,
    Words,
    as_dict,
    by_mean,
    cnn,
    dropping,
    from_dict,
    frozen,
    go,
    mlp,
    normed,
    one_thread,
    packed,
    same,
    separate,
    squared,
    state_of,
    torch,
    train,
    training,
    with_noise,
)

from hpcsched.worker.packed import free, load, pack
from hpcsched.worker.packing.member import WATCHED_EVERY

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]

STEPS = 12


def check(*builds: Build, mode: str = "loop", steps: int = STEPS) -> None:
    got = train(builds, steps, mode)
    assert [same(one, separate(build, steps)) for one, build in zip(got, builds, strict=True)] == [
        True for _ in builds
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_any_optimizer(optimizer: str) -> None:
    check(*(training(seed, optimizer=optimizer) for seed in range(3)))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_with_any_schedule(scheduler: str, optimizer: str) -> None:
    check(*(training(seed, optimizer=optimizer, scheduler=scheduler) for seed in range(2)))


@pytest.mark.parametrize("net", [normed, dropping, cnn, Residual, Recurrent, frozen])
def test_with_any_network(net: Any) -> None:
    check(*(training(seed, net=net) for seed in range(3)))


def test_with_weights_that_are_tied() -> None:
    check(*(training(seed, net=Words) for seed in range(2)))


def test_with_losses_that_are_means_or_by_sample() -> None:
    check(training(1, loss=by_mean), training(2), training(3, loss=squared))


def test_with_batches_of_several_sizes() -> None:
    check(training(1, batch=8), training(2, batch=12), training(3, batch=8), training(4, batch=5, net=normed))


def test_all_at_once_and_in_turns() -> None:
    builds = [
        training(1, net=dropping),
        training(2, net=dropping, optimizer="adam", scheduler="cycle"),
        training(3, net=cnn, optimizer="rmsprop"),
        training(4, net=normed, batch=12, data=lambda: tensors_of(1)),
        training(5, data=Augmented, collate=with_noise),
        training(6, data=Augmented, collate=with_noise, batch=7, net=dropping),
    ]
    check(*builds)


def tensors_of(seed: int) -> Any:
    from packed_trainings import tensors

    return tensors(seed)


@pytest.mark.parametrize("batches", [(8, 8), (8, 12)])
def test_with_samples_that_are_drawn_and_a_collate_function(batches: tuple[int, int]) -> None:
    check(*(
        training(seed, data=Augmented, collate=with_noise, batch=batch, net=dropping)
        for seed, batch in enumerate(batches)
    ))  # fmt: skip


def test_with_batches_of_dicts_and_named_tuples() -> None:
    check(*(training(seed, data=Augmented, collate=as_dict, loss=from_dict) for seed in range(2)))


@pytest.mark.slow
def test_with_processes_that_read_ahead() -> None:
    check(*(training(seed, data=Augmented, collate=with_noise, loaders=1) for seed in range(2)), steps=5)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_checkpoint_goes_on_elsewhere_with_the_same_random_numbers(after: int) -> None:
    build = training(1, net=dropping, data=Augmented, scheduler="steps")
    together, (first, _) = packed(build, training(2), mode="loop")
    go(together, after)
    saved = copy.deepcopy(free(first, together))
    torch.manual_seed(123)
    again = load(build(), checkpoint=saved, steps=STEPS)
    go(pack([again]), STEPS)
    assert same(state_of(again), separate(build, STEPS))


def test_in_an_order_of_its_own_each() -> None:
    check(training(1, order=1), training(2, order=2), training(3, order=1))


def test_without_momentum_at_first_and_with_parameters_that_are_not_used() -> None:
    class Unused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.spare = mlp(), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x)

    check(*(training(seed, net=Unused, optimizer="adamw") for seed in range(2)), mode="auto")


# -- what members do to one another: nothing --------------------------------------------------------------


def test_one_that_writes_into_its_batch_does_not_spoil_it_for_the_others() -> None:
    def scaling(model: Any, batch: Any) -> Any:
        batch[0].mul_(0.5)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    check(training(1), training(2, loss=scaling), training(3), training(4, loss=scaling, batch=12))
    check(training(2, loss=scaling), training(1), training(3))


def test_one_that_begins_to_write_into_its_batch_later_does_not_either() -> None:
    def late(model: Any, batch: Any) -> Any:
        model.calls = getattr(model, "calls", 0) + 1
        if model.calls > 6:
            batch[0].add_(1.0)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    check(training(1), training(2, loss=late), training(3), training(4))
    check(training(2, loss=late), training(1), training(3))


@pytest.mark.parametrize("mode", ["loop", "auto"])
def test_one_that_begins_to_draw_later_draws_its_own_numbers(mode: str) -> None:
    class Late(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.dropout, self.calls = mlp(), torch.nn.Dropout(0.0), 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            self.dropout.p = 0.5 if self.calls > 7 else 0.0
            return self.body(self.dropout(x) if self.calls > 5 else x)

    check(training(1, net=dropping), training(2, net=Late), training(3, net=Late), mode=mode)


def test_one_that_begins_to_draw_elsewhere_is_found_out() -> None:
    import random

    def late(model: Any, batch: Any) -> Any:
        model.calls = getattr(model, "calls", 0) + 1
        factor = random.random() if model.calls > 6 else 1.0
        return factor * torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    together, (first, second) = packed(training(1, loss=late), training(2, net=dropping), mode="loop")
    while second.session.step < WATCHED_EVERY + 2:
        together.step()
    assert first.draws == {"python"}
    assert second.draws == {"torch"}
    assert same(state_of(second), separate(training(2, net=dropping), second.session.step))


def test_the_process_s_own_generators_stay_where_they_are() -> None:
    together, _ = packed(training(1, net=dropping), training(2, data=Augmented, net=dropping), mode="loop")
    torch.manual_seed(99)
    for _ in range(6):
        together.step()
    drawn = torch.rand(3)
    torch.manual_seed(99)
    assert torch.equal(drawn, torch.rand(3))
