"""All dialects by name, and what each says of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcsched.core.model import Restart

NAMES: tuple[str, ...] = ("lightning", "transformers")
"""What `speaks` may say, besides "none"."""


def restart_of(speaks: str, command: Sequence[str], workdir: Path, env: Mapping[str, str]) -> Restart:
    """How a command that speaks this dialect is suspended and told to go on.

    `checkpoints` is empty where neither the command nor its script says where it saves: then the job file has
    to. Raises KeyError for a name that is not in `NAMES`; never waits, and reads at most the script.
    """
    return Restart(speaks={name: name for name in NAMES}[speaks])


def recognise(command: Sequence[str], workdir: Path, env: Mapping[str, str]) -> Restart | None:
    """What a command speaks where that is sure, with the reason in `recognised`; None where it is not.

    Never raises: what cannot be read or understood is not recognised.
    """
    return None
