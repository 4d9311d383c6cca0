"""Models spread over ranks: trained like whole ones, saved together, loaded by any number of ranks."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from budget import share, slow
from forkserver import SERVER

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402

from hpcsched.errors import ConfigError, StoreError  # noqa: E402
from hpcsched.worker import load_checkpoint  # noqa: E402
from hpcsched.worker.checkpoint.files import CheckpointStore  # noqa: E402
from hpcsched.worker.checkpoint.sharded import ShardedStore, is_sharded, sum_gradients  # noqa: E402

_DEADLINE_S = 300.0
BATCH = 12
KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


class Network(nn.Module):
    """Of sizes that no rank count divides; with a buffer, a frozen layer, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 17), nn.Linear(17, 7), nn.Linear(7, 3)])
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.frozen(x)


class Training:
    """A training in float64, its model spread over `world` ranks (0: whole, in one process)."""

    def __init__(self, kind: str, rank: int, world: int) -> None:
        torch.manual_seed(0)
        self.rank, self.world, self.step = rank, world, 0
        self.model = Network().double()
        if world:
            mesh = init_device_mesh("cpu", (world,))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            sum_gradients(self.model, world)
        self.optimizer = KINDS[kind](self.model.parameters())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            numbers = torch.Generator().manual_seed(self.step)
            x = torch.randn(BATCH, 6, dtype=torch.float64, generator=numbers)
            y = torch.randint(0, 3, (BATCH,), generator=numbers)
            parts = max(self.world, 1)
            mine = slice(self.rank * BATCH // parts, (self.rank + 1) * BATCH // parts)
            self.optimizer.zero_grad()
            losses = nn.functional.cross_entropy(self.model(x[mine]), y[mine], reduction="none")
            (losses.sum() / BATCH).backward()
            self.optimizer.step()
            self.model.seen += BATCH

    @property
    def rest(self) -> dict[str, Any]:
        generators = [{"torch": torch.get_rng_state()}] if self.rank == 0 else []
        return {"schema": 1, "step": self.step, "samples": BATCH * self.step, "rng": generators}

    def whole(self) -> dict[str, Any]:
        """All tensors of the model and of the optimizer, put together."""
        states = self.optimizer.state_dict()["state"].items()
        named = {f"{number}.{name}": value for number, state in states for name, value in state.items()}
        return {
            key: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for key, value in {**self.model.state_dict(), **named}.items()
        }

    def load(self, store: ShardedStore, path: Path) -> dict[str, Any]:
        rest = store.load(path, self.model, self.optimizer)
        self.step = rest["step"]
        return rest


def close(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-9) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[key], other[key], rtol=0, atol=tolerance) for key in one
    )


# Processes.


def spread(world: int, work: Callable[..., Any], *arguments: Any) -> None:
    """Run `work(rank, world, *arguments)` on so many ranks, and see that all come to its end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = []
    for rank in range(world):
        ranks.append(SERVER.Process(target=_be_rank, args=(rank, world, port, work, arguments)))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_DEADLINE_S)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * world


def _be_rank(rank: int, world: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        work(rank, world, *arguments)
    finally:
        dist.destroy_process_group()
    sys.exit(0)


@contextlib.contextmanager
def opened(folder: Path, keep: int = 2) -> Iterator[ShardedStore]:
    store = ShardedStore(CheckpointStore(folder, keep))
    yield store
    store.close()


# What ranks do.


def train_and_save(rank: int, world: int, folder: Path, kind: str) -> None:
    with opened(folder) as store:
        training = Training(kind, rank, world)
        assert is_sharded(training.model)
        training.train(5)
        path = store.save(training.rest, training.model, training.optimizer)
        assert path == folder / "step-000000000005.dcp"
        assert store.save(training.rest, training.model, training.optimizer) == path  # nothing new in it
        training.train(5)
        whole = training.whole()
        if rank == 0:
            torch.save(whole, folder / "whole.pt")


def go_on(rank: int, world: int, folder: Path, kind: str, tolerance: float) -> None:
    with opened(folder) as store:
        training = Training(kind, rank, world)
        training.train(1)  # what is loaded replaces everything
        rest = training.load(store, folder / "step-000000000005.dcp")
        assert (rest["step"], rest["samples"], len(rest["rng"])) == (5, 60, 1)
        assert set(rest) == {"schema", "step", "samples", "rng"}
        assert int(training.model.seen) == 60
        training.train(5)
        assert close(training.whole(), torch.load(folder / "whole.pt"), tolerance)


def save_in_the_background(rank: int, world: int, folder: Path) -> None:
    with opened(folder, keep=4) as store:
        training = Training("adam", rank, world)

        def name(step: int) -> Path:
            return folder / f"step-{step:012d}.dcp"

        def begin() -> Callable[[], Path | None]:
            return store.begin_save(training.rest, training.model, training.optimizer)

        training.train(1)
        first = begin()
        training.train(2)
        second = begin()  # waits for the first
        assert first() == name(1)
        training.train(1)
        assert store.save(training.rest, training.model, training.optimizer) == name(4)
        assert second() == name(3)
        assert begin()() == name(4)  # it is there
        training.train(1)
        last = begin()
        training.train(1)
        store.settle()
        assert last() == name(5)
        if rank == 0:
            assert sorted(folder.iterdir()) == [name(1), name(3), name(4), name(5)]


def fail_to_save(rank: int, world: int, folder: Path) -> None:
    with opened(folder) as store:
        training = Training("sgd", rank, world)
        training.train(1)
        store.save(training.rest, training.model, training.optimizer)
        training.train(1)
        with pytest.raises(StoreError, match="only a model and its optimizer"):
            sharded = next(training.model.parameters())
            store.save({**training.rest, "extra": {"mean": sharded}}, training.model, training.optimizer)
        with pytest.raises(StoreError, match=r"step-000000000002\.dcp: cannot be saved: state\['x'\] is a"):
            store.save({**training.rest, "x": object()}, training.model, training.optimizer)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for culprit in (0, 1):
            for background in (False, True):
                if rank == culprit:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
                with pytest.raises(StoreError, match="File too large"):
                    if background:
                        poll = store.begin_save(training.rest, training.model, training.optimizer)
                        store.settle()
                        poll()
                    else:
                        store.save(training.rest, training.model, training.optimizer)
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                dist.barrier()
                assert [path.name for path in folder.iterdir()] == ["step-000000000001.dcp"]
                dist.barrier()
        path = store.save(training.rest, training.model, training.optimizer)
        wrong = Training("sgd", rank, world)
        wrong.model.layers[0].bias = wrong.model.layers[1].bias
        with pytest.raises(StoreError, match="cannot be loaded"):
            store.load(path, wrong.model, wrong.optimizer)
        with pytest.raises(StoreError, match="cannot be loaded"):
            store.load(folder / "step-000000000009.dcp", training.model, training.optimizer)


def refuse(rank: int, world: int) -> None:
    def refused(match: str, model: nn.Module) -> None:
        assert is_sharded(model)
        with pytest.raises(ConfigError, match=match):
            sum_gradients(model, world)

    mesh = init_device_mesh("cpu", (world,))
    part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(part[0], mesh=mesh)
    refused("1.weight is not spread over the ranks", part)
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("outer", "inner"))
    inner = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=alone["inner"])
    refused("0.weight is spread over 1 of 2 ranks", inner)
    twice = nn.Linear(2, 2, bias=False)
    twice.weight = nn.Parameter(distribute_tensor(twice.weight.detach(), alone, [Shard(0), Shard(1)]))
    refused("weight is spread in two ways", twice)


# Tests.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks save after five steps, and the whole state five steps later."""
    folder = tmp_path_factory.mktemp("made")
    spread(2, train_and_save, folder, "adam")
    return folder


@pytest.mark.parametrize("kind", ["adam", slow("sgd")])
def test_ranks_share_a_model_as_if_it_were_whole(kind: str, made: Path, tmp_path: Path) -> None:
    """Ten steps; after five they save, and any number of ranks goes on from there."""
    if kind == "adam":
        shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    else:
        spread(2, train_and_save, tmp_path, kind)
    alone = Training(kind, 0, 0)
    assert not is_sharded(alone.model)
    alone.train(5)
    at_five = alone.whole()
    alone.train(5)
    assert close(alone.whole(), torch.load(tmp_path / "whole.pt"))
    assert not close(alone.whole(), at_five)

    state = load_checkpoint(tmp_path)
    other = Training(kind, 0, 0)
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optimizer"])
    assert (state["step"], state["samples"]) == (5, 60)
    assert close(other.whole(), at_five)
    other.step = 5
    other.train(5)
    assert close(other.whole(), alone.whole())

    for world, tolerance in share([(2, 0.0), (1, 1e-9), (3, 1e-9)]):
        spread(world, go_on, tmp_path, kind, tolerance)


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    spread(2, save_in_the_background, tmp_path)
    assert CheckpointStore(tmp_path).newest_step() == 5
    alone = Training("adam", 0, 0)
    for step in (1, 3, 4, 5):
        alone.train(step - alone.step)
        other = Training("adam", 0, 0)
        state = load_checkpoint(tmp_path / f"step-{step:012d}.dcp")
        other.model.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        assert (state["step"], state["samples"]) == (step, BATCH * step)
        assert close(other.whole(), alone.whole())


def test_a_failure_is_one_on_all_ranks_and_leaves_no_litter(tmp_path: Path) -> None:
    spread(2, fail_to_save, tmp_path)


def test_what_is_spread_otherwise_is_refused() -> None:
    spread(2, refuse)


def test_sharded_checkpoints_are_looked_after_like_files(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", keep=2)
    store.save({"step": 4, "samples": 48, "model": {}})

    def put(step: int) -> Path:
        return Path(shutil.copytree(made / "step-000000000005.dcp", store.folder / f"step-{step:012d}.dcp"))

    five, six, seven = map(put, (5, 6, 7))
    shard = six / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-9])
    (seven / "record.json").unlink()
    assert store.newest() == five
    assert capsys.readouterr().err.count("\n") == 2
    with pytest.raises(StoreError, match="bytes instead of"):
        load_checkpoint(six)
    store.quarantine_newer(five)
    put(6)
    (store.folder / "step-000000000006.dcp" / "rest.pt").unlink()
    store.quarantine_newer(five)  # over the one that is there
    assert sorted(path.name for path in store.folder.glob("*6*")) == ["step-000000000006.dcp.damaged"]

    put(8)
    (store.folder / f".step-000000000009.dcp.{2**22 + 1}.tmp").mkdir()
    store.clear_leftovers()
    store.prune(2)
    names = ["step-000000000005.dcp", "step-000000000008.dcp"]
    assert sorted(path.name for path in store.folder.glob("*[!d]") if "damaged" not in path.name) == names
    assert load_checkpoint(store.folder)["step"] == 5  # what is in it; its name is of our making
    store.set_aside("before")
    assert store.newest() is None
    assert sorted(path.name for path in (store.folder / "before").iterdir()) == names
