"""The messages between the head agent and the node agents: msgpack, each message with a tag."""

from __future__ import annotations

from signal import Signals

import msgspec

from hpcsched.core.model import Container, Device, HostCores, PythonEnvironment
from hpcsched.core.needs import Needs
from hpcsched.decoding import decode_message

PROTOCOL = 8
"""Raised with every change of a message; both ends must have the same."""

BEAT_S = 1.0
"""Period of a node agent's Beat messages (chosen)."""

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 5000
"""ZMTP's own heartbeats (chosen): answered by ZeroMQ's thread, so a busy process does not look dead."""

LOST_HEAD_S = 6.0
"""Time without a connection after which a node agent takes the head for gone (chosen)."""

HOLD_S = 60.0
"""Time for which the workers of a joinable run go on without a head, while the next one is waited for
(chosen): a head that was killed is known to be gone STALE_AFTER_S after its last snapshot, and starting
another takes a while on a busy shared filesystem."""

KILL_AFTER_S = 5.0
"""The most time from SIGTERM to SIGKILL for the workers of a node agent that leaves (chosen)."""

FENCE_SLACK_S = 2.0
"""Time added to `silence_s` for scheduling delays (chosen)."""

HANDSHAKE_MS = 5000
"""Time for ZeroMQ's handshake (chosen)."""

MAX_MESSAGE_BYTES = 64 * 2**20
"""The longest message (chosen)."""


def silence_s(grace_s: float, holds_s: float = 0.0) -> float:
    """Seconds after the break of the head's side of a connection in which all workers of the host end.

    The node agent notices at the latest when its own heartbeats are not answered, tries to come back, waits
    `holds_s` for another head, gives its workers `grace_s` to save, and kills them.
    """
    notices_s = (HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS) / 1000 + LOST_HEAD_S + holds_s + BEAT_S
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


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A part that runs on a host as another head takes over.

    `order` is what started it, on the rendezvous at `port`; `living` of its ranks are left. `attempt` is the
    one whose answers are awaited. `failing`: one has failed. `over`: all have ended, which a head may know.
    `ready`, `record` and `held`: the files, where rank 0 is here.
    """

    order: Launch
    port: int
    living: int
    attempt: int
    failing: bool = False
    catches: bool = False
    over: bool = False
    ready: bytes | None = None
    record: bytes | None = None
    held: bytes | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """A node agent asks to join, until it gets a Welcome.

    `started` is its start time in clock ticks since boot, `address` its own on the way to the head,
    `wall` its Unix time, `life` that of the head that it was started for, `epoch` that of the one that it
    has followed last, and `parts` are what has run here since.
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
    life: str = ""
    epoch: int = 0
    parts: tuple[Running, ...] = ()


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


class Joining(msgspec.Struct, frozen=True, tag="joining", kw_only=True):
    """Hosts of another allocation are to join the run, or have joined it. `hpcsched join` sends it every
    BEAT_S.

    `allocation` is the allocation in words ("slurm job 12"), `token` the one `hpcsched join` of all, `hosts`
    their names there, and `names` those that an earlier head has given them, whose node agents live on.
    `left_s` are the seconds until it ends (None: it does not, or nobody knows).
    """

    allocation: str
    token: str
    hosts: tuple[str, ...]
    names: tuple[str, ...] = ()
    left_s: float | None = None


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
    | Joining
    | Said
)

# --- from the head ----------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The node agent belongs to the run from now on."""


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The hosts of a Joining may join, under these names, in its order. `spared`: see `Join`."""

    names: tuple[str, ...]
    spared: tuple[str, ...] = ()


class SentAway(msgspec.Struct, frozen=True, tag="away"):
    """The hosts of a Joining may not join."""

    why: str


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

    def __post_init__(self) -> None:
        if self.asks:
            Signals(self.asks)  # raises ValueError, which makes the message none

    @property
    def ranks(self) -> int:
        """The number of processes to start."""
        return len(self.devices or self.cores) if self.per_rank else self.processes


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Send a signal to the part's ranks."""

    part: int
    number: Signals


class AskToSave(msgspec.Struct, frozen=True, tag="ask"):
    """Send a signal to the programs of the part that catch it; SIGTERM to all if none does."""

    part: int
    number: Signals


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


HeadMessage = (
    Welcome
    | Admitted
    | SentAway
    | Heard
    | Launch
    | Signal
    | AskToSave
    | SaveBy
    | Order
    | Expect
    | Forget
    | Drain
    | Leave
)


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


_to_head = msgspec.msgpack.Decoder(ToHead)
_to_node = msgspec.msgpack.Decoder(ToNode)


def read_to_head(data: bytes) -> ToHead:
    """A node agent's message; raises BadInput."""
    return decode_message(_to_head, data, most_bytes=MAX_MESSAGE_BYTES)


def read_to_node(data: bytes) -> ToNode:
    """The head's message; raises BadInput."""
    return decode_message(_to_node, data, most_bytes=MAX_MESSAGE_BYTES)
