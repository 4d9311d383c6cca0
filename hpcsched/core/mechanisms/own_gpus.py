"""GPUs of one's own: the way in which a job holds what it runs on unless a mechanism says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcsched.core.jobs import Job, Target
from hpcsched.core.mechanisms.base import Mechanism
from hpcsched.core.model import Role
from hpcsched.core.reasons import Reason, Why
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.resources.rooms import Rooms
from hpcsched.core.run import Run
from hpcsched.core.transitions.outcome import Outcome


class OwnGpus(Mechanism):
    """Leases on whole GPUs: the foreground of each, for one job at a time."""

    name = "gpus"
    role = Role.PRIMARY
    listed = True
    planned = True

    def __init__(self, run: Run, out: Outcome, ledger: Ledger, rooms: Rooms) -> None:
        super().__init__()
        self._run, self._out, self._ledger, self._rooms = run, out, ledger, rooms
        self.holder: dict[int, int] = {}
        """By GPU the job that holds it."""

    def waits(self, job: Job) -> bool:
        return True

    def enqueue(self, job: Job) -> None:
        needs = job.spec.needs.placing if job.spec.needs else None
        self.queue.add(
            job.id,
            arrival=job.submit_s,
            need=job.least,
            nodes=job.spec.nodes,
            needs=needs,
            mixes=job.spec.mixes_types,
            priority=job.spec.priority,
        )

    def waiting_reason(self, job: Job) -> Reason:
        plan, free = self._run.plan, len(self._ledger.free)
        planned = plan is not None and plan.rule != "marble" and job.id in plan.order
        if planned and self._rooms.starts_now(job):
            return Reason(Why.PLAN, {"free": free})
        if types := self._rooms.split(job):
            facts = {"need": job.least, "hosts": _on_each(job), "free": types}
            return Reason(Why.ONE_TYPE, facts)
        needs = str(job.spec.needs or "")
        if self.queue.first() == job.id or (needs and not self._rooms.starts_now(job)):
            hosts = _on_each(job) + (f" ({needs})" if needs else "")
            return Reason(Why.RESOURCES, {"need": job.least, "hosts": hosts, "free": free})
        return Reason(Why.PRIORITY)

    # --- leases -----------------------------------------------------------------------------

    def hold(self, job: Job, target: Target) -> None:
        self._have(job, target.gpus)

    def change(self, job: Job, target: Target) -> None:
        self._have(job, tuple(sorted({*job.gpus, *target.gpus})))

    def settle(self, job: Job, target: Target) -> None:
        self._have(job, tuple(sorted(target.gpus)))

    def keep(self, job: Job) -> None:
        self._have(job, tuple(gpu for gpu in job.current.gpus if self.holder.get(gpu) == job.id))

    def release(self, job: Job) -> None:
        self._have(job, ())

    def _have(self, job: Job, gpus: tuple[int, ...]) -> None:
        """Let the job hold exactly these GPUs, its own or free ones."""
        for gpu in set(job.gpus) - set(gpus):
            if not self._ledger.inherit(gpu):
                del self.holder[gpu]
                self._ledger.give_back(gpu)
        for gpu in set(gpus) - set(job.gpus):
            if gpu not in self._ledger.free:
                raise self._out.invalid(job, f"GPU {gpu} is not free")
            self._ledger.take(gpu)
            self.holder[gpu] = job.id
        job.gpus = gpus
        self._run.touch(job.id)

    def take_over(self, job: Job, gpu: int) -> None:
        """Let a job that has shared a GPU hold it from now on."""
        self.holder[gpu] = job.id
        job.role = Role.PRIMARY
        self._run.touch(job.id)
        self._run.list_running(job)

    def on(self, gpu: int) -> tuple[int, ...]:
        return (self.holder[gpu],) if gpu in self.holder else ()

    # --- jobs that run ----------------------------------------------------------------------

    def changed_to(self, job: Job, target: Target) -> tuple[Why, Mapping[str, Any]]:
        gpus = len(target.gpus) // job.spec.nodes
        return Why.RESIZED_IN_PLACE, {"old": job.width, "gpus": gpus}

    def saving(self) -> Iterable[Job]:
        return self._run.running


def _on_each(job: Job) -> str:
    return f" on each of {job.spec.nodes} hosts" if job.spec.nodes > 1 else ""
