"""By which versions jobs trained, for the page of their run: as their programs have told it."""

from __future__ import annotations

from collections import Counter

from hpcsched.cli.common import plural
from hpcsched.contract import files
from hpcsched.contract.words import MOST_BYTES, Versions
from hpcsched.core.machine import Machine
from hpcsched.decoding import read_file
from hpcsched.errors import BadInput
from hpcsched.store.rundir import RunDir

MOST_READ = 1000
"""Jobs (chosen): each is a file to be read."""

MOST_TOLD = 5
"""Different sets of versions."""


def versions_of(rundir: RunDir, job_id: int) -> str:
    """The versions that a job told last; "": none, or what cannot be one."""
    path = rundir.job(job_id) / files.VERSIONS
    try:
        return str(Versions.decode(read_file(path, most_bytes=MOST_BYTES, follow=False)))
    except (OSError, BadInput):
        return ""


def of_trainings(rundir: RunDir, machine: Machine) -> list[tuple[str, str]]:
    """The versions of the run's jobs, as (name, words): those of most jobs first."""
    begun = [job.id for job in machine.run.jobs.values() if job.attempts]
    told = Counter(versions_of(rundir, job_id) for job_id in begun[:MOST_READ])
    told.pop("", None)
    facts = [("trained by", f"{said} ({plural(jobs, 'job')})") for said, jobs in told.most_common(MOST_TOLD)]
    if more := len(told) - len(facts):
        facts.append(("trained by", f"{plural(more, 'other set')} of versions"))
    if facts and len(begun) > MOST_READ:
        facts.append(("trained by", f"of the first {MOST_READ} jobs that began"))
    return facts
