"""Autocast, the gradient scaler and clipping on a GPU: the bits of the same loop in plain torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

from torch.nn.functional import cross_entropy  # noqa: E402

from hpcsched.worker.session.data_parallel import DataParallel  # noqa: E402
from hpcsched.worker.session.sampler import Sampler  # noqa: E402
from hpcsched.worker.session.session import session_of  # noqa: E402
from hpcsched.worker.session.trainer import Parts  # noqa: E402

BATCH, STEPS = 8, 12


def made(*, fused: bool, **options: Any) -> Parts:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    model.cuda()
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    return Parts(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused),
        dataset=(x, y),
        global_batch=BATCH,
        loss=lambda model, batch: 40 * cross_entropy(model(batch[0]), batch[1], reduction="none"),
        **options,
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_it_is_the_loop_by_hand(precision: str, dtype: Any, clip_norm: float | None, *, fused: bool) -> None:
    parts, other = (made(fused=fused, precision=precision, clip_norm=clip_norm) for _ in range(2))
    session = session_of(parts, DataParallel(parts), total_steps=STEPS)
    session.train()
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    sampler = Sampler(other.size, other.seed)
    for step in range(STEPS):
        batch = [tensor.cuda() for tensor in other.batch(sampler.batch(step * BATCH, BATCH))]
        other.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            losses = other.loss(other.model, batch)
        scaler.scale(losses.float().sum() / BATCH).backward()
        scaler.unscale_(other.optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(other.model.parameters(), clip_norm)
        scaler.step(other.optimizer)
        scaler.update()
    for one, two in zip(parts.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
    if precision == "fp16":
        assert session.also["grad_scaler"].state_dict() == scaler.state_dict()
