"""Why a batch job ends and how long there is, by Slurm's words."""

from __future__ import annotations

import pytest

from hpcsched.batch import slurm_text
from hpcsched.batch.base import BatchJobState, EndReason, Preemption
from hpcsched.batch.command import CommandOutput
from hpcsched.batch.slurm import Slurm
from hpcsched.testing.batch import SLURM_JOB, FakeCluster, FakeJob, FakeSlurmCommands

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
    said = CommandOutput(0, f"{brother}\nJobId=7 JobName=a b {text} \n")
    assert slurm_text.reason_in(said, "7", 0) is reason
    assert slurm_text.reason_in(said, "8", 0) is EndReason.UNKNOWN
    assert slurm_text.reason_in(CommandOutput(1, said.out, "no contact"), "7", 0) is EndReason.UNKNOWN


@pytest.mark.parametrize(
    ("state", "end_s", "grace_s", "reason"),
    [
        # A release that leaves PreemptTime as it was when the grace is over.
        ("COMPLETING", 40, 40.0, EndReason.PREEMPTED),
        ("COMPLETING", 70, 40.0, EndReason.PREEMPTED),
        ("COMPLETING", 20, 40.0, EndReason.CANCELLED),
        ("COMPLETING", 600, 40.0, EndReason.CANCELLED),
        ("COMPLETING", 20, None, EndReason.CANCELLED),
        ("COMPLETING", 0, 40.0, EndReason.PREEMPTED),
        ("RUNNING", 40, 40.0, EndReason.PREEMPTED),
        ("RUNNING", 600, None, EndReason.PREEMPTED),
        # Suspended once for another job, and going on since.
        ("RUNNING", 600, 0.0, EndReason.NONE),
        ("RUNNING", None, 0.0, EndReason.NONE),
        ("COMPLETING", 30, 0.0, EndReason.CANCELLED),
    ],
)
def test_a_preemption_ends_a_job_when_its_grace_is_over(
    state: str, end_s: int | None, grace_s: float | None, reason: EndReason
) -> None:
    end = "Unknown" if end_s is None else f"2026-11-23T14:{end_s // 60:02}:{end_s % 60:02}"
    text = f"JobId=7 JobState={state} Reason=None Restarts=0 EndTime={end} PreemptTime=2026-11-23T14:00:00"
    assert slurm_text.reason_in(CommandOutput(0, text), "7", 0, grace_s) is reason


def test_a_jobs_name_says_nothing_of_its_state() -> None:
    text = "JobId=7 JobName=lr JobState=RUNNING Restarts=7 a UserId=me(1000) GroupId=me(1000) "
    text += f"JobState=COMPLETING Reason=None Restarts=0 {ENDS} PreemptTime=None"
    assert slurm_text.reason_in(CommandOutput(0, text), "7", 0) is EndReason.CANCELLED
    assert slurm_text.job_fields(text)["UserId"] == "me(1000)"


def test_a_job_in_its_second_life_was_requeued_once_and_not_now() -> None:
    known = FakeCluster({"7": FakeJob("7", "COMPLETING", why="TimeLimit", restarts=1)})
    second = Slurm({**SLURM_JOB, "SLURM_RESTART_COUNT": "1"}, run=FakeSlurmCommands(known))
    assert second.reason() is EndReason.LIMIT
    assert Slurm(SLURM_JOB, run=FakeSlurmCommands(known)).reason() is EndReason.REQUEUED


def test_a_count_of_restarts_may_be_inherited_from_the_job_that_submitted_this_one() -> None:
    known = FakeCluster({"7": FakeJob("7")})
    batch = Slurm({**SLURM_JOB, "SLURM_RESTART_COUNT": "2"}, run=FakeSlurmCommands(known))
    assert batch.allocation().restart_count == 0
    known.jobs["7"] = FakeJob("7", "COMPLETING", restarts=1)
    assert batch.reason() is EndReason.REQUEUED


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
        known.jobs["7"] = FakeJob("7", "COMPLETING", preempted=1000.0, end=1040.0)
        assert batch.reason() is (EndReason.PREEMPTED if then else EndReason.CANCELLED)
    by_qos = "PreemptType             = preempt/qos\n"
    assert slurm_text.preemption_in(known.partition, by_qos) == Preemption(grace_s=None, requeues=True)


def test_another_clusters_job_is_not_looked_for_on_this_one() -> None:
    known = FakeCluster({"7": FakeJob("7")})
    run = FakeSlurmCommands(known)
    assert Slurm({}, run=run, cluster="marble").job_state("7") is BatchJobState.RUNNING
    assert not any(word.startswith("--clusters") for call in known.calls for word in call)
    Slurm({}, run=run, cluster="summit").job_state("7")
    assert "--clusters=summit" in known.calls[-1]
    assert Slurm({**SLURM_JOB, "SLURM_CLUSTER_NAME": "summit"}, run=run).allocation().cluster == "summit"
    assert slurm_text.state_in(CommandOutput(0, "CLUSTER: summit\n"), "7") is BatchJobState.ENDED
    assert (
        slurm_text.state_in(CommandOutput(0, "CLUSTER: summit\n7|RUNNING|N/A\n"), "7")
        is BatchJobState.RUNNING
    )
