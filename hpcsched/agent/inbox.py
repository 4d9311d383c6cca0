"""Commands of users to the agent: one file each, renamed into inbox/new, so that no port is needed.

A command is acknowledged after its events are in the journal; the file's name goes into the events'
cause, so that a crash in between does not carry it out twice.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcsched.core.model import JobSpec
from hpcsched.decoding import decode, decode_file, read_file
from hpcsched.errors import BadInput, NoSuchRun, StoreError
from hpcsched.patience import TRANSIENT, patiently
from hpcsched.printing import printable
from hpcsched.store.files import sync_folder, write_atomically
from hpcsched.store.rundir import RunDir, agent_works

PERIOD_S, QUIET_PERIOD_S, QUIET_AFTER_S = 0.25, 1.0, 60.0
"""How often an agent reads its inbox, and how often when nothing has come for so long (chosen): it is
a question to the shared filesystem."""

AGENT_CHECK_EVERY_S = 0.5
"""How often a sender that waits checks that the agent still lives (chosen)."""

ANSWER_KEPT_S = 60.0
"""Time after which an answer that nobody has fetched is deleted (chosen): its sender does not wait."""

JOB_COMMANDS = ("cancel", "hold", "release", "suspend", "resume", "retry")
COMMANDS = ("submit", "drain", "signal", *JOB_COMMANDS)

USERS_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGCONT")
"""What `cancel --signal` sends: not SIGTERM, SIGTSTP, SIGKILL, by which the agent suspends and ends jobs."""


class Command(msgspec.Struct, kw_only=True):
    """One command. `jobs` for submit, `targets` (job ids) for those about jobs.

    Of a submit: `update` takes what `jobs` say of jobs that the run has, `workdir` is where it was given, and
    `cancelled` are the names of those of `jobs` that were cancelled before an agent took them.
    Of a retry: `from_scratch`. Of a signal its name, such as "SIGUSR1".
    """

    schema: int = 1
    command: str
    jobs: list[JobSpec] = []
    targets: list[int] = []
    update: bool = False
    workdir: str = ""
    cancelled: list[str] = []
    from_scratch: bool = False
    signal: str = ""

    @property
    def wanted(self) -> list[JobSpec]:
        """Of a submit: its jobs without those that were cancelled meanwhile."""
        return [job for job in self.jobs if job.name not in self.cancelled]


class Answer(msgspec.Struct, kw_only=True):
    """The agent's answer to a command: the ids of its jobs, or why it was refused.

    `outcomes`: for each of the ids, what was done, or why nothing was (`done` says which); of a submit empty
    for those that are new. `kept`: ids of jobs that the run has and of which it keeps its own definition.
    """

    ids: list[int] = []
    outcomes: list[str] = []
    done: list[bool] = []
    kept: list[int] = []
    error: str | None = None


def send(rundir: RunDir, command: Command) -> str:
    """Put a command into the inbox, for good; returns its name, to ask for the answer with."""
    rundir.make()
    name = f"{time.time_ns():020d}.{os.getpid()}.{socket.gethostname()}"
    temporary = rundir.inbox / "tmp" / name
    write_atomically(temporary, msgspec.json.encode(command), durable=True)
    new = rundir.inbox / "new"
    try:
        patiently(lambda: temporary.rename(new / name))
        patiently(lambda: sync_folder(new))
    except OSError as error:
        raise StoreError(f"cannot write {rundir.inbox}: {error.strerror}") from error
    return name


def put_back(rundir: RunDir, name: str, command: Command | None) -> None:
    """Change a command that waits, or take it out (None). The caller holds the run's lock: no agent reads."""
    path = rundir.inbox / "new" / name
    if command is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, msgspec.json.encode(command), durable=True)


def wait_for_answer(rundir: RunDir, name: str, *, timeout_s: float) -> Answer | None:
    """The agent's answer to the command of this name, or None if none came in time.

    Raises NoSuchRun when the agent has ended without taking the command.
    """
    path = rundir.inbox / "ack" / name
    now = time.monotonic()
    deadline, look = now + timeout_s, now + AGENT_CHECK_EVERY_S
    while True:
        # Looked for before the answer: an agent that is gone by then will not give one later.
        works = now < look or agent_works(rundir)
        try:
            answer = decode_file(path, Answer)
        except BadInput as error:
            raise StoreError(f"{path} cannot be understood: {error}") from error
        except FileNotFoundError:
            if not works:
                raise NoSuchRun(
                    f"the agent in {rundir.root} has ended; the command waits for the next `hpcsched run`"
                ) from None
            if now > deadline:
                return None
            time.sleep(0.02)
        else:
            # Its agent may have died before it did that; as long as the answer is there the next one does.
            with contextlib.suppress(OSError):
                (rundir.inbox / "new" / name).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            return answer
        look = now + AGENT_CHECK_EVERY_S if now >= look else look
        now = time.monotonic()


class Inbox:
    """The agent's side: reads new commands in the order they were sent."""

    def __init__(self, rundir: RunDir) -> None:
        self._new, self._ack = rundir.inbox / "new", rundir.inbox / "ack"
        self._stuck: set[str] = set()
        self._in_vain = False
        """Whether what cannot be read was waited for, and still cannot be."""
        self._answers: deque[tuple[float, str]] = deque()
        self._begun = f"{time.time_ns():020d}"
        self._heard = time.monotonic()
        self.refused: list[str] = []
        """Why commands were refused that had waited for this agent: their senders are gone."""
        for old in patiently(lambda: [*self._ack.iterdir()]):
            self._forget(old.name)

    def read(self, *, all_of_it: bool = False) -> list[tuple[str, Command | str]]:
        """Name and command of each file; a text says why a file is refused. What cannot be read now is left
        for the next time; `all_of_it`: that is waited for."""
        while self._answers and self._answers[0][0] < time.monotonic():
            self._forget(self._answers.popleft()[1])
        found = list[tuple[str, Command | str]]()
        try:
            found = patiently(self._look) if all_of_it and not self._in_vain else self._look()
            self._in_vain = False
        except OSError:
            self._in_vain = all_of_it or self._in_vain
            with contextlib.suppress(OSError):
                found = self._look(strict=False)
        self._heard = time.monotonic() if found else self._heard
        _give_names_up([command for _, command in found if isinstance(command, Command)])
        return found

    def _look(self, *, strict: bool = True) -> list[tuple[str, Command | str]]:
        names = sorted(os.listdir(self._new))  # noqa: PTH208 - called four times a second
        return _read_all([self._new / name for name in names if name not in self._stuck], strict=strict)

    def period_s(self, now: float) -> float:
        """Seconds until it is to be read again, by the monotonic clock."""
        return QUIET_PERIOD_S if now - self._heard > QUIET_AFTER_S else PERIOD_S

    def answer(self, name: str, answer: Answer) -> None:
        """Write the answer for the sender, and remove the command.

        Where that cannot be done it is left, and not read again by this agent.
        """
        if answer.error and name < self._begun:
            self.refused.append(answer.error)
        with contextlib.suppress(StoreError):  # no room: the sender will hear nothing
            write_atomically(self._ack / name, msgspec.json.encode(answer), patient=True)
            self._answers.append((time.monotonic() + ANSWER_KEPT_S, name))
        self._take_out(name)

    def _take_out(self, name: str) -> bool:
        try:
            (self._new / name).unlink(missing_ok=True)
        except OSError:
            self._stuck.add(name)
            return False
        self._stuck.discard(name)
        return True

    def _forget(self, name: str) -> None:
        """Remove an answer. As long as its command is there it stays: that is not to be carried out again by
        the next agent, refused or not."""
        if self._take_out(name):
            with contextlib.suppress(OSError):
                (self._ack / name).unlink()

    @staticmethod
    def waiting(rundir: RunDir) -> Sequence[Path]:
        """The files of commands that have not been read yet, oldest first."""
        try:
            return patiently(lambda: sorted((rundir.inbox / "new").iterdir()))
        except OSError:
            return []

    @classmethod
    def peek(cls, rundir: RunDir) -> list[tuple[str, Command]]:
        """The waiting commands that can be decoded, by name; they stay in the inbox."""
        paths = cls.waiting(rundir)
        try:
            found = patiently(lambda: _read_all(paths))
        except OSError:
            found = _read_all(paths, strict=False)
        commands = [(name, command) for name, command in found if isinstance(command, Command)]
        _give_names_up([command for _, command in commands])
        return commands


def _read_all(paths: Sequence[Path], *, strict: bool = True) -> list[tuple[str, Command | str]]:
    """Name of each file, and what it says. `strict`: raises OSError where one can perhaps be read soon."""
    found = []
    for path in paths:
        try:
            found.append((path.name, _read(path)))
        except OSError:
            if strict:
                raise
    return found


def _read(path: Path) -> Command | str:
    """What a file says, or why that is refused. Raises OSError where it can perhaps be read soon."""
    if printable(path.name) != path.name:
        return "refused: a file's name with characters that cannot be printed"  # it goes into the journal
    try:
        command = decode(read_file(path, follow=False, owner=os.geteuid()), Command)
    except (OSError, BadInput) as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            raise
        return f"refused: {error}"
    known = command.command in COMMANDS
    return command if known else f"refused: unknown command {command.command[:80]!r}"


def _give_names_up(commands: Sequence[Command]) -> None:
    """Forget jobs that were cancelled while they waited, where others of their names were submitted later."""
    later: set[str] = set()
    for command in reversed(commands):
        if command.command == "submit":
            gone = later.intersection(command.cancelled)
            command.jobs = [job for job in command.jobs if job.name not in gone]
            later.update(job.name for job in command.jobs)
