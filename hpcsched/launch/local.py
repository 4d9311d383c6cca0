"""Workers on this host: one process a rank, each the leader of its own session.

In its own session a SIGTSTP that comes before the program's handler is discarded instead of stopping
it, and its process group holds its children too. posix_spawn is used, not subprocess: it is less than half
the price, and the only way to give a child an empty signal mask and default actions whatever the
agent blocks or ignores, without running Python between fork and exec.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat as modes
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hpcsched.core.model import Device
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LOST, SUSPENDED, LaunchPlan, Place, attempt_code
from hpcsched.launch.proc import stat

KILLED_WITHIN_S = 5.0  # how long a launch that failed half-way waits for the ranks it killed
PORT_REST_S = 30.0  # a port is not handed out again for so long: its owner may not have bound it yet
PORTS_RESTING = 4096  # at most; the kernel's ephemeral range holds 28,000

LSF_WARNS_ALL = frozenset({signal.SIGUSR2})
"""LSF sends its warning to all processes of the job, and SIGUSR2 ends those that do not expect it."""

_TRANSIENT = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY, errno.EINTR, errno.ESTALE}
)
_DEFAULTED = frozenset(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class LocalLauncher:
    """Starts workers as children of this process.

    Args:
        cpus: the cores to pin a device's rank to, or None (`Devices.cpus`).
        device_env: the variables that show devices to a program (`Devices.environment`).
        shielded: signals that do not reach workers, as something sends them to all of a batch job's
            processes that only we understand.
        environ: what workers inherit below the plan's variables; default: this process's, as it is now.

    Where a plan's directory is not the agent's own, the agent stands in it for the fraction of a
    millisecond that the spawn takes: no other thread may use relative paths meanwhile.
    """

    def __init__(
        self,
        *,
        cpus: Callable[[Device], frozenset[int] | None] = lambda device: None,
        device_env: Callable[[Sequence[Device]], Mapping[str, str]] = lambda devices: {},
        shielded: frozenset[signal.Signals] = frozenset(),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._shielded = shielded
        self._cpus, self._device_env = cpus, device_env
        self._environ = dict(os.environ if environ is None else environ)
        self._ports = _Ports()
        _keep_descriptors_to_ourselves()

    def launch(self, plan: LaunchPlan, place: Place | None = None) -> LocalWorkers:
        """Start all ranks of this host, or none; see `Launcher.launch`."""
        workers = LocalWorkers()
        try:
            with _errors_as_launch_errors(plan):
                self._start(plan, place or Place(), workers)
        except BaseException:
            workers.abandon()
            raise
        return workers

    def _start(self, plan: LaunchPlan, place: Place, workers: LocalWorkers) -> None:
        workers.port = self._ports.take() if place.port is None else place.port
        env = {
            **self._environ,
            **self._device_env(plan.devices),
            **plan.env,
            "HPCSCHED_NOTIFY_PID": str(os.getpid()),
            "HPCSCHED_LAUNCHED_AT": repr(time.monotonic()),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(workers.port),
        }
        program = _program(plan, env.get("PATH", os.defpath))
        ranks = [(device,) for device in plan.devices] if plan.per_rank else [plan.devices]
        world_size = place.world_size or len(ranks)
        output = _open_output(plan.output)
        try:
            with _standing_in(plan.cwd), ignoring(self._shielded):
                for local, devices in enumerate(ranks):
                    rank = place.first_rank + local
                    env.update(_rank_variables(rank, local, world_size))
                    pipe = workers.pipe() if rank == 0 else None
                    workers.add(_spawn(program, plan.argv, env, output, pipe, self._shielded))
                    self._pin(workers.processes[local][0], devices)
        finally:
            os.close(output)
        workers.close_pipe()

    def _pin(self, pid: int, devices: tuple[Device, ...]) -> None:
        """Set the affinity before the program has had time to start threads, which inherit it."""
        sets = [self._cpus(device) for device in devices]
        cores = frozenset().union(*(cores for cores in sets if cores is not None))
        if cores and None not in sets:
            with contextlib.suppress(ProcessLookupError):  # already over
                os.sched_setaffinity(pid, cores)


class LocalWorkers:
    """Child processes by rank. Their leaders stay zombies until all have ended, so that every pid and
    process group remains theirs as long as it may be signalled."""

    def __init__(self) -> None:
        self.processes: tuple[tuple[int, int], ...] = ()
        self.pidfds: tuple[int, ...] = ()
        self.progress_fd: int | None = None
        self.ready = False
        self.record: bytes | None = None
        self.port = 0
        """Where the ranks meet."""
        self._write_end: int | None = None
        self._running: dict[int, None] = {}  # by rank
        self._ended: list[int] = []  # exit codes in order of time
        self._ours: set[int] = set()  # leaders not reaped: nobody else can have their pids
        self._code: int | None = None

    # -- being started -------------------------------------------------------------------------------

    def pipe(self) -> int:
        """Make the progress pipe; returns its write end, to be closed by `close_pipe`."""
        self.progress_fd, self._write_end = os.pipe()
        os.set_blocking(self.progress_fd, False)
        return self._write_end

    def close_pipe(self) -> None:
        """Close our copy of the write end, so that the pipe ends with the programs that write to it."""
        if self._write_end is not None:
            os.close(self._write_end)
            self._write_end = None

    def add(self, pid: int) -> None:
        """Take charge of a child just spawned, the next rank."""
        self._running[pid] = None
        self._ours.add(pid)
        self.pidfds += (os.pidfd_open(pid),)
        seen = stat(pid)
        self.processes += ((pid, seen.start_ticks if seen else 0),)

    def abandon(self) -> None:
        """End a launch that failed half-way: kill what was started, wait for it, close everything."""
        self.signal(signal.SIGKILL)
        deadline = time.monotonic() + KILLED_WITHIN_S
        while self.reap() is None and time.monotonic() < deadline:
            time.sleep(0.001)  # not by pidfd: having none left may be why we are here
        self.close()

    # -- running -------------------------------------------------------------------------------------

    def signal(self, sig: signal.Signals) -> None:
        """Send `sig` to each rank's process group whose leader is still our unreaped child."""
        self._look()
        for pid in self._ours:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, sig)

    def failed_early(self) -> bool:
        """Whether a rank has ended with other than 0 or 75 while others live."""
        self._look()
        return bool(self._running) and any(code not in (0, SUSPENDED) for code in self._ended)

    def reap(self) -> int | None:
        """None while a rank lives; else the attempt's exit code, and nothing is left of its groups."""
        self._look()
        if self._running:
            return None
        if self._code is None:
            self.signal(signal.SIGKILL)  # what the leaders left behind
            for pid in self._ours:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            self._ours.clear()
            self._code = attempt_code(self._ended)
        return self._code

    def close(self) -> None:
        """Close the descriptors; ends no process."""
        self.close_pipe()
        for fd in self.pidfds:
            os.close(fd)
        if self.progress_fd is not None:
            os.close(self.progress_fd)
        self.pidfds, self.progress_fd = (), None

    def _look(self) -> None:
        """Note the ranks that have ended, without reaping them."""
        for pid in list(self._running):
            try:
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._ours.discard(pid)
                code = LOST
            else:
                if found is None:
                    continue
                code = found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status
            del self._running[pid]
            self._ended.append(code)


class _Ports:
    """Free loopback ports, none twice within PORT_REST_S."""

    def __init__(self) -> None:
        self._given: dict[int, float] = {}  # oldest first

    def take(self) -> int:
        """A TCP port that nobody listens on now."""
        now = time.monotonic()
        for port, given in list(self._given.items()):
            if now - given < PORT_REST_S and len(self._given) < PORTS_RESTING:
                break
            del self._given[port]
        for _ in range(100):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            if port not in self._given:
                self._given[port] = now
                return int(port)
        raise OSError(errno.EAGAIN, "no free port on 127.0.0.1")


def _spawn(
    program: str,
    argv: tuple[str, ...],
    env: dict[str, str],
    output: int,
    progress: int | None,
    shielded: frozenset[signal.Signals],
) -> int:
    """Start one process in a session of its own; returns its pid."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    if progress is None:
        env.pop("HPCSCHED_PROGRESS_FD", None)
    else:
        # dup2 onto itself would leave close-on-exec set with an older libc.
        inherited = 3 if progress != 3 else 4
        actions.append((os.POSIX_SPAWN_DUP2, progress, inherited))
        env["HPCSCHED_PROGRESS_FD"] = str(inherited)
    return os.posix_spawn(
        program, argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_DEFAULTED - shielded
    )


def _keep_descriptors_to_ourselves() -> None:
    """What was left open to this process, such as a wrapper's lock file, must not outlive it in workers."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                os.set_inheritable(int(name), False)


def _rank_variables(rank: int, local: int, size: int) -> dict[str, str]:
    values = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local)}
    return values | {f"HPCSCHED_{name}": value for name, value in values.items()}


def _program(plan: LaunchPlan, path: str) -> str:
    """The file to run: by the job's own PATH, relative names from its directory. Raises LaunchError."""
    name = plan.argv[0] if plan.argv else ""
    folders = [""] if "/" in name else path.split(os.pathsep)
    found = ""
    for folder in folders if name else []:
        candidate = os.path.join(plan.cwd, folder, name)  # noqa: PTH118 - on the path of every launch
        with contextlib.suppress(OSError):
            if modes.S_ISREG(os.stat(candidate).st_mode):  # noqa: PTH116
                if os.access(candidate, os.X_OK):
                    return candidate
                found = found or candidate
    if found:
        raise LaunchError(f"not executable: {found}", transient=False)
    where = "" if "/" in name else f" in PATH={path}"
    raise LaunchError(f"command not found: {name!r}{where}", transient=False)


def _open_output(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)


_standing = threading.Lock()


@contextlib.contextmanager
def _standing_in(directory: Path) -> Iterator[None]:
    """Be in `directory`, and back after; posix_spawn has no working directory of its own to give."""
    with _standing:
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.chdir(directory)
            try:
                yield
            finally:
                os.fchdir(here)
        finally:
            os.close(here)


@contextlib.contextmanager
def ignoring(signals: frozenset[signal.Signals]) -> Iterator[None]:
    """Hear none of these signals meanwhile.

    What is spawned here ignores them too, and so does what it starts: shells do not undo that, as they do a
    signal mask.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _errors_as_launch_errors(plan: LaunchPlan) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or (plan.argv[0] if plan.argv else "")
        why = error.strerror or str(error)
        if error.errno == errno.ENOEXEC:
            why += " (a script needs a first line like #!/bin/sh)"
        raise LaunchError(f"{os.fsdecode(where)}: {why}", transient=error.errno in _TRANSIENT) from error
    except ValueError as error:  # a NUL byte, an empty argument list
        raise LaunchError(f"job {plan.job_id}: {error}", transient=False) from error
