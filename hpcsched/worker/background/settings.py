"""How this process shares its GPU, from its environment. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcsched.compat import StrEnum
from hpcsched.contract import files
from hpcsched.contract.variables import DEVICES, LANE, LANE_MEMORY_MIB, LANE_MODE, RANK, RUN_ID
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import ConfigError


class Mode(StrEnum):
    """How two jobs share a GPU: the values of `variables.LANE_MODE`, without `auto`."""

    STREAMS = "streams"
    """In the foreground's process, on streams of different priority."""
    GREEN = "green"
    """The same, and the background has some of the processors only (a green context)."""
    MPS = "mps"
    """In two processes, through NVIDIA's multi-process service."""
    PROCESS = "process"
    """In two processes, which the system lets take turns."""

    @property
    def hosted(self) -> bool:
        """Whether the background job is a guest in the foreground's process."""
        return self in (Mode.STREAMS, Mode.GREEN)


def lane(environ: Mapping[str, str]) -> str | None:
    """`foreground`, `background`, `shared` (one of several that are content with a part of the GPU), or None
    where nothing is shared. Raises ConfigError for other words."""
    word = environ.get(LANE) or None
    if word not in (None, "foreground", "background", "shared"):
        accepted = "'foreground', 'background' or 'shared'"
        raise ConfigError(where="environment", key=LANE, got=repr(word), accepted=accepted)
    return word


def mode(environ: Mapping[str, str]) -> Mode:
    """How to share; `auto`, the default, is `streams` on a GPU and `process` on CPU slots.

    Raises ConfigError for other words, and for modes that need a GPU where there is none.
    """
    word = environ.get(LANE_MODE) or "auto"
    gpu = environ.get(CUDA.variable, "") not in CUDA.none
    if word == "auto":
        return Mode.STREAMS if gpu else Mode.PROCESS
    accepted = ["auto", *(known.value for known in Mode)]
    if word not in accepted:
        raise ConfigError(where="environment", key=LANE_MODE, got=repr(word), accepted=", ".join(accepted))
    if word in (Mode.GREEN, Mode.MPS) and not gpu:
        raise ConfigError(where="environment", key=LANE_MODE, got=f"{word!r} without a GPU", accepted="a GPU")
    return Mode(word)


def memory_mib(environ: Mapping[str, str]) -> int | None:
    """The most memory, in MiB, that a job in a process of its own may take of a GPU that others use; None: no
    limit is told. Raises ConfigError for what is no such number."""
    word = environ.get(LANE_MEMORY_MIB)
    if not word:
        return None
    if not (word.isascii() and word.isdecimal() and int(word) > 0):
        accepted = "a whole number of MiB, at least 1"
        raise ConfigError(where="environment", key=LANE_MEMORY_MIB, got=repr(word), accepted=accepted)
    return int(word)


def device_of(environ: Mapping[str, str]) -> str | None:
    """The index, in the allocation, of the device that this rank is on; None where none is told."""
    devices = [word for word in environ.get(DEVICES, "").split(",") if word]
    rank = int(environ.get(RANK) or 0)
    return devices[rank] if rank < len(devices) else None


def address(environ: Mapping[str, str]) -> str | None:
    """The abstract socket at which the foreground of this rank's device awaits a guest; None: nowhere.

    In no file system: run directories lie on ones that have no sockets. Who is at the other end has to be
    asked, as anybody on the host may take the name.
    """
    run, device = environ.get(RUN_ID), device_of(environ)
    return f"\0hpcsched/{run}/lane/{device}" if run and device is not None else None


def note_of_fault(job_dir: str | Path) -> Path:
    """The file whose being there says that the job is nobody's guest any more, and why."""
    return Path(job_dir) / files.NEVER_A_GUEST
