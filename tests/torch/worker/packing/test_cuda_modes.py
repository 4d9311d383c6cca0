"""The ways of GPUs, on a stand-in: what is given to which stream in which order, and what a graph repeats."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from capturerules import WAITED, CaptureRules
from packed_trainings import (
    Augmented,
    by_sample,
    cnn,
    dropping,
    go,
    mlp,
    normed,
    one_thread,
    packed,
    same,
    separate,
    state_of,
    torch,
    training,
    with_noise,
)
from torch import nn

from hpcsched.errors import ConfigError
from hpcsched.worker.packed import Failed, Member, OutOfMemory, Pack
from hpcsched.worker.packing import cuda_modes as devices_module
from hpcsched.worker.packing.cuda_modes import REAL_STEPS, Cuda, Graph, Streams
from hpcsched.worker.packing.failures import ModeRefused
from hpcsched.worker.packing.rollback import Buffers, Weights, homes_of

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


class Stream:
    """Notes for whom it waits."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append((self.name, "waits for", other.name))


class Recorded:
    """Does again what was recorded, with the tensors that were there: as a graph, but for the time."""

    def __init__(self, work: Callable[[], None], gpu: StandIn) -> None:
        self.work, self.gpu = work, gpu

    def replay(self) -> None:
        self.gpu.replays += 1
        self.gpu.log.append("replay")
        frozen = [[dict(group) for group in m.parts.optimizer.param_groups] for m in self.gpu.members]
        assert frozen == self.gpu.options, "a graph's numbers are those of its capture"
        self.work()


class CudaGenerator:
    """The generator of the GPU: CUDA's rule for captures."""

    def __init__(self, gpu: StandIn) -> None:
        self.gpu = gpu

    def get_state(self) -> None:
        assert not self.gpu.capturing, "Cannot call CUDAGeneratorImpl::current_seed during capture"

    def set_state(self, state: None) -> None:
        assert not self.gpu.capturing, "Cannot call CUDAGeneratorImpl::set_state during capture"


class StandIn:
    """Streams that are names; graphs that are called again. Capturing launches nothing, and the state of the
    GPU's generator must not be read or set meanwhile."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.members: list[Member] = []
        self.options: Any = None
        self.main = self.here = Stream("main", self.log)
        self.streams = self.records = self.replays = 0
        self.capturing = False
        self.trouble: BaseException | None = None

    def current(self) -> Stream:
        return self.here

    def stream(self) -> Stream:
        self.streams += 1
        return Stream(f"s{self.streams}", self.log)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.here = self.here, stream
        try:
            yield
        finally:
            self.here = before

    def record(self, work: Callable[[], None], stream: Stream) -> Recorded:
        self.records += 1
        kept = [
            (Weights(m.parts.optimizer), Buffers(homes_of(m.parts.model)), m._generators)
            for m in self.members
        ]
        self.capturing = True
        try:
            with self.on(stream):
                work()
            if self.trouble is not None:
                raise self.trouble
        finally:
            self.capturing = False
            for member, (weights, buffers, generators) in zip(self.members, kept, strict=True):
                weights.put_back()
                buffers.put_back()
                member._generators = generators
        self.options = [[dict(group) for group in m.parts.optimizer.param_groups] for m in self.members]
        return Recorded(work, self)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()

    def gpu_of(members: Any) -> StandIn:
        found.members = list(members)
        for member in members:
            member._torch = [*member._torch[:1], ("cuda", CudaGenerator(found))]
        return found

    monkeypatch.setattr(devices_module, "gpu_of", gpu_of)
    return found


def check(together: Pack, made: list[Member], builds: Any) -> None:
    together.settle()
    for member, build in zip(made, builds, strict=True):
        assert same(state_of(member), separate(build, member.session.step))


# -- streams ---------------------------------------------------------------------------------------------


def test_each_has_a_stream_that_waits_for_the_others_before_and_after(gpu: StandIn) -> None:
    seen: list[str] = []

    def loss(model: Any, batch: Any) -> Any:
        seen.append(gpu.here.name)
        return by_sample(model, batch)

    builds = [training(1, loss=loss), training(2, loss=loss), training(3, loss=loss)]
    together, _ = packed(*builds, mode="streams")
    go(together, 3)
    assert set(seen) == {"main"}
    seen.clear()
    together.step()
    assert together.groups[0].mode == "streams"
    assert seen == ["s1", "s2", "s3"]
    apart = [(f"s{number}", "waits for", "main") for number in (1, 2, 3)]
    joined = [("main", "waits for", f"s{number}") for number in (1, 2, 3)]
    assert gpu.log == [*apart, *joined]
    go(together, 10)


@pytest.mark.parametrize("net", [mlp, cnn, dropping, normed])
def test_streams_compute_what_a_loop_does(gpu: StandIn, net: Any) -> None:
    builds = [training(seed, net=net, optimizer=("adam", "momentum")[seed % 2]) for seed in range(3)]
    together, made = packed(*builds, mode="streams")
    go(together, 12)
    check(together, made, builds)


def test_streams_come_together_when_a_member_fails(gpu: StandIn) -> None:
    def loss(model: Any, batch: Any) -> Any:
        if model.failing:
            raise ValueError("no")
        return by_sample(model, batch)

    def net() -> nn.Module:
        model = mlp()
        model.failing = False
        return model

    builds = [training(seed, net=net, loss=loss) for seed in range(3)]
    together, made = packed(*builds, mode="streams")
    go(together, 5)
    gpu.log.clear()
    made[1].parts.model.failing = True
    with pytest.raises(Failed, match="m1: no"):
        together.step()
    assert [entry for entry in gpu.log if entry[0] == "main"] == [
        ("main", "waits for", f"s{number}") for number in (1, 2, 3)
    ]
    together.leave(made[1])
    go(together, 12)
    made[1].parts.model.failing = False
    check(together, made, builds)


def test_streams_without_memory_are_given_up_before_anybody_has_to_leave(gpu: StandIn) -> None:
    """Side by side, all activations are there at once."""

    def loss(model: Any, batch: Any) -> Any:
        if gpu.here.name != "main":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return by_sample(model, batch)

    builds = [training(seed, loss=loss) for seed in range(2)]
    together, made = packed(*builds, mode="auto", steps=50)
    go(together, 4)
    group = together.groups[0]
    group.trial, group.wanted = None, "streams"
    together.step()
    assert group.mode == "loop"
    while not all(member.done for member in made):
        together.step()
    check(together, made, [training(0), training(1)])
    together, made = packed(*builds, mode="streams")
    with pytest.raises(OutOfMemory):
        go(together, 5)


# -- graphs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [mlp, cnn, normed])
@pytest.mark.parametrize("own", [False, True])
def test_a_graph_computes_what_a_loop_does_with_one_launch(gpu: StandIn, net: Any, own: bool) -> None:
    builds = [training(seed, net=net, order=seed if own else 0) for seed in range(3)]
    together, made = packed(*builds, mode="graph")
    go(together, 20)
    assert together.groups[0].mode == "graph"
    assert (gpu.records, gpu.replays) == (1, 20 - 3 - REAL_STEPS)
    check(together, made, builds)
    runner = together.groups[0].runner
    assert isinstance(runner, Graph)
    assert len({id(batch) for batch in runner._inputs}) == (3 if own else 1)


def test_it_is_captured_anew_when_a_learning_rate_has_changed(gpu: StandIn) -> None:
    builds = [training(1, scheduler="steps"), training(2)]
    together, made = packed(*builds, mode="graph")
    go(together, 15)
    assert gpu.records == 3  # after 6 steps, and when it changes after 9 and 12
    check(together, made, builds)


def test_captured_branches_part_and_come_together(gpu: StandIn) -> None:
    together, _ = packed(training(1), training(2), mode="graph")
    go(together, 3 + REAL_STEPS)
    gpu.log.clear()
    together.step()
    capture = gpu.log[: gpu.log.index("replay")]
    assert capture == [
        *(("s2", "waits for", "s1"), ("s3", "waits for", "s1")),
        *(("s1", "waits for", "s2"), ("s1", "waits for", "s3")),
    ]


def test_members_come_and_go_between_graphs(gpu: StandIn) -> None:
    builds = [training(seed) for seed in range(4)]
    together, made = packed(*builds[:3], mode="graph")
    go(together, 12)
    together.leave(made[0])
    assert all(p.grad is None for p in made[0].parts.model.parameters())
    go(together, 20)
    more = packed(builds[3], mode="loop")[1][0]
    together.join(more)
    go(together, 10)
    assert gpu.records == 3
    check(together, [*made, more], builds)


def adam(seed: int, **options: Any) -> Any:
    def build() -> Any:
        parts = training(seed)()
        parts.optimizer = torch.optim.Adam(parts.model.parameters(), lr=1e-3, **options)
        return parts

    return build


def test_optimizers_that_cannot_be_captured_are_refused(gpu: StandIn) -> None:
    for builds, why in (
        ([adam(1), adam(2)], "Adam is not `capturable`"),
        ([training(1, optimizer="rmsprop"), training(2)], "RMSprop is not `capturable`"),
        ([training(1, lr=torch.tensor(0.1)), training(2)], "the learning rate of SGD is a tensor"),
    ):
        together, _ = packed(*builds, mode="graph")
        with pytest.raises(ConfigError, match=why):
            go(together, 6)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = mlp(), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.body(x)


def test_models_that_are_told_by_python_what_to_do_are_refused(gpu: StandIn) -> None:
    for net, why in ((dropping, "draw random numbers"), (Counting, "changes attributes")):
        together, _ = packed(*(training(seed, net=net) for seed in range(2)), mode="graph")
        with pytest.raises(ConfigError, match=why):
            go(together, 6)


def test_what_is_found_out_in_the_capture_is_refused_then_and_nobody_is_changed(gpu: StandIn) -> None:
    gpu.trouble = RuntimeError("operation not permitted when stream is capturing")
    builds = [training(1), training(2)]
    together, made = packed(*builds, mode="graph")
    with pytest.raises(ConfigError, match="cannot be captured: operation not permitted"):
        go(together, 12)
    assert [member.session.step for member in made] == [3 + REAL_STEPS] * 2
    check(together, made, builds)


def test_batches_that_change_their_shape_are_refused(gpu: StandIn) -> None:
    def ragged(samples: Any) -> Any:
        x, y = with_noise(samples)
        return (nn.functional.pad(x, (0, 2)), y) if len(seen) > 60 else (x, y)

    seen: list[int] = []

    class Seen(Augmented):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    def loss(model: Any, batch: Any) -> Any:
        return by_sample(model, (batch[0][:, :16], batch[1]))

    builds = [training(seed, data=Seen, collate=ragged, loss=loss) for seed in range(2)]
    together, made = packed(*builds, mode="graph")
    with pytest.raises(ConfigError, match="not of one shape"):
        go(together, 12)
    assert len({member.session.step for member in made}) == 1


def test_a_capture_without_memory(gpu: StandIn) -> None:
    gpu.trouble = torch.OutOfMemoryError("CUDA out of memory")
    builds = [training(1), training(2)]
    together, made = packed(*builds, mode="graph")
    with pytest.raises(OutOfMemory) as error:
        go(together, 12)
    assert error.value.member is made[1]
    check(together, made, builds)


def test_a_trial_goes_on_with_the_others_when_a_mode_is_refused_in_a_step(
    gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: streams and graphs are among the modes that are tried, as none is clearly the fastest."""
    gpu.trouble = RuntimeError("operation not permitted when stream is capturing")
    builds = [training(1), training(2)]
    together, made = packed(*builds, mode="auto", steps=80, clock=partial(next, itertools.count()))
    together.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    tried: set[str] = set()
    refused: dict[str, str] = {}
    while not all(member.done for member in made):
        together.step()
        group = together.groups[0]
        tried.add(group.mode)
        if group.trial is not None:
            refused = group.trial.refused
    assert tried >= {"loop", "streams", "graph", "stacked/2"}
    assert refused["graph"].startswith("it cannot be captured")


def waiting(model: Any, batch: Any) -> Any:
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return by_sample(model, batch)


def hungry(model: Any, batch: Any) -> Any:
    if torch.cuda.is_current_stream_capturing():
        raise torch.OutOfMemoryError("CUDA out of memory")
    return by_sample(model, batch)


@pytest.mark.parametrize(
    ("loss", "why"), [(waiting, f"it cannot be captured: {WAITED}"), (hungry, "CUDA out of memory")]
)
def test_members_whose_graph_is_refused_leave_their_neighbours_as_they_were(
    monkeypatch: pytest.MonkeyPatch, loss: Any, why: str
) -> None:
    """A neighbour with dropout draws what it would draw without them, and the pack goes on."""
    cuda = CaptureRules(monkeypatch)
    monkeypatch.setattr(devices_module, "gpu_of", lambda members: Cuda(torch.device("cuda", 0)))
    drawn: list[int] = []

    def dropping_out(model: Any, batch: Any) -> Any:
        drawn.append(cuda.draw())
        return by_sample(model, batch)

    builds = [training(1, loss=loss), training(2, loss=loss), training(3, net=normed, loss=dropping_out)]
    together, made = packed(*builds, mode="auto", steps=80, clock=partial(next, itertools.count()))
    together.device = torch.device("cuda", 0)
    refused: dict[str, str] = {}
    while not all(member.done for member in made):
        together.step()
        for group in together.groups:
            refused |= {} if group.trial is None else group.trial.refused
    assert refused["graph"] == why
    assert drawn == [4 * step for step in range(1, 81)]
    cuda.empty_cache()
    assert cuda.held == 0


# -- the real thing, where there is none -------------------------------------------------------------------


def test_without_a_gpu_both_are_refused() -> None:
    together, made = packed(training(1), training(2), mode="loop")
    go(together, 4)
    for refused in (lambda: Streams(made), lambda: Graph(made, together.groups[0].batches())):
        with pytest.raises(ModeRefused, match="needs a GPU"):
            refused()


def test_what_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = CaptureRules(monkeypatch)
    cuda = Cuda(torch.device("cuda", 0))
    assert cuda.current() is rules.main
    stream = cuda.stream()
    seen: list[Any] = []
    graph = cuda.record(lambda: seen.append((rules.here, rules.here.capture is not None)), stream)
    graph.replay()
    assert seen == [(stream, True)]
    with cuda.on(stream):
        assert cuda.current() is stream
