"""ASHA's rules: asynchronous successive halving (Li et al., MLSys 2020, algorithm 2), in exact arithmetic.

Whenever there is room for a training, the best trial that is in the top 1/eta of its rung, by the results
that are there, goes on to the next one; where none is, a new trial begins in the first rung. So nothing waits
until a rung is complete. Some trials go on that would not have, had all results been known: of n trials about
the square root of n.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from hpcsched.errors import ConfigError
from hpcsched.tuning.hyperband import Bracket, Ladder, halving


def ladder(
    most: float,
    eta: float,
    trials: int | None = None,
    *,
    budget: float | None = None,
    whole: bool = False,
    where: str = "ASHA",
) -> Bracket:
    """The rungs that the trials climb, and about how many reach each: as in successive halving.

    It begins as low as leaves one trial that can be expected to reach the whole: within `budget` one of half
    the trials that it pays for, as some go on that would not have.

    Args:
        most: R, the largest budget of one trial, at least 1.
        eta: one trial in so many goes on to the next rung; above 1.
        trials: how many may begin; None: as many as the budget allows, without one as many as Hyperband's
            first bracket has.
        budget: for all trainings together, in the unit of R, at least R; None: no bound.
        whole: budgets of a trial are whole numbers, rounded up (steps).
        where: the file, for errors.

    Raises ConfigError (key R, eta or budget).
    """
    if budget is None:
        return halving(most, eta, trials, whole=whole, where=where)
    if not budget >= most:
        accepted = f"at least R, {most:g}: what one trial may have"
        raise ConfigError(where=where, key="budget", got=repr(budget), accepted=accepted)
    exact = Ladder(most, eta, where)
    for s in range(exact.last, -1, -1):
        least = exact.bracket(s, 1, whole)
        each = sum(step / exact.eta**i for i, step in enumerate(map(Fraction, steps_of(least))))
        paid = int(Fraction(str(budget)) / each)
        count = paid if trials is None else min(paid, trials)
        if s == 0 or (2 * exact.eta**s <= paid and exact.eta**s <= count):
            return exact.bracket(s, count, whole)
    raise AssertionError("s = 0 was the last")


def steps_of(bracket: Bracket) -> list[float]:
    """How much a trial trains in each rung, beyond the one before."""
    budgets = [budget for _, budget in bracket.rungs]
    return [after - before for before, after in zip([0.0, *budgets], budgets, strict=False)]


def best_of(results: Iterable[tuple[float, int]], ended: int, eta: float) -> list[int]:
    """The trials of a rung that may go on by what is known: the top 1/eta, the best first.

    Args:
        results: loss and number of each trial that has a finite one; of equals the lower number is better.
        ended: how many of the rung have ended, those without a result included: they rank last.
    """
    return [trial for _, trial in sorted(results)[: int(ended / Fraction(str(eta)))]]
