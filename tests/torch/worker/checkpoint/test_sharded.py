"""Models spread over ranks: what one process can tell of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.worker.checkpoint import sharded  # noqa: E402


def test_a_torch_that_cannot_leave_the_sum_of_gradients_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Before28:
        """Torch 2.7 divides by the number of ranks, and takes no other word."""

    monkeypatch.setattr(sharded, "FSDPModule", Before28)
    with pytest.raises(ConfigError) as refused:
        sharded.sum_gradients(torch.nn.Linear(2, 2), 2)
    said = str(refused.value)
    assert f"under torch {torch.__version__}" in said and "torch 2.8 or later" in said
    assert len(said.splitlines()) == 1
