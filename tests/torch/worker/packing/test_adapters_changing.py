"""Adapters on one frozen model: what changes after it was found that they can be computed as one, and what
must stay each one's own."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_trainings import PeftModel, adapter, members, next_words, peft, trained
from packed_trainings import one_thread

from hpcsched.compat import zip
from hpcsched.errors import ConfigError
from hpcsched.worker.packed import load, pack
from hpcsched.worker.packing.adapters.rows import Call, Rows
from hpcsched.worker.packing.adapters.saving import write_adapter
from hpcsched.worker.packing.engine import Pack
from hpcsched.worker.packing.failures import Failed, MemberExited
from hpcsched.worker.packing.member import Member
from hpcsched.worker.packing.reference import NotStackable
from hpcsched.worker.session.trainer import Parts

pytestmark = pytest.mark.torch
__all__ = ["one_thread", "peft"]

Build = Callable[[], Parts]
BEGUN, STEPS, CLOSE = 5, 10, 1e-6


def changed(build: Build, change: Callable[[Parts], None]) -> Build:
    def changing() -> Parts:
        parts = build()
        change(parts)
        return parts

    return changing


def go(together: Pack, made: list[Member], steps: int) -> None:
    while min(member.session.step for member in made) < steps:
        together.step()
    together.settle()


def alone(build: Build, steps: int, later: Callable[[Parts], None] = lambda _: None) -> Member:
    (member,) = members(build)
    together = pack([member], mode="loop")
    for step in range(steps):
        if step == BEGUN:
            later(member.parts)
        together.step()
    return member


def begun(*builds: Build) -> tuple[Pack, list[Member]]:
    """In `adapters` for some steps; they loop from where that cannot be any more."""
    made = members(*builds)
    together = pack(made, mode="adapters")
    go(together, made, BEGUN)
    assert [group.mode for group in together.groups] == ["adapters"]
    together.mode = "auto"
    return together, made


def far(one: Member, other: Member) -> float:
    mine, theirs = trained(one), trained(other)
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def layers(parts: Parts) -> Any:
    return parts.model.base_model.backbone.layers  # type: ignore[union-attr]


class Centred(torch.nn.Module):
    """Makes of each word something of all in its row, also of those that are filled up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)


class Average(torch.nn.Module):
    """Keeps something of each step, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean()
        return x


def test_rows_that_become_unequal_are_compared_once_more() -> None:
    def centred(parts: Parts) -> None:
        layers(parts)[0].drop = Centred()

    def longer(parts: Parts) -> None:
        data: Any = parts.dataset
        data.all[:] = [torch.cat((words, words[:3])) for words in data.all]

    builds = changed(adapter(1), centred), changed(adapter(2), centred)
    together, made = begun(*builds)
    longer(made[1].parts)
    go(together, made, STEPS)
    assert {group.mode for group in together.groups} == {"loop"}
    assert far(alone(builds[0], made[0].session.step), made[0]) <= CLOSE
    assert far(alone(builds[1], made[1].session.step, longer), made[1]) <= CLOSE


def test_dropout_that_begins_later_is_noticed() -> None:
    def drop(parts: Parts) -> None:
        layers(parts)[1].attention_drop = 0.5

    together, made = begun(adapter(1), adapter(2))
    for member in made:
        drop(member.parts)
    go(together, made, STEPS)
    assert {group.mode for group in together.groups} == {"loop"}
    for build, member in ((adapter(1), made[0]), (adapter(2), made[1])):
        one = alone(build, member.session.step, drop)
        assert far(one, member) <= CLOSE
        assert torch.equal(one.generators["torch"], member.generators["torch"])


def test_a_loss_that_begins_to_draw_before_it_asks_the_model() -> None:
    drawing: list[int] = []

    def draws(model: Any, batch: Any) -> torch.Tensor:
        weight = torch.rand(()) if drawing else torch.ones(())
        return next_words(model, batch) * weight

    def later(_: Parts) -> None:
        drawing.append(1)

    builds = adapter(1, loss=draws, dropout=0.2), adapter(2, dropout=0.2)
    together, made = begun(*builds)
    drawing.append(1)
    go(together, made, STEPS)
    assert [group.mode for group in together.groups] == ["adapters"]
    for build, member in zip(builds, made, strict=True):
        drawing.clear()
        one = alone(build, member.session.step, later)
        assert far(one, member) <= CLOSE
        assert torch.equal(one.generators["torch"], member.generators["torch"])


def test_one_that_begins_to_write_into_its_batch_changes_nobody_elses() -> None:
    writing: list[int] = []

    def writes(model: Any, batch: Any) -> torch.Tensor:
        losses = next_words(model, batch)
        if writing:
            batch["input_ids"].clamp_(max=5)
        return losses

    builds = adapter(1, loss=writes), adapter(1, rank=2)
    together, made = begun(*builds)
    writing.append(1)
    go(together, made, STEPS)
    for build, member in zip(builds, made, strict=True):
        assert far(alone(build, member.session.step), member) <= CLOSE


@pytest.mark.parametrize("before", [True, False])
def test_losses_that_count_their_calls_are_looped(before: bool) -> None:
    def counting() -> Callable[..., torch.Tensor]:
        calls: list[int] = []

        def loss(model: Any, batch: Any) -> torch.Tensor:
            if before:
                calls.append(1)
            losses = next_words(model, batch) * (1 + len(calls))
            if not before:
                calls.append(1)
            return losses

        return loss

    made = members(adapter(1, loss=counting()), adapter(2, loss=counting()))
    with pytest.raises(ConfigError, match="changes attributes of its own"):
        go(pack(made, mode="adapters"), made, STEPS)


def test_a_weight_that_gets_no_gradient_alone_gets_none_as_one() -> None:
    def early(model: Any, batch: Any) -> torch.Tensor:
        found = model.base_model.backbone(batch["input_ids"], attention_mask=batch["attention_mask"])
        return found["first"].pow(2).mean((1, 2))  # type: ignore[no-any-return]

    made = members(adapter(1, loss=early), adapter(2))
    with pytest.raises(ConfigError, match="other parameters have a gradient"):
        go(pack(made, mode="adapters"), made, STEPS)


def test_an_optimizer_without_room_leaves_the_random_numbers_of_all_as_they_were() -> None:
    full: list[int] = []

    class Full(torch.optim.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            if full:
                raise torch.OutOfMemoryError("no room")
            return super().step(*args, **kwargs)

    builds = [adapter(n, dropout=0.2, optimizer=Full if n == 2 else torch.optim.AdamW) for n in (1, 2, 3)]
    together, made = begun(*builds)
    together.groups[0].careful = 1
    full.append(1)
    together.step()
    assert [member.session.step for member in made] == [BEGUN + 1, BEGUN, BEGUN]
    full.clear()
    go(together, made, STEPS)
    for build, member in zip([adapter(n, dropout=0.2) for n in (1, 2, 3)], made, strict=True):
        one = alone(build, member.session.step)
        assert far(one, member) <= CLOSE
        assert torch.equal(one.generators["torch"], member.generators["torch"])


def test_one_that_exits_before_it_asks_the_model_ends_nobody_else() -> None:
    over: list[int] = []

    def exits(model: Any, batch: Any) -> torch.Tensor:
        if over:
            raise SystemExit(3)
        return next_words(model, batch)

    together, made = begun(adapter(1), adapter(2, loss=exits))
    over.append(1)
    with pytest.raises(Failed) as failed:
        go(together, made, STEPS)
    ((who, error),) = failed.value.errors
    assert who is made[1]
    assert isinstance(error, MemberExited)


def test_a_step_leaves_nothing_for_the_garbage_collector() -> None:
    together, _ = begun(adapter(1), adapter(2))
    together.step()
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        for _ in range(3):
            together.step()
        assert sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()) == before
    finally:
        gc.enable()


def test_buffers_are_each_ones_own_and_are_saved() -> None:
    def averages(parts: Parts) -> None:
        layers(parts)[0].drop = Average()

    builds = changed(adapter(1), averages), changed(adapter(2), averages)
    made = members(*builds)
    together = pack(made, mode="loop")
    go(together, made, STEPS)
    for build, member in zip(builds, made, strict=True):
        one = alone(build, member.session.step)
        assert torch.equal(layers(one.parts)[0].drop.seen, layers(member.parts)[0].drop.seen)
        back = load(build(), steps=40, checkpoint=member.session.state())
        assert torch.equal(layers(back.parts)[0].drop.seen, layers(member.parts)[0].drop.seen)


def test_an_adapter_that_is_merged_into_the_frozen_model_changes_nobody_elses() -> None:
    made = members(adapter(1), adapter(2))
    together = pack(made, mode="loop")
    go(together, made, STEPS)
    before = layers(made[0].parts)[0].query.base_layer.weight.clone()

    def merged(model: Any) -> dict[str, float]:
        for layer in model.base_model.backbone.layers:
            layer.query.merge()
        return {
            "far": float((model.base_model.backbone.layers[0].query.base_layer.weight - before).abs().max())
        }

    made[1].parts.evaluate = merged
    assert made[1].evaluate()["far"] > 0
    assert torch.equal(layers(made[0].parts)[0].query.base_layer.weight, before)
    again = pickle.loads(pickle.dumps(layers(made[0].parts)[0].query))
    copied = copy.deepcopy(again)
    copied.merge()
    assert torch.equal(again.base_layer.weight, before)
    assert not torch.equal(copied.base_layer.weight, before)


def test_what_is_neither_trained_now_nor_of_the_frozen_model_is_saved() -> None:
    def other(parts: Parts) -> None:
        lora = layers(parts)[0].query
        lora.second = torch.nn.Linear(2, 2).requires_grad_(False)

    member = alone(changed(adapter(1), other), 3)
    with torch.no_grad():
        layers(member.parts)[0].query.second.weight.fill_(7)
    back = load(changed(adapter(1), other)(), steps=40, checkpoint=member.session.state())
    assert float(layers(back.parts)[0].query.second.weight[0, 0]) == 7


@pytest.mark.parametrize("where", ["config", "attribute"])
def test_models_that_compute_otherwise_with_the_same_weights_are_kept_apart(where: str) -> None:
    def windowed(size: int) -> Callable[[Parts], None]:
        def change(parts: Parts) -> None:
            backbone: Any = parts.model.base_model.backbone  # type: ignore[union-attr]
            if where == "config":
                backbone.config = SimpleNamespace(window=size, id2label={0: str(size)})
            else:
                layers(parts)[0].window = size

        return change

    one, two, like_one = members(
        changed(adapter(1), windowed(4)), changed(adapter(2), windowed(8)), changed(adapter(3), windowed(4))
    )
    assert one.frozen is not None and two.frozen is not None and like_one.frozen is not None
    assert one.frozen.key != two.frozen.key
    assert one.frozen.key == like_one.frozen.key


def test_sequences_of_a_length_of_their_own_are_refused() -> None:
    takes = inspect.signature(lambda input_ids, decoder_input_ids: None)

    def call(words: int, others: int) -> Call:
        shapes = {"input_ids": (2, words), "decoder_input_ids": (2, others)}
        return Call({name: torch.ones(s, dtype=torch.long) for name, s in shapes.items()}, None, True)

    rows = Rows((2, 2), (3, 5))
    assert rows.join([call(3, 2), call(5, 2)], takes)["decoder_input_ids"].shape == (4, 2)
    for own in ((4, 2), (5, 5)):
        with pytest.raises(NotStackable, match="length of its own"):
            rows.join([call(3, own[0]), call(5, own[1])], takes)
    with pytest.raises(NotStackable, match="cannot be told apart"):
        rows.split(torch.zeros(4, 5))


def test_half_an_adapter_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, folder: str, **_: Any) -> None:
        Path(folder).mkdir()
        (Path(folder) / "part").write_bytes(b"0")
        raise OSError(28, "No space left on device")

    write_adapter(adapter(1)().model, tmp_path / "adapter")
    monkeypatch.setattr(PeftModel, "save_pretrained", full)
    write_adapter(adapter(1)().model, tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
