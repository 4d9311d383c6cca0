"""What an agent does beside its jobs, each round of its loop: it looks, and changes nothing of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from hpcsched.agent.attempts import WatchedAttempt
from hpcsched.agent.compacting import Compacting
from hpcsched.agent.effects import Effects
from hpcsched.agent.job_use import JobUseRecord, read_processes
from hpcsched.agent.launch_plans import Site
from hpcsched.agent.metrics_file import MetricsFile
from hpcsched.agent.save_room import SaveRoom, places_of
from hpcsched.agent.site_record import SiteRecord
from hpcsched.contract import files
from hpcsched.core.machine import Machine
from hpcsched.devices.base import Sample
from hpcsched.store.snapshot import SnapshotWriter

Look = Callable[[float], None]
"""Called with the time on the run's clock; never waits, never raises."""


class Tell(Protocol):
    """Shows people a line; `about`: the kind of message that it is worth too. May raise OSError."""

    def __call__(self, text: str, *, about: str = "") -> None: ...


def alongside(
    site: Site,
    effects: Effects,
    machine: Machine,
    snapshot: SnapshotWriter,
    *,
    sample: Callable[[int], Sample | None],
    here: bool,
    metrics_file: Path | None,
    records: Path | None,
    allocation: Mapping[str, str | None],
    tell: Tell,
    closing: ExitStack,
    compacting: Compacting,
) -> Sequence[Look]:
    """All of it, for this run.

    Args:
        sample: the newest sample of a device.
        here: whether all jobs run on this host.
        metrics_file: what is written for Prometheus; None: nothing.
        records: the site's folder of records; None: there is none.
        allocation: the batch job, for these.
        tell: shows people a line.
        closing: what has to be closed at the end.
        compacting: of the journal.
    """

    def say(text: str, about: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads standard error any more
            tell(text, about=about)

    def saved(job_id: int) -> tuple[Path, int] | None:
        return saved_by_itself(effects.attempt(job_id))

    room = SaveRoom(
        lambda: places_of([*machine.run.active.values()], site.checkpoints_of, saved),
        publish=lambda disks: setattr(snapshot, "short_disks", disks),
        tell=say,
    )
    closing.callback(compacting.close)
    looks: list[Look] = [compacting.look]
    if metrics_file is not None:
        metrics = MetricsFile(
            metrics_file,
            machine,
            sample=sample,
            progress=lambda: {seen.job_id: seen for seen in effects.progress()},
            saved_at=lambda job_id: saved_at(effects.attempt(job_id)),
            tell=lambda text: say(text, ""),
        )
        closing.callback(metrics.close)
        looks.append(metrics.look)
    if records is not None:
        record = SiteRecord(
            records,
            machine,
            uses=site.rundir.job_use,
            user=site.user,
            run_id=site.run_id,
            allocation=allocation,
            speed=site.speed,
            tell=lambda text: say(text, ""),
        )
        closing.callback(record.close)
        looks.append(record.look)
    if site.stand_ins:
        return looks
    processes = read_processes if here else None
    use = JobUseRecord(site.rundir.job_use, machine, sample, processes=processes)
    closing.callback(use.close)
    return [*looks, room.look, use.look]


def saved_by_itself(attempt: WatchedAttempt | None) -> tuple[Path, int] | None:
    """The newest checkpoint that the program of a running job has saved by itself, and its bytes."""
    newest = attempt.self_saving.seen.newest if attempt and attempt.self_saving else None
    return (newest.path, newest.mark[1]) if newest else None


def saved_at(attempt: WatchedAttempt | None) -> float | None:
    """The Unix time of a running job's newest checkpoint; None: there is none, or it is not known."""
    if attempt is None:
        return None
    if attempt.self_saving:
        newest = attempt.self_saving.seen.newest
        return newest.saved_at if newest else None
    try:
        return (attempt.folder / files.STATE).stat().st_mtime
    except OSError:
        return None
