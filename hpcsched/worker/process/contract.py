"""What the agent and a training program say to each other, from the program's side. No torch.

The words are the contract's (`hpcsched.contract`); a program in any language can say the same: see
`hpcsched/examples/plain.sh`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

import hpcsched
from hpcsched.compat import dataclass
from hpcsched.contract import exits, files, orders, variables
from hpcsched.contract.environment import Environment, Reader, needed
from hpcsched.contract.progress import Batching, Line, Scaling, Usage
from hpcsched.contract.ranks import own_rank
from hpcsched.contract.seats import Seat
from hpcsched.contract.state import State
from hpcsched.contract.version import Version, fits
from hpcsched.contract.words import Held, Ready
from hpcsched.errors import BadInput, WrongContract
from hpcsched.patience import patiently
from hpcsched.watchers import let_read
from hpcsched.worker.process.descriptors import offered
from hpcsched.worker.process.guest import surroundings
from hpcsched.worker.process.versions import versions

_PROGRESS_INTERVAL_S = 0.05


def say(message: str) -> None:
    """Write one line to stderr, where it can be written; data belongs on stdout and never here."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hpcsched: {message}\n")
        sys.stderr.flush()


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that readers, and a crash, see the old or the new content, never a part.

    A file system that answers nothing for a moment is waited for. Raises OSError when it cannot be written;
    the old content is then still there.
    """
    temporary = path.with_name(files.temporary(path.name, os.getpid()))

    def write() -> None:
        with open(temporary, "wb", opener=private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)

    try:
        patiently(write)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def private(path: str, flags: int) -> int:
    """Opens for `open(..., opener=private)`: what it makes is for this user only, and for those who may watch
    the run."""
    descriptor = os.open(path, flags, 0o600)
    let_read(descriptor, Path(path).parent)
    return descriptor


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_version(environ: Mapping[str, str]) -> None:
    """Raise WrongContract if the agent that has started this says a version that does not fit ours."""
    said = environ.get(variables.CONTRACT)
    if not said:
        return  # an agent of before there were versions, or somebody else who plays its part
    try:
        why = fits(Version.parse(said))
    except BadInput as error:
        why = str(error)
    if why:
        what = f"hpcsched-worker {hpcsched.__version__} does not fit the scheduler that has started it: {why}"
        raise WrongContract(f"{what}: {sys.executable} -m pip install 'hpcsched-worker==<as the scheduler>'")


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

    @property
    def resumes_midway(self) -> bool:
        """Whether this may be the attempt's second process, which goes on from the newest checkpoint: for the
        first one agents say which one they expect."""
        return self.resume and self.from_step is None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> JobEnv | None:
        """Read it; None when this process was not started by hpcsched.

        Raises ConfigError naming the variable that is missing or makes no sense, WrongContract for an agent
        of another version.
        """
        environ = surroundings() if environ is None else environ
        if not environ.get(variables.JOB_ID):
            return None
        _check_version(environ)
        told = Environment.from_environ(environ)
        assert told.job_id is not None
        which = own_rank(environ)
        job_dir = told.job_dir
        if job_dir is None:
            job_dir = f"{needed(environ, variables.RUN_DIR)}/{files.JOBS}/{told.job_id}"
        meeting = Reader(environ)
        return cls(
            job_id=told.job_id,
            attempt=1 if told.attempt is None else told.attempt,
            rank=which.rank,
            world_size=which.world_size,
            local_rank=which.local_rank,
            launched=which.launched,
            devices=told.devices or (),
            job_dir=Path(job_dir).resolve(),
            checkpoint_dir=Path(told.checkpoint_dir or f"{job_dir}/{files.CHECKPOINT}").resolve(),
            resume=bool(told.resume),
            notify_pid=told.notify_pid,
            master_addr=meeting.text("MASTER_ADDR") or "127.0.0.1",
            master_port=meeting.number("MASTER_PORT", 29500),
            progress_fd=offered(told.progress_fd, told.progress_id),
            control_fd=offered(told.control_fd, told.control_id),
            arena_fd=offered(told.arena_fd, told.arena_id),
            joining=bool(told.joining),
            from_step=told.from_step,
            steps=told.steps,
            epochs=told.epochs or None,
            continues=Path(told.continues) if told.continues else None,
            checkpoint_every_s=600.0 if told.checkpoint_every_s is None else told.checkpoint_every_s,
            keep=max(1, 2 if told.keep is None else told.keep),
            trainer=told.trainer,
            args=told.args or {},
            strategy={"kind": "ddp"} if told.strategy is None else told.strategy,
            seats=told.seats or (),
        )

    def mark_ready(self, word: Ready) -> None:
        """Tell the agent that this attempt can be suspended from now on, and what else it can."""
        self.leave_word(files.ready(self.attempt), word.encode())
        if word.step is None:  # a resize in place changes no version, and is not to wait for this
            with contextlib.suppress(OSError):
                self.leave_word(files.VERSIONS, versions().encode())

    def refuse(self, attempt: int, why: str) -> None:
        """Tell the agent that this attempt will not become `attempt` by a resize in place."""
        self.leave_word(files.refused(attempt), why.encode(errors="replace"))

    def mark_held(self, *, step: int, samples: int) -> None:
        """Tell the agent that the state of `step` is in shared memory, not on disk yet. Raises OSError."""
        self.leave_word(files.held(self.attempt), Held(step, samples).encode())

    def leave(self, *, whatever_follows: bool = False) -> int:
        """The exit code to leave with now that all is saved; rank 0 also tells the agent, if need be.

        A launcher or a shell script between us and the agent ends with a code of its own, so the agent is
        told by a file; also where code of others is still to run, `whatever_follows`. To a launcher 75 would
        be a failure, after which it starts the ranks again.
        """
        if self.rank == 0 and (whatever_follows or os.getppid() != self.notify_pid):
            try:
                self.leave_word(files.left(self.attempt), b"")
            except OSError:  # no room: at least it must not seem to be done
                return exits.SUSPENDED
        return 0 if self.launched else exits.SUSPENDED

    @property
    def stop_file(self) -> Path:
        """What appears when this attempt is to save and leave, besides the signal."""
        return self.job_dir / files.stop(self.attempt)

    def leave_word(self, name: str, data: bytes) -> None:
        """Put a file into the job's folder for the agent. Raises OSError."""
        # Renamed, so that nobody reads half of it; not synced, as it means nothing after a crash of the host.
        self.job_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.job_dir / files.temporary(name)
        temporary.write_bytes(data)
        temporary.replace(self.job_dir / name)

    def write_state(
        self,
        *,
        step: int,
        samples: int | None,
        checkpoint: Path | None,
        metrics: Mapping[str, float] | None = None,
        loss: float | None = None,
    ) -> None:
        """Replace STATE.json: what the newest good checkpoint holds. Raises OSError."""
        state = State(
            step=step,
            samples=samples,
            checkpoint=str(checkpoint.resolve()) if checkpoint is not None else None,
            attempt=self.attempt,
            metrics={name: float(value) for name, value in (metrics or {}).items()},
            loss=loss,
        )
        patiently(lambda: self.job_dir.mkdir(mode=0o700, parents=True, exist_ok=True))
        write_atomically(self.job_dir / files.STATE, state.encode())

    def wake_agent(self) -> None:
        """Send SIGUSR1 to the agent, which then looks at STATE.json; losing it does no harm."""
        # Its pid may belong to someone else by now, whom SIGUSR1 would end, unless it is our parent.
        if self.notify_pid is not None and os.getppid() == self.notify_pid:
            with contextlib.suppress(OSError):
                os.kill(self.notify_pid, signal.SIGUSR1)


class OrderReader:
    """What the agent asks of rank 0 beyond signals: JSON objects, one a line. Reading never blocks.

    `quick`: the devices are wanted at once, so the state may be left in shared memory when suspended.
    `resize`: the newest resize that was asked for and not forgotten. `pace`: for which share of the time to
    work; at first what the environment says. What makes no sense is passed over.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.quick = False
        self.resize: orders.Resize | None = None
        self.pace = 1.0
        if told := surroundings().get(variables.PACE):
            try:
                self.pace = orders.Pace.decode(told).share
            except BadInput:
                say(f"{variables.PACE}: {told[:200]!r} makes no sense")
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
        while self._descriptor is not None:
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._read(data)
            if not data:  # the agent is gone, and nobody would keep what is left in shared memory
                self._descriptor, self.quick = None, False

    def _read(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                for order in orders.decode(line):
                    self._take(order)
            except BadInput as error:
                say(f"an order of the agent's makes no sense: {line[:200]!r}: {error}")

    def _take(self, order: orders.Order) -> None:
        if isinstance(order, orders.Suspend):
            self.quick = order.quick
        elif isinstance(order, orders.Resize):
            self.resize = order
        elif isinstance(order, orders.Pace):
            self.pace = order.share
        elif self.resize and self.resize.attempt == order.attempt:
            self.resize = None


class Facts(NamedTuple):
    """What the agent is told beside a step."""

    batching: Batching | None = None
    scaling: Scaling | None = None
    usage: Usage | None = None


NOTHING_ELSE = Facts()


class ProgressWriter:
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

    def resumed(self, step: int) -> None:
        """Write that the training goes on from `step` once more, in the middle of an attempt."""
        if self._descriptor is not None:
            self._write(Line(step, time.time(), resumed=True).encode())

    def report(
        self,
        step: int,
        loss: Callable[[], float | None],
        *,
        force: bool = False,
        facts: Callable[[], Facts] = lambda: NOTHING_ELSE,
        total: int | None = None,
    ) -> None:
        """Write one line; `loss` is only asked when a line is due, for it may wait for a GPU.

        So is `facts`, what else the agent is to know.
        """
        now = time.monotonic()
        if self._descriptor is None or (now < self._next and not force):
            return
        self._next = now + _PROGRESS_INTERVAL_S
        more = facts()
        line = Line(step, time.time(), loss(), more.batching, more.scaling, more.usage, total)
        data = line.encode()
        if len(data) > select.PIPE_BUF:  # what is about hundreds of ranks
            data = Line(line.step, line.t, total=total).encode()
        self._write(data)

    def _write(self, data: bytes) -> None:
        assert self._descriptor is not None
        try:
            # A pipe takes the whole line or nothing of it.
            os.write(self._descriptor, data)
        except BlockingIOError:
            pass
        except OSError:
            self._descriptor = None
