"""Everything that can happen. Events are facts: frozen, journalled, replayed to rebuild the state.

Each carries `at` (seconds of the run's clock, which stands still while no agent lives) and, when it
is about a run of a job, `(job_id, attempt)`, so that news of a stale attempt is recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcsched.core.model import Device, HostCores, JobSpec, Progress
from hpcsched.core.plan import Plan
from hpcsched.core.processes import Program
from hpcsched.core.profile import Profile
from hpcsched.core.shared_use import SharedUse

RULES = 4
"""The version of the rules by which decisions are made in lives that begin now (see docs/adr/0030).

1: all that 0.1.0 to 0.2.0 decided. 2: packs by what was measured of them. 3: failures before a newer
checkpoint do not count, if nobody knows its step either. 4: of packs that were measured a job joins first the
one with most of its own model, no time is kept for saves of programs that nothing says can save, no program
is taken for parallel by a profile that was not measured, and what fails at once twice in a row waits.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    at: float
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(Event):
    """An agent took the run over, with these devices and this policy; the first event of each life.

    `wall` is the Unix time at `at`. Attempts of an earlier life are over once this is handled, as the agent
    has ended their processes, but for the jobs that are `adopted`: these live, on the same devices, and it
    watches them now. Those of `unsure` may live on a host that has not been heard of: by job when they no
    longer can, before which it does not start again. `epoch` numbers the lives, for their node agents to
    tell them apart (0: not numbered).
    `saved_steps` says, by job, which step each attempt that is over had saved, and of suspended jobs those
    whose state was only in the earlier agent's memory (0: nothing else was saved); `seen_steps` how far each
    was by the last snapshot. `grace_s` is how long a worker may take to save before it is ended by force.
    `profiles` replace those of earlier lives, which may have had other devices; `parallel` are the programs
    that have said that they are. `deadline` is when the allocation ends (None: not known, or never);
    `reserve_s` the seconds to keep before that besides what saving is known to take. `cores` are those for
    jobs that need no GPU. `run_id` is what the run's processes are known by ("" in journals of 0.1.0).
    The job file that this life began with: `updated` are definitions taken from it, by job, `kept` the keys
    of which it says otherwise than the run, by job, and `again` the jobs that run again with what was taken.
    `rules` is the version of the rules by which this life decides: a replay decides by them too, and with the
    `mechanisms` that other packages have added to it. `release_after_s`: a host of which no job can use
    anything for so long is given back to the batch system (None: never); not the one that `stays`.
    `reads_inbox`: commands wait for this agent, and nothing is decided before `InboxRead`.
    """

    wall: float
    devices: tuple[Device, ...]
    policy: str
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    grace_s: float = 30.0
    saved_steps: Mapping[int, int] = field(default_factory=dict)
    profiles: tuple[Profile, ...] = ()
    parallel: tuple[Program, ...] = ()
    deadline: float | None = None
    reserve_s: float = 60.0
    cores: tuple[HostCores, ...] = ()
    seen_steps: Mapping[int, int] = field(default_factory=dict)
    updated: Mapping[int, JobSpec] = field(default_factory=dict)
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    again: tuple[int, ...] = ()
    run_id: str = ""
    rules: int = 1
    mechanisms: tuple[str, ...] = ()
    release_after_s: float | None = None
    stays: str = ""
    reads_inbox: bool = False
    adopted: tuple[int, ...] = ()
    unsure: Mapping[int, float] = field(default_factory=dict)
    epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxRead(Event):
    """The commands that waited for the agent have been carried out: decisions begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineMoved(Event):
    """The allocation now ends at `deadline` of the run's clock; None: no longer known, or never."""

    deadline: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesLoaded(Event):
    """The profiles to go by, one for each model and number of hosts, on devices of `gpu_type` ("": the run's
    own). `parallel`: programs that have said, in an earlier run, that they are."""

    profiles: tuple[Profile, ...]
    parallel: tuple[Program, ...] = ()
    gpu_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUsesKnown(Event):
    """What earlier runs have seen, on such devices, of models that share them."""

    uses: tuple[SharedUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade(Event):
    """The plan that the policy asked for; it was made from the state right before."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSubmitted(Event):
    """Jobs that came together; ids are given in order, from `first_id`.

    `cancelled`: ids of those that were cancelled before an agent took them.
    """

    first_id: int
    jobs: tuple[JobSpec, ...]
    cancelled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionsCompared(Event):
    """Jobs of the run were submitted again, with other definitions: see `AgentStarted`. None of those that
    are `updated` runs."""

    updated: Mapping[int, JobSpec] = field(default_factory=dict)
    kept: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    again: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRequested(Event):
    """The user wants jobs that have ended to run again: from what they had saved, or `from_scratch`."""

    job_ids: tuple[int, ...]
    from_scratch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressObserved(Event):
    """How far the running jobs are; put before every event that can lead to a decision."""

    progress: tuple[Progress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent(Event):
    """Base of events about a job."""

    job_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(JobEvent):
    """The user wants the job ended for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRequested(JobEvent):
    """The user wants a waiting job not to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequested(JobEvent):
    """The user lets a held job go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRequested(JobEvent):
    """The user wants a running job to save, leave its devices, and stay away until resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested(JobEvent):
    """The user wants a job he suspended to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(Event):
    """Save everything, start nothing, stop with work left. While that goes on: a better word on its cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent(JobEvent):
    """Base of events about one attempt of a job."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSpawned(AttemptEvent):
    """The attempt's processes exist: (pid, start time in clock ticks since boot) of each rank."""

    processes: tuple[tuple[int, int], ...]
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWaited(AttemptEvent):
    """So many seconds of the attempt have gone by before its processes could be started, or could not: its
    modules were loaded, its interpreter asked, its checkpoints looked for. They do not count as time that it
    has run. Told of a job with a time limit, before what came of it."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersReady(AttemptEvent):
    """The program has said that it can be suspended; `in_place`: also resized while it goes on; `parallel`:
    that it can be one of several ranks, as one that is resized can.

    `took_s` are measured seconds since the launch (None for what only follows a profile).
    """

    in_place: bool = False
    parallel: bool = False
    took_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSeen(AttemptEvent):
    """What is seen of an attempt that saves by itself (`JobSpec.restart`), whenever that changes. The first
    one says that it can be suspended.

    `handles`: its processes catch the signal that asks them to save; without that they would only be ended.
    `step` and `saved_at` are those of its newest whole checkpoint, `saved_at` in seconds of the run's clock
    (None: not known, or there is none).
    """

    handles: bool
    step: int | None = None
    saved_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingSeen(AttemptEvent):
    """An attempt that was asked to leave is still writing a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersApart(AttemptEvent):
    """The attempt's processes, so many, have not met `seconds` after their launch (`met`: now they have)."""

    processes: int
    seconds: float
    met: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersResized(AttemptEvent):
    """The attempt has become the next one, as it was told to by a Resize action, after `step` steps.

    Later events are about that one. `stopped_s` are the seconds that training stood still for it, `built_s`
    those that the ranks that joined took to start (None where they were not measured).
    """

    step: int
    stopped_s: float | None = None
    built_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingProposed(AttemptEvent):
    """The program expects so many steps a second of its next epoch, by the number of GPUs on each of its
    hosts, with global batches of `batch` samples in the mean."""

    rates: Mapping[int, float]
    batch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageMeasured(AttemptEvent):
    """What the processes of an attempt on CPU cores use, in the median of `samples` samples: `rate` steps per
    second, `cpu` cores by rank, and by rank the share of the time (0 to 1) for which its link was full: of
    workers 0. `stable`: the samples differ little from each other (NEARCHUS, section IV)."""

    rate: float
    cpu: tuple[float, ...]
    net: tuple[float, ...]
    samples: int
    stable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUseMeasured(AttemptEvent):
    """What an attempt that shares its device uses of that: the most memory so far, in MiB, and the share of
    the time (0 to 1) for which it had it busy lately. None: not known."""

    memory_mib: float | None = None
    busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoresLost(Event):
    """The cores of a host can be used no more."""

    host: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeFailed(AttemptEvent):
    """The attempt goes on as it was: nothing lives any more of the ranks that were to join it.

    `refused`: its program has said that it cannot train on so many GPUs, by a restart neither.
    """

    error: str
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(AttemptEvent):
    """A checkpoint that holds `step` steps is on disk."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersExited(AttemptEvent):
    """All processes of the attempt are gone.

    `code` is 0 (done), 75 (saved and left) or the first other exit code, 128+N for signal N.
    `step` is the last step known to be done, `again` how many it lost by going back, `saved_step` the step of
    the newest good checkpoint (None: it reports none). `took_s` are measured seconds since it was asked to
    save (None if it was not, and for what only follows a profile). `held`: the state of `saved_step` is in
    memory, and not on disk yet. `lasted_s` are measured seconds since the launch (None for what only follows
    a profile). `unreadable` says why its record of what it has saved cannot be read ("": it can), `no_room`
    which of its directories had no room left when it failed ("": none). `unasked`: they had ended well before
    anybody asked them to, and that is told now that the memory of their GPUs is free. `oom`: main memory ran
    out, how ("": it did not); `over_limit`: the job's own limit was exceeded. `not_taken`: which checkpoint
    of a job that saves by itself does not count, and why ("": none).
    """

    code: int
    step: int | None = None
    again: int = 0
    saved_step: int | None = None
    detail: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    took_s: float | None = None
    held: bool = False
    lasted_s: float | None = None
    unreadable: str = ""
    no_room: str = ""
    unasked: bool = False
    oom: str = ""
    over_limit: bool = False
    not_taken: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed(AttemptEvent):
    """The attempt's processes could not be started; `transient` says whether to try again.

    `host_fault`: a host that is being lost is to blame, not the job; `no_room`: this directory, which has no
    room left ("": none).
    """

    error: str
    transient: bool = True
    host_fault: bool = False
    no_room: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost(Event):
    """A device disappeared or reported a fatal error; it is used no more."""

    gpu: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFound(Event):
    """A device that was lost is well again, and is used again."""

    gpu: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsJoined(Event):
    """Hosts of another allocation have joined, with devices and cores that the run has not had in this life.
    `ends`: by host when its allocation ends, by the run's clock (not named: never, or not known)."""

    devices: tuple[Device, ...]
    cores: tuple[HostCores, ...] = ()
    ends: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEndMoved(Event):
    """A host now ends at `end` of the run's clock; None: no longer known, or with the run."""

    host: str
    end: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsReleased(Event):
    """These hosts are gone, as a ReleaseHosts action asked for: their batch system has them back."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFailed(Event):
    """The batch system has not taken these hosts back: the run has them as before."""

    hosts: tuple[str, ...]
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventVoided(Event):
    """The event in this record of the journal could not be handled, and counts for nothing: now and in every
    replay.

    `kind` is its type (Unreadable: its record was damaged), `error` why. `job_id` and `attempt` are what it
    was about; `ended`: it would have told that the attempt is over.
    """

    record: int
    kind: str
    error: str
    job_id: int | None = None
    attempt: int | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    """A timer asked for by a SetTimer action has run out; `key` is that action's."""

    key: tuple[str, int, int]
