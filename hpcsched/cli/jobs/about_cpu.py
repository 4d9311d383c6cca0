"""Jobs on CPU cores, in words: for `status`, `top`, `explain`, and for what `run` tells."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from hpcsched.cli.common import plural
from hpcsched.core.mechanisms.cpu.cores import WHOLE, most_cores
from hpcsched.core.mechanisms.cpu.layout import said_seats
from hpcsched.core.model import JobState, Usage

if TYPE_CHECKING:
    from hpcsched.core.jobs import Job
    from hpcsched.core.machine import Machine
    from hpcsched.core.mechanisms.cpu.mechanism import Cpu
    from hpcsched.policy.cpu.dtconfig import ScalingSearch
    from hpcsched.store.status import CoresStatus


def _cpu(machine: Machine) -> Cpu:
    """The mechanism, which `status` and `top` need not import."""
    from hpcsched.core.mechanisms.cpu.mechanism import Cpu

    return machine.mechanism(Cpu)


def there(machine: Machine) -> dict[str, float]:
    """The cores for such jobs by host, including those that CPU slots could lend."""
    return {
        name: most_cores([host], machine.ledger.devices.values())
        for name, host in _cpu(machine).cores.hosts.items()
    }


def as_it_is(status: CoresStatus | None) -> list[str]:
    """The measurements of a job's configuration; nothing before the first."""
    if status is None or status.rate is None or status.cpu is None or status.net is None:
        return []
    used = sum(status.cpu)
    line = f"{status.rate:.4g} steps/s, {used:.4g} of its {status.held:.4g} cores used"
    full = [f"of server {i} in {share:.0%} of the time" for i, share in enumerate(status.net) if share]
    links = f"; the link was full {', '.join(full)}" if full else ""
    return [f"{line} ({used / status.held:.0%}){links}"]


def what_is_next(machine: Machine, job: Job) -> list[str]:
    """The next step of a job's search, or what it waits for."""
    from hpcsched.policy.cpu.dtconfig import ScalingSearch

    if job.id in _cpu(machine).queue:
        return [_before(machine, job)]
    if job.target:
        seats = said_seats(job.target.seats)
        if job.state is JobState.SUSPENDING:
            return [f"it starts again with {seats} cores as soon as it has saved"]
        return [f"it goes on with {seats} cores without a restart, as soon as that is prepared"]
    allotment = _cpu(machine).cores.of.get(job.id)
    runs = job.state in (JobState.STARTING, JobState.RUNNING) and not job.wanted
    if not runs or allotment is None or not isinstance(allotment.memory, ScalingSearch):
        return []
    if len(job.current.seats) == 1:
        return ["it keeps these cores until it ends"]
    lines = [_searches(job, allotment.memory, allotment.usage)]
    if not job.ready:
        lines.append("it has not said yet that it can be suspended: until it does it keeps these cores")
    return lines


def _before(machine: Machine, job: Job) -> str:
    """What a waiting job waits for: the jobs before it, and the cores to start on."""
    from hpcsched.policy.cpu.configurations import Rules

    rules = Rules.of(job.spec.strategy)
    waiting = _cpu(machine).queue.walk()
    before = plural(sum(1 for _ in takewhile(lambda job_id: job_id != job.id, waiting)), "job")
    free = {
        host: sum(_cpu(machine).room(host, lent=True).values()) / WHOLE for host in _cpu(machine).cores.hosts
    }
    host = max(free, key=lambda name: free[name], default=None)
    cores = "no CPU cores"
    if host:
        cores = f"{free[host]:.4g} of {there(machine)[host]:.4g} CPU cores free on {host}"
    first, budget = rules.first().cores / WHOLE, rules.budget / WHOLE
    return f"{before} before it; {cores}; it starts on {first:.4g} of the {budget:.4g} that it may have"


def _searches(job: Job, search: ScalingSearch, usage: Usage | None) -> str:
    """The state of a running job's search."""
    from hpcsched.policy.cpu.configurations import CpuShape
    from hpcsched.policy.cpu.dtconfig import DRIFT, MOST_CHANGES

    if search.trial and search.shape == CpuShape.of(job.current.seats):
        against = f" and compared with {search.base.rate:.4g} steps/s" if search.base else ""
        return f"tries {search.trial}: {search.shape}, until it is measured{against}"
    if usage is None:
        return f"the {'next' if search.base else 'first'} measurement comes once it is steady"
    if search.rests:
        if search.changes >= MOST_CHANGES:
            return f"stays with these cores: it has been changed {search.changes} times by now"
        more = plural(search.patience - search.rested, "more measurement")
        until = f"its speed changes by {DRIFT:.0%}, or for {more}"
        return f"stays with these cores until {until}: then all is tried anew"
    if search.waits:
        return "takes more cores as soon as no other job has or wants them"
    return "what it tries next is decided with the next measurement"
