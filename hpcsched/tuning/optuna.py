"""An Optuna study as a source of jobs: its sampler proposes, its pruner stops, its storage remembers.

Unlike `Tuning` this is not a pure function: asking a study changes it, and what it proposes depends on the
results so far. What must survive a crash is in the study itself: which job a trial is at is written in the
trial's user attribute `hpcsched_job`, so another process that loads the study from its storage goes on.
"""

from __future__ import annotations

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpcsched.errors import ConfigError
from hpcsched.tuning.hyperband import halving
from hpcsched.tuning.search import Search
from hpcsched.tuning.source import UNKNOWN, JobSource, Outcomes, RungJob, TrialProgress, job_name
from hpcsched.tuning.space import Axis

_JOB = "hpcsched_job"


class OptunaTuning(JobSource):
    """Trials of a study, trained in the rungs of successive halving; after each the study's pruner decides.

    Failed and cancelled jobs, and those without a finite metric, are told as failed trials. A process that
    dies between asking for a trial and naming its job leaves a running trial behind, as any of Optuna's
    workers does.
    """

    def __init__(
        self, study: Study, search: Search, *, trials: int, parallel: int = 16, run: str = "hpcsched"
    ) -> None:
        """Go on with the trials of this run in the study, if there are any.

        Args:
            study: with one objective, in the search's direction.
            search: its space, metric, R, eta and unit; its method does not matter. R is a whole number:
                Optuna counts whole steps.
            trials: how many this run asks for in all.
            parallel: how many may be unfinished at once; the more, the more can be packed, and the less
                the sampler knows when it proposes.
            run: tells apart runs that share a study.

        Raises ConfigError if the study's direction is not the search's, or R is no whole number.
        """
        super().__init__(search)
        wanted = StudyDirection.MAXIMIZE if search.mode == "max" else StudyDirection.MINIMIZE
        if list(study.directions) != [wanted]:
            got = " and ".join(direction.name.lower() for direction in study.directions)
            accepted = f"{wanted.name.lower()}, as mode is {search.mode}"
            raise ConfigError(where=f"study {study.study_name}", key="direction", got=got, accepted=accepted)
        if search.R % 1:
            accepted = "a whole number, with a study of Optuna"
            raise ConfigError(where=search.where, key="R", got=repr(search.R), accepted=accepted)
        self._study, self._trials, self._parallel, self._run = study, trials, parallel, run
        ladder = halving(search.R, search.eta, whole=True, where=search.where)
        self._budgets = [int(budget) for _, budget in ladder.rungs]
        self._distributions = {axis.name: _distribution(axis) for axis in search.space.axes()}
        self._live: dict[int, optuna.Trial] = {}

    def jobs(self, outcomes: Outcomes, at_once: int = 1) -> list[RungJob]:
        """All jobs that should exist by now, by trial and rung, after telling the study what is new."""
        for trial in self._own():
            if not trial.state.is_finished():
                self._settle(trial, outcomes)
        own = self._own()
        unfinished = sum(not trial.state.is_finished() for trial in own)
        for _ in range(min(self._parallel - unfinished, self._trials - len(own))):
            asked = self._study.ask(self._distributions)
            self._live[asked.number] = asked
            self._name(asked, 0)
        return self.existing(outcomes)

    def existing(self, outcomes: Outcomes) -> list[RungJob]:
        """The jobs of all trials so far; changes nothing."""
        return [self._job(trial, rung) for trial in self._own() for rung in range(self._rung(trial) + 1)]

    def finished(self, outcomes: Outcomes) -> bool:
        """Whether all trials have been asked for and told; `jobs` is what tells them."""
        own = self._own()
        return len(own) >= self._trials and all(trial.state.is_finished() for trial in own)

    def progress(self, outcomes: Outcomes) -> TrialProgress:
        """How much is done; totals are for trials that are not pruned, and shrink with each that is."""
        own = self._own()
        full = len(self._budgets)
        rungs = [self._rung(trial) + 1 if trial.state.is_finished() else full for trial in own]
        rungs += [full] * (self._trials - len(own))
        done = [job for job in self.existing(outcomes) if outcomes.get(job.name, UNKNOWN).state]
        before = dict(zip(self._budgets, [0, *self._budgets], strict=False))
        return TrialProgress(
            rungs_done=len(done),
            rungs=sum(rungs),
            jobs_done=len(done),
            jobs=sum(rungs),
            budget_done=sum(job.budget - before[int(job.budget)] for job in done),
            budget=sum(self._budgets[count - 1] for count in rungs),
        )

    def _settle(self, frozen: FrozenTrial, outcomes: Outcomes) -> None:
        """Tell the study how the newest job of an unfinished trial ended, if it has.

        A crash after any of the steps is made good by doing them all again.
        """
        rung = self._rung(frozen)
        job = self._job(frozen, rung)
        if outcomes.get(job.name, UNKNOWN).state is None:
            return
        loss = self._loss(outcomes, job)
        if loss is None:
            self._study.tell(frozen.number, state=TrialState.FAIL)
            return
        value, step = self._sign * loss, self._budgets[rung]
        # After a restart there is no trial object. Optuna makes one from the number that its storage has for
        # the trial, which it does not offer in any other way.
        trial = self._live.get(frozen.number) or optuna.Trial(self._study, frozen._trial_id)
        if step not in frozen.intermediate_values:
            trial.report(value, step)
        if rung + 1 == len(self._budgets):
            self._study.tell(frozen.number, value)
        elif trial.should_prune():
            self._study.tell(frozen.number, state=TrialState.PRUNED)
        else:
            self._name(trial, rung + 1)

    def _own(self) -> list[FrozenTrial]:
        """The trials of this run, in the order of their numbers."""
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.user_attrs.get(_JOB, "").startswith(f"{self._run}/")]

    def _rung(self, trial: FrozenTrial) -> int:
        return int(trial.user_attrs[_JOB].rpartition("-r")[2])

    def _name(self, trial: optuna.Trial, rung: int) -> None:
        trial.set_user_attr(_JOB, f"{self._run}/{job_name(trial.number, 0, rung)}")

    def _job(self, trial: FrozenTrial, rung: int) -> RungJob:
        return RungJob(
            name=job_name(trial.number, 0, rung),
            trial=trial.number,
            bracket=0,
            rung=rung,
            args={**self.search.args, **trial.params},
            budget=self._budgets[rung],
            continues=job_name(trial.number, 0, rung - 1) if rung else None,
        )


def _distribution(axis: Axis) -> BaseDistribution:
    match axis.written:
        case "choice":
            return CategoricalDistribution(axis.values)
        case "int":
            return IntDistribution(int(axis.low), int(axis.high))
        case _:
            return FloatDistribution(float(axis.low), float(axis.high), log=axis.log)
