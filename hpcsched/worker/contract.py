"""What the agent and a training program say to each other: environment, files, signals. No torch.

A program in any language can do the same: see `hpcsched/examples/plain.sh`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.core.model import Seat
from hpcsched.errors import ConfigError
from hpcsched.planning.lanes.pacing import share_of
from hpcsched.worker.hosted import surroundings
from hpcsched.worker.offered import offered
from hpcsched.worker.ranks import own_rank
from hpcsched.worker.variables import Variables

EXIT_SUSPENDED = 75
"""Saved and left (EX_TEMPFAIL)."""
EXIT_CANNOT_SAVE = 74
"""Asked to save, and could not (EX_IOERR)."""

PACE = "HPCSCHED_PACE"
"""The variable with the pace of a job that the agent has told to another process of the same attempt."""

SEATS = "HPCSCHED_SEATS"
"""The variable with the seats of all ranks of a job on CPU cores, as JSON."""

_PROGRESS_INTERVAL_S = 0.05


def say(message: str) -> None:
    """Write one line to stderr; data belongs on stdout and never here."""
    sys.stderr.write(f"hpcsched: {message}\n")
    sys.stderr.flush()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that readers, and a crash, see the old or the new content, never a part.

    Raises OSError when it cannot be written; the old content is then still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def private(path: str, flags: int) -> int:
    """Opens for `open(..., opener=private)`: what it makes is for this user only."""
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnv:
    """What the agent told this rank through its environment.

    `steps` is the whole job's work (None: not given). `keep` is how many checkpoints to keep.
    `progress_fd` and `control_fd` are open descriptors, given to rank 0 only; `arena_fd` is memory that all
    ranks of the job on this host share. `joining`: the attempt runs already, and this rank is added to it.
    `epochs` is the same as `steps` in passes over the data, `continues` the checkpoints of the job that this
    one begins with when it has none of its own. `from_step` is where the agent expects the attempt to go on
    (None: not given). `seats` are those of all ranks, where the ranks share CPU cores. `launched`: this rank
    was started by a launcher such as torchrun, not by hpcsched.
    """

    job_id: int
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    devices: tuple[str, ...]
    job_dir: Path
    checkpoint_dir: Path
    resume: bool
    notify_pid: int | None
    master_addr: str
    master_port: int
    progress_fd: int | None = None
    control_fd: int | None = None
    arena_fd: int | None = None
    joining: bool = False
    from_step: int | None = None
    steps: int | None = None
    epochs: float | None = None
    continues: Path | None = None
    checkpoint_every_s: float = 600.0
    keep: int = 2
    trainer: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"kind": "ddp"})
    seats: tuple[Seat, ...] = ()
    launched: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> JobEnv | None:
        """Read it; None when this process was not started by hpcsched.

        Raises ConfigError naming the variable that is missing or makes no sense.
        """
        read = Variables(surroundings() if environ is None else environ)
        if read.text("HPCSCHED_JOB_ID") is None:
            return None
        job_id = read.number("HPCSCHED_JOB_ID", int)
        which = own_rank(read)
        job_dir = read.text("HPCSCHED_JOB_DIR")
        if job_dir is None:
            job_dir = f"{read.needed('HPCSCHED_RUN_DIR')}/jobs/{job_id}"
        return cls(
            job_id=job_id,
            attempt=read.number("HPCSCHED_ATTEMPT", int, 1),
            rank=which.rank,
            world_size=which.world_size,
            local_rank=which.local_rank,
            launched=which.launched,
            devices=tuple(filter(None, (read.text("HPCSCHED_DEVICES") or "").split(","))),
            job_dir=Path(job_dir).resolve(),
            checkpoint_dir=Path(read.text("HPCSCHED_CHECKPOINT_DIR") or f"{job_dir}/checkpoint").resolve(),
            resume=bool(read.number("HPCSCHED_RESUME", int, 0)),
            notify_pid=read.maybe("HPCSCHED_NOTIFY_PID"),
            master_addr=read.text("MASTER_ADDR") or "127.0.0.1",
            master_port=read.number("MASTER_PORT", int, 29500),
            progress_fd=offered(read, "PROGRESS"),
            control_fd=offered(read, "CONTROL"),
            arena_fd=offered(read, "ARENA"),
            joining=bool(read.number("HPCSCHED_JOINING", int, 0)),
            from_step=read.maybe("HPCSCHED_FROM_STEP"),
            steps=read.maybe("HPCSCHED_STEPS"),
            epochs=read.number("HPCSCHED_EPOCHS", float, 0.0) or None,
            continues=Path(told) if (told := read.text("HPCSCHED_CONTINUES")) else None,
            checkpoint_every_s=read.number("HPCSCHED_CHECKPOINT_EVERY_S", float, 600.0),
            keep=max(1, read.number("HPCSCHED_KEEP", int, 2)),
            trainer=read.text("HPCSCHED_TRAINER"),
            args=read.table("HPCSCHED_ARGS", {}),
            strategy=read.table("HPCSCHED_STRATEGY", {"kind": "ddp"}),
            seats=_seats_of(read.text(SEATS)),
        )

    def mark_ready(self, **facts: Any) -> None:
        """Tell the agent that this attempt can be suspended from now on, and what else it can."""
        self.leave_word(f"ready.{self.attempt}", json.dumps(facts))

    def refuse(self, attempt: int, why: str) -> None:
        """Tell the agent that this attempt will not become `attempt` by a resize in place."""
        self.leave_word(f"refused.{attempt}", why)

    def mark_held(self, *, step: int, samples: int) -> None:
        """Tell the agent that the state of `step` is in shared memory, not on disk yet. Raises OSError."""
        self.leave_word(f"held.{self.attempt}", json.dumps({"step": step, "samples": samples}))

    def leave(self) -> int:
        """The exit code to leave with now that all is saved; rank 0 also tells the agent, if need be.

        A launcher or a shell script between us and the agent ends with a code of its own, so the agent is
        told by a file. To a launcher 75 would be a failure, after which it starts the ranks again.
        """
        if self.rank == 0 and os.getppid() != self.notify_pid:
            try:
                self.leave_word(f"left.{self.attempt}", "")
            except OSError:  # no room: at least it must not seem to be done
                return EXIT_SUSPENDED
        return 0 if self.launched else EXIT_SUSPENDED

    @property
    def stop_file(self) -> Path:
        """What appears when this attempt is to save and leave, besides the signal."""
        return self.job_dir / f"stop.{self.attempt}"

    def leave_word(self, name: str, text: str) -> None:
        """Put a file into the job's folder for the agent. Raises OSError."""
        # Renamed, so that nobody reads half of it; not synced, as it means nothing after a crash of the host.
        self.job_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.job_dir / f".{name}.tmp"
        temporary.write_text(text)
        temporary.replace(self.job_dir / name)

    def write_state(
        self,
        *,
        step: int,
        samples: int,
        checkpoint: Path,
        metrics: Mapping[str, float] | None = None,
        loss: float | None = None,
    ) -> None:
        """Replace STATE.json: what the newest good checkpoint holds. Raises OSError."""
        state: dict[str, Any] = {
            "schema": 1,
            "step": step,
            "samples": samples,
            "checkpoint": str(checkpoint.resolve()),
            "attempt": self.attempt,
        }
        if metrics is not None:
            # JSON has no NaN, and one must not make the record unreadable: null is what is not finite.
            state["metrics"] = {k: float(v) if math.isfinite(v) else None for k, v in metrics.items()}
        if loss is not None:
            state["loss"] = loss
        self.job_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self.job_dir / "STATE.json", json.dumps(state).encode() + b"\n")

    def wake_agent(self) -> None:
        """Send SIGUSR1 to the agent, which then looks at STATE.json; losing it does no harm."""
        # Its pid may belong to someone else by now, whom SIGUSR1 would end, unless it is our parent.
        if self.notify_pid is not None and os.getppid() == self.notify_pid:
            with contextlib.suppress(OSError):
                os.kill(self.notify_pid, signal.SIGUSR1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeOrder:
    """Become attempt `attempt` with `world_size` ranks.

    The ranks `keep` stay and are numbered from 0 in that order, rank 0 first; the others leave. The rest of
    `world_size` join: they are started beside us, all on this host if `one_host`. `seats` are those of all
    ranks from then on, where the ranks share CPU cores. `where`: "address:port" to which those who join come.
    """

    attempt: int
    world_size: int
    keep: tuple[int, ...]
    one_host: bool
    seats: tuple[Seat, ...] = ()
    where: str | None = None

    @property
    def joining(self) -> int:
        """How many ranks join."""
        return self.world_size - len(self.keep)


def seats_of(table: list[dict[str, Any]]) -> tuple[Seat, ...]:
    """Seats in their JSON form; raises KeyError, TypeError or ValueError for what is none."""
    return tuple(
        Seat(
            server=bool(seat["server"]),
            share=float(seat["share"]),
            host=str(seat.get("host", "")),
            cores=tuple(int(core) for core in seat.get("cores", ())),
        )
        for seat in table
    )


def _seats_of(text: str | None) -> tuple[Seat, ...]:
    """The seats in a variable; raises ConfigError."""
    try:
        return seats_of(json.loads(text)) if text else ()
    except (ValueError, TypeError, KeyError, AttributeError):
        accepted = '[{"server": true, "share": 0.5, "cores": [0]}, ...]'
        raise ConfigError(where="environment", key=SEATS, got=repr(text), accepted=accepted) from None


class Orders:
    """What the agent asks of rank 0 beyond signals: JSON objects, one a line. Reading never blocks.

    `quick`: the devices are wanted at once, so the state may be left in shared memory when suspended.
    `resize`: the newest resize that was asked for and not forgotten. `pace`: for which share of the time to
    work; at first what HPCSCHED_PACE says. What makes no sense is passed over.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.quick = False
        self.resize: ResizeOrder | None = None
        self.pace = 1.0
        if told := surroundings().get(PACE):
            try:
                self.pace = share_of(json.loads(told), PACE)
            except (ValueError, ConfigError):
                say(f"{PACE}: {told[:200]!r} makes no sense")
        if descriptor is not None:
            try:
                os.set_blocking(descriptor, False)
                os.set_inheritable(descriptor, False)
            except OSError:
                self._descriptor = None

    @property
    def descriptor(self) -> int | None:
        """What is readable when there is something to look at; None once the agent has gone."""
        return self._descriptor

    def look(self) -> None:
        """Take in what has come."""
        if self._descriptor is None:
            return
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._descriptor = None  # the agent is gone
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, ConfigError):
                say(f"an order of the agent's makes no sense: {line[:200]!r}")

    def _take(self, order: dict[str, Any]) -> None:
        for name, facts in order.items():
            if name == "suspend":
                self.quick = bool(facts.get("quick"))
            elif name == "resize":
                keep = tuple(int(rank) for rank in facts["keep"])
                asked = ResizeOrder(
                    attempt=int(facts["attempt"]),
                    world_size=int(facts["world_size"]),
                    keep=keep,
                    one_host=bool(facts["one_host"]),
                    seats=seats_of(facts.get("seats", [])),
                    where=facts.get("where"),
                )
                if keep[:1] != (0,) or len(set(keep)) != len(keep) or asked.joining < 0:
                    raise ValueError("rank 0 has to stay")
                self.resize = asked
            elif name == "pace":
                self.pace = share_of(facts, "order")
            elif name == "forget" and self.resize and self.resize.attempt == facts["attempt"]:
                self.resize = None


class Progress:
    """Progress lines to the agent; a slow, full or closed pipe never holds training up.

    At most about 20 lines a second, unless `force` is set.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._next = 0.0
        if descriptor is not None:
            try:
                os.set_blocking(descriptor, False)
            except OSError:
                self._descriptor = None

    def report(
        self,
        step: int,
        loss: Callable[[], float | None],
        *,
        force: bool = False,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Write one line; `loss` is only asked when a line is due, for it may wait for a GPU.

        So is `facts`, what else the agent is to know.
        """
        now = time.monotonic()
        if self._descriptor is None or (now < self._next and not force):
            return
        self._next = now + _PROGRESS_INTERVAL_S
        line: dict[str, Any] = {"step": step, "t": time.time(), **facts()}
        if (value := loss()) is not None:
            line["loss"] = value
        data = json.dumps(line).encode() + b"\n"
        if len(data) > select.PIPE_BUF:  # what is about hundreds of ranks
            data = json.dumps({key: line[key] for key in ("step", "t")}).encode() + b"\n"
        try:
            # A pipe takes the whole line or nothing of it.
            os.write(self._descriptor, data)
        except BlockingIOError:
            pass
        except OSError:
            self._descriptor = None
