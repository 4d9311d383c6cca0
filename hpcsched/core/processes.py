"""How many processes a program is started as: one, unless it is known to be parallel.

A program that knows nothing of ranks would otherwise run as identical copies, which overwrite each other's
files. A trainer is one process a GPU, as it is our own; of a command it has to be known: from the job file,
from what its model has said of itself, or from a profile that was measured on several counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from hpcsched.core.model import AUTO, PER_GPU, JobSpec, Kind
from hpcsched.core.profile import Profile

PLACEHOLDERS = ("gpus", "nodes", "world_size", "node_rank", "master_addr", "master_port")
"""What a command, its arguments and its variables may be told, as `{gpus}` and so on."""

_NAMES = "|".join(PLACEHOLDERS)
_PLACEHOLDER = re.compile(rf"\$\{{+(?:{_NAMES})\}}+|\{{\{{({_NAMES})\}}\}}|\{{({_NAMES})\}}")
_COUNTS = re.compile(r"(?<!\$)(?<!\{)\{(?:gpus|world_size)\}")


class KnownLauncher(StrEnum):
    """A program that starts the ranks itself: to be started once on each host, or once for all."""

    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate launch"
    DEEPSPEED = "deepspeed"
    MPIRUN = "mpirun"
    SRUN = "srun"

    @property
    def once(self) -> bool:
        """Once for the whole job, not once on each host."""
        return self in (KnownLauncher.MPIRUN, KnownLauncher.SRUN)


_MODULES = {
    "torch.distributed.run": KnownLauncher.TORCHRUN,
    "torch.distributed.launch": KnownLauncher.TORCHRUN,
    "accelerate.commands.launch": KnownLauncher.ACCELERATE,
}
_PROGRAMS = {
    "torchrun": KnownLauncher.TORCHRUN,
    "deepspeed": KnownLauncher.DEEPSPEED,
    "mpirun": KnownLauncher.MPIRUN,
    "mpiexec": KnownLauncher.MPIRUN,
    "srun": KnownLauncher.SRUN,
}


def launcher_of(command: Sequence[str]) -> KnownLauncher | None:
    """The launcher that a command begins with, if it does; `python -m` and a path before it are seen."""
    return _launcher_of(tuple(command))


@lru_cache(maxsize=1024)  # each launch asks a dozen times
def _launcher_of(command: tuple[str, ...]) -> KnownLauncher | None:
    name = command[0].rpartition("/")[2] if command else ""
    if re.fullmatch(r"python[\d.]*", name):
        words = iter(command[1:])
        option = next((word for word in words if word == "-m" or not word.startswith("-")), "")
        return _MODULES.get(next(words, "")) if option == "-m" else None
    if name == "accelerate":
        return KnownLauncher.ACCELERATE if command[1:2] == ("launch",) else None
    if name == "env":
        return _launcher_of(command[1 + sum("=" in word for word in command[1:]) :])
    mpi = re.fullmatch(r"(mpirun|mpiexec)\.(openmpi|mpich|hydra)", name)
    return _PROGRAMS.get(mpi[1] if mpi else name)


def is_told(spec: JobSpec) -> bool:
    """Whether a launcher is told how many GPUs there are, so that it can be given any number."""
    launcher = launcher_of(spec.command)
    if launcher is KnownLauncher.TORCHRUN and not any(
        word.startswith(("--nproc-per-node", "--nproc_per_node")) for word in spec.command
    ):
        return True  # by its variable, see `launch.environment`
    if launcher is KnownLauncher.DEEPSPEED and not chooses_gpus(spec.command):
        return True  # it starts a rank on each GPU that it sees
    texts = (*spec.command, *spec.env.values(), *_texts(spec.args))
    return any(_COUNTS.search(text) for text in texts)


def chooses_gpus(command: Sequence[str]) -> bool:
    """Whether a deepspeed takes GPUs by numbers of its own: it then passes over those that it is shown."""
    return any(word.partition("=")[0] in _CHOOSES for word in command)


_CHOOSES = frozenset({"--num_gpus", "--num-gpus", "-i", "--include", "-e", "--exclude"})


def _texts(tree: Any) -> list[str]:
    match tree:
        case str():
            return [tree]
        case Mapping():
            return [text for value in tree.values() for text in _texts(value)]
        case list() | tuple():
            return [text for value in tree for text in _texts(value)]
    return []


def substituted(text: str, value_of: Callable[[str], object]) -> str:
    """The text with `{gpus}` and the other placeholders replaced, where they stand in exactly this form.

    `${gpus}` is a shell's and stays; `{{gpus}}` stands for `{gpus}`; all other braces stay as they are.
    """

    def value(found: re.Match[str]) -> str:
        escaped, name = found.groups()
        if name:
            return str(value_of(name))
        return f"{{{escaped}}}" if escaped else found[0]

    return _PLACEHOLDER.sub(value, text)


class Because(StrEnum):
    """Why a command is started as so many processes; the value is said to people."""

    TRAINER = "a trainer runs as one process on each GPU"
    JOB_FILE = "the job file says so"
    LAUNCHER = "a launcher starts the ranks itself"
    UNTOLD = "its launcher is not told how many GPUs it has: {gpus} in its command does that, or gpus = N"
    SAID = "its program has said that it is parallel"
    PROFILE = "the profile of its model was measured on several GPU counts"
    UNKNOWN = "nothing says that its program is parallel"


@dataclass(frozen=True, slots=True)
class ProcessLayout:
    """The processes of a job.

    `per_gpu`: one on each GPU; else `each` on each host, which see all the job's GPUs there. `once`: on its
    first host only. `most` is the number of GPUs on each host that they can use, as far as that is known
    (None: any number).
    """

    per_gpu: bool
    because: Because
    each: int = 1
    once: bool = False
    most: int | None = None

    def __str__(self) -> str:
        if self.per_gpu:
            what = "one process on each GPU"
        elif self.each > 1:
            what = f"{self.each} processes on each host"
        else:
            what = "one process"
        return f"{what}: {self.because}"


Program = tuple[str, str]
"""A model, and what is started for it: a model's name alone may be that of any program."""


def program_of(spec: JobSpec) -> Program:
    """A command's program and its script, whatever its options: `python train.py --lr 0.1` is `train.py`.

    A script that is named by where it is called from is another one elsewhere.
    """
    program, *words = spec.command or ("",)
    script = next((word for word in words if not word.startswith("-")), "")
    parts = [program, script]
    if any("/" in part or part.endswith((".py", ".sh")) for part in parts if not part.startswith("/")):
        parts.append(spec.workdir)
    return spec.model, " ".join(filter(None, parts))


def shape_of(
    spec: JobSpec, profile: Profile | None, parallel: Collection[Program], *, believes_all: bool = False
) -> ProcessLayout:
    """The processes of a job.

    `profile` is its model's as it was loaded; `parallel` are the programs that have said that they are.
    `believes_all`: by a profile that was published or fitted a program is parallel, too (rules before
    version 4).
    """
    # What was learnt may be of anything; a profile that was measured is of one process on each GPU. One of
    # other sources is of the model, and says nothing of this program.
    several = profile is not None and profile.source != "learned" and len(profile.throughput) > 1
    asked = spec.gpus_min > 1 or spec.gpus_max is not None
    if spec.kind is not Kind.COMMAND:
        return ProcessLayout(True, Because.TRAINER)
    if spec.processes == PER_GPU:
        return ProcessLayout(True, Because.JOB_FILE)
    if (launcher := launcher_of(spec.command)) and spec.processes in (AUTO, 1):
        free = asked or several or is_told(spec)
        return ProcessLayout(
            False, Because.LAUNCHER if free else Because.UNTOLD, once=launcher.once, most=None if free else 1
        )
    if spec.processes != AUTO:
        each = spec.processes if isinstance(spec.processes, int) else 1  # "one", in journals of 0.1.0
        return ProcessLayout(False, Because.JOB_FILE, each=each, most=None if asked or each == 1 else each)
    if program_of(spec) in parallel:
        return ProcessLayout(True, Because.SAID)
    if several and profile and (believes_all or profile.source == "measured"):
        return ProcessLayout(True, Because.PROFILE)
    return ProcessLayout(False, Because.UNKNOWN, once=True, most=None if asked else 1)
