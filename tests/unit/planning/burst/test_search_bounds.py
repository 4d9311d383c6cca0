"""The search for burst plans ends soon whatever the table, or says that it would not."""

from __future__ import annotations

import numpy as np
import pytest

from hpcsched.errors import ConfigError
from hpcsched.planning.burst import search
from hpcsched.planning.burst.costs import _moved_home
from hpcsched.planning.burst.planner import solve
from hpcsched.planning.burst.search import min_plus
from hpcsched.planning.burst.table import parse


def problem(prev, counts, gpus=8):
    times = {str(count): 900 / count + 20 for count in counts}
    layers = [{"id": i, "name": f"l{i}", "prev": each, "time_us": times} for i, each in enumerate(prev)]
    return parse({"schema": 1, "gpus": gpus, "layers": layers}, where="t.json")


def beside(branches):
    """One layer, so many branches of a layer each, and one that reads from them all."""
    return [[], *[[0]] * branches, [*range(1, branches + 1)]]


def within(depth):
    """Blocks within each other: a layer of each is read by the next, and by the one at its end."""
    down = [[i - 1] if i else [] for i in range(depth)]
    return [*down, *([depth + i - 1, depth - i - 1] for i in range(depth))]


def test_sixty_branches_are_planned_at_once():
    assert solve(problem(beside(60), [1, 2, 4, 8])).iter_us > 0  # all sets of them are 2^60


@pytest.mark.long
@pytest.mark.parametrize(
    ("prev", "counts", "gpus", "got"),
    [
        (beside(3), range(1, 65), 64, "64 GPU counts for each of 5 layers with 6 edges"),
        (beside(6), range(1, 41), 40, "40 GPU counts for each of 8 layers with 12 edges"),
        (beside(1), [1, 2**20], 2**20, None),
        (beside(5), [1, 2**20], 2**20, "7 layers on up to 1048576 GPUs"),
        (within(600), [1, 2], 2, "blocks of branches within each other, too deep"),
    ],
)
def test_what_takes_too_long_is_refused_in_a_line(prev, counts, gpus, got):
    asked = problem(prev, counts, gpus)
    if got is None:
        assert solve(asked).iter_us > 0
        return
    with pytest.raises(ConfigError) as caught:
        solve(asked)
    line = str(caught.value)
    assert got in line and "accepted: fewer layers, branches or GPU counts" in line and "\n" not in line


def test_a_table_with_too_many_counts_is_refused():
    with pytest.raises(ConfigError, match="1500 GPU counts; accepted: at most 1024"):
        problem([[]], range(1, 1501), 2000)


def test_steps_in_parts_come_to_the_same(monkeypatch):
    asked = problem(beside(5), [1, 2, 3, 4, 8])
    random = np.random.default_rng(1)
    a, b = random.random((2, 3, 4, 5)), random.random((3, 5, 6))
    whole = solve(asked), min_plus(a, b)
    monkeypatch.setattr(search, "_AT_ONCE", 1)
    parts = solve(asked), min_plus(a, b)
    assert parts[0] == whole[0] and np.array_equal(parts[1], whole[1])


@pytest.mark.parametrize("batch", [1, 2, 12, 30, 64, 210])
def test_equal_shares_move_what_all_ranks_say(batch):
    counts = np.array([n for n in range(1, batch + 1) if batch % n == 0], dtype=float)
    shares = [
        [(k * batch // n, (k + 1) * batch // n) if k < n else (0, 0) for k in range(batch)] for n in counts
    ]
    for g, ours in enumerate(shares):
        for h, theirs in enumerate(shares):
            most = 0.0
            for (a, b), (c, d) in zip(ours, theirs, strict=True):
                stays = max(0.0, min(b, d) - max(a, c))
                most = max(most, b - a - stays, d - c - stays)
            assert _moved_home(counts, batch)[g, h] == most / batch
