"""What a process is told through its environment, with types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Callable, NamedTuple, TypeVar

from hpcsched.contract import seats, variables
from hpcsched.contract.seats import Seat
from hpcsched.contract.version import Version
from hpcsched.errors import BadInput, ConfigError

_Number = TypeVar("_Number", int, float)


def _bad(name: str, got: str, accepted: str) -> ConfigError:
    return ConfigError(where="environment", key=name, got=got, accepted=accepted)


class Kind(NamedTuple):
    """How a value stands in a variable: both ways, and what is accepted. `read` raises ValueError,
    BadInput."""

    write: Callable[[Any], str]
    read: Callable[[str], Any]
    accepted: str


def _number(text: str) -> float:
    number = float(text)
    if math.isnan(number):
        raise ValueError("not a number")
    return number


def _table(text: str) -> dict[str, Any]:
    table = json.loads(text)
    if not isinstance(table, dict):
        raise ValueError("no object")
    return table


TEXT = Kind(str, str, "text")
WHOLE = Kind(str, int, "a number")
NUMBER = Kind(lambda number: repr(float(number)), _number, "a number")
FLAG = Kind(lambda flag: str(int(flag)), lambda text: bool(int(text)), "a number")
TABLE = Kind(lambda table: json.dumps(dict(table)), _table, "a JSON object")
WORDS = Kind(",".join, lambda text: tuple(filter(None, text.split(","))), "words with commas between")
SEATS = Kind(
    lambda found: json.dumps(seats.to_table(found)),
    lambda text: seats.of_table(json.loads(text)),
    '[{"server": true, "share": 0.5, "cores": [0]}, ...]',
)
VERSION = Kind(str, Version.parse, 'a version of the contract, such as "1.0"')


class Reader:
    """Reads variables with types; the empty string counts as absent. Raises ConfigError naming the
    variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str | None:
        """Its text, if it is there."""
        return self._environ.get(name) or None

    def number(self, name: str, default: int) -> int:
        """A whole number."""
        found = self.maybe(name, WHOLE)
        return default if found is None else int(found)

    def table(self, name: str) -> dict[str, Any]:
        """A JSON object, empty if it is not there."""
        return self.maybe(name, TABLE) or {}

    def maybe(self, name: str, kind: Kind) -> Any:
        """Its value, if it is there."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return kind.read(text)
        except (ValueError, TypeError, RecursionError, BadInput):
            raise _bad(name, repr(text), kind.accepted) from None


def _told(name: str, kind: Kind) -> Any:
    return field(default=None, metadata={"name": name, "kind": kind})


@dataclass(frozen=True)
class Environment:
    """The contract's variables, or some of them; None: it is not told.

    Some are of an attempt, some are added on its host, some for each of its ranks: `to_environ` of parts,
    laid over each other, is what a process gets. Empty text counts as not told. Paths are text, times are in
    seconds.

    - `contract`: the version that whoever started this process speaks.
    - `run_id`, `run_dir`, `job_id`, `job_name`, `job_dir`, `attempt`: what this is, and where the job's
      folder is; `array_index`: its number in its array.
    - `devices`: indices of the attempt's devices in the allocation, by rank; `seats` instead for processes on
      CPU cores.
    - `checkpoint_dir`, `checkpoint_every_s`, `keep`: where checkpoints go, how often, how many stay.
    - `resume`: go on from the newest of them; `from_step`: the step that is expected then; `continues`: the
      folder of the job that this one begins with where it has none of its own.
    - `steps`, `epochs`: the whole work of the job; `args`: its arguments.
    - `trainer`, `strategy`: the class that is trained, and how; `standin`: the course of a stand-in.
    - `lane`: "foreground" or "background" where devices are shared; `pack`: the name of the pack.
    - `store_key`: what the keys of the store begin with where the ranks meet.
    - `notify_pid`: the agent on this host; `launched_at`: when it was launched, on the host's monotonic
      clock; `joining`: the attempt runs already, and this rank is added to it.
    - `rank`, `world_size`, `local_rank`: which rank this is.
    - `progress_fd`, `control_fd`, `arena_fd`: open descriptors, with "device:inode" in the `_id` of each.
    - `cuda_devices`, `driver_variables`: the GPUs as they were named at the start, and
      checksums of the variables that find their driver.
    """

    contract: Version | None = _told(variables.CONTRACT, VERSION)
    run_id: str | None = _told(variables.RUN_ID, TEXT)
    run_dir: str | None = _told(variables.RUN_DIR, TEXT)
    job_dir: str | None = _told(variables.JOB_DIR, TEXT)
    job_id: int | None = _told(variables.JOB_ID, WHOLE)
    job_name: str | None = _told(variables.JOB_NAME, TEXT)
    array_index: int | None = _told(variables.ARRAY_INDEX, WHOLE)
    attempt: int | None = _told(variables.ATTEMPT, WHOLE)
    devices: tuple[str, ...] | None = _told(variables.DEVICES, WORDS)
    seats: tuple[Seat, ...] | None = _told(variables.SEATS, SEATS)
    checkpoint_dir: str | None = _told(variables.CHECKPOINT_DIR, TEXT)
    checkpoint_every_s: float | None = _told(variables.CHECKPOINT_EVERY_S, NUMBER)
    keep: int | None = _told(variables.KEEP, WHOLE)
    resume: bool | None = _told(variables.RESUME, FLAG)
    from_step: int | None = _told(variables.FROM_STEP, WHOLE)
    continues: str | None = _told(variables.CONTINUES, TEXT)
    steps: int | None = _told(variables.STEPS, WHOLE)
    epochs: float | None = _told(variables.EPOCHS, NUMBER)
    args: Mapping[str, Any] | None = _told(variables.ARGS, TABLE)
    trainer: str | None = _told(variables.TRAINER, TEXT)
    strategy: Mapping[str, Any] | None = _told(variables.STRATEGY, TABLE)
    standin: Mapping[str, Any] | None = _told(variables.STANDIN, TABLE)
    lane: str | None = _told(variables.LANE, TEXT)
    pack: str | None = _told(variables.PACK, TEXT)
    store_key: str | None = _told(variables.STORE_KEY, TEXT)
    notify_pid: int | None = _told(variables.NOTIFY_PID, WHOLE)
    launched_at: float | None = _told(variables.LAUNCHED_AT, NUMBER)
    joining: bool | None = _told(variables.JOINING, FLAG)
    rank: int | None = _told(variables.RANK, WHOLE)
    world_size: int | None = _told(variables.WORLD_SIZE, WHOLE)
    local_rank: int | None = _told(variables.LOCAL_RANK, WHOLE)
    progress_fd: int | None = _told(variables.PROGRESS_FD, WHOLE)
    progress_id: str | None = _told(variables.PROGRESS_ID, TEXT)
    control_fd: int | None = _told(variables.CONTROL_FD, WHOLE)
    control_id: str | None = _told(variables.CONTROL_ID, TEXT)
    arena_fd: int | None = _told(variables.ARENA_FD, WHOLE)
    arena_id: str | None = _told(variables.ARENA_ID, TEXT)
    cuda_devices: str | None = _told(variables.CUDA_DEVICES, TEXT)
    driver_variables: str | None = _told(variables.DRIVER_VARIABLES, TEXT)

    def to_environ(self) -> dict[str, str]:
        """The variables of what is told."""
        return {
            about["name"]: about["kind"].write(value)
            for key, about in _FIELDS.items()
            if (value := getattr(self, key)) is not None
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Environment:
        """What is told there. Raises ConfigError naming the variable that makes no sense."""
        read = Reader(environ)
        found = {key: read.maybe(about["name"], about["kind"]) for key, about in _FIELDS.items()}
        if found["devices"] is None and variables.DEVICES in environ:
            found["devices"] = ()
        return cls(**found)


_FIELDS: dict[str, Mapping[str, Any]] = {field.name: field.metadata for field in fields(Environment)}


def needed(environ: Mapping[str, str], name: str) -> str:
    """The text of a variable that has to be there. Raises ConfigError."""
    text = Reader(environ).text(name)
    if text is None:
        raise _bad(name, "not set", "a value")
    return text
