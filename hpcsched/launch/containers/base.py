"""The seam to container runtimes: what is to be started, and how a runtime is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Protocol

from hpcsched.core.model import Container


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """One process, as it is to run in a container.

    `argv` is looked up inside. `env` is all that it is to have of the host's environment, `told` the names of
    those that are of this job and hold against the image's own. `cwd` and `folders` have to be there, under
    the same paths as outside. `gpus`: it uses NVIDIA GPUs.
    """

    container: Container
    argv: tuple[str, ...]
    env: Mapping[str, str]
    told: frozenset[str]
    cwd: str
    folders: tuple[str, ...] = ()
    gpus: bool = False

    @property
    def mounts(self) -> list[tuple[str, str, str]]:
        """What is shown inside, as (outside, inside, mode), outer folders first: a mount below the job's
        folder is not hidden by that, and a job's folder is not by a mount above it. Of two at one place the
        user's counts."""
        ours = [(folder, folder, "rw") for folder in (*self.folders, self.cwd)]
        listed = [*ours, *self.container.mounts]
        at_places = {PurePosixPath(at): (outside, at, mode) for outside, at, mode in listed}
        return [at_places[place] for place in sorted(at_places, key=lambda place: len(place.parts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What the host starts for it; `argv[0]` is looked up in the agent's PATH."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class Runtime(Protocol):
    """One kind of container runtime. Pure: nothing is started or looked up here, but for folders of images.

    `programs`: what it is called, the first that is in PATH is used. `passes_signals`: signals to what the
    host has started reach the program; if not, that process must be left alone by signals that it would die
    of, and the program is signalled itself.
    """

    @property
    def programs(self) -> tuple[str, ...]:
        """Its names in PATH."""

    @property
    def passes_signals(self) -> bool:
        """Whether signals reach the program."""

    def start(self, inside: Inside, program: str) -> Outside:
        """How the process is started by `program`. Raises LaunchError."""
