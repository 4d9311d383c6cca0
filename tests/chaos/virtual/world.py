"""The world around an agent, on the virtual clock: programs, users, a batch system, and what goes wrong."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hpcsched.agent.inbox import Answer, Command, send
from hpcsched.batch.base import AllocatedHost, Allocation, BatchJobState, EndReason
from hpcsched.batch.local import Local
from hpcsched.core.model import JobSpec
from hpcsched.decoding import decode_file
from hpcsched.errors import BatchError, StoreError
from hpcsched.launch.base import LaunchPlan
from hpcsched.patience import PASSING
from hpcsched.policy import make_policy
from hpcsched.store import compaction
from hpcsched.store.rundir import RunDir

from .clock import VirtualClock
from .disk import Died, Disk
from .programs import FIRST_PID, Ledger, Program, SharedMemory
from .schedule import Doing, Schedule

HOST = "n1"
CALM_S = 100.0
"""How often users let all go on once nothing goes wrong any more."""
ANSWERS_WITHIN_S = 3.0
"""Time in which an agent answers a command."""
LOOKS_EVERY_S = 0.2
"""How often users look for answers."""
OVER_AFTER_S = 600.0
"""Time after which all must be over then; what is left is stuck."""
COMPACTS_S = 1.0
"""How long the process that prepares a compaction is at it."""
KILL_WAIT_S = 10.0
"""From the SIGTERM of the batch system to its SIGKILL."""


@dataclass
class Sent:
    """A command that was sent `at` a time, and what was `answered`, and when. `refused`: it is none, or one
    that cannot be carried out. `due`: when an agent had had time to answer, undisturbed."""

    command: Command
    at: float
    refused: bool
    answer: Answer | None = None
    answered: float = float("inf")
    due: float | None = None

    @property
    def cancels(self) -> bool:
        return self.command.command == "cancel"

    @property
    def retries(self) -> bool:
        return self.command.command == "retry"

    def may_change(self, job_ids: Iterable[int]) -> bool:
        """Whether it may have done something to one of these jobs, or may still do so."""
        if self.answer is None:
            return bool({*job_ids}.intersection(self.command.targets))
        if not self.answer.done:  # an agent has carried it out that did not live to say so
            return not self.answer.error and bool({*job_ids}.intersection(self.command.targets))
        return any(done and i in job_ids for i, done in zip(self.answer.ids, self.answer.done, strict=True))


class World:
    """Everything but the agent. It outlives each agent."""

    def __init__(self, schedule: Schedule, root: Path) -> None:
        self.schedule, self.rundir = schedule, RunDir(root / "run")
        self.clock = VirtualClock()
        self.random = Random(schedule.seed ^ 0x5EED)
        self.disk = Disk(root, self.random)
        self.clock.around = self.disk.not_the_agent
        self.ledger = Ledger()
        self.programs: list[Program] = []
        self.memory = SharedMemory(self.clock, self.ledger)
        self.lost_gpus: set[int] = set()
        self.sent: dict[str, Sent] = {}
        """By the names of their files."""
        self._told_to_end_at = self._jumped_at = float("-inf")
        self.limit: float | None = None
        """When the batch job's time is up, as a Unix time."""
        self.batch_silent_until = 0.0
        self.reason = EndReason.NONE
        self.calm = False
        self._disturbances: list[tuple[float, bool]] = [(float("-inf"), False)]
        """When something has disturbed the agent, and whether it could work well from then on."""
        self.lives, self.lived_s, self.stopped_s = 0, 0.0, 0.0
        """How many agents there were, for how long, and for how long all was stopped."""
        self._began = self._stopped_before_s = 0.0
        self.wrong: list[str] = []
        """What was seen to be wrong while it was played."""
        self.said: list[str] = []
        self._next_pid = FIRST_PID
        for doing in schedule.doings:
            self.clock.after(doing.at, lambda doing=doing: self._do(doing))
        self.clock.after(LOOKS_EVERY_S, self._looks_again)
        self.clock.after(schedule.lasts_s, self._lets_all_go_on)

    # --- the launcher -----------------------------------------------------------------------

    def launch(self, plan: LaunchPlan) -> Program:
        if self.disk.dead:
            raise Died
        ranks = len(plan.devices) if plan.per_rank else plan.processes
        pids = range(self._next_pid, self._next_pid + ranks)
        self._next_pid += ranks
        habits = self.schedule.habits[plan.env["HPCSCHED_JOB_NAME"]]
        program = Program(plan, pids, habits, self.clock, self.ledger, lambda: self.programs, self.memory)
        self.programs = [*(one for one in self.programs if not one.over), program]
        self.ledger.launched[program.job].append(self.clock.monotonic)
        return program

    def ready_for(self, plan: LaunchPlan) -> bool:
        return True

    def give_up(self, job_id: int, attempt: int) -> None: ...

    def forget(self, job_id: int) -> None:
        self.memory.forget(job_id)

    def keeping(self) -> set[int]:
        return self.memory.keeping()

    @property
    def living(self) -> list[Program]:
        return [program for program in self.programs if program.alive]

    # --- processes that another agent has left ----------------------------------------------

    def find_orphans(self, run_id: str, known: Iterable[Any], **_: Any) -> list[tuple[int, int]]:
        return sorted(process for program in self.living for process in program.processes)

    def end_processes(
        self, processes: Sequence[tuple[int, int]], grace_s: float, *, killed: list[tuple[int, int]] | None
    ) -> list[tuple[int, int]]:
        theirs = [program for program in self.living if set(program.processes) & set(processes)]
        for program in theirs:
            program.signal(signal.SIGTERM)
        until = self.clock.monotonic + grace_s
        while any(program.alive for program in theirs) and self.clock.monotonic < until:
            self.clock.sleep(0.1)
        for program in theirs:
            if program.alive and killed is not None:
                killed += program.processes
            program.killed()
        return []

    def compacts(self, journal: Path, words: Sequence[str]) -> Compaction:
        """A process begins that prepares the compaction of the journal."""
        life, process = self.lives, Compaction(journal, words)
        self.clock.after(COMPACTS_S, lambda: self.disk.living and self.lives == life and process.ends())
        return process

    # --- what happens -----------------------------------------------------------------------

    def _do(self, doing: Doing) -> None:
        self.said.append(f"{self.clock.monotonic - 1000:.3f}: {doing.kind} {doing.args}")
        self.looks_for_answers()  # as a jump of the clock makes the agent forget old ones
        match doing.kind, doing.args:
            case "submit", (name,):
                self._send(Command(command="submit", jobs=[self.schedule.later[name]]))
            case "submit again", (name,):
                self._send(Command(command="submit", jobs=[self._spec(name)]), refused=True)
            case "no command", (data,):
                self._puts(data)
            case (("cancel" | "hold" | "release" | "suspend" | "resume" | "retry"), (name,)):
                if job_id := self._id_of(name):
                    self._send(Command(command=doing.kind, targets=[job_id]))
            case "kill agent", ():
                self.disk.dies()
            case "kill agent in a call", (calls,):
                self.disk.kill_at_call = self.disk.calls + calls
            case "node dies", ():
                for program in self.living:
                    program.killed()
                self.disk.node_dies(self.rundir.journal)
                self.disk.dies()
            case "kill worker", (name,):
                if theirs := [program for program in self.living if program.job == name]:
                    program = self.random.choice(theirs)
                    program.loses(self.random.randrange(len(program.processes)))
            case (("no room" | "broken disk"), (seconds,)):
                full = doing.kind == "no room"
                numbers = (errno.ENOSPC, errno.EDQUOT) if full else (errno.EIO, errno.ESTALE)
                self.disk.failing = self.random.choice(numbers)
                self._disturbs()
                self.clock.after(seconds, self._disk_is_well)
            case "no more files", (seconds,):
                self.disk.no_more_files = True
                self._disturbs()
                self.clock.after(seconds, self._disk_is_well)
            case "clock jumps", (seconds,):
                self._disturbs()
                self.clock.jumped_s += seconds
                self._jumped_at = self.clock.monotonic
            case "all stopped", _ if self.disk.failing in PASSING:
                pass  # the agent waits for the disk, in the middle of a round: stops are played between two
            case "all stopped", (seconds,):
                self.clock.stand_still(seconds)
                self._disturbs()
                self.stopped_s += seconds
                if self.limit is not None:  # the batch system stopped it, and does not count that time
                    self.limit += seconds
                for program in self.living:
                    program.stood_still(seconds)
            case "batch silent", (seconds,):
                self._disturbs()
                self.batch_silent_until = self.clock.monotonic + seconds
            case "GPU lost", (gpu, seconds):
                self.lost_gpus.add(gpu)
                self.clock.after(seconds, lambda: self.lost_gpus.discard(gpu))
            case "SIGTERM", ():
                self._told_to_end_at = self.clock.monotonic
                self.signals(signal.SIGTERM)
            case "ends sooner", (seconds,):
                self._ends_sooner(seconds)
            case _:
                raise AssertionError(doing)

    def _lets_all_go_on(self) -> None:
        ids = list(range(1, len(self.schedule.jobs) + 1))
        for kind in ("release", "resume"):
            self._send(Command(command=kind, targets=ids))
        if not self.calm:
            self.clock.after(OVER_AFTER_S, self._gives_up)
        self.calm = True
        self.clock.after(CALM_S, self._lets_all_go_on)

    def _gives_up(self) -> None:
        raise AssertionError(f"not over after {OVER_AFTER_S:g} s of calm")

    def _disk_is_well(self) -> None:
        self.disk.failing, self.disk.no_more_files = 0, False
        self._disturbs()

    def signals(self, number: signal.Signals) -> None:
        """Send the agent, if there is one, a signal; one that it does not catch yet ends it."""
        if not self.disk.living:
            return
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            assert number is signal.SIGTERM, "a warning that nobody hears"
            self.disk.dies()
        os.kill(os.getpid(), number)

    def _id_of(self, name: str) -> int:
        names = [spec.name for spec in self.schedule.jobs]
        return names.index(name) + 1 if name in names else 0

    def _spec(self, name: str) -> JobSpec:
        return next(spec for spec in self.schedule.jobs if spec.name == name)

    def _send(self, command: Command, *, refused: bool = False) -> None:
        """Send a command, one that is to be refused or not."""
        try:
            self._was_sent(send(self.rundir, command), command, refused=refused)
        except StoreError as error:
            self.said.append(str(error))

    def _was_sent(self, name: str, command: Command, *, refused: bool) -> None:
        self.sent[name] = sent = Sent(command, self.clock.monotonic, refused)
        self.clock.after(ANSWERS_WITHIN_S, lambda: self._must_be_answered(sent))

    def _puts(self, data: bytes) -> None:
        """Put something into the inbox that is no command."""
        name = f"{int(self.clock.wall * 1e9):020d}.1.elsewhere"
        if (folder := self.rundir.inbox / "new").is_dir():
            (folder / name).write_bytes(data)
            self._was_sent(name, Command(command=repr(data[:30])), refused=True)

    def _must_be_answered(self, sent: Sent) -> None:
        if self.undisturbed(sent.at):
            sent.due = self.clock.monotonic

    def _looks_again(self) -> None:
        self.looks_for_answers()
        self.clock.after(LOOKS_EVERY_S, self._looks_again)

    def looks_for_answers(self) -> None:
        for name, sent in self.sent.items():
            if sent.answer is None:
                with suppress(OSError):
                    sent.answer = decode_file(self.rundir.inbox / "ack" / name, Answer)
                    sent.answered = self.clock.monotonic

    # --- the batch system -------------------------------------------------------------------

    def begins(self) -> None:
        """A batch job begins: an allocation with its own time limit."""
        self.lives += 1
        self.looks_for_answers()  # who waits for one sees it before it is removed
        self._began, self._stopped_before_s = self.clock.monotonic, self.stopped_s
        self._disturbs()
        limit_s = None if self.calm else self.schedule.time_limit_s
        self.reason, self.limit = EndReason.NONE, None
        if limit_s is None:
            return
        self._ends_in(limit_s)

    def _ends_in(self, seconds: float) -> None:
        """The batch job's time is up in so many seconds."""
        life, self.limit = self.lives, self.clock.wall + seconds

        def over() -> None:
            if self.lives == life and self.disk.living:
                self.reason = EndReason.LIMIT
                self.clock.after(KILL_WAIT_S, kill)
                self.signals(signal.SIGTERM)

        def kill() -> None:
            if self.lives == life and self.disk.living:
                for program in self.living:
                    if program.would_save and self.undisturbed(self.clock.monotonic - seconds / 2):
                        self.wrong.append(f"{program.job}: attempt {program.attempt} was killed at the limit")
                    program.killed()
                self.disk.dies()

        self.clock.after(seconds, over)

    def _ends_sooner(self, seconds: float) -> None:
        """Its time is up in so many seconds, if not sooner: the batch system warns of that."""
        if self.disk.living and self.limit is not None and self.limit > self.clock.wall + seconds:
            self._ends_in(seconds)
            self.signals(signal.SIGUSR2)

    def ended(self, *, died: bool) -> None:
        """The agent is gone: the batch job is over, or another agent begins in it."""
        # It may be the batch system's, which kills soon after: there is no time for all then.
        hurried = self.limit is not None and self.clock.monotonic - self._told_to_end_at < KILL_WAIT_S
        # By a clock that has jumped it may be over long before the batch system says so.
        jumped = self.limit is not None and self._jumped_at >= self._began and self.clock.wall > self.limit
        if not (died or self.disk.failing or hurried or jumped):
            left = self.memory.keeping()
            self.wrong += [f"job {job_id}: its state was left in memory" for job_id in left]
        self.memory.lost()
        for program in self.living:
            program.agent_is_gone()
        self._disturbs()
        self.lived_s += self.clock.monotonic - self._began - (self.stopped_s - self._stopped_before_s)

    def undisturbed(self, since: float, until: float = float("inf")) -> bool:
        """Whether nothing has disturbed an agent between these times."""
        before = [well for at, well in self._disturbances if at < since]
        return before[-1] and not any(since <= at <= until for at, _ in self._disturbances)

    def disk_was_well(self) -> bool:
        """Whether the disk has done all that was asked of it since this agent began."""
        return all(well for at, well in self._disturbances if at >= self._began)

    def _disturbs(self) -> None:
        well = self.disk.living and not (self.disk.failing or self.disk.no_more_files)
        self._disturbances.append((self.clock.monotonic, well))


class Compaction:
    """The process that prepares a compaction; it dies with the agent."""

    def __init__(self, journal: Path, words: Sequence[str]) -> None:
        self._journal, self._archives = journal, "archive" in words
        self.returncode: int | None = None

    def ends(self) -> None:
        """It has done its work, unless it was killed."""
        if self.returncode is None:
            compaction.prepare(self._journal, make_policy, archives=self._archives)
            self.returncode = 0

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL

    def wait(self) -> int | None:
        return self.returncode


class VirtualBatch(Local):
    """A batch system with a time limit; one without is none at all."""

    def __init__(self, world: World) -> None:
        super().__init__((HOST,))
        self._world = world

    def allocation(self) -> Allocation:
        hosts = (AllocatedHost(name=HOST),)
        if self._world.limit is None:
            return Allocation(kind="none", id=None, hosts=hosts, here=HOST)
        return Allocation(kind="slurm", id="7", hosts=hosts, here=HOST, deadline=self._world.limit)

    def end_time(self) -> float | None:
        if self._world.clock.monotonic < self._world.batch_silent_until:
            raise BatchError("squeue: no answer")
        return self._world.limit

    def reason(self) -> EndReason:
        silent = self._world.clock.monotonic < self._world.batch_silent_until
        return EndReason.UNKNOWN if silent else self._world.reason

    def kill_wait(self) -> float | None:
        return KILL_WAIT_S

    def job_state(self, job_id: str) -> BatchJobState:
        return BatchJobState.RUNNING

    def comment(self, text: str) -> None: ...
