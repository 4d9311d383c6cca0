"""Over any rank counts, changed in the middle, a reproducible training has the same bits as on one rank."""

from __future__ import annotations

import contextlib
import random
from datetime import timedelta
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forkserver import SERVER

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, relu  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from hpcsched.worker.ranks.reproducible import Seeded, VirtualShards, deterministic, pin_threads  # noqa: E402
from hpcsched.worker.session.sampler import Sampler  # noqa: E402

_DEADLINE_S = 120.0
STEPS = 14

Plan = list[tuple[int, int]]
"""(ranks, up to which step), one after the other."""


class Conv(nn.Module):
    """Batch norm, two dtypes, every generator, a layer for some samples, for none, and one that thaws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.second_norm = (
            nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
            nn.BatchNorm2d(8),
        )
        self.some, self.none, self.late = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = relu(self.first_norm(self.first(x)))
        x = relu(self.second_norm(self.second(x)))
        x = nn.functional.dropout(x, 0.2, self.training).mean((2, 3))
        x = x * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        if x[0, 0] > x[0, 1]:
            x = x + self.some(x)
        return self.last(self.late(x).double())


class Transformer(nn.Module):
    """Dropout, a buffer with infinite values, and one of whole numbers that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 4)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.head(self.layers(self.embed(x), mask=self.mask).mean(1))


class Training:
    """What a rank does between two changes of the rank count."""

    def __init__(self, kind: str, ranks: Any, count: int, batch: int) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(50, 3, 7, 7) if kind == "conv" else torch.randint(0, 16, (50, 6))
        self.y = torch.randint(0, 4, (50,))
        if kind == "conv":
            self.model: nn.Module = Conv()
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        else:
            self.model = Transformer()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.batch = batch
        self.shards = VirtualShards(self.model, ranks, count=count, global_batch=batch, seed=5)
        self.step = 0
        self.drawn: list[float] = []

    def run(self, until: int) -> None:
        sampler = Sampler(len(self.x), seed=7)
        while self.step < until:
            batch = torch.from_numpy(sampler.batch(self.step * self.batch, self.batch))
            self.shards.begin(self.step)
            weight = torch.rand(())
            if isinstance(self.model, Conv):
                self.model.late.requires_grad_(self.step >= 5)
            for part in self.shards.parts(batch[self.shards.place]):
                losses = cross_entropy(self.model(self.x[part]), self.y[part], reduction="none")
                (weight * losses.sum() / self.batch).backward()
            self.optimizer.step()
            self.step += 1
            self.drawn = [random.random(), np.random.rand(), torch.rand(()).item()]

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "drawn": self.drawn,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def train(folder: Path, kind: str, plan: Plan, *, count: int, batch: int) -> list[bytes]:
    """Train with real processes; the final state in bits, by rank."""
    folder.mkdir()
    run_all(
        be_rank, [(str(folder), kind, plan, rank, count, batch) for rank in range(max(w for w, _ in plan))]
    )
    return [(folder / f"end.{rank}").read_bytes() for rank in range(plan[-1][0])]


def run_all(target: Any, calls: list[tuple[Any, ...]]) -> None:
    processes = [SERVER.Process(target=target, args=args) for args in calls]
    for process in processes:
        process.start()
    try:
        for process in processes:
            wait_for([process.sentinel], _DEADLINE_S)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def be_rank(folder: str, kind: str, plan: Plan, rank: int, count: int, batch: int) -> None:
    pin_threads(1)
    deterministic(torch.device("cpu"))
    ranks = SimpleNamespace(rank=rank, world_size=0)
    training: Training | None = None
    for number, (world, until) in enumerate(plan):
        if rank >= world:
            training = None  # left; when there are more ranks again, it is another process
            continue
        ranks.world_size = world
        with met(f"{folder}/meet.{number}", rank, world):
            if training is None:
                training = Training(kind, ranks, count, batch)
                if number:
                    training.load(torch.load(f"{folder}/state.{number}"))
            training.run(until)
            if rank == 0:
                torch.save(training.state(), f"{folder}/state.{number + 1}")
    if training is not None:
        Path(folder, f"end.{rank}").write_bytes(bits(training.state()))


@contextlib.contextmanager
def met(path: str, rank: int, world: int) -> Any:
    """Inside, torch's default process group is there; left only when all leave."""
    if world == 1:
        yield
        return
    timeout = timedelta(seconds=_DEADLINE_S)
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    yield
    if store.add("parted", 1) == world:
        store.set("all parted", "yes")
    store.wait(["all parted"], timeout)
    dist.destroy_process_group()


def bits(value: Any) -> bytes:
    """All of a nested state; minus zero is not zero here."""
    if isinstance(value, torch.Tensor):
        return repr((value.dtype, value.shape)).encode() + value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(repr(key).encode() + bits(value[key]) for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        return b"".join(map(bits, value))
    return repr(value).encode()


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("one")
    conv = train(folder / "conv", "conv", [(1, STEPS)], count=7, batch=20)
    transformer = train(folder / "transformer", "transformer", [(1, STEPS)], count=4, batch=10)
    return {"conv": conv[0], "transformer": transformer[0]}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([(2, STEPS)], id="2"),
        pytest.param([(3, STEPS)], id="3"),
        pytest.param([(4, STEPS)], id="4"),
        pytest.param([(1, 3), (3, 6), (2, 9), (4, STEPS)], id="1-3-2-4"),
        pytest.param([(4, 2), (3, 7), (1, 10), (2, STEPS)], id="4-3-1-2"),
    ],
)
@pytest.mark.parametrize(("kind", "count", "batch"), [("conv", 7, 20), ("transformer", 4, 10)])
def test_the_bits_are_those_of_one_rank(
    tmp_path: Path, on_one_rank: dict[str, bytes], kind: str, count: int, batch: int, plan: Plan
) -> None:
    ends = train(tmp_path / "ranks", kind, plan, count=count, batch=batch)
    assert [end == on_one_rank[kind] for end in ends] == [True] * len(ends)


def test_another_number_of_shards_rounds_differently(tmp_path: Path, on_one_rank: dict[str, bytes]) -> None:
    """Else equal bits would show nothing."""
    (other,) = train(tmp_path / "other", "transformer", [(1, STEPS)], count=5, batch=10)
    assert len(other) == len(on_one_rank["transformer"])
    assert other != on_one_rank["transformer"]


class Augmented:
    """Noise from all three generators that a sample's transforms may draw from."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.1 * torch.rand(2) + 0.1 * random.random() + 0.1 * np.random.rand()


def mask(items: list[torch.Tensor]) -> torch.Tensor:
    """A collate function that draws, as those of language models do."""
    batch = torch.stack(items)
    return torch.where(torch.rand_like(batch) < 0.3, 0.0, batch)


def load_with(folder: str, loaders: int, pieces: list[list[tuple[int, int]]]) -> None:
    torch.manual_seed(loaders)  # what a process has drawn before does not matter
    seeded = Seeded(Augmented(), 3, mask)
    loader = DataLoader(
        seeded,
        batch_sampler=pieces,
        collate_fn=seeded.collate,
        num_workers=loaders,
        multiprocessing_context="fork" if loaders else None,
    )
    batches = list(loader) if loaders else [seeded.batch(piece) for piece in pieces]
    Path(folder, f"batches.{loaders}").write_bytes(bits(batches))


def test_augmentations_do_not_depend_on_the_loader_processes(tmp_path: Path) -> None:
    indices = Sampler(9, seed=1).batch(0, 24).tolist()
    pieces = [list(zip(range(at, at + 4), indices[at : at + 4], strict=True)) for at in range(0, 24, 4)]
    run_all(load_with, [(str(tmp_path), loaders, pieces) for loaders in (0, 1, 2)])
    assert len({(tmp_path / f"batches.{loaders}").read_bytes() for loaders in (0, 1, 2)}) == 1
