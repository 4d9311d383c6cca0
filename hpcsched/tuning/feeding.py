"""A search as the source of a run's jobs: what the run knows of them in, the jobs that are missing out."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any

from hpcsched import jobfile
from hpcsched.contract.exits import REFUSED
from hpcsched.contract.strategies import Packed
from hpcsched.core.machine import Machine
from hpcsched.core.model import JobSpec, JobState
from hpcsched.core.reasons import Why
from hpcsched.errors import ConfigError
from hpcsched.tuning.grouping import BATCH_KEYS, STRATEGIES, packs_of
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


class Feeder:
    """Gives a run the jobs of a search that it does not have yet; all it goes by is the run itself.

    Args:
        workdir: where the trainer is imported.
    """

    def __init__(self, source: JobSource, *, workdir: Path, user: str = "") -> None:
        self.source, self._workdir, self._user = source, workdir, user

    def __call__(self, machine: Machine) -> list[JobSpec]:
        """The jobs that are missing. Raises ConfigError when the trainer refuses its arguments, or does not
        report the metric."""
        check_results(self.source, machine)
        outcomes = outcomes_of(machine)
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
        """How many trainings there is room for: GPUs, and the seats of their packs."""
        search = self.source.search
        seats = 1 if search.packing == "off" else Packed.most
        return search.parallel or seats * max(1, len(machine.ledger.devices))

    def _order(self, job: RungJob) -> tuple[Any, ...]:
        """First rungs first, and those of all brackets next to each other that have most choices in common:
        jobs that come one after the other are packed together, and models that are alike gain most by that.
        With batches of other sizes they share little, so that choice comes first; models that may be computed
        as one gain more by being the same, and of those the longest begins, so that others are there with it
        for as long as can be."""
        search, own = self.source.search, self.source.search.architecture
        axes = [axis for axis in search.space.axes() if axis.values and not own]
        axes += [axis for axis in search.space.axes() if own and axis.name in (*own, *BATCH_KEYS)]
        batch_first = search.exact or not own
        axes.sort(key=lambda axis: ((axis.name in BATCH_KEYS) != batch_first, len(axis.values)))
        places = (axis.coordinate(job.args[axis.name]) for axis in axes)
        return job.rung, *places, -job.budget if own else 0, job.trial

    def _table(self, job: RungJob, pack: str | None) -> dict[str, Any]:
        """A rung's job as a job file would have it."""
        search = self.source.search
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

    def _model(self, job: RungJob) -> str:
        """The name of its model, by which what is measured of one goes for all of it."""
        name = self.source.search.trainer.partition(":")[2]
        chosen = (f"{key}={job.args[key]}" for key in self.source.search.architecture)
        return "-".join((name, *chosen))

    def _strategy(self, pack: str | None) -> str | dict[str, Any]:
        if self.source.search.packing == "off":
            return "ddp"
        # Models computed as one are rounded in other ways, by whoever happens to be in the pack: after
        # hundreds of steps that can make another trial the winner.
        mode = "loop" if self.source.search.exact else "auto"
        return {"kind": "packed", "mode": mode, **({"pack": pack} if pack else {})}


def check_results(source: JobSource, machine: Machine) -> None:
    """Raise ConfigError if nothing can come of a search: a job has completed without the metric that it is
    for, or whatever has ended was refused by the trainer."""
    outcomes = outcomes_of(machine)
    _check_metric(source, outcomes)
    if any(attempt.ready_s is not None for job in machine.run.jobs.values() for attempt in job.attempts):
        return  # the trainer takes some
    began_s = machine.run.lives[-1].at if machine.run.lives else 0.0
    failed = (
        job for job in machine.run.jobs.values() if job.state is JobState.FAILED and job.exit == REFUSED
    )
    refused = [job for job in failed if (job.ended_s or 0.0) >= began_s]
    if len(refused) >= min(MOST_REFUSED, len(outcomes)) > 0:
        exits = (note.reason.facts for note in refused[0].story if note.reason.why is Why.EXITED)
        detail = next((str(facts["detail"]) for facts in exits if facts.get("detail")), "")
        raise ConfigError(
            where=source.search.where,
            got=f"its trainer refuses the first {len(refused)} trials{detail}",
            accepted="a trainer that is there, and arguments that it takes",
        )


def _check_metric(source: JobSource, outcomes: Mapping[str, TrialOutcome]) -> None:
    reported = source.missing_metric(outcomes)
    if reported is not None:
        names = ", ".join(reported) or "nothing: the trainer's evaluate reports no number"
        search = source.search
        raise ConfigError(where=search.where, key="metric", got=repr(search.metric), accepted=names)
