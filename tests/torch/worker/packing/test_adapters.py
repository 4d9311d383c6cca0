"""Adapters on one frozen model, computed as one: each as it is alone, whatever its rank, batch and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_trainings import (
    Lora,
    adapter,
    members,
    next_words,
    peft,
    trained,
)
from packed_trainings import one_thread

from hpcsched.errors import ConfigError
from hpcsched.worker.packed import free, load, pack
from hpcsched.worker.packing.adapters.mode import AdaptersMode
from hpcsched.worker.packing.adapters.saving import write_adapter
from hpcsched.worker.packing.engine import Pack
from hpcsched.worker.packing.failures import Failed
from hpcsched.worker.packing.member import Member
from hpcsched.worker.session.trainer import Parts

pytestmark = pytest.mark.torch
__all__ = ["one_thread", "peft"]

Build = Callable[[], Parts]
STEPS, CLOSE = 12, 1e-6


def alone(build: Build, steps: int = STEPS) -> Member:
    (member,) = members(build)
    together = pack([member], mode="loop")
    for _ in range(steps):
        together.step()
    return member


def go(together: Pack, made: Sequence[Member], steps: int = STEPS) -> None:
    while min(member.session.step for member in made) < steps:
        together.step()
    together.settle()


def far(one: Member, other: Member) -> float:
    mine, theirs = trained(one), trained(other)
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def check(*builds: Build, close: float = CLOSE) -> list[Member]:
    made = members(*builds)
    together = pack(made, mode="adapters")
    go(together, made)
    assert [(group.mode, len(group.members)) for group in together.groups] == [("adapters", len(builds))]
    for build, member in zip(builds, made, strict=True):
        one = alone(build)
        assert member.session.step == STEPS
        assert far(one, member) <= close
        assert torch.equal(one.generators["torch"], member.generators["torch"])
        assert member.session.last_loss() == pytest.approx(one.session.last_loss(), rel=1e-5)
    return made


def test_ranks_scales_rates_and_batches_of_their_own() -> None:
    check(
        adapter(1, rank=2, alpha=4, batch=4),
        adapter(2, rank=8, alpha=32, batch=6, lr=1e-3),
        adapter(3, rank=5, batch=3, optimizer=torch.optim.SGD),
    )


def test_sentences_of_unequal_lengths_are_filled_up() -> None:
    made = check(adapter(1, lengths=(3, 6)), adapter(2, lengths=(8, 14), batch=2), adapter(3, lengths=(5, 5)))
    together = pack(made, mode="adapters")
    go(together, made, STEPS + 4)
    runner = together.groups[0].runner
    assert isinstance(runner, AdaptersMode)
    assert 0.2 < runner.padding < 0.8


def test_a_model_that_looks_ahead_is_given_a_mask() -> None:
    def no_mask(model: Any, batch: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch["input_ids"]).mean((1, 2))
        return found

    check(adapter(1, lengths=(3, 3), loss=no_mask), adapter(2, lengths=(9, 9), loss=no_mask))


@pytest.mark.parametrize("where", [{"drop": 0.2}, {"dropout": 0.3}, {"drop": 0.1, "dropout": 0.2}], ids=str)
def test_random_numbers_are_each_ones_own(where: dict[str, float]) -> None:
    check(adapter(1, **where), adapter(2, rank=2, batch=5, **where), adapter(3, lengths=(3, 9), **where))


def test_one_that_drops_out_beside_one_that_does_not() -> None:
    check(adapter(1, dropout=0.5), adapter(2, dropout=0.0))


def test_adapters_need_not_be_in_the_same_layers() -> None:
    check(
        adapter(1, targets=("query",)),
        adapter(2, targets=("value", "out")),
        adapter(3, targets=("copy:inner", "query")),
    )
    check(adapter(1, targets=("norm", "query")), adapter(2, targets=("norm", "copy:out"), batch=2))


def test_what_one_trains_and_another_leaves_as_it_is_keeps_them_apart() -> None:
    made = members(adapter(1, targets=("norm", "query")), adapter(2, targets=("query",)))
    together = pack(made, mode="adapters")
    go(together, made)
    assert len(together.groups) == 2


def test_clipping_and_half_precision() -> None:
    check(adapter(1, clip_norm=0.01), adapter(2))
    check(adapter(1, precision="bf16"), adapter(2, precision="bf16"), close=2e-3)


def test_in_a_loop_it_is_the_same_to_the_last_bit() -> None:
    builds = adapter(1, rank=2, drop=0.1), adapter(2, batch=6, drop=0.1)
    made = members(*builds)
    together = pack(made, mode="loop")
    go(together, made)
    while min(member.session.step for member in made) < STEPS:
        together.step()
    assert all(member.session.step >= STEPS for member in made)
    for build, member in zip(builds, made, strict=True):
        assert far(alone(build, member.session.step), member) == 0


def test_layers_that_are_computed_again_in_the_backward_pass() -> None:
    def again(model: Any, batch: Any) -> torch.Tensor:
        for layer in model.base_model.backbone.layers:
            if "again" not in vars(layer):
                own = layer.forward
                layer.again = True
                layer.forward = lambda x, mask, own=own: torch.utils.checkpoint.checkpoint(
                    own, x, mask, use_reentrant=False
                )
        return next_words(model, batch)

    check(adapter(1, loss=again, targets=("value", "out")), adapter(2, loss=again, targets=("out",)))


def test_what_is_frozen_lies_in_memory_once_and_nothing_stays_changed() -> None:
    made = members(adapter(1), adapter(2, rank=8))
    together = pack(made, mode="adapters")
    bases = [member.parts.model.base_model for member in made]
    assert bases[0].backbone.embed.weight.data_ptr() == bases[1].backbone.embed.weight.data_ptr()
    assert bases[0].head.weight.data_ptr() == bases[1].head.weight.data_ptr()
    before = bases[0].backbone.embed.weight.clone()
    go(together, made)
    assert torch.equal(bases[0].backbone.embed.weight, before)
    for member in made:
        assert not [m for m in member.parts.model.modules() if "forward" in vars(m)]


def test_those_on_another_frozen_model_go_by_themselves() -> None:
    made = members(adapter(1), adapter(2, frozen=1), adapter(3), adapter(4, frozen=1))
    together = pack(made, mode="adapters")
    go(together, made)
    assert sorted(len(group.members) for group in together.groups) == [2, 2]


def test_models_that_differ_where_nobody_has_looked_are_not_shared() -> None:
    def odd() -> Parts:
        parts = adapter(2)()
        with torch.no_grad():
            parts.model.base_model.backbone.embed.weight[word, 1] += 1
        return parts

    word = 31
    made = members(adapter(1), odd)
    assert made[0].frozen is not None and made[1].frozen is not None
    if made[0].frozen.key != made[1].frozen.key:  # it was one of those that are looked at
        pytest.fail("choose another element")
    together = pack(made, mode="auto")
    go(together, made)
    assert len(together.groups) == 2
    assert far(alone(odd), made[1]) == 0


def test_one_that_comes_and_one_that_goes() -> None:
    first, second, third = members(adapter(1), adapter(2, rank=8, batch=6), adapter(3, batch=2))
    together = pack([first, second], mode="adapters")
    for _ in range(5):
        together.step()
    checkpoint = free(second, together)
    together.join(third)
    for _ in range(7):
        together.step()
    for build, member, steps in ((adapter(1), first, 12), (adapter(2, rank=8, batch=6), second, 5)):
        assert far(alone(build, steps), member) <= CLOSE
    assert third.session.step == 7
    assert far(alone(adapter(3, batch=2), 7), third) <= CLOSE
    assert not [name for name in checkpoint["model"] if "embed" in name or "base_layer" in name]
    back = load(adapter(2, rank=8, batch=6)(), steps=40, checkpoint=checkpoint)
    alone_again = pack([back], mode="loop")
    for _ in range(7):
        alone_again.step()
    assert far(alone(adapter(2, rank=8, batch=6)), back) <= CLOSE


def test_a_checkpoint_is_not_taken_for_one_of_another_model() -> None:
    checkpoint = alone(adapter(1)).session.state()
    load(adapter(1)(), steps=40, checkpoint=checkpoint)
    with pytest.raises(ConfigError, match="another frozen model"):
        load(adapter(1, frozen=1)(), steps=40, checkpoint=checkpoint)


def test_one_whose_loss_fails_changes_nothing_for_the_others() -> None:
    broken: list[int] = []

    def fails(model: Any, batch: Any) -> torch.Tensor:
        losses = next_words(model, batch)
        if broken:
            raise ValueError("no more")
        return losses

    made = members(adapter(1, drop=0.1), adapter(2, drop=0.1, loss=fails), adapter(3, drop=0.1))
    together = pack(made, mode="adapters")
    go(together, made, 5)
    assert together.groups[0].mode == "adapters"
    broken.append(1)
    with pytest.raises(Failed, match="job 2: no more"):
        go(together, made)
    together.leave(made[1])
    go(together, [made[0], made[2]])
    for member, build in ((made[0], adapter(1, drop=0.1)), (made[2], adapter(3, drop=0.1))):
        assert far(alone(build, member.session.step), member) <= CLOSE


def twice(model: Any, batch: Any) -> torch.Tensor:
    return next_words(model, batch) + next_words(model, batch)


def elsewhere(model: Any, batch: Any) -> torch.Tensor:
    return model.base_model.head(model.base_model.backbone.embed(batch["input_ids"])).mean((1, 2)) + 0 * sum(
        p.sum() for p in model.parameters()
    )


def mixing(model: Any, batch: Any) -> torch.Tensor:
    layer = model.base_model.backbone.layers[0]
    if not isinstance(layer.drop, Mixing):
        layer.drop = Mixing()
    return next_words(model, batch)


class Mixing(torch.nn.Module):
    """Makes of each sample something of all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (twice, "asks the frozen model more than once"),
        (elsewhere, "does not ask the frozen model"),
        (mixing, "do not give what they give by themselves"),
    ],
)
def test_what_cannot_be_is_refused_and_looped(loss: Callable[..., torch.Tensor], why: str) -> None:
    builds = adapter(1, loss=loss), adapter(2, loss=loss, batch=6)
    made = members(*builds)
    with pytest.raises(ConfigError, match=why):
        go(pack(made, mode="adapters"), made)
    made = members(*builds, steps=80)
    together = pack(made)
    go(together, made, 60)
    assert {group.mode for group in together.groups} <= {"loop", "turns"}
    for build, member in zip(builds, made, strict=True):
        assert far(alone(build, member.session.step), member) == 0


def test_models_without_adapters_have_none_in_common() -> None:
    from packed_trainings import training

    made = members(training(1), training(2))
    assert made[0].frozen is None
    with pytest.raises(ConfigError, match="no adapters on the same frozen model"):
        go(pack(made, mode="adapters"), made)


def test_adapters_are_written_for_peft_and_replaced_as_a_whole(tmp_path: Path) -> None:
    parts = adapter(1)()
    folder = tmp_path / "adapter"
    for value in (1.0, 2.0):
        lora = next(module for module in parts.model.modules() if isinstance(module, Lora))
        with torch.no_grad():
            lora.lora_B["default"].weight.fill_(value)
        write_adapter(parts.model, folder)
        saved = torch.load(folder / "adapter_model.pt")
        assert float(saved["base_model.backbone.layers.0.query.lora_B.default.weight"][0, 0]) == value
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


RAN: list[int] = []
"""Here, as losses that change something of their own are looped."""


def counting(model: Any, batch: Any) -> torch.Tensor:
    RAN.append(1)
    if len(RAN) > 40:  # from here on it asks for something else
        batch = {name: tensor.clone() for name, tensor in batch.items()}
    return next_words(model, batch)


def test_a_call_is_foreseen_and_one_that_comes_otherwise_is_made_out_anew() -> None:
    RAN.clear()
    builds = adapter(1, loss=counting, drop=0.1), adapter(2, drop=0.1)
    made = members(*builds, steps=100)
    together = pack(made, mode="adapters")
    go(together, made, 6)
    before = len(RAN)
    go(together, made, 16)
    assert len(RAN) == before + 10
    go(together, made, 60)
    assert len(RAN) > before + 54 + 20
    assert together.groups[0].mode == "adapters"
    for number, member in enumerate(made, 1):
        assert far(alone(adapter(number, drop=0.1), 60), member) <= CLOSE
