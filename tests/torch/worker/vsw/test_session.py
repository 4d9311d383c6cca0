"""Sessions by stream workers in this process: models that are unlike most."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.planning.vsw.options import WorkerOptions  # noqa: E402
from hpcsched.worker.session.session import Session, session_of  # noqa: E402
from hpcsched.worker.session.trainer import Parts  # noqa: E402
from hpcsched.worker.vsw.adaptive_batches import AdaptiveBatches  # noqa: E402
from hpcsched.worker.vsw.memory import remembered  # noqa: E402

pytestmark = pytest.mark.torch

ADAPTIVE = {"local_batch": 2, "global_batch": [8, 32], "similarity": 0.9, "every": 2}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCSCHED_JOB_ID", raising=False)


def training(
    model: nn.Module, trained: list[Any], loss: Any, **options: Any
) -> tuple[Session, AdaptiveBatches]:
    """Of samples that are all the same."""
    parts = Parts(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        dataset=(torch.ones(40, 3),),
        global_batch=8,
        loss=loss,
    )
    strategy = AdaptiveBatches(parts, WorkerOptions.parse(options or ADAPTIVE))
    return session_of(parts, strategy, total_steps=12), strategy


def test_gradients_that_no_optimizer_takes_do_not_add_up() -> None:
    """Only something else is trained, but the model is not frozen: compared is the gradient of one step."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    one, strategy = training(
        model, [torch.zeros(1, requires_grad=True)], lambda m, batch: m(batch[0]).squeeze(1)
    )
    norms = []
    for _ in one.steps():
        strategy.train_step()
        norms.append(float(model[0].weight.grad.norm()))
    assert norms == pytest.approx([norms[0]] * len(norms))
    assert strategy.control.seen == pytest.approx(1.0)


def test_sparse_gradients_are_refused_in_the_first_step() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    one, strategy = training(model, list(model.parameters()), lambda m, batch: m(batch[0].long()).squeeze(1))
    with pytest.raises(ConfigError, match="model: has sparse gradients; accepted: dense ones"):
        for _ in one.steps():
            strategy.train_step()


def test_a_model_of_which_nothing_is_trained_at_first_has_no_gradients_to_sum() -> None:
    model = nn.Linear(3, 1).requires_grad_(False)
    outside = nn.Parameter(torch.ones(1))
    one, strategy = training(
        model, [outside], lambda m, batch: m(batch[0]).squeeze(1) * outside, local_batch=2
    )
    for _ in one.steps():
        strategy.train_step()
        model.requires_grad_(True)
    assert one.step == 12


def test_the_batch_grows_no_larger_than_the_dataset() -> None:
    def made(**bounds: Any) -> tuple[Session, AdaptiveBatches]:
        model = nn.Linear(3, 1)
        loss = lambda m, batch: m(batch[0]).squeeze(1)  # noqa: E731
        return training(model, list(model.parameters()), loss, **{**ADAPTIVE, "similarity": 0.999, **bounds})

    one, strategy = made(global_batch=[8, 512], every=1, rate=0.9)
    one.total_steps = 100
    sizes = []
    for _ in one.steps():
        strategy.control.wish = 512.0  # as if it had wanted to grow ever since
        strategy.train_step()
        sizes.append(one.global_batch)
    assert max(sizes) == 40
    with pytest.raises(ConfigError, match="from 44 samples, more than the 40 of the dataset"):
        made(global_batch=[44, 88])


def test_a_local_batch_without_room_is_remembered_for_the_next_attempt_of_a_job(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("no room")
        return model(batch[0]).squeeze(1)

    for env in (None, SimpleNamespace(job_dir=tmp_path, attempt=1)):
        model = nn.Linear(3, 1)
        one, strategy = training(model, list(model.parameters()), loss, local_batch=[2, 8])
        strategy.context.env = env  # None: a program that somebody has started by hand
        for _ in one.steps():
            strategy.train_step()
        assert one.step == 12
        assert strategy.table.too_large == {(4, 1)}
        assert remembered(tmp_path) == (set() if env is None else {(4, 1)})
    strategy.remember_too_large((2, 1))
    assert remembered(tmp_path) == {(4, 1)}, "the smallest has to do"
