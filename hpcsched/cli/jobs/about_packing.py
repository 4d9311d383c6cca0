"""Packs, in words, for `explain`: the jobs that a job trains with as one, or why it joins no pack."""

from __future__ import annotations

from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.packing.packs import is_packed
from hpcsched.core.nouns import reworded


def together(machine: Machine, job: Job) -> list[str]:
    """The jobs that a running job trains with as one."""
    if not is_packed(job.spec) or not machine.mechanism(Packing).packs.shared(job):
        return []
    gpu = job.current.gpus[0]
    ids = [machine.own.holder[gpu], *machine.mechanism(Packing).packs.on((gpu,))]
    others = ", ".join(
        f"{machine.run.jobs[i].id} ({machine.run.jobs[i].spec.name})" for i in ids if i != job.id
    )
    what = "shares" if job.id in machine.mechanism(Packing).packs.gpu_of else "holds"
    return [f"it {what} {machine.ledger.noun} {gpu}, where it trains as one with {others}"]


def why_not(machine: Machine, job: Job) -> list[str]:
    """GPU by GPU, why a waiting job that may be packed does not train there with others."""
    if not is_packed(job.spec):
        return []
    from hpcsched.policy.packing import why_waiting

    noun, view = machine.ledger.noun, machine.mechanism(Packing).view()
    return [f"not on {noun} {gpu}: {reworded(why, noun)}" for gpu, why in why_waiting(view, job)]
