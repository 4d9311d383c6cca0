"""Where a training with Accelerate is in its data, as it is saved."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from hpcsched.errors import ConfigError
from hpcsched.worker.process.contract import write_atomically

PLACE = "hpcsched.json"
"""The file in a folder of `save_state`."""


class At(NamedTuple):
    """Where the steps of an epoch are in a loader: how many `batches` all ranks together have had of it,
    whether it is through, and how many `others` passes over it had begun before, which were looks."""

    batches: int
    through: bool
    others: int = 0  # was not kept by earlier versions


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass over a loader, behind `others` in the epoch: `had` batches, of this rank, the first `skipped`
    of which were not read, and whether that was all; `first` of them at its first step. `part`: its batches
    are known to be the steps'."""

    number: int
    others: int
    had: int = 0
    through: bool = False
    first: int = 0
    part: bool = False
    skipped: int = 0


@dataclasses.dataclass
class Place:
    """Where a training is: `loaders` are those of the steps in `epoch`, by their numbers."""

    step: int = 0
    epoch: int = 0
    loaders: dict[int, At] = dataclasses.field(default_factory=dict)
    world_size: int = 1
    seeds: dict[int, int] = dataclasses.field(default_factory=dict)

    def put(self, number: int, at: At) -> None:
        """The steps are there in this loader. Raises ConfigError."""
        before = self.loaders.get(number, at).others
        if before != at.others:
            got = f"steps in loops {before + 1} and {at.others + 1} over a loader in epoch {self.epoch}"
            accepted = "in one, the same when a training goes on: the place is that in it"
            raise ConfigError(where="Accelerator", got=got, accepted=accepted)
        self.loaders[number] = at

    def save(self, folder: Path) -> None:
        """For `load`."""
        write_atomically(folder / PLACE, json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def load(cls, folder: Path) -> Place:
        """Raises ConfigError."""
        try:
            found = json.loads((folder / PLACE).read_bytes())
            return cls(
                step=int(found["step"]),
                epoch=int(found["epoch"]),
                loaders={int(key): At(*at) for key, at in found["loaders"].items()},
                world_size=int(found["world_size"]),
                seeds={int(key): int(seed) for key, seed in found["seeds"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            accepted = "a folder that hpcsched.integrations.accelerate has saved"
            raise ConfigError(where=str(folder), key=PLACE, got=repr(error), accepted=accepted) from None
