"""Models in chunks, lanes on the CPU, and random numbers that are kept apart."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from hpcsched.planning.background.pacing import Pacer  # noqa: E402
from hpcsched.planning.background.referee import Referee  # noqa: E402
from hpcsched.worker.background.chunks import LOSS, WHOLE, Chunked, chunked_loss, segments_of  # noqa: E402
from hpcsched.worker.background.lane import StreamLane  # noqa: E402
from hpcsched.worker.background.rng_isolation import (  # noqa: E402
    Generators,
    NotHostable,
    divert_generators,
    draw_from,
    process_settings,
    put_back,
)
from hpcsched.worker.background.timing import StepTimer  # noqa: E402
from hpcsched.worker.packing import rng_hooks  # noqa: E402
from hpcsched.worker.process import rng  # noqa: E402
from hpcsched.worker.session.trainer import Parts  # noqa: E402

CPU = torch.device("cpu")


class Skipping(nn.Module):
    """Branches, a value that skips over several layers, in-place activations, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.left = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True))
        self.right = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.3), nn.Conv2d(4, 4, 1))
        self.last = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 3))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return self.last(self.left(x) + self.right(x) + x)


class Shouting(StreamLane):
    """A lane that notes the pieces that go through it."""

    def __init__(self) -> None:
        super().__init__(Referee(Pacer(1)))
        self.heard: list[object] = []

    def piece(self, key: object) -> None:
        self.heard.append(key)
        super().piece(key)


def step(call: Callable[[Any], Any], model: Any, x: Any) -> list[Any]:
    torch.manual_seed(1)
    model.zero_grad()
    loss: Any = F.cross_entropy(call(x), torch.arange(len(x)) % 3)
    loss.backward()
    return [
        loss.detach(),
        *(p.grad.clone() for p in model.parameters()),
        *(b.clone() for b in model.buffers()),
    ]


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_a_model_in_chunks_computes_the_same_to_the_last_bit(most: int) -> None:
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(4, 2, 6, 6)
    other = copy.deepcopy(model)
    lane = Shouting()
    chunked = Chunked(other, (x,), lane, most=most)
    for _ in range(2):
        for a, b in zip(step(model, model, x), step(chunked, other, x), strict=True):
            assert torch.equal(a, b)
    assert chunked.chunks <= most
    assert chunked.training  # everything but the call is the model's


def test_a_step_goes_through_the_gates_of_its_chunks_forwards_and_then_backwards() -> None:
    model, x = Skipping(), torch.randn(4, 2, 6, 6)
    lane = Shouting()
    chunked = Chunked(model, (x,), lane, most=3)
    step(chunked, model, x)
    forward = [("forward", index) for index in range(chunked.chunks)]
    backward = [("backward", index) for index in reversed(range(chunked.chunks))]
    assert chunked.chunks == 3
    assert lane.heard == [*forward, LOSS, *backward]


def test_without_gradients_there_are_no_gates_backwards() -> None:
    model, x = Skipping(), torch.randn(4, 2, 6, 6)
    lane = Shouting()
    with torch.no_grad():
        Chunked(model, (x,), lane, most=2)(x)
    assert lane.heard == [("forward", 0), ("forward", 1), LOSS]


def test_chunks_hold_about_as_many_layers_each_and_nothing_twice() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    segments = segments_of(model, (torch.ones(2, 4),), 4)
    assert [len(segment.layers) for segment in segments] == [2, 3, 2, 3]
    assert [layer.id for segment in segments for layer in segment.layers] == list(range(10))


def parts_of(model: nn.Module, loss: Callable[[nn.Module, Any], Any]) -> Parts:
    data = torch.randn(10, 4), torch.arange(10) % 3
    return Parts(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        dataset=data,
        global_batch=4,
        loss=loss,
    )


def test_a_model_that_cannot_be_cut_is_one_piece_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            return self.layer(x) if x.sum() > 0 else self.layer(-x)

    lane, model = Shouting(), Dynamic()
    parts = parts_of(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    loss = chunked_loss(parts, 4, lane, CPU, graphs=False)
    assert "this model is launched as one chunk" in capsys.readouterr().err
    for _ in range(2):
        total: Any = loss(model, parts.batch([0, 1])).sum()
        total.backward()
    assert lane.heard == [WHOLE, WHOLE]


def test_trying_a_model_out_changes_nothing_that_is_drawn_and_evaluation_passes_no_gates() -> None:
    def noisy(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0] + torch.rand(())), batch[1], reduction="none")

    lane, model = Shouting(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    parts = parts_of(model, noisy)
    before = torch.get_rng_state()
    loss = chunked_loss(parts, 4, lane, CPU, graphs=False)
    assert torch.equal(before, torch.get_rng_state())
    model.eval()
    loss(model, parts.batch([0, 1]))
    assert lane.heard == []


# -- lanes on the CPU --------------------------------------------------------------------------------------


def test_on_the_cpu_a_piece_has_completed_when_the_next_one_begins() -> None:
    lane = StreamLane(Referee(Pacer(1)))
    with lane.work():
        for index in range(5):
            lane.piece(index)
            assert lane.referee.pacer.outstanding == 1
    assert lane.referee.pacer.outstanding == 0


def test_a_held_lane_waits_and_open_gates_let_it_through_unpaced() -> None:
    lane = StreamLane(Referee(Pacer(1)))
    lane.referee.pacer.held = True
    passed = threading.Event()

    def go() -> None:
        lane.piece("a")
        lane.piece("b")
        passed.set()

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    assert not passed.wait(0.05)
    lane.open_gates = True
    assert passed.wait(10)
    thread.join()
    assert lane.referee.pacer.outstanding == 0


def test_a_lane_that_waits_can_be_given_up() -> None:
    class Enough(Exception):
        pass

    def enough() -> None:
        raise Enough

    lane = StreamLane(Referee(Pacer(1)), between=enough)
    with pytest.raises(Enough):
        lane.piece("a")


# -- following a foreground ----------------------------------------------------------------------------------


class Listening(Referee):
    def __init__(self) -> None:
        super().__init__(Pacer(1))
        self.heard: list[str] = []

    def began(self, chunk: int, now_us: float) -> None:
        self.heard.append(f"+{chunk}")

    def ended(self, chunk: int, now_us: float, took_us: float) -> None:
        assert took_us >= 0
        self.heard.append(f"-{chunk}")


def watched(model: nn.Module, steps: int) -> tuple[list[str], StepTimer, list[Any]]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, referee = StepTimer(model, optimizer, CPU, sums=True), Listening()
    watch.tell(referee)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return referee.heard, watch, [p.detach().clone() for p in model.parameters()]


def test_a_step_is_followed_chunk_by_chunk_forwards_backwards_sum_and_optimizer() -> None:
    heard, watch, _ = watched(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)), 2)
    assert watch.parts == 2
    assert heard == ["+0", "-0", "+1", "-1", "+2", "-2", "+3", "-3", "+4", "-4", "+5", "-5"] * 2
    assert [times.barred for times in watch.feedback.chunks] == [False] * 4 + [True, False]


def test_following_changes_no_bit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 1))
    other = copy.deepcopy(model)
    _, _, followed = watched(model, 5)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        other(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(followed, other.parameters(), strict=True))


def test_evaluations_and_unused_modules_do_not_confuse_it() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.unused, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x))

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, referee = StepTimer(model, optimizer, CPU, sums=False), Listening()
    watch.tell(referee)
    with torch.no_grad():
        model(torch.randn(5, 4))
    model.eval()
    model(torch.randn(5, 4))
    model.train()
    assert referee.heard == []
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    begun = [int(word[1:]) for word in referee.heard if word[0] == "+"]
    ended = [int(word[1:]) for word in referee.heard if word[0] == "-"]
    assert begun == ended == sorted(begun)
    assert (
        len(begun) < watch.chunks
    )  # the unused module's chunks are missing, and its neighbours' have their time


def test_a_foreground_by_itself_learns_its_times_in_isolation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = StepTimer(model, optimizer, CPU, sums=False)
    for _ in range(5):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    assert all(times.alone_us is not None for times in watch.feedback.chunks)


# -- random numbers ------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "randn": lambda: torch.randn(3),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "randn_like": lambda: torch.randn_like(torch.ones(3)),
    "randint": lambda: torch.randint(10, (3,)),
    "randint from": lambda: torch.randint(5, 10, (3,)),
    "randint_like": lambda: torch.randint_like(torch.ones(3), 10),
    "randint_like from": lambda: torch.randint_like(torch.ones(3), 5, 10),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(torch.zeros(3), torch.ones(3)),
    "normal of": lambda: torch.normal(0.0, 1.0, (3,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 3),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "poisson": lambda: torch.poisson(torch.ones(9)),
    "dropout": lambda: F.dropout(torch.ones(9), 0.5),
    "dropout2d": lambda: F.dropout2d(torch.ones(1, 9, 2, 2), 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(9), 0.5, training=True),
    "rrelu": lambda: F.rrelu(-torch.ones(9), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(9)),
    "attention": lambda: F.scaled_dot_product_attention(*(torch.ones(1, 2, 3, 4),) * 3, dropout_p=0.5),
    "distribution": lambda: torch.distributions.Normal(0.0, 1.0).sample(torch.Size([3])),
    "init": lambda: nn.Linear(3, 3).weight.detach(),
    "python": lambda: torch.tensor([random.random(), random.gauss(0, 1), random.randrange(99)]),
    "shuffle": lambda: torch.tensor(random.sample(range(9), 9)),
    "numpy": lambda: torch.from_numpy(np.random.rand(3) + np.random.normal(size=3)),
    "numpy permutation": lambda: torch.from_numpy(np.random.permutation(9)),
    "rng": lambda: torch.tensor(torch.initial_seed()),
}


def as_guest(work: Callable[[], Any]) -> Any:
    def inside() -> Any:
        generators = Generators(CPU)
        draw_from(generators)
        with generators:
            return work()

    return copy_context().run(inside)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.fixture(autouse=True)
def _diverted() -> None:
    divert_generators()


@pytest.mark.parametrize("name", DRAWS)
def test_a_guest_draws_what_it_would_alone_and_takes_nothing_from_the_foreground(name: str) -> None:
    draw = DRAWS[name]
    seed(5)
    alone = [draw(), draw()]
    seed(6)
    before = rng.capture(CPU)

    def guest() -> list[Any]:
        seed(5)
        return [draw(), draw()]

    beside = as_guest(guest)
    after = rng.capture(CPU)
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"][1], after["numpy"][1]) and before["numpy"][2] == after["numpy"][2]
    assert torch.equal(before["torch"], after["torch"])


@pytest.mark.parametrize("name", DRAWS)
def test_threads_that_a_guest_starts_draw_from_its_generators_too(name: str) -> None:
    draw, drawn = DRAWS[name], []
    before = rng.capture(CPU)

    def guest() -> Any:
        seed(5)
        expected = draw()
        seed(5)
        thread = threading.Thread(target=lambda: drawn.append(draw()))
        thread.start()
        thread.join()
        return expected

    expected = as_guest(guest)
    after = rng.capture(CPU)
    assert torch.equal(drawn[0], expected)
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"][1], after["numpy"][1]) and before["numpy"][2] == after["numpy"][2]
    assert torch.equal(before["torch"], after["torch"])


@pytest.mark.parametrize(
    "order", [(rng_hooks.prepare, divert_generators), (divert_generators, rng_hooks.prepare)]
)
def test_it_does_so_in_a_process_that_packs_too(
    order: tuple[Callable[[], None], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in rng.PYTHONS:
        monkeypatch.setattr(random, name, getattr(random._inst, name))  # type: ignore[attr-defined]
    for prepare in order:
        prepare()
    told: list[int] = []
    seed(6)
    before = random.getstate()
    rng_hooks.listen(lambda: told.append(1))
    try:
        as_guest(lambda: seed(5) or random.random())
        there = random.getstate() == before
        random.random()
    finally:
        rng_hooks.listen(None)
    assert there and told


def test_a_guests_generators_are_saved_and_put_back_like_a_process_of_its_own() -> None:
    def guest() -> None:
        seed(3)
        state = rng.capture(CPU)
        first = [draw() for draw in DRAWS.values()]
        rng.restore(state, CPU)
        assert all(torch.equal(a, draw()) for a, draw in zip(first, DRAWS.values(), strict=True))

    as_guest(guest)


def test_dropout_of_the_fused_kind_drops_out_its_share() -> None:
    def guest() -> Any:
        torch.manual_seed(0)
        return torch.ops.aten.native_dropout(torch.ones(10_000), 0.25, True)

    dropped, mask = as_guest(guest)
    assert mask.dtype == torch.bool
    assert mask.float().mean().item() == pytest.approx(0.75, abs=0.02)
    assert torch.equal(dropped, mask / 0.75)


def test_a_generator_of_the_guests_own_is_left_alone() -> None:
    alone = torch.rand(3, generator=torch.Generator().manual_seed(4))
    assert torch.equal(as_guest(lambda: torch.rand(3, generator=torch.Generator().manual_seed(4))), alone)


def test_draws_that_cannot_be_led_elsewhere_are_refused_with_the_operators_name() -> None:
    def guest() -> Any:
        q = torch.ones(1, 2, 3, 4)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)

    with pytest.raises(NotHostable, match="flash_attention_for_cpu"):
        as_guest(guest)

    def without_dropout() -> Any:
        q = torch.ones(1, 2, 3, 4)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0)[0]

    assert as_guest(without_dropout).shape == (1, 2, 3, 4)


def test_settings_of_the_whole_process_are_put_back_and_the_guest_is_told_which_it_was() -> None:
    before = process_settings()
    put_back(before)
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = not before["torch.backends.cudnn.benchmark"]
    torch.backends.cudnn.allow_tf32 = not before["torch.backends.cudnn.allow_tf32"]
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(NotHostable, match=r"torch\.set_default_dtype is used"):
        put_back(before)
    assert process_settings() == before
