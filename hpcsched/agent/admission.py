"""Admission of jobs into a run: their checks, and the events that add them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hpcsched import jobfile, submission
from hpcsched.agent.inbox import Answer, Command
from hpcsched.agent.watched import refuse_secrets
from hpcsched.contract.variables import LANE_MODE
from hpcsched.core import events as ev
from hpcsched.core.definitions import differing, was_unsaid
from hpcsched.core.jobs import Job
from hpcsched.core.machine import Machine
from hpcsched.core.mechanisms.cpu.cores import WHOLE, most_cores
from hpcsched.core.mechanisms.sharing.shares import shares_a_gpu
from hpcsched.core.model import Device, HostCores, JobSpec, JobState, Kind
from hpcsched.core.nouns import noun
from hpcsched.core.processes import Program, program_of
from hpcsched.core.profile import Profile, cost_at
from hpcsched.core.resources.gpus import own_type
from hpcsched.core.shared_use import SharedUse
from hpcsched.core.states import FAILURES
from hpcsched.errors import ConfigError
from hpcsched.jobfile.needs import check_needs
from hpcsched.planning.jobs.costs import require_profiles
from hpcsched.policy.cpu.configurations import Rules
from hpcsched.store.profiles import FindProfiles, measured_on


@dataclass(frozen=True, kw_only=True)
class JobEdits:
    """Jobs of the run that were submitted again, compared with their definitions in the run.

    `updated` and `kept`: see `events.AgentStarted`; `again` are those of the updated that had failed, or
    all that had. `said` tells of each job that differs what becomes of it. `profiles` are of models that the
    updated ones name.
    """

    updated: dict[int, JobSpec] = field(default_factory=dict)
    kept: dict[int, tuple[str, ...]] = field(default_factory=dict)
    again: tuple[int, ...] = ()
    said: dict[int, str] = field(default_factory=dict)
    profiles: tuple[Profile, ...] = ()

    @property
    def ignored(self) -> list[int]:
        """Ids of the jobs that keep the run's definition."""
        return [job_id for job_id, keys in self.kept.items() if keys]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The checks of jobs against what this run has.

    `find_profiles` gives the profiles of these models for a type of GPU ("": for the devices that the run
    began with), `find_parallel` the programs of them that have said in an earlier run that they are
    parallel, `find_shared` what was seen there of models that share such devices. `stand_ins`: every job
    runs as a stand-in of its profile. `cores` is the most that a host has for jobs without GPUs.
    `memory_mib` is the memory of the largest GPU; None: not known. `devices` and `host_cores` are those of
    all hosts. `joinable`: others may come, so that a job need not fit on these. `mps`: whether jobs may
    share GPUs by MPS. `watched`: others may read what is on record of jobs.
    """

    machine: Machine
    find_profiles: FindProfiles
    stand_ins: bool
    find_parallel: Callable[[set[str]], Sequence[Program]] = lambda models: ()
    find_shared: Callable[[], Sequence[SharedUse]] = tuple
    hosts: int = 1
    cores: float = 0.0
    memory_mib: float | None = None
    devices: Sequence[Device] = ()
    host_cores: Sequence[HostCores] = ()
    joinable: bool = False
    mps: bool = True
    watched: bool = False

    def events(
        self,
        jobs: Sequence[JobSpec],
        *,
        at: float,
        gpus: int,
        where: str,
        cause: str = "",
        cancelled: Collection[str] = (),
    ) -> list[ev.Event]:
        """The events that add jobs, the submission last. Raises ConfigError for jobs that cannot run here.

        The jobs are as a job file gives them, checked by themselves. Those whose names are `cancelled` are
        over as they come, and need not fit.
        The submission alone carries the cause: a journal torn before it does not hold the command.
        """
        machine = self.machine
        jobfile.check_names(jobs, where=where, known=machine.run.by_name.keys())
        wanted = [job for job in jobs if job.name not in cancelled]
        found = self._checked(wanted, gpus=gpus, where=where)
        parallel = self.parallel(jobs)
        first_id = machine.run.jobs.last_id + 1
        known = ev.ProfilesLoaded(at=at, profiles=found, parallel=parallel)
        events: list[ev.Event] = [known] if found or parallel else []
        there = (*self.devices, *machine.ledger.devices.values())
        events += self.on_other_types({job.model for job in jobs}, there, at=at)
        if uses := self._shared(jobs):
            events.append(ev.SharedUsesKnown(at=at, uses=uses))
        over = tuple(i for i, job in enumerate(jobs, first_id) if job.name in cancelled)
        new = ev.JobsSubmitted(at=at, cause=cause, first_id=first_id, jobs=tuple(jobs), cancelled=over)
        return [*events, new]

    def _checked(self, jobs: Sequence[JobSpec], *, gpus: int, where: str) -> tuple[Profile, ...]:
        """The profiles of models that are new; raises ConfigError for jobs that this run cannot take."""
        machine = self.machine
        for job in () if self.joinable else jobs:
            self._check_fits(job, self.devices, gpus=gpus, where=where)
        for job in jobs:
            if not self.mps and job.env.get(LANE_MODE) == "mps":
                accepted = "another mode: the settings here have mps = false (`hpcsched config show`)"
                key = f"job {job.name}.env.{LANE_MODE}"
                raise ConfigError(where=where, key=key, got="mps", accepted=accepted)
        if self.watched:
            accepted = "it in the environment of `hpcsched run` or in a file: others may watch this run"
            refuse_secrets(jobs, where=where, accepted=accepted)
        new = {job.model for job in jobs} - {model for model, *_ in machine.estimates.profiles}
        found = self.find_profiles(new, "") if new else ()
        for job in () if self.joinable else jobs:
            self._check_memory(job, [*found, *machine.estimates.profiles.values()], where)
        stand_ins = [job for job in jobs if self.stand_ins or job.kind is Kind.REPLAY]
        require_profiles(stand_ins, [*machine.estimates.profiles.values(), *found])
        return found

    def edits(
        self,
        jobs: Sequence[JobSpec],
        *,
        update: bool,
        called_in: str,
        gpus: int,
        where: str,
        retry: bool = False,
        living: bool = True,
    ) -> JobEdits:
        """The differences between jobs submitted again and the run's definitions, and what becomes of them.

        `living` False: nothing runs (yet), whatever the machine says. `retry`: all that have failed run
        again. `called_in`: see `differing`. Raises ConfigError for definitions that this run cannot take.
        """
        machine, edits = self.machine, JobEdits()
        for spec in jobs:
            job = machine.run.jobs[machine.run.by_name[spec.name]]
            keys = differing(job.spec, spec, called_in=called_in)
            if keys == ("processes",) and not update and was_unsaid(job.spec, spec):
                keys = ()
            if not keys:
                if job.id in machine.run.kept:
                    edits.kept[job.id] = ()
                continue
            if update and not (living and job.state.active):
                spec = spec if "workdir" in keys else replace(spec, workdir=job.spec.workdir)
                edits.updated[job.id] = spec
            else:
                edits.kept[job.id] = keys
            edits.said[job.id] = edit_message(job, keys, update=update, living=living)
        ids = sorted(edits.updated)  # to look through all that there ever were takes long: not each time
        failed = machine.run.jobs.in_state(*FAILURES) if retry else map(machine.run.jobs.look, ids)
        edits = replace(edits, again=tuple(job.id for job in failed if job.state in FAILURES))
        if not edits.updated:
            return edits
        waits_for = self._waited_for(edits.updated)
        jobfile.check_names(waits_for, where=where, known=machine.run.by_name.keys(), again=True)
        found = self._checked(list(edits.updated.values()), gpus=gpus, where=where)
        return replace(edits, profiles=found)

    def _waited_for(self, updated: Mapping[int, JobSpec]) -> list[JobSpec]:
        """These definitions, and those of all jobs that they wait for, with their changes: whoever waits in a
        circle now is among them."""
        run = self.machine.run
        found = {spec.name: spec for spec in updated.values()}
        line = [*found.values()]
        for spec in line:
            for name in spec.after:
                if name not in found and (job_id := run.by_name.get(name)) is not None:
                    found[name] = run.jobs.look(job_id).spec
                    line.append(found[name])
        return line

    def submitted(
        self, command: Command, *, at: float, gpus: int, cause: str
    ) -> tuple[list[ev.Event], Answer]:
        """The events of a submit command, and the answer to its sender. Raises ConfigError.

        Every job is checked as a job file's is: a file in the inbox may come from anywhere. One that changes
        nothing that the run has, and holds no new job, is refused: `Answer.kept` and `Answer.outcomes` say
        what differs.
        """
        names = self.machine.run.by_name
        old = [submission.checked(job, where="submit") for job in command.wanted if job.name in names]
        new = [submission.checked(job, where="submit") for job in command.jobs if job.name not in names]
        edits = self.edits(old, update=command.update, called_in=command.workdir, gpus=gpus, where="submit")
        if sharing := {job.model for job in edits.updated.values() if shares_a_gpu(job)}:
            self._sharing.update(sharing)
        # What has waited for this agent may have come with its job file meanwhile.
        agreed = command.update or self.machine.run.reads_inbox
        if not (new or edits.updated or edits.ignored or agreed):
            jobfile.check_names(command.jobs, where="submit", known=names.keys())
        events: list[ev.Event] = []
        compared = bool(edits.updated or edits.kept)
        if new:
            known_by = "" if compared else cause
            gone = command.cancelled
            events = self.events(new, at=at, gpus=gpus, where="submit", cause=known_by, cancelled=gone)
        parallel = self.parallel(edits.updated.values())
        if edits.profiles or parallel:
            events.append(ev.ProfilesLoaded(at=at, profiles=edits.profiles, parallel=parallel))
        if compared:
            about = ev.DefinitionsCompared(
                at=at, cause=cause, updated=edits.updated, kept=edits.kept, again=edits.again
            )
            events.append(about)
        next_id = self.machine.run.jobs.last_id + 1
        ids = {job.name: job_id for job_id, job in enumerate(new, next_id)} | {
            job.name: names[job.name] for job in old
        }
        given = [ids[job.name] for job in command.jobs if job.name in ids]
        outcomes = ["" if i >= next_id else edits.said.get(i, "is in the run already") for i in given]
        done = [i >= next_id or i in edits.updated for i in given]
        return events, Answer(ids=given, outcomes=outcomes, done=done, kept=edits.ignored)

    def better_profiles(self) -> tuple[Profile, ...]:
        """Profiles to go by from now on for the jobs of earlier lives, whose devices may have been others."""
        models = {job.spec.model for job in self.machine.run.jobs.left()}
        found = self.find_profiles(models, "") if models else ()
        return self._new(found)

    def on_other_types(
        self, models: set[str], devices: Iterable[Device], *, at: float
    ) -> list[ev.ProfilesLoaded]:
        """What is known of these models on those of these devices that are not of the run's own type."""
        devices = tuple(devices)
        types = dict.fromkeys(device.gpu_type for device in devices)
        own = own_type(self.devices) or self.machine.ledger.own_type or own_type(devices)
        types.pop(own, None)
        find = self.find_profiles
        new = {each: self._new(measured_on(each, models, find), each) for each in types}
        return [ev.ProfilesLoaded(at=at, profiles=new[each], gpu_type=each) for each in types if new[each]]

    def joined(self, devices: Iterable[Device], at: float) -> list[ev.ProfilesLoaded]:
        """What is known of the models of unfinished jobs on devices that come to the run."""
        models = {job.spec.model for job in self.machine.run.jobs.left()}
        return self.on_other_types(models, devices, at=at) if models else []

    def _new(self, profiles: Iterable[Profile], gpu_type: str = "") -> tuple[Profile, ...]:
        known = self.machine.estimates.profiles
        return tuple(p for p in profiles if known.get((p.model, p.nodes, gpu_type)) != p)

    def parallel(self, jobs: Iterable[JobSpec]) -> tuple[Program, ...]:
        """The programs of these commands that are known to be parallel, and new to the run."""
        new = {program_of(job) for job in jobs if job.kind is Kind.COMMAND} - self.machine.estimates.parallel
        known = self.find_parallel({model for model, _ in new}) if new else ()
        return tuple(program for program in known if program in new)

    def _shared(self, jobs: Iterable[JobSpec]) -> tuple[SharedUse, ...]:
        """What earlier runs have seen of the models of these jobs, and of those beside models of the run."""
        new = {job.model for job in jobs if shares_a_gpu(job)}
        if not new:
            return ()
        first = new - self._sharing
        found, known = self.find_shared() if first else (), self._sharing | new
        self._sharing.update(new)
        return tuple(use for use in found if first & {*use.models} and {*use.models} <= known)

    @cached_property
    def _sharing(self) -> set[str]:
        """The models of the run's jobs that share devices; looked for once: there may be very many."""
        return {job.spec.model for job in self.machine.run.jobs.values() if shares_a_gpu(job.spec)}

    def cannot_start(self) -> list[str]:
        """Why the jobs that wait can never start on what is left here: a line each."""
        machine, lines = self.machine, []
        here = self if not self.joinable else self._as_it_is()
        devices = list(machine.ledger.devices.values())
        for job in machine.run.jobs.left():
            if job.held or job.unmet or job.state not in (JobState.PENDING, JobState.SUSPENDED):
                continue
            try:
                here._check_fits(job.spec, devices, gpus=len(devices), where="")
            except ConfigError as error:
                lines.append(f"{error.key}: {error.got}; accepted: {error.accepted}")
            else:
                why = machine.waiting_reason(job)
                lines.append(f"job {job.spec.name}: {why.said(machine.ledger.noun) if why else why}")
        return lines

    def _as_it_is(self) -> Admission:
        """The same for the hosts that there are now, where some have joined."""
        ledger = self.machine.ledger
        cores = tuple(ledger.host_cores.values())
        return replace(
            self,
            hosts=len(ledger.host_names),
            cores=most_cores(cores, tuple(ledger.devices.values())),
            host_cores=cores,
        )

    @property
    def _noun(self) -> str:
        """What people call the devices here."""
        return noun(device.kind for device in self.devices)

    def _check_fits(self, job: JobSpec, devices: Sequence[Device], *, gpus: int, where: str) -> None:
        """Refuse a job that could never start on these devices, and the cores and memory of their hosts."""
        jobfile.check_fits([job], gpus=gpus, hosts=self.hosts, where=where, noun=self._noun)
        self._check_cores(job, where)
        check_needs(job, devices, self.host_cores, where=where)

    def _check_cores(self, job: JobSpec, where: str) -> None:
        """Refuse a job that could never start on the cores that there are."""
        if job.cpus is None:
            return
        if self.stand_ins:
            got = f"{job.strategy['kind']} on pretended GPUs"
            raise ConfigError(where=where, key=f"job {job.name}.strategy", got=got, accepted="cpu:N or cuda")
        need = Rules.of(job.strategy).first().cores / WHOLE
        if need > self.cores:
            got = f"{need:.4g} cores to start with"
            accepted = f"at most {self.cores:.4g}: no host here has more for jobs without {self._noun}s"
            accepted += " (cpus_per_gpu)"
            raise ConfigError(where=where, key=f"job {job.name}.strategy.cpus", got=got, accepted=accepted)

    def _check_memory(self, job: JobSpec, profiles: Sequence[Profile], where: str) -> None:
        """Refuse a background job that has no room in any GPU's memory, even alone."""
        tables = (profile.memory_mib for profile in profiles if profile.model == job.model)
        need, room = cost_at(next(tables, None), 1), self.memory_mib
        if job.background and need is not None and room is not None and need > room:
            got = f"{job.model} needs {need:.0f} MiB on one GPU"
            accepted = f"at most {room:.0f} MiB: no GPU here has more"
            raise ConfigError(where=where, key=f"job {job.name!r}.background", got=got, accepted=accepted)


_HAD = {
    JobState.FAILED: "failed",
    JobState.TIMEOUT: "run for all of its time",
    JobState.OUT_OF_MEMORY: "run out of memory",
}


def edit_message(job: Job, keys: Sequence[str], *, update: bool, living: bool = True) -> str:
    """The message for a job whose `keys` differ between job file and run: what becomes of them."""
    differs = f"{', '.join(keys)} {'differs' if len(keys) == 1 else 'differ'} from the run's"
    if not update:
        return f"{differs} (kept; --update takes the file's)"
    if living and job.state.active:
        return f"{differs} (kept, as it runs: suspend it, then --update takes the file's)"
    if job.state.failed:
        return f"{differs} (taken; it had {_HAD[job.state]} and runs again)"
    if job.state.final:
        return f"{differs} (taken; it is {job.state}: `hpcsched retry {job.spec.name}` runs it again)"
    return f"{differs} (taken)"
