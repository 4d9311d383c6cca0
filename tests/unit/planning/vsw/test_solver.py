"""The exact choice of one option per group."""

from itertools import product

import pytest
from budget import share
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.planning.vsw.solver import Infeasible, Option, TooLarge, solve


def best(groups, workers, use_all):
    """(largest time, groups used) of the best of all choices; None: there is none."""
    found = []
    for choice in product(*([*([] if use_all else [None]), *group] for group in groups)):
        used = [option for option in choice if option is not None]
        if used and sum(option.workers for option in used) == workers:
            found.append((max(option.iter_s for option in used), len(used)))
    return min(found, default=None)


def check(groups, workers, use_all):
    expected = best(groups, workers, use_all)
    try:
        picked = solve(groups, workers, use_all=use_all)
    except Infeasible as error:
        assert expected is None
        assert str(error)
        return
    used = [group[i] for group, i in zip(groups, picked, strict=True) if i is not None]
    assert sum(option.workers for option in used) == workers
    assert not use_all or None not in picked
    assert (max(option.iter_s for option in used), len(used)) == expected


OPTIONS = st.lists(st.builds(Option, st.integers(1, 7), st.integers(1, 9).map(lambda n: n / 7)), max_size=4)


@given(groups=st.lists(OPTIONS, min_size=1, max_size=4), workers=st.integers(1, 20), use_all=st.booleans())
def test_it_equals_trying_everything(groups, workers, use_all):
    check(groups, workers, use_all)


@given(options=OPTIONS, count=st.integers(2, 4), workers=st.integers(1, 20), use_all=st.booleans())
def test_it_equals_trying_everything_on_groups_that_are_alike(options, count, workers, use_all):
    check([options] * count, workers, use_all)


@pytest.mark.parametrize("use_all", [False, True])
def test_all_small_cases_of_two_groups(use_all):
    sets = [
        [Option(w, t) for w, t in zip((1, 2, 4), times, strict=True) if t]
        for times in product((0, 1, 2), repeat=3)
    ]
    for one, other in share([*product(sets, repeat=2)]):
        for workers in range(1, 9):
            check([one, other], workers, use_all)


def test_a_large_case_has_the_known_answer():
    # Times are proportional to the workers: GPUs twice as fast take twice as many.
    slow = [Option(w, 0.2 * w) for w in range(1, 1201)]
    fast = [Option(w, 0.1 * w) for w in range(1, 1201)]
    groups = [slow, fast] * 8
    picked = solve(groups, 1200)
    assert [groups[i][j].workers for i, j in enumerate(picked)] == [50, 100] * 8


def test_runs_of_workers_that_are_far_apart_are_added():
    groups = [[Option(w, w / 100) for w in range(1, 300) if w % 7 in (0, 1, 3)] for _ in range(3)]
    picked = solve(groups, 600)
    workers = [group[i].workers for group, i in zip(groups, picked, strict=True)]
    assert sum(workers) == 600
    # 600 is 5 modulo 7, as 1 + 1 + 3 are: of such numbers 197, 197 and 199 are too few.
    assert max(workers) == 204


def test_more_sums_than_can_be_tried_are_refused() -> None:
    with pytest.raises(TooLarge, match="1000000000 workers on 64 groups"):
        solve([[Option(1, 1.0)]] * 64, 10**9)


def test_of_equally_fast_choices_the_one_with_fewest_groups_and_the_first():
    group = [Option(1, 1.0), Option(2, 1.0), Option(3, 1.0)]
    assert solve([group] * 4, 3) == [2, None, None, None]


def test_the_index_is_that_of_the_fastest_option_with_so_many_workers():
    assert solve([[Option(2, 3.0), Option(2, 1.0), Option(2, 1.0)]], 2) == [1]


@pytest.mark.parametrize(
    ("groups", "workers", "use_all", "why"),
    [
        ([[]], 3, False, "no group has an option"),
        ([], 3, False, "no group has an option"),
        ([[Option(3, 1.0)], []], 3, True, "group 2 has no option"),
        ([[Option(12, 1.0)], [Option(84, 1.0)]], 7, False, "the groups reach 12..96 workers, 7 are asked"),
        (
            [[Option(2, 1.0), Option(4, 1.0)]] * 2,
            5,
            False,
            "only multiples of 2 workers can be reached, 5 are asked",
        ),
        (
            [[Option(1, 1.0), Option(3, 1.0)]] * 3,
            6,
            True,
            "only 3 workers and 2, 4, ... more can be reached, 6 are asked",
        ),
        (
            [[Option(3, 1.0)], [Option(4, 1.0)]],
            6,
            False,
            "no choice of options adds up to 6 workers; 4 and 7 can be reached",
        ),
        (
            [[Option(3, 1.0), Option(7, 1.0)], [Option(5, 1.0), Option(11, 1.0)]],
            10,
            True,
            "no choice of options adds up to 10 workers; 8 and 12 can be reached",
        ),
    ],
)
def test_what_cannot_be_reached_is_told(groups, workers, use_all, why):
    with pytest.raises(Infeasible) as error:
        solve(groups, workers, use_all=use_all)
    assert str(error.value) == why
