"""Throughput seen while jobs run, and what it says of the GPU counts that no job has run on yet.

A sample is a stretch of one attempt, long enough to be timed, in which nothing began or ended on the hosts
of its job. From `LEAST_SAMPLES` of them on, the throughput of a model on a count is believed where it says
something new: where nothing was known, or where it contradicts the profile by more than both are uncertain.

The other counts follow from a Gaussian process over the logarithm of the throughput: the profile (or, where
there is none, a usual scaling) times an unknown factor common to all counts, a smooth unknown change with
the count, and an unknown error of each count. What was seen settles them as far as it goes; the rest shows
as `Profile.spread`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log, sqrt
from statistics import median, stdev

from hpcsched.core.profile import Profile

Key = tuple[str, int, str]
"""A model, on how many hosts it runs, and on which type of GPU ("": the run's own)."""

LEAST_STEPS, LEAST_S = 5, 2.0
"""A stretch is a sample from this many steps and seconds on."""

LEAST_SAMPLES = 3
"""The throughput on a count is not believed from fewer."""

MOST_SAMPLES = 32
"""Older ones are forgotten: five minutes, as jobs are looked at every ten seconds."""

TOLERANCE = 0.05
"""Share by which a throughput may differ from what is believed, at least, and be no contradiction."""

USUAL_SCALING = 0.8
"""Taken for the exponent of throughput over GPUs of a model of which nothing is known."""

_GRID = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
"""The counts on each host that a curve without a profile is worked out for."""


_MOST_LOG = 700.0
"""Of a rate: beyond it no float holds it."""


@dataclass(frozen=True, slots=True)
class _Prior:
    """Standard deviations of what is unknown of the log throughput, and over what factor in the GPU count
    the smooth part of it changes."""

    common: float
    smooth: float
    single: float
    reach: float = log(4.0)

    def covariance(self, a: int, b: int) -> float:
        near = exp(-0.5 * (log(a / b) / self.reach) ** 2)
        return self.common**2 + self.smooth**2 * near + self.single**2 * (a == b)


_OF_A_PROFILE = _Prior(common=0.15, smooth=0.1, single=0.1)
_OF_NOTHING = _Prior(common=20.0, smooth=0.5, single=0.05)


@dataclass(slots=True)
class SeenRates:
    """The newest samples of a model on one count."""

    rates: list[float] = field(default_factory=list)
    steps: int = 0
    """Steps of all samples, kept or not."""
    told: tuple[float, float] | None = None
    """Rate and error when this was last believed: what comes later is compared with it."""

    def add(self, steps: int, seconds: float) -> None:
        """Take one more sample in."""
        self.rates = [*self.rates[1 - MOST_SAMPLES :], steps / seconds]
        self.steps += steps

    @property
    def rate(self) -> float:
        """Steps per second: the median, as a single sample may be of anything."""
        return median(self.rates)

    @property
    def spread(self) -> float:
        """Relative standard deviation between the samples; infinite for fewer than two."""
        return stdev(map(log, self.rates)) if len(self.rates) > 1 else inf

    @property
    def error(self) -> float:
        """Relative standard error of the rate."""
        return self.spread / sqrt(len(self.rates))

    @property
    def enough(self) -> bool:
        return len(self.rates) >= LEAST_SAMPLES


@dataclass(slots=True)
class _Stretch:
    """The start of a sample: the step that was done at `at` (run clock)."""

    attempt: int
    step: int
    at: float


@dataclass(slots=True)
class SeenThroughput:
    """What a run has seen of its models' throughput. Counts are on each host of a job."""

    seen: dict[Key, dict[int, SeenRates]] = field(default_factory=dict)
    beliefs: dict[Key, Profile] = field(default_factory=dict)
    """What to go by instead of the profile: it corrected, or the counts seen where there is none."""
    curves: dict[Key, Profile] = field(default_factory=dict)
    """The same, with the counts that were not seen estimated."""
    _open: dict[int, _Stretch] = field(default_factory=dict)
    _quiet_since: dict[str, float] = field(default_factory=dict)

    def disturb(self, hosts: Iterable[str], now: float) -> None:
        """Something began or ended on these hosts: no sample goes across it."""
        for host in hosts:
            self._quiet_since[host] = now

    def gone(self, job_id: int) -> None:
        """The job's attempt is over, or about to leave."""
        self._open.pop(job_id, None)

    def observe(
        self, job_id: int, attempt: int, key: Key, gpus: int, hosts: Iterable[str], *, step: int, at: float
    ) -> SeenRates | None:
        """The attempt had done `step` steps at `at` (run clock).

        Returns all that was seen of this model on this count if that completes a sample.
        """
        quiet_since = max((self._quiet_since.get(host, 0.0) for host in hosts), default=0.0)
        start = self._open.get(job_id)
        if start is None or start.attempt != attempt or start.at < quiet_since:
            if at >= quiet_since:
                self._open[job_id] = _Stretch(attempt, step, at)
            return None
        if step - start.step < LEAST_STEPS or at - start.at < LEAST_S:
            return None
        self._open[job_id] = _Stretch(attempt, step, at)
        seen = self.seen.setdefault(key, {}).setdefault(gpus, SeenRates())
        seen.add(step - start.step, at - start.at)
        return seen

    def own_type_is(self, new: str, old: str) -> None:
        """The run's own type of GPU was `old`, and is `new` from now on: what was seen stays of its type."""
        names = {"": old, new: ""}
        for table in (self.seen, self.beliefs, self.curves):
            moved = {(model, nodes, names.get(of, of)): found for (model, nodes, of), found in table.items()}
            table.clear()
            table.update(moved)  # type: ignore[arg-type]

    def points(self, key: Key) -> dict[int, SeenRates]:
        """The counts of a model that enough was seen of."""
        return {gpus: seen for gpus, seen in sorted(self.seen.get(key, {}).items()) if seen.enough}

    def believe(self, key: Key, profile: Profile | None) -> None:
        """Go by what was seen of a model, and by the profile that was loaded for it."""
        points = self.points(key)
        for seen in points.values():
            seen.told = seen.rate, seen.error
        if points and profile is None:
            self.beliefs[key] = as_seen(key, points)
        elif profile and any(contradicts(profile, gpus, seen) for gpus, seen in points.items()):
            self.beliefs[key] = corrected(key, profile, points)
        else:
            self.beliefs.pop(key, None)
        self.curves.pop(key, None)
        if known := self.beliefs.get(key, profile):
            partial = profile is None or profile.source == "learned"
            self.curves[key] = estimated(known) if partial else known


def contradicts(profile: Profile, gpus: int, seen: SeenRates) -> bool:
    """Whether what was seen differs from the profile by more than both are uncertain."""
    spread = (profile.spread or {}).get(gpus, 0.0) if profile.source != "learned" else 0.0
    return _differ(seen.rate, profile.rate(gpus), max(spread, seen.error))


def differs(seen: SeenRates) -> bool:
    """Whether what was seen since a throughput was last believed differs from that."""
    return seen.told is None or _differ(seen.rate, seen.told[0], max(seen.told[1], seen.error))


def _differ(a: float, b: float, error: float) -> bool:
    return abs(log(a) - log(b)) > max(TOLERANCE, 2 * error)


def as_seen(key: Key, points: Mapping[int, SeenRates]) -> Profile:
    """A profile of the counts that were seen, and of no others."""
    model, nodes, gpu_type = key
    return Profile(
        model=model,
        device=gpu_type,
        nodes=nodes,
        throughput={gpus: seen.rate for gpus, seen in points.items()},
        spread={gpus: seen.spread for gpus, seen in points.items()},
        source="learned",
    )


def corrected(key: Key, profile: Profile, points: Mapping[int, SeenRates]) -> Profile:
    """The profile as what was seen makes it most likely, with its uncertainty by count."""
    counts = sorted({*profile.throughput, *points})
    known = {gpus: (seen.rate, seen.error) for gpus, seen in points.items()}
    prior = {gpus: profile.rate(gpus) for gpus in counts}
    return replace(_posterior(profile, prior, known, _OF_A_PROFILE), nodes=key[1])


def estimated(profile: Profile) -> Profile:
    """A curve through the counts of a profile that was learnt, with a usual scaling where there are none."""
    counts = sorted({*_GRID, *profile.throughput})
    known = {gpus: (rate, (profile.spread or {}).get(gpus, 0.0)) for gpus, rate in profile.throughput.items()}
    return _posterior(profile, {gpus: gpus**USUAL_SCALING for gpus in counts}, known, _OF_NOTHING)


def _posterior(
    profile: Profile,
    expected: Mapping[int, float],
    points: Mapping[int, tuple[float, float]],
    prior: _Prior,
) -> Profile:
    """The Gaussian process with this prior, given points (rate, relative error) by count.

    The profile with its mean and standard deviation on the counts of `expected`, the prior's mean.
    """
    at = sorted(points)
    between = [[prior.covariance(a, b) + (a == b) * points[a][1] ** 2 for b in at] for a in at]
    off = [log(points[g][0]) - log(expected[g]) for g in at]
    throughput, spread = {}, {}
    for g, rate in expected.items():
        to = [prior.covariance(g, other) for other in at]
        pull = _solve(between, to)
        mean = log(rate) + sum(p * o for p, o in zip(pull, off, strict=True))
        throughput[g] = exp(min(max(mean, -_MOST_LOG), _MOST_LOG))
        left = prior.covariance(g, g) - sum(p * c for p, c in zip(pull, to, strict=True))
        spread[g] = sqrt(max(0.0, left))
    return replace(profile, throughput=throughput, spread=spread, source="learned")


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with matrix x = right, for a positive definite matrix: Gaussian elimination needs no pivots there."""
    rows = [[*row, y] for row, y in zip(matrix, right, strict=True)]
    size = len(rows)
    for k in range(size):
        for i in range(k + 1, size):
            share = rows[i][k] / rows[k][k]
            rows[i] = [a - share * b for a, b in zip(rows[i], rows[k], strict=True)]
    found = [0.0] * size
    for k in reversed(range(size)):
        known = sum(rows[k][j] * found[j] for j in range(k + 1, size))
        found[k] = (rows[k][size] - known) / rows[k][k]
    return found
