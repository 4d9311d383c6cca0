"""The control daemon of NVIDIA's multi-process service (MPS): started, asked, and ended.

Each run has daemons of its own on each host, as the run's user, in a folder that only this user can enter:
one for all GPUs, and one for each MIG instance, which a daemon cannot share with anything else. A daemon
begins servers, a server serves clients: processes that use the GPU. Source: NVIDIA's guide "Multi-Process
Service". Nothing here touches a GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from hpcsched.compat import dataclass
from hpcsched.contract.visibility import CUDA

CONTROL = "nvidia-cuda-mps-control"
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"

STARTS_WITHIN_S = 20.0
"""How long a daemon may take until it answers (chosen)."""
ANSWERS_WITHIN_S = 5.0
"""How long a daemon that is there may take to answer (chosen)."""
QUITS_WITHIN_S = 5.0
"""How long a daemon may take to end when it is told to (chosen)."""

_TEMPORARY = Path("/tmp")  # nosec B108 # whose the folder is, is looked at
"""Where the folders are: on the host, as a cluster's file system has no pipes; not TMPDIR, which a job may
set."""
_ALL_GPUS = "gpus"
_INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "USER")
"""What a daemon gets of the environment of whoever starts it: nothing of one job, as it serves several, and
no CUDA_VISIBLE_DEVICES, by which the GPUs would have other numbers for the clients."""
_LOOK_S = 0.02


class MpsError(Exception):
    """A daemon is not to be had; the text says why."""


def home(run_id: str) -> Path:
    """The folder of a run's daemons on this host."""
    return _TEMPORARY / f"hpcsched-mps-{os.getuid()}-{run_id}"


def daemon_for(run_id: str, device: str) -> Daemon:
    """The daemon for a client that is on `device`, a name out of CUDA_VISIBLE_DEVICES."""
    if not device.startswith(CUDA.part):
        return Daemon(home(run_id) / _ALL_GPUS)
    name = sha256(device.encode()).hexdigest()[:12]  # a socket's path is short, and names may have slashes
    return Daemon(home(run_id) / name, visible=device)


def daemons(run_id: str) -> list[Daemon]:
    """The daemons that a run has begun on this host."""
    with contextlib.suppress(OSError):
        if _private(home(run_id)):
            return [Daemon(folder) for folder in sorted(home(run_id).iterdir()) if folder.is_dir()]
    return []


@dataclass(frozen=True)
class Daemon:
    """One daemon. `visible`: the only device that it serves; None: all that this user may use here."""

    folder: Path
    visible: str | None = None

    def variables(self) -> dict[str, str]:
        """The variables that make a process its client, or let the control program speak to it."""
        return {PIPE_DIRECTORY: str(self.folder / "pipe"), LOG_DIRECTORY: str(self.folder / "log")}

    def start(self, environ: Mapping[str, str]) -> None:
        """Have it run, unless it does. Several processes may want this at once. Raises MpsError.

        A client of a daemon that is not there would go on without MPS, and say nothing: so it has to answer.
        """
        program = shutil.which(CONTROL, path=environ.get("PATH"))
        if program is None:
            raise MpsError(f"no {CONTROL} here")
        try:
            self._make_folders()
            with _alone(self.folder / "lock"):
                if self.ask("get_server_list", environ) is None:
                    self._start(program, environ)
        except (OSError, subprocess.SubprocessError) as error:
            raise MpsError(f"{CONTROL}: {error}") from error

    def _start(self, program: str, environ: Mapping[str, str]) -> None:
        said = self.folder / "log" / "start"
        with said.open("wb") as output:  # not a pipe: a daemon that keeps its end open would hold us up
            subprocess.run(
                [program, "-d"],
                env=self._environment(environ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=STARTS_WITHIN_S,
                start_new_session=True,  # it is not to end with the job that needs it first
                preexec_fn=_on_all_cores,
                check=False,
            )
        until = time.monotonic() + ANSWERS_WITHIN_S
        while self.ask("get_server_list", environ) is None:
            if time.monotonic() > until:
                words = said.read_text(errors="replace").strip()
                raise MpsError(words or f"{CONTROL} does not answer")
            time.sleep(_LOOK_S)

    def ask(
        self, command: str, environ: Mapping[str, str], *, within_s: float = ANSWERS_WITHIN_S
    ) -> str | None:
        """What it answers; None where no daemon answers in time."""
        program = shutil.which(CONTROL, path=environ.get("PATH"))
        if program is None or not (self.folder / "pipe").is_dir():
            return None
        try:
            done = subprocess.run(
                [program],
                input=f"{command}\n".encode(),
                env=self._environment(environ),
                cwd="/",
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=within_s,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None

    def clients(self, environ: Mapping[str, str], *, within_s: float) -> dict[int, int]:
        """The pid of the server of each client, by the client's pid."""
        until, found = time.monotonic() + within_s, dict[int, int]()
        for server in _pids(self.ask("get_server_list", environ, within_s=within_s)):
            left_s = max(0.0, until - time.monotonic())
            listed = _pids(self.ask(f"get_client_list {server}", environ, within_s=left_s))
            found |= dict.fromkeys(listed, server)
        return found

    def terminate(self, clients: Mapping[int, int], environ: Mapping[str, str], *, within_s: float) -> None:
        """Have the work of these `clients` on the GPU ended; the processes live on.

        A client that is killed while it has work there may take others along.
        """
        until = time.monotonic() + within_s
        for client, server in clients.items():
            left_s = max(0.0, until - time.monotonic())
            self.ask(f"terminate_client {server} {client}", environ, within_s=left_s)

    def quit(self, environ: Mapping[str, str]) -> None:
        """Tell it to end, with its servers, whatever clients they have."""
        self.ask(f"quit -t {QUITS_WITHIN_S / 2:.0f}", environ, within_s=QUITS_WITHIN_S)

    def _environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        kept = {name: environ[name] for name in _INHERITED if name in environ}
        shown = {} if self.visible is None else {CUDA.variable: self.visible}
        return {**kept, **shown, **self.variables()}

    def _make_folders(self) -> None:
        for folder in (self.folder.parent, self.folder, self.folder / "pipe", self.folder / "log"):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not _private(folder):
                raise MpsError(f"{folder} is somebody else's, or open to others")


def _private(folder: Path) -> bool:
    """Whether it is a folder of this user's that nobody else can enter."""
    seen = folder.lstat()
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o077


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """In here this process is the only one that starts the daemon. Raises MpsError."""
    until = time.monotonic() + STARTS_WITHIN_S + ANSWERS_WITHIN_S
    with lock.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise MpsError("another process starts it, and does not come to an end") from None
                time.sleep(_LOOK_S)
        yield


def _pids(answer: str | None) -> Iterator[int]:
    return (int(word) for word in (answer or "").split() if word.isdecimal())


def _on_all_cores() -> None:
    """In the daemon: it would keep to the cores of the job that begins it."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
