"""A session has the strategy that it is given, and nothing that it is told is passed over."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.worker import Session  # noqa: E402
from hpcsched.worker.session.data_parallel import DataParallel  # noqa: E402


@pytest.mark.parametrize(
    "options", [{"in_place": True}, {"reproducible": True}, {"shards": 4}, {"rehearse": print}]
)
def test_what_the_default_strategy_is_told_does_not_go_with_another(options: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: given together with a strategy"):
        Session(
            model=model,
            optimizer=optimizer,
            dataset_size=4,
            global_batch=2,
            strategy=DataParallel(),
            **options,
        )
