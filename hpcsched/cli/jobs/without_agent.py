"""Commands about jobs that were submitted where no agent runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcsched.cli.common import say, say_json, select
from hpcsched.client.waiting import read_all, take_back, taken_by, waits, with_untaken
from hpcsched.core.reasons import Reason, Why
from hpcsched.errors import ConfigError
from hpcsched.store.run_folders import has_commands
from hpcsched.store.rundir import RunDir


def explained(rundir: RunDir, key: str, *, as_json: bool) -> bool:
    """Explain the job of this id or name, if it is one that no agent has taken; else False."""
    if not has_commands(rundir):
        return False
    status, untaken = with_untaken(rundir)
    job = next((job for job in untaken if key in (str(job.id), job.name)), None)
    if job is None:
        return False
    why, following = Reason(Why(str(job.reason))), list[str]()
    if waits(job):
        following = [f"`{taken_by(status)}` takes it", f"`hpcsched cancel {job.name}` cancels it"]
    if as_json:
        page = {
            "schema": 1,
            "id": job.id,
            "name": job.name,
            "state": job.state,
            "reason": {"code": str(why.why), "text": str(why)},
            "next": following,
            "story": [],
        }
        say_json(page)
        return True
    say(f"job {job.id} ({job.name}) is {job.state}")
    say(f"  because: {why}")
    for text in following:
        say(f"  next: {text}")
    return True


def cancel(rundir: RunDir, keys: Sequence[str]) -> int:
    """Cancel jobs that wait for an agent, and take back retries that do; the exit code: 1 if there was none.

    With them go those that wait for them to complete. Raises RunDirError where an agent has come meanwhile.
    """
    status = read_all(rundir)
    chosen = select(status, keys)
    names = {job.name for job in status.jobs}
    words = {word for key in keys for word in key.split(",")} - names
    by_number = sorted(word for word in words if re.fullmatch(r"[\d-]+", word))
    if by_number and any(waits(job) for job in select(status, by_number)):
        waiting = ", ".join(job.name for job in status.jobs if waits(job))
        accepted = f"names, as ids are given when an agent takes a job: {waiting}"
        raise ConfigError(where="cancel", got=repr(by_number[0]), accepted=accepted)
    gone, kept = take_back(rundir, chosen)
    for job in chosen:
        what = "cancelled" if job.name in gone else f"is {job.state}, and no agent runs that could end it"
        what = "stays as it is: what waited for it is taken back" if job.name in kept else what
        say(f"job {job.id} ({job.name}): {what}", err=True)
    for name in gone - {job.name for job in chosen}:
        say(f"job {name}: cancelled: it waited for one of these", err=True)
    return int(not (gone or kept))
