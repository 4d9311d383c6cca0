"""A search by ASHA as a source of jobs: what is decided depends on the results that are there by then.

All it goes by is which of its jobs there are and how they ended, as algorithm 2 does. A job that is there is
never taken back, and whoever goes on with a run after a crash finds what was decided in its jobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from hpcsched.tuning.asha import best_of, steps_of
from hpcsched.tuning.search import MOST_TRIALS, Search
from hpcsched.tuning.source import JobSource, Outcomes, RungJob, TrialProgress, job_name

ROUNDING = 1e-9
"""Budgets of rungs are rounded: so much more than the whole, relatively, is no more."""


@dataclass(slots=True)
class _Rung:
    """A rung as it is by now.

    `jobs` by trial, `ended` of them; `losses` with the trial of those that have a finite metric.
    """

    jobs: dict[int, RungJob] = field(default_factory=dict)
    ended: int = 0
    losses: list[tuple[float, int]] = field(default_factory=list)

    @property
    def running(self) -> int:
        return len(self.jobs) - self.ended


class AshaTuning(JobSource):
    """Asynchronous successive halving (Li et al., MLSys 2020, algorithm 2).

    Which jobs there are next is a pure function of those there are and of their outcomes: `outcomes` has
    every job that was submitted, with no state while it is unfinished. A call costs time in the jobs that
    there are.
    """

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        (self._ladder,) = search.brackets()
        self._steps = steps_of(self._ladder)
        most = self._ladder.trials
        if search.budget is not None:  # if fewer go on than planned, more may begin
            most = min(search.trials or MOST_TRIALS, int(search.budget / self._steps[0] * (1 + ROUNDING)))
        self._configs = search.space.sample(most, search.seed)
        self._made: dict[tuple[int, int], RungJob] = {}

    def jobs(self, outcomes: Outcomes, at_once: int = 1) -> list[RungJob]:
        """The jobs there are, and as many new ones as make `at_once` unfinished, if there is more to do."""
        rungs = self._rungs(outcomes)
        jobs = _in_order(rungs)
        for _ in range(at_once - sum(rung.running for rung in rungs)):
            job = self._next(rungs)
            if job is None:
                break
            rungs[job.rung].jobs[job.trial] = job
            jobs.append(job)
        return jobs

    def existing(self, outcomes: Outcomes) -> list[RungJob]:
        """The jobs there are, by rung and trial."""
        return _in_order(self._rungs(outcomes))

    def progress(self, outcomes: Outcomes) -> TrialProgress:
        """How much is done; what is to come is taken to be as if all went as planned."""
        rungs = self._rungs(outcomes)
        done = self._closed(rungs)
        begun = 0 if done else min(self._ladder.trials, len(self._configs))
        counts = self._to_come(rungs, begun=begun)
        counts[:done] = [len(rung.jobs) for rung in rungs[:done]]
        ended = [rung.ended for rung in rungs]
        return TrialProgress(
            rungs_done=done,
            rungs=len(rungs),
            jobs_done=sum(ended),
            jobs=sum(counts),
            budget_done=self._cost(ended),
            budget=self._cost(counts),
        )

    def _undecided(self, jobs: Sequence[RungJob], outcomes: Outcomes) -> set[tuple[int, int]]:
        rungs = self._rungs(outcomes)
        return {(self._ladder.s, i) for i in range(self._closed(rungs), len(rungs))}

    def _rungs(self, outcomes: Outcomes) -> list[_Rung]:
        """What there is by now: the jobs that are in `outcomes`."""
        rungs = [_Rung() for _ in self._steps]
        for trial in range(len(self._configs)):
            for i, rung in enumerate(rungs):
                job = self._job(trial, i)
                outcome = outcomes.get(job.name)
                if outcome is None:
                    break
                rung.jobs[trial] = job
                rung.ended += outcome.state is not None
                if (loss := self._loss(outcomes, job)) is not None:
                    rung.losses.append((loss, trial))
            if trial not in rungs[0].jobs:
                break  # trials begin in their order
        return rungs

    def _next(self, rungs: Sequence[_Rung]) -> RungJob | None:
        """Algorithm 2's `get_job`: the promotion that reaches highest, or a new trial; None: neither is
        there, or the budget does not allow it."""
        places = (self._joins(rungs, i) for i in range(len(rungs) - 1, -1, -1))
        return next((job for job in places if job is not None), None)

    def _joins(self, rungs: Sequence[_Rung], i: int) -> RungJob | None:
        """The job that could join a rung now."""
        if i == 0:
            trial = len(rungs[0].jobs)
            found = self._job(trial, 0) if trial < len(self._configs) else None
        else:
            before = rungs[i - 1]
            best = best_of(before.losses, before.ended, self.search.eta)
            found = next((self._job(trial, i) for trial in best if trial not in rungs[i].jobs), None)
        return found if found is None or self._affords(rungs, i) else None

    def _affords(self, rungs: Sequence[_Rung], i: int) -> bool:
        """Whether one more in a rung leaves enough of the budget for all that may go on. What has failed
        counts as if it had trained to its end: a search of which nothing works ends, too."""
        if self.search.budget is None:
            return True
        counts = self._to_come(rungs, more=i)
        return self._cost(counts) <= self.search.budget * (1 + ROUNDING)

    def _to_come(self, rungs: Sequence[_Rung], *, begun: int = 0, more: int | None = None) -> list[int]:
        """How many each rung has in the end, if no more than one in eta go on from now on.

        Args:
            begun: so many trials begin, if there are not more already.
            more: a rung that one more joins now.
        """
        counts: list[int] = []
        for i, rung in enumerate(rungs):
            there = len(rung.jobs) + (i == more)
            if i == 0:
                counts.append(max(there, begun))
                continue
            before, all_before = rungs[i - 1], counts[-1]
            able = all_before - (before.ended - len(before.losses))
            counts.append(max(there, min(int(all_before / Fraction(str(self.search.eta))), able)))
        return counts

    def _cost(self, counts: Sequence[int]) -> float:
        """The budget that so many trainings in each rung take."""
        return math.fsum(count * step for count, step in zip(counts, self._steps, strict=True))

    def _closed(self, rungs: Sequence[_Rung]) -> int:
        """How many rungs, from the first on, are as they will be at the end."""
        for i, rung in enumerate(rungs):
            if rung.running or self._joins(rungs, i) is not None:
                return i
        return len(rungs)

    def _job(self, trial: int, rung: int) -> RungJob:
        if (trial, rung) not in self._made:
            s = self._ladder.s
            self._made[trial, rung] = RungJob(
                name=job_name(trial, s, rung),
                trial=trial,
                bracket=s,
                rung=rung,
                args={**self.search.args, **self._configs[trial]},
                budget=self._ladder.rungs[rung][1],
                continues=job_name(trial, s, rung - 1) if rung else None,
            )
        return self._made[trial, rung]


def _in_order(rungs: Sequence[_Rung]) -> list[RungJob]:
    return [job for rung in rungs for job in rung.jobs.values()]
