"""A search as a source of jobs: from what is known of its jobs so far, all jobs that should exist by now.

Nothing is remembered between calls, so nothing is lost in a crash: whoever submits the jobs that are missing,
by name, goes on where the search was. Here which of a rung's trials go on is decided when all its jobs are
final, and so does not depend on the order in which they end; `asynchronous` does not wait for that.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcsched.tuning.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class RungJob:
    """One job of a search: train `trial` up to `budget` (epochs or steps in all, as the search's unit says).

    `args` are fixed and chosen. It goes on from the newest checkpoint of the job `continues` (None: it starts
    anew); what a program goes on from is its own affair.
    """

    name: str
    trial: int
    bracket: int
    rung: int
    args: Mapping[str, Any]
    budget: float
    continues: str | None


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What is known of a job: its final state (None: not finished), and what its trainer's evaluate said, or
    its program."""

    state: Literal["completed", "failed", "cancelled"] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


Outcomes = Mapping[str, TrialOutcome]
"""By the name of the job. A job that is not in it is not finished; names of other jobs are ignored."""

UNKNOWN = TrialOutcome()

_NAME = re.compile(r"t([0-9]{4,18})-b([0-9]{1,4})-r([0-9]{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best result so far: the job whose checkpoint has it, and the value of the metric."""

    job: RungJob
    metric: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """Where one trial is: the budget it has completed, and the metric there (None: none, or not finite).

    `state`: running (its newest job is not finished), waiting (for the others of its rung), stopped (others
    were better), finished (had the whole budget), failed, cancelled, or "no metric" (completed, but the
    metric is missing or not a finite number). `job` is its newest one; `best`: the search's best is its.
    """

    trial: int
    bracket: int
    args: Mapping[str, Any]
    budget: float
    metric: float | None
    state: str
    job: str
    best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProgress:
    """How much is done of how much. Totals shrink when so many trials fail that a rung is not full.

    `budget` is what is trained in all jobs, in the search's unit.
    """

    rungs_done: int
    rungs: int
    jobs_done: int
    jobs: int
    budget_done: float
    budget: float


def job_name(trial: int, bracket: int, rung: int) -> str:
    """The name of a trial's job: trial and rung count from 0, the bracket is Hyperband's s."""
    return f"t{trial:04d}-b{bracket}-r{rung}"


def place_of(name: str) -> tuple[int, int, int] | None:
    """Trial, bracket and rung of a job by its name; None: it is none of a search."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


class JobSource(ABC):
    """A search that makes jobs, and says where it stands."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self._sign = -1.0 if search.mode == "max" else 1.0

    @abstractmethod
    def jobs(self, outcomes: Outcomes, at_once: int = 1) -> list[RungJob]:
        """All jobs that should exist by now, in the order of submission.

        `at_once`: for how many unfinished ones there is room; it counts where there is always one more that
        could be tried.
        """

    def existing(self, outcomes: Outcomes) -> list[RungJob]:
        """As `jobs`, but where asking for jobs makes new ones: those there are."""
        return self.jobs(outcomes)

    @abstractmethod
    def progress(self, outcomes: Outcomes) -> TrialProgress:
        """How much of the search is done."""

    def finished(self, outcomes: Outcomes) -> bool:
        """Whether all is done: no job is unfinished and none will follow."""
        return all(outcomes.get(job.name, UNKNOWN).state for job in self.jobs(outcomes))

    def best(self, outcomes: Outcomes) -> Best | None:
        """The best metric of all completed jobs, whatever their budget, as in Hyperband (None: none yet).

        Of equals the one with more budget, then that of the lower trial.
        """
        found = [
            (loss, -job.budget, job.trial, job)
            for job in self.existing(outcomes)
            if (loss := self._loss(outcomes, job)) is not None
        ]
        if not found:
            return None
        loss, _, _, job = min(found, key=lambda entry: entry[:3])
        return Best(job=job, metric=self._sign * loss)

    def trials(self, outcomes: Outcomes) -> list[TrialRow]:
        """A row for each trial, in their order."""
        jobs = self.existing(outcomes)
        best = self.best(outcomes)
        undecided = self._undecided(jobs, outcomes)
        by_trial: dict[int, list[RungJob]] = {}
        for job in jobs:
            by_trial.setdefault(job.trial, []).append(job)
        rows = []
        for trial, own in sorted(by_trial.items()):
            done = [job for job in own if outcomes.get(job.name, UNKNOWN).state == "completed"]
            loss = self._loss(outcomes, done[-1]) if done else None
            rows.append(
                TrialRow(
                    trial=trial,
                    bracket=own[-1].bracket,
                    args=own[-1].args,
                    budget=done[-1].budget if done else 0,
                    metric=None if loss is None else self._sign * loss,
                    state=self._state(own[-1], outcomes, undecided),
                    job=own[-1].name,
                    best=best is not None and best.job.trial == trial,
                )
            )
        return rows

    def missing_metric(self, outcomes: Outcomes) -> list[str] | None:
        """The metrics that the trainer does report, if no completed job has the one searched for.

        None: some job has it, or none has completed. An empty list: the trainer reports nothing.
        """
        reported = [
            outcomes[job.name].metrics
            for job in self.existing(outcomes)
            if outcomes.get(job.name, UNKNOWN).state == "completed"
        ]
        if not reported or any(self.search.metric in metrics for metrics in reported):
            return None
        return sorted({name for metrics in reported for name in metrics})

    def _undecided(self, jobs: Sequence[RungJob], outcomes: Outcomes) -> set[tuple[int, int]]:
        """Brackets and rungs whose completed trials wait for others."""
        return set()

    def _state(self, job: RungJob, outcomes: Outcomes, undecided: set[tuple[int, int]]) -> str:
        state = outcomes.get(job.name, UNKNOWN).state
        if state != "completed":
            return state or "running"
        if self._loss(outcomes, job) is None:
            return "no metric"
        if job.budget >= self.search.R:
            return "finished"
        return "waiting" if (job.bracket, job.rung) in undecided else "stopped"

    def _loss(self, outcomes: Outcomes, job: RungJob) -> float | None:
        """The metric with the sign that makes less better; None where there is no finite one.

        Infinities count as none: a training that diverged must not win a search for the largest value.
        """
        outcome = outcomes.get(job.name, UNKNOWN)
        if outcome.state != "completed":
            return None
        value = outcome.metrics.get(self.search.metric, math.nan)
        return self._sign * value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class _Rung:
    """A rung as it is: its jobs, in the order of trials, and whether all of them are final."""

    jobs: tuple[RungJob, ...]
    decided: bool


class Tuning(JobSource):
    """Hyperband, successive halving, random and grid search: which jobs there are is a pure function.

    The more outcomes are known, the more jobs there are: all first rungs in the order of their brackets, then
    all second rungs, and so on; none ever goes away. A call costs time in the jobs that there are.
    """

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self._brackets = search.brackets()
        wanted = sum(bracket.trials for bracket in self._brackets)
        if search.method == "grid":
            self._configs = list(search.space.grid())
        else:
            self._configs = search.space.sample(wanted, search.seed)
        self._made: dict[tuple[int, int], RungJob] = {}

    def jobs(self, outcomes: Outcomes, at_once: int = 1) -> list[RungJob]:
        """All jobs that should exist by now, in the order of submission.

        Outcomes that become known only add jobs, each at a place of its own, whatever their order.
        """
        rungs = [rung for course in self._courses(outcomes) for rung in course]
        rungs.sort(key=lambda rung: rung.jobs[0].rung)  # stable: brackets stay in their order
        return [job for rung in rungs for job in rung.jobs]

    def progress(self, outcomes: Outcomes) -> TrialProgress:
        """How much of the search is done; rungs to come are taken to be full."""
        rungs = rungs_done = jobs = jobs_done = 0
        budget = budget_done = 0.0
        for bracket, course in zip(self._brackets, self._courses(outcomes), strict=False):
            size, decided, before = 0, True, 0.0
            for i, (planned, until) in enumerate(bracket.rungs):
                if i < len(course):
                    size, decided = len(course[i].jobs), course[i].decided
                    done = sum(outcomes.get(job.name, UNKNOWN).state is not None for job in course[i].jobs)
                elif decided:
                    break  # none was good enough to go on
                else:
                    size, done = min(planned, size), 0
                rungs, rungs_done = rungs + 1, rungs_done + (done == size)
                jobs, jobs_done = jobs + size, jobs_done + done
                budget, budget_done = budget + size * (until - before), budget_done + done * (until - before)
                before = until
        return TrialProgress(
            rungs_done=rungs_done,
            rungs=rungs,
            jobs_done=jobs_done,
            jobs=jobs,
            budget_done=budget_done,
            budget=budget,
        )

    def _undecided(self, jobs: Sequence[RungJob], outcomes: Outcomes) -> set[tuple[int, int]]:
        return {(job.bracket, job.rung) for job in jobs if outcomes.get(job.name, UNKNOWN).state is None}

    def _courses(self, outcomes: Outcomes) -> Iterator[list[_Rung]]:
        """For each bracket that has trials its rungs so far; the last one may be undecided."""
        first = 0
        for bracket in self._brackets:
            trials: Sequence[int] = range(first, min(first + bracket.trials, len(self._configs)))
            first += len(trials)
            if not trials:
                return  # the space has no more configurations
            course = []
            for i, (_, budget) in enumerate(bracket.rungs):
                jobs = tuple(self._job(trial, bracket.s, i, budget) for trial in trials)
                decided = all(outcomes.get(job.name, UNKNOWN).state for job in jobs)
                course.append(_Rung(jobs, decided))
                if not decided or i + 1 == len(bracket.rungs):
                    break
                trials = self._survivors(jobs, bracket.rungs[i + 1][0], outcomes)
                if not trials:
                    break
            yield course

    def _survivors(self, jobs: Sequence[RungJob], count: int, outcomes: Outcomes) -> list[int]:
        """The best trials of a rung, `count` at most, in their order; never one without a finite metric."""
        losses = ((self._loss(outcomes, job), job.trial) for job in jobs)
        ranked = sorted((loss, trial) for loss, trial in losses if loss is not None)
        return sorted(trial for _, trial in ranked[:count])

    def _job(self, trial: int, bracket: int, rung: int, budget: float) -> RungJob:
        if (trial, rung) not in self._made:
            self._made[trial, rung] = RungJob(
                name=job_name(trial, bracket, rung),
                trial=trial,
                bracket=bracket,
                rung=rung,
                args={**self.search.args, **self._configs[trial]},
                budget=budget,
                continues=job_name(trial, bracket, rung - 1) if rung else None,
            )
        return self._made[trial, rung]
