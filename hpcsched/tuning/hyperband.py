"""Hyperband's brackets (Li et al., JMLR 18, 2018, algorithm 1), in exact arithmetic.

A bracket of successive halving starts many configurations on a small budget, or few on a large one, and
lets one in eta of them go on to eta times the budget, up to the whole of it. Hyperband runs brackets of all
kinds, as nobody knows beforehand how early results tell the good from the bad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from hpcsched.errors import ConfigError

_MOST_BRACKETS = 100


@dataclass(frozen=True, slots=True)
class Bracket:
    """One run of successive halving: for each rung, how many trials, and the budget they reach.

    `s` is the paper's number of the bracket: its first rung's budget is R / eta^s. Budgets are cumulative: a
    trial of the second rung goes on from where it was.
    """

    s: int
    rungs: tuple[tuple[int, float], ...]

    @property
    def trials(self) -> int:
        """How many it starts."""
        return self.rungs[0][0]


def brackets(
    most: float, eta: float, *, whole: bool = False, where: str = "Hyperband"
) -> tuple[Bracket, ...]:
    """Hyperband's brackets, that with the most trials first (algorithm 1).

    Bracket s starts n = ceil((s_max + 1) / (s + 1) * eta^s) trials; its rung i has floor(n / eta^i) of them,
    for a budget of R * eta^(i - s). The paper's table for R = 81 rounds down on the way (27, 9, 6 and 5 after
    the first 81 trials); this is the algorithm as printed (34, 15, 8 and 5).

    Args:
        most: R, the largest budget of one trial, at least 1.
        eta: one trial in so many goes on to the next rung; above 1.
        whole: budgets are whole numbers, rounded up (steps).
        where: the file, for errors.

    Raises ConfigError (key R or eta).
    """
    ladder = Ladder(most, eta, where)
    return tuple(
        ladder.bracket(s, math.ceil(Fraction(ladder.last + 1, s + 1) * ladder.eta**s), whole)
        for s in range(ladder.last, -1, -1)
    )


def halving(
    most: float, eta: float, trials: int | None = None, *, whole: bool = False, where: str = "Hyperband"
) -> Bracket:
    """Successive halving: one bracket from the least budget up, with so many trials.

    With fewer trials than Hyperband's first bracket has (None: that many) it begins higher, so that one of
    them reaches the whole budget. Arguments and errors as for `brackets`.
    """
    ladder = Ladder(most, eta, where)
    if trials is None:
        return ladder.bracket(ladder.last, math.ceil(ladder.eta**ladder.last), whole)
    s = max(s for s in range(ladder.last + 1) if s == 0 or ladder.eta**s <= trials)
    return ladder.bracket(s, trials, whole)


class Ladder:
    """R, eta and s_max as exact numbers: floats would say that log 243 / log 3 is below 5.

    Raises ConfigError (key R or eta).
    """

    def __init__(self, most: float, eta: float, where: str) -> None:
        if not (math.isfinite(most) and most >= 1):
            raise ConfigError(where=where, key="R", got=repr(most), accepted="a number of at least 1")
        if not (math.isfinite(eta) and eta > 1):
            raise ConfigError(where=where, key="eta", got=repr(eta), accepted="a number above 1, such as 3")
        # 2.1 means 21/10, not the float beside it.
        self.most, self.eta = Fraction(str(most)), Fraction(str(eta))
        self.last, power = 0, self.eta
        while power <= self.most:
            self.last, power = self.last + 1, power * self.eta
            if self.last >= _MOST_BRACKETS:
                accepted = f"one that makes fewer than {_MOST_BRACKETS} brackets"
                raise ConfigError(where=where, key="R", got=f"{most!r} with eta = {eta!r}", accepted=accepted)

    def bracket(self, s: int, trials: int, whole: bool) -> Bracket:
        """So many trials that begin at R / eta^s, and one in eta of each rung in the next."""
        rungs: dict[Fraction, int] = {}
        for i in range(s + 1):
            budget = self.most / self.eta ** (s - i)
            # Where rounding makes two rungs one, it is the first: the second has nothing more to train.
            rungs.setdefault(Fraction(math.ceil(budget)) if whole else budget, int(trials / self.eta**i))
        return Bracket(s, tuple((count, _plain(budget)) for budget, count in rungs.items()))


def _plain(budget: Fraction) -> float:
    return budget.numerator if budget.denominator == 1 else float(budget)
