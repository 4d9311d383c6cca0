"""Slurm's queue: what its commands print (22.05, and other releases' forms), and what is refused."""

from __future__ import annotations

import pytest

from hpcsched.batch.base import EndReason
from hpcsched.batch.command import CommandOutput
from hpcsched.batch.numbers import whole
from hpcsched.batch.queue import Pending, Planned, Shape
from hpcsched.batch.slurm_limits import has_code
from hpcsched.batch.slurm_queue import (
    SlurmQueue,
    gpus_in,
    partitions_in,
    pending_in,
    planned_in,
    seconds,
    times_in,
)
from hpcsched.batch.slurm_steps import components, gpus_by_request, has_overlap
from hpcsched.batch.slurm_submissions import rows_in
from hpcsched.batch.slurm_text import job_fields, preemption_in, queue_rows, reason_in
from hpcsched.cli.run import waited
from hpcsched.errors import BatchError

SINFO = """\
gpu*|up|2-00:00:00|10|gpu:a100:4(S:0-1)|mixed
gpu*|up|2-00:00:00|2|gpu:h100:8|idle~
gpu*|up|2-00:00:00|3|gpu:a100:4(S:0-1)|drained*
short|up|30:00|12|gpu:a100:4|idle
closed|inactive|infinite|12|gpu:a100:4|idle
cpu|up|infinite|50|(null)|idle
broken line
"""
LIMITS = """\
PartitionName=gpu AllowGroups=ALL MaxNodes=4 MaxTime=2-00:00:00 PreemptMode=OFF State=UP
PartitionName=short MaxNodes=UNLIMITED MaxTime=00:30:00 PreemptMode=REQUEUE State=UP
"""
JOB = (
    "JobId=4 JobName=wrap x=1 UserId=me(0) GroupId=me(0) Requeue=1 Restarts=1 TimeLimit=00:20:00 "
    "SubmitTime=2026-11-28T23:45:45 EligibleTime=2026-11-28T23:47:46 StartTime=2026-11-28T23:48:00 "
    "Partition=main NumNodes=2 NumCPUs=2 TresPerNode=gres:gpu:6"
)


def test_partitions_with_the_nodes_that_can_be_used():
    gpu, short, cpu = partitions_in(SINFO, LIMITS)
    assert (gpu.name, gpu.default, gpu.preempted, gpu.limit_s) == ("gpu", True, False, 172800.0)
    assert (gpu.hosts, gpu.types) == ({4: 10, 8: 2}, ("a100", "h100"))
    assert (gpu.nodes_for(1), gpu.nodes_for(8), gpu.nodes_for(9)) == (4, 2, 0)
    assert (short.limit_s, short.preempted, short.nodes_for(4)) == (1800.0, True, 12)
    assert (cpu.hosts, cpu.limit_s) == ({0: 50}, None)


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:6", [("gpu", 6)]),
        ("gres:gpu:a100:2", [("a100", 2)]),
        ("gres/gpu:h100=8,nvme:1", [("h100", 8)]),
        ("gpu:a100:4(IDX:0-3),gpu:v100:2", [("a100", 4), ("v100", 2)]),
        ("shard:8,mps:100", []),
        ("(null)", []),
        ("", []),
    ],
)
def test_gpus_of_a_node_or_of_a_job(gres, found):
    assert gpus_in(gres) == found


def test_an_answer_about_a_job_that_is_not_submitted():
    said = "sbatch: Job 6 to start at 2026-11-29T00:25:46 using 2 processors on nodes node1 in partition p"
    assert planned_in(said, failed=False) == Planned(start=1795911946.0)
    refused = "allocation failure: Requested node configuration is not available\n"
    assert planned_in(refused, failed=True) == Planned(
        refused="Requested node configuration is not available"
    )
    for text, failed in (
        ("", False),
        ("sbatch: error: Unable to contact slurm controller", True),
        ("?", False),
    ):
        with pytest.raises(BatchError):
            planned_in(text, failed=failed)


def test_times_of_a_job_that_came_back():
    times = times_in(JOB, "4")
    assert times is not None
    assert times.shape == Shape(partition="main", nodes=2, gpus=6, limit_s=1200.0)
    assert (times.started - times.eligible, times.started - times.submitted) == (14.0, 135.0)
    assert times_in(JOB, "5") is None
    assert times_in(JOB.replace("StartTime=2026-11-28T23:48:00", "StartTime=Unknown"), "4") is None


def test_what_is_asked_changes_nothing_and_hides_the_job_we_are_in():
    asked = []

    def run(argv, *, environ, stdin=""):
        asked.append((tuple(argv), environ))
        text = "7|main|2|gres:gpu:6|1:00:00|2026-11-29T00:05:46|Resources\n8|main|1-2|x|1:00|N/A|Priority\n"
        return CommandOutput(
            0, text if argv[0] == "squeue" else "", "sbatch: Job 1 to start at 2026-11-29T00:00:00"
        )

    queue = SlurmQueue({"SLURM_JOB_ID": "3", "SLURM_CONF": "/x", "SBATCH_ACCOUNT": "a"}, run=run)
    shape = Shape(partition="main", nodes=2, gpus=6, limit_s=5400.0)
    assert queue.planned(shape, ("--account=b",)).start is not None
    argv, environ = asked[0]
    assert argv[:2] == ("sbatch", "--test-only")
    assert {"--partition=main", "--nodes=2", "--gres=gpu:6", "--time=1:30:00", "--account=b"} <= set(argv)
    assert {"SLURM_JOB_ID"}.isdisjoint(environ)
    assert (environ["SLURM_CONF"], environ["SBATCH_ACCOUNT"], environ["TZ"]) == ("/x", "a", "UTC0")
    waiting = Shape(partition="main", nodes=2, gpus=6, limit_s=3600.0)
    assert queue.pending() == (Pending(job_id="7", shape=waiting, start=1795910746.0),)


def test_times_that_are_none():
    assert [seconds(text) for text in ("infinite", "UNLIMITED", "1-00:00:00", "?")] == [
        None,
        None,
        86400.0,
        None,
    ]


NO_NUMBERS = ("²", "٣", "9" * 5000, "-1", "1_0", "")


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_ends_no_parser(text):
    assert whole(text) is None
    row = f"gpu|up|1:00:00|{text}|gpu:4|idle\ngpu|up|1:00:00|2|gpu:{text}|idle"
    assert [one.hosts for one in partitions_in(row, f"PartitionName=gpu MaxNodes={text}")] == [{0: 2}]
    assert list(pending_in(f"7|main|{text}|gpu:1|1:00|N/A|x")) == []
    assert times_in(JOB.replace("NumNodes=2", f"NumNodes={text}"), "4") is None
    assert queue_rows(f"{text}|RUNNING|N/A") == []
    assert list(rows_in(f"{text}|a|RUNNING|N/A|N/A|None")) == []
    assert reason_in(CommandOutput(0, f"JobId=4 JobState=RUNNING Restarts={text}"), "4", 0) is EndReason.NONE
    assert preemption_in(f"PreemptMode=REQUEUE GraceTime={text}", "") is None
    assert not has_code(f"{text}-{text}", 3)
    environ = {"SLURM_HET_SIZE": text, "SLURM_GPUS_ON_NODE": text, "SLURMD_NODENAME": "a"}
    assert components(environ) == (environ,)
    assert list(gpus_by_request(environ, ["a"])) == []


def test_a_number_is_at_most_18_digits():
    assert whole("9" * 18) == 10**18 - 1 and whole("9" * 19) is None
    assert has_code("3-", 3) and has_code("70-79", 75) and not has_code("3", 4)
    assert has_overlap(f"slurm {'9' * 5000}.5")


def test_no_answer_about_waiting_ends_a_run(monkeypatch):
    class Odd:
        def times(self, job_id):
            raise ValueError(job_id)

    monkeypatch.setenv("SLURM_JOB_ID", "4")
    monkeypatch.setattr(waited, "queue_of", lambda kind, *, environ: Odd())
    assert waited.begun("slurm") is None


def test_a_jobs_name_is_none_of_its_fields():
    name = "x UserId=a(0) JobState=COMPLETED Restarts=7 y"
    shown = f"JobId=4 JobName={name} UserId=me(1) GroupId=me(1) JobState=RUNNING Command=/x Comment={name} "
    fields = job_fields(shown)
    assert (fields["UserId"], fields["JobState"]) == ("me(1)", "RUNNING")
    assert job_fields("JobId=4 " + "x " * 2**20 + "JobState=RUNNING") == {"JobId": "4"}


@pytest.mark.parametrize("text", [" JobName=" * 20_000, "x" * 2**20, " UserId=" + "(1" * 2**18])
def test_the_fields_of_a_long_text_take_linear_time(text):
    """Quadratic, each of these takes minutes, and the suite's own time limit ends it."""
    assert len(job_fields(text)) <= 1
