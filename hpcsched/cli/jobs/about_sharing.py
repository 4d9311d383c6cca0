"""Shared GPUs, in words, for `explain`: whom a job shares one with and what that costs, or why it waits."""

from __future__ import annotations

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.mechanisms.sharing.shares import shares_a_gpu
from hpcsched.core.needs import said_mib
from hpcsched.core.nouns import reworded


def as_it_is(machine: Machine, job: Job) -> list[str]:
    """Whom a running job shares its GPU with, what it keeps of its speed there, and what it uses."""
    sharing = machine.mechanism(Sharing)
    if not sharing.with_it(job):
        return []
    from hpcsched.policy.sharing import alone, kept

    others = ", ".join(f"job {other.id} ({other.spec.name})" for other in sharing.beside(job))
    gpu = f"{machine.ledger.noun} {job.gpus[0]}"
    lines = [f"it shares {gpu} with {others}" if others else f"it is alone on {gpu}"]
    if others:
        view = sharing.view()
        if (share := kept(view, job)) is not None:
            lines[0] += f", at {share:.2f} of its speed alone"
        elif not job.reports:
            lines[0] += "; it tells nothing of its progress"
        else:
            lines[0] += ", being measured" if alone(view, job) else "; its speed alone is not known"
    use = sharing.shares.use.get(job.id)
    said = [f"{said_mib(use.memory_mib)} of memory"] if use and use.memory_mib else []
    said += [f"the device for {use.busy:.0%} of the time"] if use and use.busy is not None else []
    return [*lines, *([f"it uses {' and '.join(said)}"] if said else [])]


def why_not(machine: Machine, job: Job) -> list[str]:
    """GPU by GPU, why a waiting job that is content with a part of one shares it with nobody there."""
    if not shares_a_gpu(job.spec):
        return []
    from hpcsched.policy.sharing import why_waiting

    noun, view = machine.ledger.noun, machine.mechanism(Sharing).view()
    return [f"not on {noun} {gpu}: {reworded(why, noun)}" for gpu, why in why_waiting(view, job)]
