"""What a Slurm site allows, as `doctor` tells it: on recorded text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from places import DATA

from hpcsched.batch.command import CommandOutput
from hpcsched.batch.slurm_limits import has_code, limits
from hpcsched.errors import BatchError

BATCH = DATA / "batch"
ANSWERS = {
    "config": "scontrol-config-22.05.txt",
    "partition": "scontrol-partition-22.05.txt",
    "assoc": "sacctmgr-assoc-22.05.txt",
    "qos": "sacctmgr-qos-22.05.txt",
}


class Recorded:
    """Answers as Slurm did; what is in `silent` hangs or is forbidden."""

    def __init__(self, *silent: str) -> None:
        self.silent, self.calls = silent, list[tuple[str, ...]]()

    def __call__(self, argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = "") -> CommandOutput:
        self.calls.append(tuple(argv))
        topic = next((word for word in ANSWERS if word in argv), "job")
        if topic in self.silent:
            raise BatchError(f"{argv[0]} did not answer within 5 s")
        if topic == "job":
            return CommandOutput(0, "JobId=7 JobName=x UserId=ada(1) Account=lab QOS=long\n")
        text = (BATCH / ANSWERS[topic]).read_text()
        if topic == "partition" and argv[-1] != "partition":
            text = next(f"{line}\n" for line in text.splitlines() if f"PartitionName={argv[-1]} " in line)
        if topic == "assoc":
            own = not any(word == "user=" for word in argv)
            text = "".join(f"{row}\n" for row in text.splitlines() if ("|ada|" in row) == own)
        return CommandOutput(0, text)


def told(run: Recorded, **environ: str) -> list[str]:
    return [f"{what}: {words}" for what, words in limits(environ, run=run, user="ada")]


def test_on_a_login_node() -> None:
    lines = told(Recorded())
    assert (
        "partition main (default): MaxTime=02:00:00, DefaultTime=00:10:00, MaxNodes=1, DefMemPerCPU=500"
        in lines
    )
    (spare,) = (line for line in lines if line.startswith("partition spare"))
    assert "PreemptMode=REQUEUE GraceTime=40" in spare and "MaxMemPerNode=3000" in spare
    assert "KillWait: 60 s from SIGTERM to SIGKILL" in "\n".join(lines)
    assert [line for line in lines if line.startswith("account lab, of user ada: at most 3 jobs at a time")]
    assert [line for line in lines if line.startswith("account lab: ") and "cpu=8 for all its users" in line]
    assert "QOS long: at most 08:00:00 for each job (--time); at most cpu=10 for each user" in "\n".join(
        lines
    )


def test_inside_a_job_each_limit_of_its_partition_is_said_with_what_it_means() -> None:
    lines = told(Recorded(), SLURM_JOB_ID="7", SLURM_JOB_PARTITION="spare")
    mine = [line for line in lines if line.startswith("partition ")]
    assert mine and all(line.startswith("partition spare: ") for line in mine)
    grace = "jobs may have to make way: requeued, with 40 s of grace to save in"
    assert f"partition spare: PreemptMode=REQUEUE GraceTime=40: {grace}" in mine
    memory = "a job that asks for no memory gets so many MiB for each CPU; more by --mem"
    assert f"partition spare: DefMemPerCPU=500: {memory}" in mine
    assert not any(line.startswith("account root") for line in lines)


def test_what_the_controllers_settings_mean() -> None:
    lines = "\n".join(told(Recorded()))
    for said in (
        "JobRequeue: 0: for --requeue the script needs #SBATCH --requeue",
        "RequeueExit: 70-79: Slurm requeues jobs that end so, also a run that stops with work left (75)",
        "max_batch_requeue: 3",
        "disable_job_shrink: --release-idle-nodes is refused",
        "OverTimeLimit: 5 min",
    ):
        assert said in lines


@pytest.mark.parametrize("silent", [("config",), ("partition",), ("assoc",), ("qos", "job")])
def test_what_is_not_told_is_left_out(silent: tuple[str, ...]) -> None:
    run = Recorded(*silent)
    lines = told(run, SLURM_JOB_ID="7")
    assert bool(lines) != ("config" in silent)
    assert len(run.calls) <= 6


def test_lists_of_exit_codes() -> None:
    assert [has_code(text, 75) for text in ("75", "3, 70-79", "76-80", "", "x", "75-x")] == [
        *(True, True, False, False, False, True)
    ]
