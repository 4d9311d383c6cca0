"""What lies beside the Trainer's own files in a checkpoint that hpcsched goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from hpcsched.errors import ConfigError
from hpcsched.worker.process.contract import write_atomically

NAME = "hpcsched.json"


@dataclass
class Note:
    """What has to be known to go on, and the Trainer does not save.

    `losses`: the sum of each rank since step `logged_at`, where their mean was logged; `total_loss` is the
    sum up to there. `steps_per_epoch`: None for a dataset of unknown length; `passes`: the epochs of it that
    this attempt has begun. `extra`: the Trainer's arguments do not ask for this checkpoint. `stopped`: a
    callback has ended the training here, before its last step.
    """

    global_batch: int
    max_steps: int
    steps_per_epoch: Any = None
    passes: int = 0
    losses: list[float] = field(default_factory=list)
    logged_at: int = 0
    total_loss: float = 0.0
    extra: bool = False
    stopped: bool = False
    loggers: dict[str, str] = field(default_factory=dict)
    averages: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """How many ranks have saved it."""
        return len(self.losses)

    def write(self, folder: Path) -> None:
        """Put it into a checkpoint of which all other files are there. Raises OSError."""
        write_atomically(folder / NAME, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, folder: Path) -> Note:
        """Raises ConfigError for a folder that is no checkpoint of a prepared Trainer."""
        try:
            table = json.loads((folder / NAME).read_bytes())
            # Older versions have not written all of it.
            return cls(**{one.name: table[one.name] for one in fields(cls) if one.name in table})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                where=str(folder),
                got=f"its {NAME} cannot be used ({error.__class__.__name__}: {error})",
                accepted="a checkpoint of a Trainer that prepare_trainer has prepared",
            ) from None


def whole(folder: Path) -> bool:
    """Whether a Trainer has written all of a checkpoint: what it writes last can be read."""
    try:
        return isinstance(json.loads((folder / TRAINER_STATE_NAME).read_bytes()), dict)
    except (OSError, ValueError):
        return False
