"""Training by any plan, on any number of ranks, is training in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from burstranks import Ranks, cases  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "models", "plans", "dtype", "adam", "most"),
    [
        (3, range(28), 4, torch.float64, False, 1e-12),
        (4, range(28, 43), 4, torch.float32, False, 1e-5),
        (2, range(43, 51), 4, torch.float64, True, 1e-12),
    ],
    ids=["float64", "float32", "AdamW"],
)
def test_random_models_learn_the_same_by_random_plans(
    ranks: int, models: range, plans: int, dtype: torch.dtype, adam: bool, most: float
) -> None:
    """Twenty steps; half of the trainings change their plan after ten. 204 cases in all."""
    group = Ranks(ranks)
    try:
        # Model by model: all together may take longer than ranks may be silent, on a busy machine.
        found = [case for model in models for case in group.ask(cases, [model], plans, dtype, adam)[0]]
    finally:
        group.close()
    assert len(found) == len(models) * plans
    assert max(found)[0] <= most, max(found)
