"""Why a batch job ends, how long there is, and what follows from it; the batch system is a stand-in."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hpcsched.agent import ending as endings
from hpcsched.agent.clock import RunClock
from hpcsched.agent.ending import Ending, forced_s
from hpcsched.agent.watch import AllocationWatch, Answer, period_s
from hpcsched.batch import slurm_text as says
from hpcsched.batch.base import EndReason, JobLife, Preemption
from hpcsched.batch.command import Answer as Said
from hpcsched.batch.pyslurm import Asker
from hpcsched.batch.slurm import Slurm
from hpcsched.core import events as ev
from hpcsched.errors import BatchError
from hpcsched.testing.batch import SLURM_JOB, FakeCluster, FakeJob, FakeSlurmCommands
from hpcsched.testing.builders import Driver, a_job, a_profile

ENDS = "EndTime=2026-11-23T14:31:07"
EARLY, LATE = "PreemptTime=2026-11-23T14:30:47", "PreemptTime=2026-11-23T14:31:07"
CASES = [
    # As Slurm 22.05.8 said it of real jobs, in the handler of their SIGTERM (the words that matter).
    (f"JobState=COMPLETING Reason=TimeLimit Restarts=0 {ENDS} PreemptTime=None", EndReason.LIMIT),
    (f"JobState=COMPLETING Reason=None Restarts=0 {ENDS} PreemptTime=None", EndReason.CANCELLED),
    ("JobState=COMPLETING Reason=None Restarts=1 EndTime=Unknown PreemptTime=None", EndReason.REQUEUED),
    ("JobState=PENDING Reason=BeginTime Restarts=1 EndTime=Unknown", EndReason.REQUEUED),
    (f"JobState=COMPLETING Reason=NodeDown Restarts=0 {ENDS} PreemptTime=None", EndReason.NODE_FAIL),
    (f"JobState=RUNNING Reason=None Restarts=0 {ENDS} {EARLY}", EndReason.PREEMPTED),
    (
        f"JobState=COMPLETING Reason=None Restarts=0 {ENDS} PreemptTime=2026-11-23T14:31:07",
        EndReason.PREEMPTED,
    ),
    # Cancelled by its owner while its time of grace ran.
    (
        f"JobState=COMPLETING Reason=None Restarts=0 {ENDS} PreemptTime=2026-11-23T14:30:47",
        EndReason.CANCELLED,
    ),
    (f"JobState=RUNNING Reason=None Restarts=0 {ENDS} PreemptTime=None", EndReason.NONE),
    ("JobState=BAFFLED Reason=None Restarts=0", EndReason.UNKNOWN),
]


@pytest.mark.parametrize(("text", "reason"), CASES)
def test_why_slurm_ends_a_job(text: str, reason: EndReason) -> None:
    brother = "JobId=6 JobState=COMPLETING Reason=TimeLimit Restarts=5"
    said = Said(0, f"{brother}\nJobId=7 JobName=a b {text} \n")
    assert says.reason_in(said, "7", 0) is reason
    assert says.reason_in(said, "8", 0) is EndReason.UNKNOWN
    assert says.reason_in(Said(1, said.out, "no contact"), "7", 0) is EndReason.UNKNOWN


def test_a_job_in_its_second_life_was_requeued_once_and_not_now() -> None:
    known = FakeCluster({"7": FakeJob("7", "COMPLETING", why="TimeLimit", restarts=1)})
    second = Slurm({**SLURM_JOB, "SLURM_RESTART_COUNT": "1"}, run=FakeSlurmCommands(known))
    assert second.reason() is EndReason.LIMIT
    assert Slurm(SLURM_JOB, run=FakeSlurmCommands(known)).reason() is EndReason.REQUEUED


def test_how_long_slurm_gives() -> None:
    known = FakeCluster({"7": FakeJob("7")})
    batch = Slurm({**SLURM_JOB, "SLURM_JOB_PARTITION": "main"}, run=FakeSlurmCommands(known))
    assert batch.kill_wait() == 45.0
    assert batch.allocation().preemption is None
    shown = "PartitionName=p GraceTime={} PreemptMode={}\n"
    for grace, mode, then in (
        (40, "REQUEUE", Preemption(grace_s=40.0, requeues=True)),
        (40, "CANCEL", Preemption(grace_s=40.0, requeues=False)),
        (40, "GANG,SUSPEND", None),
        (0, "REQUEUE", None),
    ):
        known.partition = shown.format(grace, mode)
        assert batch.allocation().preemption == then
    by_qos = "PreemptType             = preempt/qos\n"
    assert says.preemption_in(known.partition, by_qos) == Preemption(grace_s=None, requeues=True)


@pytest.mark.parametrize(
    ("wait_s", "counted_s"), [(None, 25.0), (30.0, 25.0), (5.0, 4.0), (120.0, 100.0), (1.0, 0.5), (0.0, 0.0)]
)
def test_what_is_counted_on_of_the_time_before_sigkill(wait_s: float | None, counted_s: float) -> None:
    assert forced_s(wait_s) == counted_s


@pytest.mark.parametrize(("grace_s", "every_s"), [(300.0, 10.0), (40.0, 4.0), (5.0, 2.0), (None, 10.0)])
def test_the_end_is_asked_for_often_where_hosts_may_be_taken(grace_s: float | None, every_s: float) -> None:
    assert period_s(Preemption(grace_s=grace_s, requeues=True)) == every_s
    assert period_s(None) == 60.0


def test_another_clusters_job_is_not_looked_for_on_this_one() -> None:
    known = FakeCluster({"7": FakeJob("7")})
    run = FakeSlurmCommands(known)
    assert Slurm({}, run=run, cluster="marble").life("7") is JobLife.RUNNING
    assert not any(word.startswith("--clusters") for call in known.calls for word in call)
    Slurm({}, run=run, cluster="summit").life("7")
    assert "--clusters=summit" in known.calls[-1]
    assert Slurm({**SLURM_JOB, "SLURM_CLUSTER_NAME": "summit"}, run=run).allocation().cluster == "summit"
    assert says.life_in(Said(0, "CLUSTER: summit\n"), "7") is JobLife.ENDED
    assert says.life_in(Said(0, "CLUSTER: summit\n7|RUNNING|N/A\n"), "7") is JobLife.RUNNING


# --- what the agent makes of it --------------------------------------------------------------


class Watch:
    """A watch whose answers the test gives."""

    def __init__(self, kill_wait_s: float | None = 30.0) -> None:
        self.comment, self.kill_wait_s = "", kill_wait_s
        self.answers: list[Answer] = []
        self.why = 0

    def ask_now(self) -> None: ...

    def ask_why(self) -> None:
        self.why += 1

    def take(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers


class Scene:
    """A run with an hour left, and what it is told."""

    def __init__(self, *, deadline: float | None = 3600.0, kill_wait_s: float | None = 30.0) -> None:
        profile = a_profile("m", [1.0, 2.0], start_s=1.0, suspend_s=1.0)
        self.driver = Driver(a_job("a", "m"), gpus=2, profiles=(profile,), deadline=deadline)
        self.watch, self.said = Watch(kill_wait_s), []
        self.ending = Ending(
            self.driver.machine,
            RunClock(),
            watch=self.watch,  # type: ignore[arg-type]
            tell=self.said.append,
            publish=lambda at: None,
        )

    def hears(self, *answers: Answer) -> list[ev.Event]:
        self.watch.answers += answers
        events = self.ending.events()
        for event in events:
            self.driver.handle(event)
        return events

    @property
    def cause(self) -> str:
        return self.driver.machine.drain_cause

    @property
    def left_s(self) -> float:
        return self.driver.machine.deadline or 0.0


def why(reason: EndReason) -> Answer:
    return Answer(reason=reason, of_end=False)


@pytest.mark.parametrize(
    "reason",
    [EndReason.LIMIT, EndReason.CANCELLED, EndReason.PREEMPTED, EndReason.REQUEUED, EndReason.NODE_FAIL],
)
def test_a_sigterm_is_asked_about_before_anything_is_done(reason: EndReason) -> None:
    scene = Scene(kill_wait_s=120.0)
    assert scene.ending.told_to_end() == [] and scene.watch.why == 1
    assert scene.hears() == []
    scene.hears(why(reason))
    assert scene.cause == f"batch:{reason}"
    assert 95 < scene.left_s <= 101


def test_a_warning_before_it_does_not_make_a_cancel_the_end_of_the_time() -> None:
    scene = Scene()
    assert scene.ending.warned("SIGUSR2") == []
    scene.hears(Answer(deadline=time.time() + 3600))
    scene.ending.told_to_end()
    scene.hears(why(EndReason.CANCELLED))
    assert scene.cause == "batch:CANCELLED"


def test_a_cancel_while_it_saves_for_the_end_counts() -> None:
    scene = Scene()
    scene.driver.tell(ev.DrainRequested, cause="deadline")
    scene.ending.told_to_end()
    scene.hears(why(EndReason.CANCELLED))
    assert scene.cause == "batch:CANCELLED" and scene.left_s < 30


def test_a_sigterm_of_a_job_that_goes_on_is_a_warning() -> None:
    scene = Scene()
    scene.ending.told_to_end()
    end = Answer(deadline=time.time() + 3600)
    assert scene.hears(why(EndReason.NONE), end) == []
    assert any("SIGTERM from the batch system; saving begins in" in text for text in scene.said)
    scene.ending.told_to_end()  # the real one
    scene.hears(why(EndReason.LIMIT))
    assert scene.cause == "batch:LIMIT"


def test_an_interrupt_of_a_job_that_goes_on_is_its_users() -> None:
    scene = Scene()
    scene.ending.told_to_end("SIGINT")
    scene.hears(why(EndReason.NONE))
    assert scene.cause == "SIGINT"


@pytest.mark.parametrize(("deadline", "cause"), [(3600.0, "SIGTERM"), (None, "SIGTERM"), (0.5, "deadline")])
def test_without_a_word_all_is_saved_and_the_word_counts_when_it_comes(
    monkeypatch: pytest.MonkeyPatch, deadline: float | None, cause: str
) -> None:
    monkeypatch.setattr(endings, "SAID_WITHIN_S", -1.0)
    scene = Scene(deadline=deadline)
    scene.ending.told_to_end()
    scene.hears()
    assert scene.cause == cause and scene.left_s < 26
    scene.hears(why(EndReason.UNKNOWN))
    assert scene.cause == cause
    scene.hears(why(EndReason.REQUEUED))
    assert scene.cause == "batch:REQUEUED"


def test_a_preemption_is_the_end_when_its_grace_is_over() -> None:
    scene = Scene()
    end = time.time() + 40
    scene.hears(Answer(deadline=end, reason=EndReason.PREEMPTED))
    assert scene.cause == "batch:PREEMPTED"
    assert 60 < scene.left_s < 66  # SIGKILL comes later than the end by KillWait
    assert [text for text in scene.said if "hosts are wanted" in text]


class Preempting:
    """A batch system that takes the hosts away at the second question."""

    def __init__(self) -> None:
        self.ends = [10_000.0, 9_000.0]
        self.reasons = 0

    def end_time(self) -> float:
        return self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]

    def reason(self) -> EndReason:
        self.reasons += 1
        return EndReason.PREEMPTED

    def kill_wait(self) -> float:
        return 7.0

    def comment(self, text: str) -> None: ...


@pytest.mark.parametrize("preemption", [Preemption(grace_s=40.0, requeues=True), None])
def test_an_end_that_comes_sooner_is_asked_about_where_hosts_may_be_taken(
    preemption: Preemption | None,
) -> None:
    batch = Preempting()
    watch = AllocationWatch(batch, deadline=10_000.0, preemption=preemption)  # type: ignore[arg-type]
    answers: list[Answer] = []
    try:
        for wanted in (1, 2):
            watch.ask_now()
            deadline = time.monotonic() + 20
            while len(answers) < wanted:
                assert time.monotonic() < deadline
                answers += watch.take()
                time.sleep(0.01)
    finally:
        watch.close()
    assert [answer.reason for answer in answers] == [None, EndReason.PREEMPTED if preemption else None]
    assert watch.kill_wait_s == 7.0


# --- pyslurm in a process of its own ---------------------------------------------------------

HANGS = """
import ctypes
__version__ = "25.11.2"
class RPCError(Exception): ...
class Job:
    @staticmethod
    def load(job):
        if job == 7:
            ctypes.PyDLL(None).sleep(600)  # with Python's lock held, as libslurm does
        if job == 8:
            raise RPCError("Invalid job id specified")
        found = Job()
        found.end_time, found.state = 1000 + job, "RUNNING"
        return found
"""


def test_a_pyslurm_that_hangs_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text(HANGS)
    ask = Asker({"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}, timeout_s=20.0)
    assert ask("end_time", 9) == 1009
    first = ask._process
    assert first is not None
    ask._timeout_s = 0.5
    with pytest.raises(BatchError, match=r"pyslurm did not answer: nothing within 0\.5 s"):
        ask("end_time", 7)
    assert first.poll() is not None
    ask._timeout_s = 20.0
    assert ask("state", 9) == "RUNNING"
    with pytest.raises(BatchError, match="Invalid job id specified"):
        ask("state", 8)
    assert ask("version") == "25.11.2"
    ask.close()
