"""Optimus's allocation for parameter-server training (Peng et al., EuroSys 2018), as NEARCHUS's baseline.

The time of a step is fitted to measured configurations of equal nodes. Then one node more comes every ten
minutes, a server or a worker, whichever the fit says gains more. Written from the papers' descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import numpy.typing as npt

from hpcsched.planning.ps.model import NetworkLink, PsModel
from hpcsched.planning.ps.whatif.best import fixed

Array = npt.NDArray[np.float64]

FIRST_NODES = (1, 2)
"""Servers and workers that a training begins with (NEARCHUS, section V)."""

NODE_INTERVAL_S = 600.0
"""Seconds from one node more to the next (Optimus: ten minutes)."""

MAX_FIRST_SAMPLES = 20
"""Configurations that are measured first (NEARCHUS, section III-C)."""

MAX_ROLE_RATIO = 2.0
"""The largest ratio of servers to workers, or of workers to servers, in a measured configuration (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted speed, by the numbers of servers p and workers w.

    The seconds of a step are a / w + b + c w / p + d w + e p. Where each worker's batch is a step
    (`weak`), those between two batches of a worker are b + c w / p + d w + e p. None of the `coefficients`,
    in that order, is negative.
    """

    coefficients: tuple[float, ...]
    weak: bool = False

    def rate(self, servers: int, workers: int) -> float:
        """Predicted steps a second."""
        time_s = float(_terms(np.array([servers]), np.array([workers]), self.weak)[0] @ self.coefficients)
        return (workers if self.weak else 1) / time_s if time_s > 0 else 0.0


def fit(measured: Iterable[tuple[int, int, float]], *, weak: bool = False) -> Fit:
    """The fit of least squares to (servers, workers, steps a second). Raises ValueError if there are none."""
    rows = np.array(list(measured), dtype=float).reshape(-1, 3)
    if not len(rows):
        raise ValueError("no configuration was measured")
    servers, workers, rates = rows.T
    times_s = (workers if weak else 1.0) / rates
    return Fit(
        coefficients=tuple(map(float, _nonnegative(_terms(servers, workers, weak), times_s))), weak=weak
    )


def sampled(
    nodes: int, *, count: int = MAX_FIRST_SAMPLES, most_unlike: float = MAX_ROLE_RATIO
) -> list[tuple[int, int]]:
    """Configurations to measure, at most `count`, evenly picked from all those of `nodes` nodes at most."""
    every = [
        (servers, size - servers)
        for size in range(2, nodes + 1)
        for servers in range(1, size)
        if 1 / most_unlike <= servers / (size - servers) <= most_unlike
    ]
    if len(every) <= count:
        return every
    return [every[round(i * (len(every) - 1) / (count - 1))] for i in range(count)]


def profiled(
    model: PsModel, configurations: Iterable[tuple[int, int]], link: NetworkLink | None = None
) -> Fit:
    """The fit to what would be measured of these (servers, workers) of NODE_CORES cores each."""
    return fit(((p, w, fixed(model, p, w, link).usage.rate) for p, w in configurations), weak=model.weak)


def next_node(fit: Fit, servers: int, workers: int) -> Literal["server", "worker"] | None:
    """The role of one node more, by what is predicted to be faster; None if neither is faster than now."""
    now = fit.rate(servers, workers)
    server, worker = fit.rate(servers + 1, workers), fit.rate(servers, workers + 1)
    if max(server, worker) <= now:
        return None
    return "worker" if worker >= server else "server"


def _terms(servers: Array, workers: Array, weak: bool) -> Array:
    of_all = [np.ones(len(workers)), workers / servers, workers, servers]
    return np.stack(of_all if weak else [1 / workers, *of_all], axis=-1)


def _nonnegative(terms: Array, values: Array) -> Array:
    """Coefficients of least squares of which none is negative.

    It is the unconstrained solution in those that are not 0; they are few, so all choices are tried.
    """
    best, least = np.zeros(terms.shape[1]), float(values @ values)
    for size in range(1, terms.shape[1] + 1):
        for chosen in combinations(range(terms.shape[1]), size):
            part = np.linalg.lstsq(terms[:, chosen], values, rcond=None)[0]
            error = float(np.sum((terms[:, chosen] @ part - values) ** 2))
            if (part >= 0).all() and error < least:
                best = np.zeros(terms.shape[1])
                best[list(chosen)] = part
                least = error
    return best
