"""The samples of a pack are read once for all who want them, and are what each would read alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from packed_trainings import (
    Augmented,
    Build,
    as_dict,
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
    with_noise,
)

from hpcsched.worker.packed import load
from hpcsched.worker.packing.batches import mapped, private, tensors_in, writes_in
from hpcsched.worker.packing.compatibility import Memory, architecture
from hpcsched.worker.packing.data_feed import same_data
from hpcsched.worker.session.trainer import Parts

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


class Counted(Augmented):
    """Says how often its samples were asked for."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        type(self).asked += 1
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    Counted.asked = 0


def parts(**options: Any) -> Parts:
    return training(1, **options)()


def scaled(by: Any) -> Any:
    def collate(samples: Any) -> Any:
        x, y = with_noise(samples)
        return x * by, y

    return collate


def test_samples_are_read_once_for_all() -> None:
    together, made = packed(*(training(seed, data=Counted) for seed in range(4)), mode="loop")
    go(together, 6)
    assert Counted.asked == 6 * 8
    assert len({id(member.parts.dataset) for member in made}) == 1


def test_samples_are_read_once_for_batches_of_several_sizes() -> None:
    together, made = packed(*(training(1, data=Counted, batch=batch) for batch in (8, 12, 24)), mode="loop")
    while made[0].clock < 48 or len({member.clock for member in made}) > 1:
        together.step()
    assert [member.session.step for member in made] == [6, 4, 2]
    assert Counted.asked == 48


def test_who_is_furthest_behind_goes_next_so_all_end_an_epoch_together() -> None:
    together, made = packed(training(1, batch=8), training(2, batch=12), training(3, batch=32), mode="loop")
    farthest = 0.0
    while made[0].session.samples < 96:
        together.step()
        samples = [member.session.samples for member in made]
        farthest = max(farthest, max(samples) - min(samples))
    go(together, 3)
    assert [member.session.samples for member in made] == [96, 96, 96]
    assert farthest <= 32


def test_no_more_is_kept_than_somebody_will_come_to() -> None:
    together, made = packed(*(training(s, data=Augmented, batch=batch) for s, batch in enumerate((4, 6))))
    go(together, 60)
    feed = together.groups[0].feeds[0]
    assert len(feed._batches) <= 3
    assert len(feed._samples) <= 3 * 6
    assert min(feed._samples) >= min(member.session.samples for member in made) - 3 * 6


def test_one_who_joins_later_reads_at_its_own_place_and_shares_with_those_who_are_there() -> None:
    together, (first,) = packed(training(1, data=Counted), mode="loop")
    go(together, 5)
    second, third = members(training(2, data=Counted), training(3, data=Counted))
    together.join(second)
    together.join(third)
    feeds = {id(feed): len(feed.readers) for group in together.groups for feed in group.feeds}
    assert sorted(feeds.values()) == [1, 2]
    Counted.asked = 0
    go(together, 4)
    assert Counted.asked == 2 * 4 * 8
    for member, seed in ((first, 1), (second, 2), (third, 3)):
        assert same(state_of(member), separate(training(seed, data=Augmented), member.session.step))


def test_a_feed_goes_on_when_others_of_its_readers_leave() -> None:
    together, made = packed(*(training(seed, data=Counted) for seed in range(3)), mode="loop")
    go(together, 4)
    feed = together.groups[0].feeds[0]
    together.leave(made[0])
    assert together.groups[0].feeds[0] is feed
    go(together, 8)
    for member, seed in ((made[1], 1), (made[2], 2)):
        assert same(state_of(member), separate(training(seed, data=Augmented), 8))


def test_a_checkpoint_of_another_order_keeps_its_order() -> None:
    together, (first,) = packed(training(1, order=5), mode="loop")
    go(together, 3)
    state = first.call(first.session.state)
    again = load(training(1, order=0)(), checkpoint=state)
    other, _ = packed(training(2, order=0), mode="loop")
    go(other, 3)  # so that both are at one place, each in its own order
    other.join(again)
    go(other, 9)
    assert same(state_of(again)["model"], separate(training(1, order=5), again.session.step)["model"])


# -- what is the same ----------------------------------------------------------------------------------------


SAME: list[tuple[Build, Build]] = [
    (training(1), training(2)),
    (training(1, batch=8), training(2, batch=12, net=normed)),
    (training(1, data=Augmented), training(2, data=Augmented)),
    (training(1, data=Augmented, collate=with_noise), training(2, data=Augmented, collate=with_noise)),
    (training(1, data=Augmented, collate=scaled(2.0)), training(2, data=Augmented, collate=scaled(2.0))),
    (training(1, data=lambda: tensors(1)), training(2, data=lambda: tensors(1))),
]

DIFFERENT: list[tuple[Build, Build]] = [
    (training(1), training(1, order=1)),
    (training(1), training(1, data=lambda: tensors(3))),
    (training(1), training(1, data=Augmented)),
    (training(1, data=Augmented), training(1, data=lambda: Augmented(2))),
    (training(1, data=Augmented), training(1, data=Augmented, collate=with_noise)),
    (training(1, data=Augmented, collate=as_dict), training(1, data=Augmented, collate=with_noise)),
    (training(1, data=Augmented, collate=scaled(2.0)), training(1, data=Augmented, collate=scaled(3.0))),
    (
        training(1, data=Augmented, collate=scaled(torch.ones(1))),
        training(1, data=Augmented, collate=scaled(torch.ones(1))),
    ),
    (
        training(1, data=Augmented, collate=functools.partial(with_noise)),
        training(1, data=Augmented, collate=functools.partial(with_noise)),
    ),
    (training(1, data=lambda: [*zip(*tensors(), strict=True)]), training(1, data=lambda: [(1.0, 2)] * 96)),
    (training(1), training(1, data=lambda: tuple(t.double() for t in tensors()))),
]


@pytest.mark.parametrize("pair", SAME)
def test_data_of_the_same_content_are_the_same(pair: tuple[Build, Build]) -> None:
    assert same_data(pair[0](), pair[1]())


@pytest.mark.parametrize("pair", DIFFERENT)
def test_what_is_not_the_same_for_certain_is_read_by_itself(pair: tuple[Build, Build]) -> None:
    assert not same_data(pair[0](), pair[1]())


def test_a_name_tells_what_cannot_be_compared() -> None:
    class Local(Augmented):  # cannot be pickled
        pass

    one, other = parts(data=Local), parts(data=Local)
    assert not same_data(one, other)
    one.data = other.data = "noise"
    assert same_data(one, other)
    other.data = "other noise"
    assert not same_data(one, other)
    other.data = None
    assert not same_data(one, other)


def test_large_datasets_are_not_compared_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = parts(data=Augmented), parts(data=Augmented)
    assert same_data(one, other)
    monkeypatch.setattr("hpcsched.worker.packing.data_feed.MOST_BYTES_COMPARED", 100)
    assert not same_data(one, other)
    assert same_data(one, one)


def test_batches_of_any_structure_are_walked_and_copied() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    batch = {"a": [x, ("word", y)], "b": 3, "c": mapped}
    assert [tensor is known for tensor, known in zip(tensors_in(batch), (x, y), strict=True)] == [True, True]
    copy = private(batch)
    assert copy["a"][0] is not x
    assert torch.equal(copy["a"][1][1], y)
    assert copy["a"][1][0] == "word"
    before = writes_in(batch)
    copy["a"][0].add_(1)
    assert writes_in(batch) == before
    y.add_(1)
    assert writes_in(batch) == before + 1


# -- what models have in common, and remember ---------------------------------------------------------------


def test_architectures() -> None:
    def of(build: Build) -> Any:
        made = build()
        return architecture(made.model, made.loss)

    assert of(training(1)) == of(training(2))
    assert of(training(1)) != of(training(1, net=normed))
    assert of(training(1)) != of(training(1, loss=lambda model, batch: model(batch[0]).mean(1)))

    def smoothed(by: float) -> Any:
        return lambda model, batch: torch.nn.functional.cross_entropy(
            model(batch[0]), batch[1], label_smoothing=by, reduction="none"
        )

    assert of(training(1, loss=smoothed(0.1))) == of(training(2, loss=smoothed(0.1)))
    assert of(training(1, loss=smoothed(0.1))) != of(training(2, loss=smoothed(0.2)))

    def frozen() -> Build:
        def build() -> Parts:
            made = training(1)()
            made.model[0].bias.requires_grad_(False)
            return made

        return build

    assert of(training(1)) != of(frozen())


def test_a_memory_notices_what_a_step_leaves_behind() -> None:
    class Holder:
        def __init__(self) -> None:
            self.rows: list[int] = []
            self.table = {"a": torch.zeros(2)}

    holder = Holder()
    model = normed()

    def loss(model: Any, batch: Any) -> Any:
        return holder

    changes: list[Any] = [
        lambda: holder.rows.append(1),
        lambda: holder.table["a"].add_(1),
        lambda: holder.table.update(b=1),
        lambda: setattr(model, "fresh", torch.zeros(1)),
        lambda: setattr(model[0], "scale", 2.0),
        lambda: setattr(holder, "me", holder),
    ]
    for change in changes:
        memory = Memory(model, loss)
        assert not memory.changed()
        change()
        assert memory.changed()
        memory.put_back()
    assert not hasattr(model, "fresh")
    assert not hasattr(model[0], "scale")
    memory = Memory(model, loss)
    model[1](torch.randn(4, 8))  # its statistics are no secret: they are buffers
    assert not memory.changed()
