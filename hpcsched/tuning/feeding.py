"""A search as the source of a run's jobs: what the run knows of them in, the jobs that are missing out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from hpcsched import jobfile
from hpcsched.contract.exits import REFUSED
from hpcsched.contract.strategies import Packed
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, JobState
from hpcsched.core.reasons import Why
from hpcsched.dialects.command import program_name
from hpcsched.errors import ConfigError
from hpcsched.tuning.command import job_table, uses_folder, values_of
from hpcsched.tuning.grouping import BATCH_KEYS, STRATEGIES, packs_of
from hpcsched.tuning.search import example_of
from hpcsched.tuning.source import JobSource, RungJob, TrialOutcome

MOST_REFUSED = 3
"""Trials that the trainer may refuse before the search is given up, if none has got any further."""

_ENDED = {
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
    JobState.TIMEOUT: "failed",
    JobState.OUT_OF_MEMORY: "failed",
}


def outcomes_of(machine: Machine) -> dict[str, TrialOutcome]:
    """What a run knows of its jobs, by name."""
    found: dict[str, TrialOutcome] = {}
    for job in machine.run.jobs.values():
        state: Any = _ENDED.get(job.state)
        metrics = {name: nan if value is None else value for name, value in job.metrics.items()}
        found[job.spec.name] = TrialOutcome(state, metrics) if state else TrialOutcome()
    return found


class Trials:
    """What is known of a search's trials: of trainers what the run knows; programs leave more
    (`store.trials`)."""

    def outcomes(self, machine: Machine) -> dict[str, TrialOutcome]:
        """What has become of the run's jobs, by name."""
        return outcomes_of(machine)

    def missing(self, name: str) -> str:
        """What was looked for, and where, for a job that has completed without the metric ("": nothing)."""
        return ""


class Feeder:
    """Gives a run the jobs of a search that it does not have yet; all it goes by is the run itself, and what
    is known of its trials.

    Args:
        workdir: where the trainer is imported, and the program runs.
        folder_of: makes the folder of a trial, for a program that is told it.
    """

    def __init__(
        self,
        source: JobSource,
        *,
        workdir: Path,
        user: str = "",
        trials: Trials | None = None,
        folder_of: Callable[[int], Path] | None = None,
    ) -> None:
        self.source, self._workdir, self._user = source, workdir, user
        self._trials, self._folder_of = trials or Trials(), folder_of

    def __call__(self, machine: Machine) -> list[JobSpec]:
        """The jobs that are missing. Raises ConfigError when the trainer or program refuses its arguments, or
        does not report the metric."""
        check_results(self.source, machine, self._trials)
        outcomes = self._trials.outcomes(machine)
        missing = [
            job for job in self.source.jobs(outcomes, self._at_once(machine)) if job.name not in outcomes
        ]
        if not missing:
            return []
        missing.sort(key=self._order)
        packs: dict[str, str] = {}
        if self.source.search.packing in STRATEGIES:
            packs = packs_of(missing, self.source.search, devices=len(machine.ledger.devices))
        table = {"schema": 1, "job": [self._table(job, packs.get(job.name)) for job in missing]}
        where, known = self.source.search.where, machine.run.by_name.keys()
        return list(
            jobfile.parse(table, where=where, workdir=self._workdir, user=self._user, known=known).jobs
        )

    def _at_once(self, machine: Machine) -> int:
        """How many trainings there is room for: GPUs, and the seats of their packs, or shares."""
        search, devices = self.source.search, len(machine.ledger.devices)
        if search.parallel:
            return search.parallel
        if not search.command:
            return (1 if search.packing == "off" else Packed.most) * max(1, devices)
        like = example_of(search)
        share = like.needs.share if like.needs else None
        if like.cpus is not None:
            cores = sum(len(host.own) for host in machine.ledger.host_cores.values())
            return max(1, devices, int(cores / like.cpus))
        if share is not None:
            return max(1, devices) * (int(1 / share) if share else Packed.most)
        return max(1, devices // max(1, like.gpus_min * like.nodes))

    def _order(self, job: RungJob) -> tuple[Any, ...]:
        """First rungs first, and those of all brackets next to each other that have most choices in common:
        jobs that come one after the other are packed together, and models that are alike gain most by that.
        With batches of other sizes they share little, so that choice comes first; models that may be computed
        as one gain more by being the same, and of those the longest begins, so that others are there with it
        for as long as can be."""
        search, own = self.source.search, self.source.search.architecture
        if search.command:
            return job.rung, job.trial
        axes = [axis for axis in search.space.axes() if axis.values and not own]
        axes += [axis for axis in search.space.axes() if own and axis.name in (*own, *BATCH_KEYS)]
        batch_first = search.exact or not own
        axes.sort(key=lambda axis: ((axis.name in BATCH_KEYS) != batch_first, len(axis.values)))
        places = (axis.coordinate(job.args[axis.name]) for axis in axes)
        return job.rung, *places, -job.budget if own else 0, job.trial

    def _table(self, job: RungJob, pack: str | None) -> dict[str, Any]:
        """A rung's job as a job file would have it."""
        search = self.source.search
        if search.command:
            return self._program(job)
        length = {"steps": int(job.budget)} if search.unit == "steps" else {"epochs": job.budget}
        return {
            **search.defaults,
            **length,
            **({"continues": job.continues} if job.continues else {}),
            "name": job.name,
            "model": self._model(job),
            "trainer": search.trainer,
            "args": dict(job.args),
            "gpus": 1,
            "strategy": self._strategy(pack),
            "keep_checkpoints": 1,
        }

    def _program(self, job: RungJob) -> dict[str, Any]:
        """The same of one that runs a program."""
        search = self.source.search
        folder = str(self._folder_of(job.trial)) if self._folder_of and uses_folder(search) else ""
        values = values_of(trial=job.trial, args=job.args, budget=job.budget, folder=folder)
        return {
            **job_table(search, values),
            **({"steps": int(job.budget)} if search.unit == "steps" else {}),
            **({"after": [job.continues]} if job.continues else {}),
            "name": job.name,
            "model": self._model(job),
            "keep_checkpoints": 1,
        }

    def _model(self, job: RungJob) -> str:
        """The name of its model, by which what is measured of one goes for all of it."""
        search = self.source.search
        name = program_name(search.command) if search.command else search.trainer.partition(":")[2]
        chosen = (f"{key}={job.args[key]}" for key in search.architecture)
        return "-".join((name, *chosen))

    def _strategy(self, pack: str | None) -> str | dict[str, Any]:
        if self.source.search.packing == "off":
            return "ddp"
        # Models computed as one are rounded in other ways, by whoever happens to be in the pack: after
        # hundreds of steps that can make another trial the winner.
        mode = "loop" if self.source.search.exact else "auto"
        return {"kind": "packed", "mode": mode, **({"pack": pack} if pack else {})}


def check_results(source: JobSource, machine: Machine, trials: Trials) -> None:
    """Raise ConfigError if nothing can come of a search: a job has completed without the metric that it is
    for, or whatever has ended was refused by the trainer or program."""
    search, outcomes = source.search, trials.outcomes(machine)
    _check_metric(source, outcomes, trials)
    jobs = machine.run.jobs.values()
    if any(attempt.ready_s is not None for job in jobs for attempt in job.attempts):
        return  # the trainer takes some
    began_s = machine.run.lives[-1].at if machine.run.lives else 0.0
    codes = NOT_RUN if search.command else (REFUSED,)
    failed = (job for job in jobs if job.state is JobState.FAILED and job.exit in codes)
    refused = [job for job in failed if (job.ended_s or 0.0) >= began_s]
    if search.command and _some_work(jobs, refused):
        return
    if len(refused) >= min(MOST_REFUSED, len(outcomes)) > 0:
        facts = [note.reason.facts for note in refused[0].story if note.reason.why in _SAYS_WHY]
        detail = next((str(why) for each in facts if (why := each.get("detail") or each.get("error"))), "")
        detail = f": {detail.removeprefix(': ')}" if detail else ""
        what = "program fails in" if search.command else "trainer refuses"
        of = "program" if search.command else "trainer"
        raise ConfigError(
            where=search.where,
            got=f"its {what} the first {len(refused)} trials{detail}",
            accepted=f"a {of} that is there, and arguments that it takes",
        )


NOT_RUN = (REFUSED, 126, 127, None)
"""Exit codes of programs whose arguments are wrong, or that are not there, as interpreters, parsers of
arguments and shells have them; None: it could not be started."""

_SAYS_WHY = (Why.EXITED, Why.LAUNCH_FAILED)


def _some_work(jobs: Iterable[Job], refused: Sequence[Job]) -> bool:
    """Whether a program does in some trial what it does not in those that it has refused: it has ended in
    another way, or was there before the first of those had ended and still is."""
    ids = {job.id for job in refused}
    first_s = min((job.ended_s or 0.0 for job in refused), default=0.0)
    return any(
        (job.state.final and job.id not in ids and job.state is not JobState.CANCELLED)
        or (job.state.active and job.current.start_s < first_s)
        for job in jobs
    )


def _check_metric(source: JobSource, outcomes: Mapping[str, TrialOutcome], trials: Trials) -> None:
    reported = source.missing_metric(outcomes)
    if reported is None:
        return
    search = source.search
    for name, outcome in outcomes.items():
        if outcome.state == "completed" and (looked := trials.missing(name)):
            key = "result" if search.result else "result_file"
            accepted = (
                "a pattern that finds" if search.result else "a JSON object with"
            ) + f" {search.metric!r}"
            raise ConfigError(where=search.where, key=key, got=f"{name}: {looked}", accepted=accepted)
    nothing = "nothing: the trainer's evaluate reports no number"
    if search.command:
        nothing = "`result` or `result_file`, which say where the program writes it: it tells no number"
    names = ", ".join(reported) or nothing
    raise ConfigError(where=search.where, key="metric", got=repr(search.metric), accepted=names)
