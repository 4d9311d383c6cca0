"""The words of the domain: jobs, their states, devices, roles, attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

from hpcsched.contract.seats import Seat
from hpcsched.core.environments import PythonEnvironment as PythonEnvironment
from hpcsched.core.needs import Needs
from hpcsched.core.reasons import Reason
from hpcsched.core.states import JobState as JobState

NOTHING: Mapping[str, Any] = {}
DDP: Mapping[str, Any] = {"kind": "ddp"}
"""Shared by all jobs that say nothing else, as there may be a million of them; never written to."""

PER_GPU, AUTO = "per-gpu", "auto"
"""What a job may say of its processes besides their number: see `core.processes`."""


class Role(StrEnum):
    """MARBLE section V-C: a primary has its optimal GPU count, a secondary what was left. Both are in the
    foreground of their GPUs; a job in the background has the other lane of one. A packed one trains together
    with the job that has the GPU, a shared one beside it; one on CPU cores needs none (NEARCHUS)."""

    PRIMARY = "primary"
    SECONDARY = "secondary"
    BACKGROUND = "background"
    PACKED = "packed"
    SHARED = "shared"
    CORES = "cores"


class Ended(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    SUSPENDED = "suspended"
    RESIZED = "resized"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


class Kind(StrEnum):
    """What a job runs: a Trainer class, any program, or a stand-in that follows its profile."""

    TRAINER = "trainer"
    COMMAND = "command"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What only a job with a trainer can be asked for; apart, as a million jobs must fit into a gibibyte.

    `epochs` is the whole job's work in passes over the data, which only its trainer can count. `continues` is
    the name of a job whose final state it begins with, steps and all.
    """

    epochs: float | None = None
    continues: str | None = None


SIGNALS: Mapping[str, int] = {
    "SIGTERM": 15,
    "SIGUSR1": 10,
    "SIGUSR2": 12,
    "SIGINT": 2,
    "SIGHUP": 1,
    "SIGQUIT": 3,
    "SIGXCPU": 24,
}
"""What may ask a program to save, with their numbers on Linux: other signals stop or end it whatever it does,
or mean something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The container that a job's program runs in.

    `image`: a file, a folder, an address, or a name that `runtime` knows. `runtime`: "apptainer", "enroot",
    "pyxis", "bubblewrap", or "auto", by the image. `mounts`: (outside, inside, "ro" or "rw") beside those
    that a job needs in any case. `options`: more arguments for the runtime. `python`: runs a trainer inside.
    Jobs of one file share the object.
    """

    image: str
    runtime: str = "auto"
    mounts: tuple[tuple[str, str, str], ...] = ()
    options: tuple[str, ...] = ()
    python: str = "python3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """How a program that saves by itself, and goes on by itself when started again, is asked to and told.

    `speaks` is the dialect that the rest comes from ("": given key by key), `recognised` why the program is
    taken to speak it ("": the job file says so). `signal` asks it to save and to end ("": it saves only as it
    goes, so it is ended, and loses the steps since then). `checkpoints` are patterns of what it saves,
    relative to where it runs; `complete` is the file that it writes last into one that is a folder ("": not
    known). `resume_args` are added to its command when there is a checkpoint (`{checkpoint}`,
    `{accumulation}`). `saved_codes` are exit codes that mean "saved", besides 75. `batch`: what becomes of
    its global batch on another number of GPUs: "fixed", nobody knows, so it stays on as many as it began on;
    "scales", it changes, as the job file allows; "kept", by `accumulation`, which is that of its first
    attempt. `suspend_command` and `resume_command` save and restore it from outside (CRIU, DMTCP). Jobs of
    one file share the object.
    """

    speaks: str = ""
    recognised: str = ""
    signal: str = "SIGTERM"
    checkpoints: tuple[str, ...] = ()
    complete: str = ""
    resume_args: tuple[str, ...] = ()
    saved_codes: tuple[int, ...] = ()
    batch: Literal["fixed", "scales", "kept"] = "fixed"
    accumulation: int = 1
    suspend_command: tuple[str, ...] = ()
    resume_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """A job's place among jobs that were submitted as one: `index` tells it from the others.

    `at_once`: so many of them may be under way (in line, running, suspended) at a time; None: all.
    """

    name: str
    index: int
    at_once: int | None = None


MOST_JOBS = 16
"""Jobs that share a device, at most (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What the user asked for; never changes.

    `gpus_min` and `gpus_max` count GPUs on each of the job's `nodes` hosts; `gpus_max` None means "as many as
    there are". All its counts are multiples of `gpus_multiple`, these two as well. `steps` is the whole job's
    work in steps (None: not known). Times are seconds. `background`: it has low priority, and runs on one
    GPU's background lane. `max_foreground_slowdown` is the share of its speed that a job in the foreground
    gives up, at most, for those beside it (0: it shares no GPU). `processes`: on each host, where the program
    is a command: "per-gpu", a number, or "auto" (see `core.processes`). `environment`: whose Python runs its
    trainer (None: the run's; see `launch.interpreters`); jobs of one file share the object. `restart`: the
    program saves by itself, and can be started again (None: only the contract says when it can be suspended).
    `progress_pattern` finds the step in a line of its output ("": as its dialect does, if it speaks one).
    `container`: what it runs in (None: the host itself).
    `needs`: time, cores, memory, kinds of GPUs, modules (None: the file says nothing of these). `array`: the
    jobs that it was submitted with as one (None: it stands alone). `priority`: a higher one waits before all
    with a lower one; among equals it is first come, first served.
    """

    name: str
    kind: Kind
    model: str
    trainer: str | None = None
    command: tuple[str, ...] = ()
    args: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    steps: int | None = None
    training: Training | None = None
    after: tuple[str, ...] = ()
    gpus_min: int = 1
    gpus_max: int | None = None
    gpus_multiple: int = 1
    nodes: int = 1
    strategy: Mapping[str, Any] = field(default_factory=lambda: DDP)
    submit_at: float = 0.0
    retries: int = 2
    env: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    output: str = "hpcsched-%j.out"
    checkpoint_every_s: float = 600.0
    keep_checkpoints: int = 2
    workdir: str = "."
    processes: int | str = PER_GPU
    user: str = ""
    background: bool = False
    max_foreground_slowdown: float = 0.05
    environment: PythonEnvironment | None = None
    restart: Restart | None = None
    progress_pattern: str = ""
    container: Container | None = None
    needs: Needs | None = None
    array: Array | None = None
    priority: int = 0

    @property
    def epochs(self) -> float | None:
        """Passes over the data, where the work is given so."""
        return self.training.epochs if self.training else None

    @property
    def cpus(self) -> float | None:
        """The cores that a job on CPU cores may have at most (its budget); None for all others."""
        return self.strategy.get("cpus") if self.strategy["kind"] in ("ps", "cpu") else None

    @property
    def continues(self) -> str | None:
        """The job whose final state it begins with, if there is one."""
        return self.training.continues if self.training else None

    @property
    def mixes_types(self) -> bool:
        """Whether its GPUs may be of several types: of stream workers each has as many as it is fast."""
        return self.strategy["kind"] == "vsw" and not {"workers", "accumulation"} & self.strategy.keys()

    @property
    def uneven(self) -> bool:
        """Whether its hosts may give it unequally many GPUs."""
        return self.nodes > 1 and self.mixes_types


class ComputeMode(StrEnum):
    """What a GPU lets processes do, in NVML's words; one that nothing is known of counts as DEFAULT."""

    DEFAULT = "DEFAULT"
    EXCLUSIVE_PROCESS = "EXCLUSIVE_PROCESS"
    """One process at a time."""
    PROHIBITED = "PROHIBITED"
    """None at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU (or CPU slot, or pretended GPU) of the allocation.

    `handle` is what a worker's environment needs to find it: a UUID of a GPU or of a MIG
    instance (an index where it has none), a CPU list for a slot. `stands_for` is the type of GPU that a
    pretended one is taken for ("": none).
    """

    index: int
    host: str
    kind: str
    handle: str
    memory_mib: float | None = None
    compute_mode: ComputeMode = ComputeMode.DEFAULT
    stands_for: str = ""

    @property
    def gpu_type(self) -> str:
        """The name that profiles know it by."""
        return self.stands_for or self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCores:
    """The cores of a host, and its memory.

    `own` are those for jobs that need no GPU: nothing else uses them; CPU slots lend them their cores while
    no other job has the slot. `numa` says which cores lie on which NUMA node (a core that is not in it: on
    node 0). `kept` is the number of cores for jobs on GPUs, `memory_mib` the main memory for jobs; 0 and
    None: not counted.
    """

    host: str
    own: tuple[int, ...] = ()
    numa: Mapping[int, int] = field(default_factory=dict)
    kept: int = 0
    memory_mib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the processes of a job were measured to use: see `events.UsageMeasured`."""

    rate: float
    cpu: tuple[float, ...]
    net: tuple[float, ...]
    samples: int
    stable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an attempt is: `step` steps done in all, of `total` if its program says so, and its measured
    steps per second (or None).

    `done_s` is when that step was done, in seconds of the run's clock (None: not known). `again` is how
    many steps the attempt has lost so far by going back without ending.
    """

    job_id: int
    attempt: int
    step: int
    rate: float | None = None
    done_s: float | None = None
    total: int | None = None
    again: int = 0


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One stretch of a job on one set of devices, in the order of its ranks.

    Times are in the run's clock. `launch_s` are measured seconds from the launch to ready (None: not
    measured), `stopped_s` those for which training stood still at its end for a resize in place (by the
    profile where they were not measured). `in_place`: it began by one, without a launch. `quick`: it was
    asked to save as its devices were wanted. `guests` are the ids of the jobs that have come to share its
    devices, in the background or beside it, at any time in it. `again` is how many steps it lost by going
    back to a checkpoint without ending.

    A job on CPU cores has `SeatedAttempt`s.
    """

    number: int
    gpus: tuple[int, ...]
    role: str
    start_s: float
    end_s: float | None = None
    ended: Ended | None = None
    from_step: int = 0
    to_step: int | None = None
    ready_s: float | None = None
    signalled_s: float | None = None
    in_place: bool = False
    quick: bool = False
    launch_s: float | None = None
    stopped_s: float | None = None
    guests: tuple[int, ...] = ()
    again: int = 0

    seats: ClassVar[tuple[Seat, ...]] = ()
    why: ClassVar[Reason | None] = None
    usage: ClassVar[Usage | None] = None


@dataclass(slots=True, kw_only=True)
class SeatedAttempt(Attempt):
    """One of a job on CPU cores; apart, as there may be a million of the others.

    `seats` are its processes by rank, `why` they are as they are, `usage` what was last measured of them.
    """

    seats: tuple[Seat, ...] = ()  # type: ignore[misc]
    why: Reason | None = None  # type: ignore[misc]
    usage: Usage | None = None  # type: ignore[misc]
