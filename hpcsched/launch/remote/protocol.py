"""What the head agent and the node agents say to each other: msgpack, each message with a tag.

Messages that must not be lost or come twice are numbered, kept until the other end has acknowledged them,
and sent again when it does not: a broken connection is made anew by ZeroMQ, but what was on its way is
gone. `Link` is one end of such a conversation.
"""

from __future__ import annotations

from collections import deque

import msgspec

from hpcsched.core.model import Device, HostCores, PythonEnvironment
from hpcsched.decoding import decode_message

PROTOCOL = 4
"""Raised with every change of a message; both ends must have the same."""

RESEND_S = 2.5
"""What has not been acknowledged for so long is sent again; acknowledgements come at least once a second."""

BEAT_S = 1.0
"""How often a node agent says that it lives, and how its devices are."""

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
"""ZMTP's own heartbeats: answered by ZeroMQ's thread, so an end that is busy does not look dead."""

LOST_HEAD_S = 6.0
"""When its connection has been gone for so long, so has the head, to a node agent."""

KILL_AFTER_S = 5.0
"""A node agent that leaves gives workers so long, at most, between SIGTERM and SIGKILL."""

SLACK_S = 2.0

HANDSHAKE_MS = 5000
MOST_BYTES = 64 * 2**20
"""No message is longer."""


def silence_s(grace_s: float) -> float:
    """So long after the head's side of a connection broke nothing can live on the host, network or not.

    The node agent notices at the latest when its own heartbeats are not answered, tries to come back,
    gives its workers `grace_s` to save, and kills them.
    """
    notices_s = (HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS) / 1000 + LOST_HEAD_S + BEAT_S
    return notices_s + grace_s + min(grace_s, KILL_AFTER_S) + SLACK_S


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """One device at one moment, as in `devices.Sample`; devices come in order of the host's indices."""

    utilisation: float | None = None
    memory_mib: float | None = None
    healthy: bool = True
    why: str = ""


# --- from a node agent ------------------------------------------------------------------------------


class Coming(msgspec.Struct, frozen=True, tag="coming"):
    """It lives, but first ends what an earlier life left on its host: a Hello follows."""

    name: str


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """A node agent asks to join, until it gets a Welcome.

    `started` is its start time in clock ticks since boot, `address` its own on the way to the head,
    `wall` its Unix time.
    """

    name: str
    hostname: str
    pid: int
    started: int
    devices: tuple[Device, ...]
    kind: str
    speed: float
    address: str
    wall: float
    cores: HostCores | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """It lives; Unix time and its devices."""

    wall: float
    readings: tuple[Reading, ...]


class Launched(msgspec.Struct, frozen=True, tag="launched"):
    """The part's ranks have been started; `port` is where all ranks of the attempt meet."""

    part: int
    port: int


class LaunchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """None of the part's ranks could be started; `host_fault`: since the host is being lost."""

    part: int
    error: str
    transient: bool
    host_fault: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The program has said that it can be suspended, as `attempt`; `data` is what its ready file holds."""

    part: int
    attempt: int
    data: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Rank 0 will not become `attempt`; `data` says why."""

    part: int
    attempt: int
    data: bytes


class Living(msgspec.Struct, frozen=True, tag="living"):
    """A rank has ended, and this many of the part's still live."""

    part: int
    count: int


class Progressed(msgspec.Struct, frozen=True, tag="progress"):
    """What rank 0 wrote to its progress descriptor."""

    part: int
    data: bytes


class Recorded(msgspec.Struct, frozen=True, tag="record"):
    """STATE.json has changed."""

    part: int
    data: bytes


class Failing(msgspec.Struct, frozen=True, tag="failing"):
    """A rank has ended with other than 0 or 75 while others of the part live."""

    part: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """All of the part's ranks have ended.

    On the host of rank 0 `record` is STATE.json, and `held` what a quick suspend has left in the arena: one
    of them is the newest.
    """

    part: int
    code: int
    record: bytes | None = None
    held: bytes | None = None


class Keeping(msgspec.Struct, frozen=True, tag="keeping"):
    """The jobs whose state of a quick suspend is being made durable on this host, from now on."""

    jobs: tuple[int, ...]


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node agent starts no more, and leaves when its workers have ended, which it tells as ever."""

    why: str


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The last word: no worker is left on the host, and the node agent leaves."""

    why: str


NodeMessage = (
    Coming
    | Hello
    | Beat
    | Launched
    | LaunchFailed
    | Ready
    | Refused
    | Living
    | Progressed
    | Recorded
    | Failing
    | Exited
    | Keeping
    | Leaving
    | Gone
)

# --- from the head ----------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The node agent belongs to the run from now on."""


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """Carries an acknowledgement when there is nothing else to say."""


class Launch(msgspec.Struct, frozen=True, tag="launch", kw_only=True):
    """Start one host's ranks of an attempt; see `LaunchPlan` and `Place`. `devices`: the host's indices, or
    `cores`, the handles of what each rank has instead."""

    part: int
    job_id: int
    attempt: int
    argv: tuple[str, ...]
    module: str = ""
    environment: PythonEnvironment | None = None
    env: dict[str, str]
    cwd: str
    folder: str
    output: str
    devices: tuple[int, ...]
    cores: tuple[str, ...] = ()
    per_rank: bool
    processes: int = 1
    parallel: bool = True
    first_rank: int
    world_size: int
    node_rank: int = 0
    nodes: int = 1
    address: str
    port: int | None
    joins: str | None = None
    arena: bool = False
    idle: bool = False
    share: float | None = None

    @property
    def ranks(self) -> int:
        """How many processes that is."""
        return len(self.devices or self.cores) if self.per_rank else self.processes


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Send a signal to the part's ranks."""

    part: int
    number: int


class Order(msgspec.Struct, frozen=True, tag="order"):
    """Give rank 0, of this part, an order through its control pipe."""

    part: int
    line: bytes


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """This part is told to become `attempt`: look for what its rank 0 answers."""

    part: int
    attempt: int


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Nothing that is kept here for the job's next attempt is wanted any more."""

    job_id: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Have all workers save and leave within `grace_s` seconds (0: kill them now), then leave too."""

    grace_s: float


HeadMessage = Welcome | Heard | Launch | Signal | Order | Expect | Forget | Leave


class ToHead(msgspec.Struct, frozen=True, array_like=True):
    """`seq` 0: not numbered. `ack`: all up to this number has arrived at the sender."""

    seq: int
    ack: int
    body: NodeMessage


class ToNode(msgspec.Struct, frozen=True, array_like=True):
    """As ToHead, the other way."""

    seq: int
    ack: int
    body: HeadMessage


_encode = msgspec.msgpack.Encoder().encode
_to_head = msgspec.msgpack.Decoder(ToHead)
_to_node = msgspec.msgpack.Decoder(ToNode)


def read_to_head(data: bytes) -> ToHead:
    """A node agent's message; raises BadInput."""
    return decode_message(_to_head, data, most_bytes=MOST_BYTES)


def read_to_node(data: bytes) -> ToNode:
    """The head's message; raises BadInput."""
    return decode_message(_to_node, data, most_bytes=MOST_BYTES)


class Link:
    """One end: what it sends arrives once and in order as long as the other end lives.

    Nothing bounds what is kept but the time until the other end counts as lost, a few seconds.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._kept: deque[tuple[int, NodeMessage | HeadMessage]] = deque()
        self._sent_at = 0.0
        self._heard = 0
        self._told = 0

    def kept(self, message: NodeMessage | HeadMessage, now: float) -> bytes:
        """To be sent: a message that must arrive."""
        self._sent += 1
        if not self._kept:
            self._sent_at = now
        self._kept.append((self._sent, message))
        return self._wrap(self._sent, message)

    def passing(self, message: NodeMessage | HeadMessage) -> bytes:
        """To be sent: a message that may be lost."""
        return self._wrap(0, message)

    def _wrap(self, seq: int, message: NodeMessage | HeadMessage) -> bytes:
        self._told = self._heard
        return _encode((seq, self._heard, message))

    def take(self, envelope: ToHead | ToNode, now: float) -> bool:
        """Whether to act on what arrived: not if it came before, nor if something before it is missing."""
        acknowledged = False
        while self._kept and self._kept[0][0] <= envelope.ack:
            self._kept.popleft()
            acknowledged = True
        if acknowledged:
            self._sent_at = now
        if envelope.seq == 0:
            return True
        if envelope.seq != self._heard + 1:
            self._told = -1  # the other end seems not to know what has arrived
            return False
        self._heard = envelope.seq
        return True

    @property
    def owes(self) -> bool:
        """Whether the other end is to be told what has arrived."""
        return self._told != self._heard

    def again(self, now: float) -> list[bytes]:
        """To be sent once more, if it is time for that."""
        if not self._kept or now - self._sent_at < RESEND_S:
            return []
        self._sent_at = now
        return [self._wrap(seq, message) for seq, message in self._kept]
