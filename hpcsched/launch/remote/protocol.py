"""The messages between the head agent and the node agents: msgpack, each message with a tag.

Messages that must not be lost or come twice are numbered, kept until the other end has acknowledged them, and
sent again when it does not: ZeroMQ reconnects by itself, but loses the messages that were on their way.
`MessageChannel` is one end of that.
"""

from __future__ import annotations

from collections import deque

import msgspec

from hpcsched.core.model import Container, Device, HostCores, PythonEnvironment
from hpcsched.core.needs import Needs
from hpcsched.decoding import decode_message

PROTOCOL = 6
"""Raised with every change of a message; both ends must have the same."""

RESEND_S = 2.5
"""Time without an acknowledgement after which messages are sent again (chosen); one comes every second."""

BEAT_S = 1.0
"""Period of a node agent's Beat messages (chosen)."""

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
"""ZMTP's own heartbeats (chosen): answered by ZeroMQ's thread, so a busy process does not look dead."""

LOST_HEAD_S = 6.0
"""Time without a connection after which a node agent takes the head for gone (chosen)."""

KILL_AFTER_S = 5.0
"""The most time from SIGTERM to SIGKILL for the workers of a node agent that leaves (chosen)."""

FENCE_SLACK_S = 2.0
"""Time added to `silence_s` for scheduling delays (chosen)."""

HANDSHAKE_MS = 5000
"""Time for ZeroMQ's handshake (chosen)."""

MAX_MESSAGE_BYTES = 64 * 2**20
"""The longest message (chosen)."""


def silence_s(grace_s: float) -> float:
    """Seconds after the break of the head's side of a connection in which all workers of the host end.

    The node agent notices at the latest when its own heartbeats are not answered, tries to come back,
    gives its workers `grace_s` to save, and kills them.
    """
    notices_s = (HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS) / 1000 + LOST_HEAD_S + BEAT_S
    return notices_s + grace_s + min(grace_s, KILL_AFTER_S) + FENCE_SLACK_S


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """One device at one moment, as in `devices.Sample`; devices come in order of the host's indices."""

    utilisation: float | None = None
    memory_mib: float | None = None
    healthy: bool = True
    why: str = ""
    energy_j: float | None = None


# --- from a node agent ------------------------------------------------------------------------------


class Coming(msgspec.Struct, frozen=True, tag="coming"):
    """The node agent lives, but first ends orphans of an earlier life on its host: a Hello follows."""

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
    """The node agent lives; its Unix time and devices, as they were `age_s` seconds ago."""

    wall: float
    readings: tuple[Reading, ...]
    age_s: float = 0.0


class Launched(msgspec.Struct, frozen=True, tag="launched"):
    """The part's ranks have been started; `port` is that of the attempt's rendezvous."""

    part: int
    port: int


class LaunchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """None of the part's ranks could be started; `host_fault`: since the host is being lost."""

    part: int
    error: str
    transient: bool
    host_fault: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The program has made its ready file for `attempt`, with the content `data`."""

    part: int
    attempt: int
    data: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Rank 0 has refused to become `attempt`; `data` is the content of its refused file."""

    part: int
    attempt: int
    data: bytes


class Living(msgspec.Struct, frozen=True, tag="living"):
    """A rank has ended; `count` ranks of the part still live."""

    part: int
    count: int


class Progressed(msgspec.Struct, frozen=True, tag="progress"):
    """Bytes that rank 0 wrote to its progress descriptor."""

    part: int
    data: bytes


class Recorded(msgspec.Struct, frozen=True, tag="record"):
    """STATE.json has changed to `data`."""

    part: int
    data: bytes


class Failing(msgspec.Struct, frozen=True, tag="failing"):
    """A rank has ended with other than 0 or 75 while others of the part live."""

    part: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """All of the part's ranks have ended.

    On the host of rank 0 `record` is STATE.json, and `held` the held file of a quick suspend; either may be
    the newer one. `after_s`: how many seconds ago they had, as the memory of their GPUs was still in use.
    `oom`, `over_limit`: main memory ran out, see `Workers`.
    """

    part: int
    code: int
    record: bytes | None = None
    held: bytes | None = None
    after_s: float = 0.0
    oom: str = ""
    over_limit: bool = False


class Catches(msgspec.Struct, frozen=True, tag="catches"):
    """Whether a program of the part catches the signal that asks it to save (`Launch.asks`), from now on."""

    part: int
    so: bool


class SavedBy(msgspec.Struct, frozen=True, tag="saved"):
    """The command of a SaveBy is over, with this exit code and these last words."""

    part: int
    code: int
    words: str


class Keeping(msgspec.Struct, frozen=True, tag="keeping"):
    """The jobs whose state of a quick suspend is being made durable on this host, from now on."""

    jobs: tuple[int, ...]


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node agent starts no more workers, and leaves when its own have ended, which it still reports."""

    why: str


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """The last message: no worker is left on the host, and the node agent leaves."""

    why: str


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A line that people should see."""

    line: str


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
    | Catches
    | SavedBy
    | Keeping
    | Leaving
    | Gone
    | Said
)

# --- from the head ----------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The node agent belongs to the run from now on."""


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """Carries an acknowledgement when there is no other message."""


class Launch(msgspec.Struct, frozen=True, tag="launch", kw_only=True):
    """Start one host's ranks of an attempt; see `LaunchPlan` and `RankPlacement`.

    `devices`: the host's indices; or `cores`: the handles of each rank's cores. `asks`: the number of the
    signal that asks the program to save, 0: as the contract has it.
    """

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
    container: Container | None = None
    asks: int = 0
    needs: Needs | None = None

    @property
    def ranks(self) -> int:
        """The number of processes to start."""
        return len(self.devices or self.cores) if self.per_rank else self.processes


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Send a signal to the part's ranks."""

    part: int
    number: int


class AskToSave(msgspec.Struct, frozen=True, tag="ask"):
    """Send a signal to the programs of the part that catch it; SIGTERM to all if none does."""

    part: int
    number: int


class SaveBy(msgspec.Struct, frozen=True, tag="saveby"):
    """Run a command that saves the part's rank 0 from outside."""

    part: int
    command: tuple[str, ...]
    within_s: float


class Order(msgspec.Struct, frozen=True, tag="order"):
    """Give rank 0, which is in this part, an order through its control pipe."""

    part: int
    line: bytes


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """The part is told to become `attempt`: report the answer of its rank 0."""

    part: int
    attempt: int


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Free the job's shared memory: it has no next attempt here."""

    job_id: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Nothing starts any more: nobody waits for what ends."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Have all workers save and leave within `grace_s` seconds (0: kill them now), then leave too."""

    grace_s: float


HeadMessage = Welcome | Heard | Launch | Signal | AskToSave | SaveBy | Order | Expect | Forget | Drain | Leave


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
    return decode_message(_to_head, data, most_bytes=MAX_MESSAGE_BYTES)


def read_to_node(data: bytes) -> ToNode:
    """The head's message; raises BadInput."""
    return decode_message(_to_node, data, most_bytes=MAX_MESSAGE_BYTES)


class MessageChannel:
    """One end of a channel: numbered messages arrive once and in order as long as the other end lives.

    The number of kept messages is bounded only by the time until the other end counts as lost, a few seconds.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._kept: deque[tuple[int, NodeMessage | HeadMessage]] = deque()
        self._sent_at = 0.0
        self._heard = 0
        self._told = 0

    def numbered(self, message: NodeMessage | HeadMessage, now: float) -> bytes:
        """The bytes to send for a message that must arrive; it is kept until it is acknowledged."""
        self._sent += 1
        if not self._kept:
            self._sent_at = now
        self._kept.append((self._sent, message))
        return self._wrap(self._sent, message)

    def unnumbered(self, message: NodeMessage | HeadMessage) -> bytes:
        """The bytes to send for a message that may be lost."""
        return self._wrap(0, message)

    def _wrap(self, seq: int, message: NodeMessage | HeadMessage) -> bytes:
        self._told = self._heard
        return _encode((seq, self._heard, message))

    def take(self, envelope: ToHead | ToNode, now: float) -> bool:
        """Whether to act on an arrived message: not on one that came before, nor on one after a gap."""
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
    def owes_ack(self) -> bool:
        """Whether the other end waits for an acknowledgement."""
        return self._told != self._heard

    def resends(self, now: float) -> list[bytes]:
        """The bytes of all messages to send once more, if it is time for that."""
        if not self._kept or now - self._sent_at < RESEND_S:
            return []
        self._sent_at = now
        return [self._wrap(seq, message) for seq, message in self._kept]
