"""The join file of a run: the address of the head, and the keys that admit node agents.

The head makes new keys for each of its lives. They travel through a file that only this user can
read, in the run directory, and are never seen in a process list or an environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import uuid
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import msgspec

from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.decoding import decode
from hpcsched.errors import BadInput, ConfigError, StoreError
from hpcsched.launch.proc import stat
from hpcsched.launch.remote.protocol import PROTOCOL
from hpcsched.patience import patiently

JOIN_PREFIX, JOINED_PREFIX = "join-", "joined-"
SERVE_ON_S = 25.0
"""The least time that node agents serve on after a SIGTERM: most batch systems leave it before SIGKILL."""

_LIFE = secrets.token_bytes(16)


def store_key(job_id: int) -> str:
    """The prefix of a job's keys in the rendezvous store: 32 characters that only its ranks know.

    It is the same as long as this process lives, since ranks may join those that run.
    """
    return hashlib.blake2b(str(job_id).encode(), key=_LIFE, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, each key in 40 characters of Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"  # a secret has no place in logs

    @classmethod
    def new(cls) -> KeyPair:
        """A new pair of keys."""
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the join file.

    `life`: the head's life. `hosts`: the hosts it expects. `devices`: the argument of `--devices`. `cpus` and
    `gpus`: by host the number of CPUs and the GPUs that the batch system granted, where that is known.

    `grace_s`: the time that workers get to save once the head is gone. `standbys`: see `LocalLauncher`.
    `cpus_per_gpu`: the cores kept for the jobs of each GPU. `serve_on_s`: the time to serve on after a signal
    that ends the node agent, so that the head can have all jobs save in good order; after the first signal
    `notice_s` longer, as that may only begin a time of grace. `reserve_s`: what is kept before the end of an
    allocation besides the time to save. `shielded`: the numbers of the signals that the
    batch system sends to every process of the job. `names`: by host its name in the run, where that is
    another one than in its allocation. `head`: the head's host name, pid and start time in clock ticks.

    `epoch` counts the heads of the run: nobody obeys one of a lower number any more. `holds_s`: the time for
    which workers go on without a head, while another one is waited for. `spared`: the marks (`NODE`) of what
    runs on for an earlier head's node agents.
    """

    life: str
    run_id: str
    endpoint: str
    server_key: str
    client_public: str
    client_secret: str
    hosts: tuple[str, ...]
    devices: str
    cpus: dict[str, int] = {}
    gpus: dict[str, tuple[str, ...]] = {}
    grace_s: float
    standbys: int | None = None
    cpus_per_gpu: int = 0
    serve_on_s: float = SERVE_ON_S
    notice_s: float = 0.0
    reserve_s: float = 60.0
    shielded: tuple[Signals, ...] = ()
    names: dict[str, str] = {}
    head: tuple[str, int, int] | None = None
    epoch: int = 0
    holds_s: float = 0.0
    spared: tuple[str, ...] = ()
    protocol: int = PROTOCOL


class _Version(msgspec.Struct):
    protocol: int


def new_life() -> str:
    """A new name for a life of the head."""
    return uuid.uuid4().hex[:12]


def join_file(run_dir: Path, life: str) -> Path:
    """The path of a life's join file. Each life has its own: NFS may show an old file of the same name."""
    return run_dir / f"{JOIN_PREFIX}{life}"


def newest_join(run_dir: Path) -> Path | None:
    """The join file of the present life; None: there is none, or the head admits nobody."""
    with contextlib.suppress(OSError):
        files = [(path.stat().st_mtime, path) for path in run_dir.glob(f"{JOIN_PREFIX}*")]
        return max(files, default=(0.0, None), key=lambda entry: entry[0])[1]
    return None


def successor(run_dir: Path, join: Join) -> Join | None:
    """The keys of a head that leads the run after that of `join`; None: there is none (yet)."""
    path = newest_join(run_dir)
    if path is None or path == join_file(run_dir, join.life):
        return None
    try:
        found = read_join(path)
    except ConfigError:
        return None
    return found if found.run_id == join.run_id and found.epoch > join.epoch else None


def joined_file(run_dir: Path, life: str, token: str) -> Path:
    """The path of the join file for the node agents of another allocation (`Joining.token`)."""
    return run_dir / f"{JOINED_PREFIX}{life}-{token}"


def write_join(path: Path, join: Join, *, alone: bool = True) -> None:
    """Write a join file atomically, for this user only. `alone`: those of earlier lives are removed. Raises
    StoreError."""
    temporary = path.with_name(f".{path.name}.tmp")

    def write() -> None:
        temporary.unlink(missing_ok=True)
        for old in [*path.parent.iterdir()] if alone else ():
            if old.name.startswith((JOIN_PREFIX, JOINED_PREFIX)):
                old.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(join))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    try:
        patiently(write)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(f"{path}: {error.strerror or error}") from error


def remove_join(path: Path, life: str, *, joined: bool) -> None:
    """Remove a head's join file, and those of node agents of other allocations (`joined`). Never raises."""

    def remove() -> None:
        others = path.parent.glob(f"{JOINED_PREFIX}{life}-*") if joined else ()
        for file in (path, *others):
            file.unlink(missing_ok=True)

    with contextlib.suppress(OSError):
        patiently(remove)


def read_join(path: Path) -> Join:
    """Read a join file. Raises ConfigError if it is missing, cannot be decoded, or others can read it."""

    def bad(got: str) -> ConfigError:
        return ConfigError(
            where=str(path), got=got, accepted="the file that a running head agent has written"
        )

    def content() -> bytes:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise bad("can be read by others, so its keys are worth nothing")
            return file.read()

    try:
        data = patiently(content)
    except OSError as error:
        raise bad(error.strerror or str(error)) from None
    try:
        protocol = decode(data, _Version, most_bytes=SMALL_BYTES).protocol
        if protocol != PROTOCOL:
            raise bad(
                f"protocol {protocol}, but this hpcsched speaks {PROTOCOL}: use the same version everywhere"
            )
        return decode(data, Join, most_bytes=SMALL_BYTES)
    except BadInput as error:
        raise bad(f"not a join file: {error}") from None


def this_process() -> tuple[str, int, int]:
    """This process, as `Join.head` names the head's."""
    seen = stat(os.getpid())
    return os.uname().nodename, os.getpid(), seen.start_ticks if seen else 0


def head_stands_still(join: Join) -> bool:
    """Whether the head's process is on this host, and is stopped, or hangs in the kernel."""
    if join.head is None or join.head[0] != os.uname().nodename:
        return False
    seen = stat(join.head[1])
    return seen is not None and seen.start_ticks == join.head[2] != 0 and seen.state in "TtD"
