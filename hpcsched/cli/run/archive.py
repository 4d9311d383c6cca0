"""A run's finished jobs and learnt profiles, put into the user's database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from hpcsched.agent.life import LifeResult
from hpcsched.cli.common import say
from hpcsched.cli.run.results import Bounds, result_of
from hpcsched.core.jobs import Costs, Job
from hpcsched.core.learning import Key
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.model import JobState
from hpcsched.core.profile import Cost, Profile
from hpcsched.errors import StoreError
from hpcsched.store import job_use
from hpcsched.store.database import Database, FinishedJob, RunEntry, iso
from hpcsched.store.job_use import JobUse
from hpcsched.store.rundir import RunDir


def archive(life: LifeResult, database: Path, directory: str) -> None:
    """Record the run, its jobs in a final state, and what it learnt; doing it twice leaves one of each."""
    machine, record = life.machine, life.run
    first = datetime.fromtimestamp(machine.run.lives[0].wall, UTC)
    with Database(database) as opened:
        opened.record_run(
            RunEntry(
                run_id=record.id,
                directory=directory,
                host=record.host,
                policy=record.policy,
                gpus=len(machine.ledger.devices) + len(machine.ledger.lost),
                allocation=json.dumps(record.allocation),
                started_at=iso(first),
                ended_at=iso(datetime.now(UTC)),
            )
        )
        opened.record_jobs(_finished(life, _used(Path(directory))))
        opened.record_parallel(sorted(machine.estimates.parallel))
        # Stand-ins follow a profile: what they "do" teaches nothing.
        if life.device_kind != "replay":
            own, types = life.device_kind, machine.ledger.types
            known = [p for p in opened.profiles() if p.device in (own, *types)]
            opened.record_shared(life.device_kind, machine.mechanism(Sharing).shares.seen())
            opened.record_profiles(_learnt(machine, life.device_kind, known))


def _used(directory: Path) -> Mapping[tuple[int, bool], JobUse]:
    try:
        return job_use.read(RunDir(directory).job_use)
    except StoreError as error:
        say(f"hpcsched: {error}: the history of this run has no MaxRSS", err=True)
        return {}


def _finished(life: LifeResult, uses: Mapping[tuple[int, bool], JobUse]) -> list[FinishedJob]:
    machine = life.machine

    def wall(at: float) -> str:
        """The wall time of a moment of the run's clock: in the life it belongs to."""
        lived = [one for one in machine.run.lives if one.at <= at] or machine.run.lives[:1]
        return iso(datetime.fromtimestamp(lived[-1].wall + (at - lived[-1].at) / life.speed, UTC))

    jobs = []
    unproven = Bounds(None, None)  # none is recorded, and finding them takes long for many jobs
    for result in result_of(machine, bounds=unproven).jobs:
        job = machine.run.jobs[result.id]
        if not job.state.final or job.ended_s is None:
            continue
        used = uses.get((job.id, False))
        jobs.append(
            FinishedJob(
                run_id=life.run.id,
                job_id=job.id,
                name=job.spec.name,
                model=job.spec.model,
                state=job.state,
                exit=job.exit,
                submit_s=job.submit_s,
                start_s=job.started_s,
                end_s=job.ended_s,
                submit_at=wall(job.submit_s),
                start_at=None if job.started_s is None else wall(job.started_s),
                end_at=wall(job.ended_s),
                gpu_hours=result.gpu_hours,
                steps=_steps(job),
                steps_repeated=job.steps_repeated,
                suspensions=job.suspensions,
                gpus_max=max((len(a.gpus) for a in job.attempts), default=0),
                max_rss_bytes=round(used.memory_mib * 2**20) if used and used.memory_mib else None,
                attempts=msgspec.to_builtins(result.attempts),
            )
        )
    return jobs


def _steps(job: Job) -> int | None:
    """The steps that a job has done; None where nothing has told of any."""
    if job.state is JobState.COMPLETED and job.spec.steps is not None:
        return job.spec.steps
    return job.step if job.reports and job.step else None


def _first(*costs: Cost | None) -> Cost | None:
    """The first one that is known."""
    return next((cost for cost in costs if cost is not None), None)


def _learnt(machine: Machine, device: str, known: Iterable[Profile]) -> Iterator[Profile]:
    """Profiles learnt by the run, with the counts that earlier runs saw.

    Profiles that somebody measured or imported are not overwritten.
    """
    by_key: dict[Key, Profile] = {}
    for profile in known:
        key = profile.model, profile.nodes, "" if profile.device == device else profile.device
        if key not in by_key or profile.source != "learned":
            by_key[key] = profile
    for key, profile in machine.estimates.observed.beliefs.items():
        if key[2] not in machine.ledger.types:
            continue  # of several types at a time
        before, costs = by_key.get(key), machine.estimates.costs.get(profile.model, Costs())
        if before and before.source != "learned":
            continue
        earlier = before or profile
        # What was measured comes first, then what the run went by, what it has seen, what earlier ones had.
        yield replace(
            profile,
            device=key[2] or device,
            throughput={**(before.throughput if before else {}), **profile.throughput},
            spread={**((before and before.spread) or {}), **(profile.spread or {})},
            start_s=_first(costs.starts.median, profile.start_s, costs.start_s, earlier.start_s),
            # Of durable saves alone: an allocation's end is reckoned with it, and quick ones do not last.
            suspend_s=_first(
                costs.durable_saves.median, profile.suspend_s, costs.suspend_s, earlier.suspend_s
            ),
            grow_s=_first(costs.grows.median, profile.grow_s, earlier.grow_s),
            shrink_s=_first(costs.shrinks.median, profile.shrink_s, earlier.shrink_s),
            note="learnt while jobs ran",
        )
