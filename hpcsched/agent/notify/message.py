"""What a message says. Its JSON is a promise to who gets it (docs/notifications.md)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcsched.core.jobs import Job
from hpcsched.printing import printable
from hpcsched.redaction import without_secrets

MOST_JOBS = 20
"""Jobs that a message names; the others are counted (chosen)."""

MOST_REASON = 300
"""Characters of a job's reason: a last line of output may be long (chosen)."""


class RunPart(msgspec.Struct, kw_only=True, frozen=True):
    """The run that a message is about. `jobs`: how many there are, by state."""

    id: str
    dir: str
    host: str
    allocation: dict[str, str | None]
    state: str
    jobs: dict[str, int]


class JobPart(msgspec.Struct, kw_only=True, frozen=True):
    """A job that a message is about. `exit`: its exit code, where it had one."""

    id: int
    name: str
    state: str
    reason: str
    exit: int | None


class Message(msgspec.Struct, kw_only=True, frozen=True):
    """A message. `text` says all of it, in lines for people; `more_jobs` are not among `jobs`."""

    schema: int = 1
    kind: str
    text: str
    time: str
    run: RunPart
    jobs: list[JobPart] = []
    more_jobs: int = 0


def shown(text: str, most: int = MOST_REASON) -> str:
    """Words of a program, as a message may have them: in a line, no secret, not too long."""
    text = printable(without_secrets(text))
    return text if len(text) <= most else text[: most - 1] + "…"


def job_part(job: Job, noun: str) -> JobPart:
    """What a message says of a job; `noun`: what the devices of its run are called."""
    reason = shown(job.reason.said(noun)) if job.reason else ""
    return JobPart(id=job.id, name=job.spec.name, state=str(job.state), reason=reason, exit=job.exit)


def about(jobs: Sequence[JobPart], more: int) -> list[str]:
    """A line for each of these jobs, and one for those that are not named."""
    lines = [f"job {job.id} ({job.name}) {job.state}: {job.reason or '-'}" for job in jobs]
    return lines + [f"and {more} more"] * bool(more)
