"""The jobs of a request: those that the run does not have yet, and what is said anew of those that it has."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.agent.admission import Admission, JobEdits
from hpcsched.agent.hosts import Hosts
from hpcsched.agent.request import FindParallel, FindProfiles, FindShared, RunRequest
from hpcsched.agent.watched import is_watched
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.cores import most_cores
from hpcsched.core.model import JobSpec
from hpcsched.core.resources.gpus import own_type
from hpcsched.store.rundir import RunDir


def admission_for(
    machine: Machine,
    hosts: Hosts,
    find_profiles: FindProfiles,
    find_parallel: FindParallel,
    find_shared: FindShared,
    request: RunRequest,
) -> Admission:
    """The rules by which jobs are taken into the run."""
    sizes = (device.memory_mib for device in hosts.inventory)
    own = request.device_type or own_type(hosts.inventory) or machine.ledger.own_type or hosts.kind
    return Admission(
        machine=machine,
        find_profiles=lambda models, gpu_type: find_profiles(models, gpu_type or own),
        find_parallel=find_parallel,
        find_shared=lambda: find_shared(own),
        stand_ins=hosts.stand_ins,
        hosts=hosts.granted,  # a job for more than have come waits for an allocation in which they do
        cores=most_cores(hosts.cores, hosts.inventory),
        memory_mib=max((size for size in sizes if size is not None), default=None),
        devices=hosts.inventory,
        host_cores=hosts.cores,
        joinable=hosts.remote is not None and hosts.remote.joinable,
        mps=request.mps,
        watched=is_watched(RunDir(request.dir), request.share),
    )


def submitted(
    request: RunRequest,
    machine: Machine,
    hosts: Hosts,
    find_profiles: FindProfiles,
    find_parallel: FindParallel,
    find_shared: FindShared,
) -> list[ev.Event]:
    """What brings the order's jobs in that the run does not have yet; raises ConfigError."""
    new = [job for job in request.jobs if job.name not in machine.run.by_name]
    _check_environments(request, new, hosts)
    if not new:
        return []
    admission = admission_for(machine, hosts, find_profiles, find_parallel, find_shared, request)
    return admission.events(new, at=machine.run.now, gpus=hosts.gpus_per_host, where=request.where)


def _check_environments(request: RunRequest, jobs: Sequence[JobSpec], hosts: Hosts) -> None:
    """Raises BadEnvironment where jobs, or those of the source, could not start on this host."""
    if hosts.interpreters is None or hosts.stand_ins:
        return  # node agents find out on their hosts
    like = (request.like,) if request.like else ()
    for job in hosts.interpreters.unlike((*jobs, *like), request.environment):
        hosts.interpreters.check(job, request.environment)


def edits_of(request: RunRequest, machine: Machine, admission: Admission, hosts: Hosts) -> JobEdits:
    """What the order's jobs say of those that the run has already; raises ConfigError."""
    old = [job for job in request.jobs if job.name in machine.run.by_name]
    return admission.edits(
        old,
        update=request.update,
        retry=request.retry,
        called_in=request.workdir,
        gpus=hosts.gpus_per_host,
        where=request.where,
        living=False,
    )
