"""Stream workers on a real GPU: any number of them at once trains what one after the other does; memory that
ends; what is found out about speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from hpcsched.planning.vsw.options import WorkerOptions  # noqa: E402
from hpcsched.worker.session.session import session_of  # noqa: E402
from hpcsched.worker.session.trainer import Parts  # noqa: E402
from hpcsched.worker.vsw.adaptive_batches import AdaptiveBatches  # noqa: E402
from hpcsched.worker.vsw.streams import StreamWorkers  # noqa: E402

STEPS, BATCH, SAMPLES = 50, 12, 120
CLOSE = {"rtol": 0.0, "atol": 1e-6}


@pytest.fixture(autouse=True)
def the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HPCSCHED_JOB_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    cudnn: Any = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.allow_tf32
    cudnn.deterministic, cudnn.allow_tf32 = True, False
    yield
    cudnn.deterministic, cudnn.allow_tf32 = before


def parts(width: int = 16, batch: int = BATCH) -> Parts:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(width * 36, 10),
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    return Parts(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        dataset=(x, torch.randint(0, 10, (SAMPLES,), generator=generator)),
        global_batch=batch,
        loss=lambda model, given: cross_entropy(model(given[0]), given[1], reduction="none"),
    )


def trained(steps: int = STEPS, given: Parts | None = None, **options: Any) -> AdaptiveBatches:
    given = given or parts()
    strategy = AdaptiveBatches(given, WorkerOptions.parse(options))
    for _ in session_of(given, strategy, total_steps=steps).steps():
        strategy.train_step()
    torch.cuda.synchronize()
    return strategy


def weights(strategy: AdaptiveBatches) -> dict[str, Any]:
    return {name: value.cpu() for name, value in strategy.training.model.state_dict().items()}


@pytest.mark.parametrize(("workers", "more"), [(1, 5), (2, 2), (3, 1), (6, 0), (12, 0)])
def test_any_number_of_workers_at_once_is_the_same_training(workers: int, more: int) -> None:
    plain = weights(trained(workers=1, accumulation=0))
    found = weights(trained(workers=workers, accumulation=more))
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, **CLOSE)


def test_an_adaptive_batch_that_is_compared_every_few_steps_is_the_same_on_any_streams() -> None:
    rule = {"global_batch": [12, 48], "similarity": 0.99, "every": 5, "rate": 0.3}
    one = trained(local_batch=6, **rule)
    assert one.control.wish == 48
    other = trained(local_batch=2, **rule)
    assert len(other._workers._models) > 1, "a GPU tries several at once"
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(other)[name], value, **CLOSE)


def test_streams_work_at_the_same_time() -> None:
    """Two waits of the GPU on two streams take about as long as one."""
    model = nn.Linear(4, 4).cuda()

    def loss(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(200_000_000)
        return model(given).sum(1)

    workers = StreamWorkers(model, loss, torch.device("cuda", 0))
    workers.have(4)
    given = torch.ones(2, 4, device="cuda")
    took = []
    for batches in ([given], [given] * 4):
        workers.forward(batches)
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        workers.forward(batches)
        done.record()
        torch.cuda.synchronize()
        took.append(begun.elapsed_time(done))
    assert took[1] < 2 * took[0]


def test_more_workers_than_memory_are_given_up_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCSCHED_JOB_ID", "1")
    monkeypatch.setenv("HPCSCHED_RUN_DIR", str(tmp_path))
    (tmp_path / "jobs" / "1").mkdir(parents=True)
    total = torch.cuda.mem_get_info()[1]
    given = parts()

    def hungry(model: nn.Module, batch: Any) -> torch.Tensor:
        """A worker waits, so that more at once gain for certain, and holds 15 % of the memory until its
        backward pass: seven are too many."""
        torch.cuda._sleep(20_000_000)
        ballast = torch.empty(int(total * 0.15) // 8, dtype=torch.float64, device="cuda", requires_grad=True)
        losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses + 0.0 * (ballast[:1] * ballast[:1]).sum()

    given.loss = hungry
    training = trained(60, given, local_batch=1).training
    assert (training.step, training.samples) == (60, 60 * BATCH)
    ((local, count),) = json.loads((tmp_path / "jobs" / "1" / "too-large.json").read_text())
    assert local == 1
    assert 2 < count <= 7
