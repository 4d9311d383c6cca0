"""Runs that a group may read: no secret gets on their record, and none that is there is opened to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpcsched import watchers
from hpcsched.core import events as ev
from hpcsched.core.model import JobSpec
from hpcsched.errors import ConfigError
from hpcsched.redaction import is_secret
from hpcsched.store import journal
from hpcsched.store.rundir import RunDir


def is_watched(rundir: RunDir, group: int | None) -> bool:
    """Whether others may read the run: it is given to a group now, or was in an earlier life."""
    return group is not None or watchers.mode_in(rundir.root) == watchers.FILE


def refuse_secrets(jobs: Iterable[JobSpec], *, where: str, accepted: str) -> None:
    """Raise ConfigError for a job with a secret, by its name, in its `env`."""
    for job in jobs:
        if secret := next(filter(is_secret, job.env), None):
            key = f"job {job.name}.env.{secret}"
            raise ConfigError(where=where, key=key, got="a secret, by its name", accepted=accepted)


def open_to(rundir: RunDir, group: int) -> None:
    """Let a group, by id, read a run with a journal. Raises StoreError, and ConfigError, before anything is
    changed, where a secret is on its record: of jobs that have ended and of older definitions too."""
    accepted = "a run without it: another --dir, or this one without --share"
    refuse_secrets(_on_record(rundir), where="--share", accepted=accepted)
    rundir.make(share=group)


def _on_record(rundir: RunDir) -> Iterator[JobSpec]:
    for event, _ in journal.read(rundir.journal):
        if isinstance(event, ev.JobsSubmitted):
            yield from event.jobs
        elif isinstance(event, ev.AgentStarted | ev.DefinitionsCompared):
            yield from event.updated.values()
