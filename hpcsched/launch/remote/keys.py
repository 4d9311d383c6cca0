"""What a node agent needs to join a run: where the head is, and the keys that let it in.

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

import msgspec

from hpcsched.contract.codec import SMALL_BYTES
from hpcsched.decoding import decode
from hpcsched.errors import BadInput, ConfigError, StoreError
from hpcsched.launch.remote.protocol import PROTOCOL

PREFIX = "join-"
SERVE_ON_S = 25.0
"""How long node agents serve on after a SIGTERM, at least: what most batch systems leave before SIGKILL."""

_LIFE = secrets.token_bytes(16)


def store_key(job_id: int) -> str:
    """What the keys of the store begin with where the ranks of a job meet: 32 characters that only they know.

    The same for all of a job's ranks as long as this process lives, since ranks may join those that run.
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
        """A pair that nobody else has."""
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """The join file. `life` is one life of the head; `hosts` those it expects; `devices` what to open there;
    `cpus` how many the batch system granted, and `gpus` which, by host, where that is known.

    `grace_s`: how long workers may take to save once the head is gone. `standbys`: see `LocalLauncher`.
    `cpus_per_gpu`: how many cores are kept for the jobs of each GPU. `serve_on_s`: how long to serve on
    after a signal that ends it, so that the head can have all jobs save in good order; after the first for
    `notice_s` more, as it may only tell of a time of grace that begins. `shielded`: the numbers of the
    signals that the batch system sends to every process of the job.
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
    shielded: tuple[int, ...] = ()
    protocol: int = PROTOCOL


class _Version(msgspec.Struct):
    protocol: int


def new_life() -> str:
    """A name for one life of the head."""
    return uuid.uuid4().hex[:12]


def join_file(run_dir: Path, life: str) -> Path:
    """Another name for each life: on NFS an old file of the same name may be seen for a while."""
    return run_dir / f"{PREFIX}{life}"


def write_join(path: Path, join: Join) -> None:
    """Put it there whole, for this user only, and sweep what earlier lives left. Raises StoreError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        for old in path.parent.glob(f"{PREFIX}*"):
            old.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(join))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(f"{path}: {error.strerror or error}") from error


def read_join(path: Path) -> Join:
    """Raises ConfigError for a file that is missing, that others can read, or that we cannot."""

    def bad(got: str) -> ConfigError:
        return ConfigError(
            where=str(path), got=got, accepted="the file that a running head agent has written"
        )

    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise bad("can be read by others, so its keys are worth nothing")
            data = file.read()
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
