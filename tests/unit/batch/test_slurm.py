"""Slurm's commands and environment, on recorded text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from places import DATA

from hpcsched.batch import slurm_steps, slurm_submit, slurm_text
from hpcsched.batch.base import AllocatedHost, BatchJobState
from hpcsched.batch.command import CommandOutput
from hpcsched.batch.pyslurm import PySlurm
from hpcsched.batch.slurm import Slurm
from hpcsched.errors import BatchError
from hpcsched.testing.batch import (
    SLURM_JOB,
    FakeCluster,
    FakeJob,
    FakeSlurmCommands,
    asked_directly,
    fake_pyslurm,
)

BATCH = DATA / "batch"


class Saying:
    """Answers every command alike, and remembers them."""

    def __init__(self, out: str = "", *, code: int = 0, err: str = "") -> None:
        self.answer = CommandOutput(code, out, err)
        self.calls: list[tuple[str, ...]] = []
        self.environs: list[Mapping[str, str]] = []

    def __call__(self, argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = "") -> CommandOutput:
        self.calls.append(tuple(argv))
        self.environs.append(environ)
        return self.answer


def test_recorded_queue() -> None:
    rows = slurm_text.queue_rows((BATCH / "squeue-22.05.txt").read_text())
    assert rows == [
        ("7", BatchJobState.ENDED, 1795244098.0),
        ("1", BatchJobState.ENDED, 1795243888.0),
        ("5", BatchJobState.ENDED, 1795244096.0),
        ("6", BatchJobState.ENDED, 1795244096.0),
        ("4", BatchJobState.PENDING, None),
        ("3", BatchJobState.PENDING, None),
        ("8", BatchJobState.RUNNING, None),  # without a time limit
        ("9", BatchJobState.RUNNING, None),
        ("2", BatchJobState.SUSPENDED, 1795244696.0),
    ]


@pytest.mark.parametrize("end", ["(null)", "", "Unknown", "2026-13-40T99:00:00", "soon"])
def test_an_end_that_is_no_time_is_no_answer(end):
    with pytest.raises(BatchError, match="which is no time"):
        Slurm(SLURM_JOB, run=Saying(f"7|RUNNING|{end}\n")).end_time()


@pytest.mark.parametrize("end", ["UNLIMITED", "N/A", "NONE"])
def test_no_end(end: str) -> None:
    assert Slurm(SLURM_JOB, run=Saying(f"7|RUNNING|{end}\n")).end_time() is None


@pytest.mark.parametrize("out", ["", "garbage\n", "8|RUNNING|2026-11-21T06:37:43\n", "7|RUNNING\n"])
def test_an_answer_without_our_job_is_an_error(out: str) -> None:
    with pytest.raises(BatchError, match="does not list job 7"):
        Slurm(SLURM_JOB, run=Saying(out)).end_time()


def test_the_end_of_one_job_of_an_array() -> None:
    run = Saying("6|RUNNING|2026-11-21T06:37:43\n7|RUNNING|2026-11-21T06:37:44\n")
    assert Slurm(SLURM_JOB, run=run).end_time() == 1795243064.0


def test_the_users_own_formats_do_not_reach_squeue() -> None:
    run = Saying("7|RUNNING|N/A\n")
    odd = {"SQUEUE_STATES": "R", "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "relative", "TZ": "Asia/Tokyo"}
    Slurm({**SLURM_JOB, **odd, "SLURM_CONF": "/x"}, run=run).end_time()
    (environ,) = run.environs
    assert not [key for key in environ if key.startswith("SQUEUE_")]
    assert (environ["SLURM_TIME_FORMAT"], environ["TZ"], environ["SLURM_CONF"]) == ("standard", "UTC0", "/x")


@pytest.mark.parametrize(
    ("answer", "life"),
    [
        (CommandOutput(0, "7|RUNNING|x\n"), BatchJobState.RUNNING),
        (CommandOutput(0, "7|CANCELLED by 0|x\n"), BatchJobState.ENDED),
        (CommandOutput(0, "7|SUSPENDED|x\n"), BatchJobState.SUSPENDED),
        (CommandOutput(0, "7|REQUEUE_HOLD|x\n"), BatchJobState.HELD),
        (CommandOutput(0, "7|PENDING|N/A|BeginTime\n"), BatchJobState.PENDING),
        (CommandOutput(0, "7|PENDING|N/A|launch failed requeued held\n"), BatchJobState.HELD),
        (CommandOutput(0, "7|PENDING|N/A|JobHoldMaxRequeue\n"), BatchJobState.HELD),
        (CommandOutput(0, "7|REVOKED|N/A|None\n7|RUNNING|N/A|None\n"), BatchJobState.RUNNING),  # federated
        (CommandOutput(0, "7|CONFIGURING|x\n"), BatchJobState.PENDING),
        (CommandOutput(0, "7|OUT_OF_MEMORY|x\n"), BatchJobState.ENDED),
        (CommandOutput(0, "7|NEWLY_INVENTED|x\n"), BatchJobState.UNKNOWN),
        (CommandOutput(0, "7||x\n"), BatchJobState.UNKNOWN),
        (CommandOutput(0, ""), BatchJobState.ENDED),
        (CommandOutput(0, "what?\n"), BatchJobState.UNKNOWN),
        (CommandOutput(0, "5|PENDING|x\n6|RUNNING|x\n"), BatchJobState.RUNNING),  # the tasks of an array
        (CommandOutput(1, "", "slurm_load_jobs error: Invalid job id specified\n"), BatchJobState.ENDED),
        (
            CommandOutput(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"),
            BatchJobState.UNKNOWN,
        ),
        (CommandOutput(-9, ""), BatchJobState.UNKNOWN),
    ],
)
def test_lives(answer: CommandOutput, life: BatchJobState) -> None:
    assert slurm_text.state_in(answer, "7") is life


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_ID": "x7"}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
        ({"SLURM_JOB_NODELIST": "node[2-1]"}, "SLURM_JOB_NODELIST"),
        ({"SLURM_PROCID": "3"}, "started this"),
    ],
)
def test_a_broken_environment_is_named(changes: dict[str, str], word: str) -> None:
    with pytest.raises(BatchError, match=word):
        Slurm({**SLURM_JOB, **changes}, run=Saying()).allocation()


def allocated(**changes: str | None) -> list[tuple[str, tuple[str, ...] | None, int | None]]:
    environ = {key: value for key, value in {**SLURM_JOB, **changes}.items() if value is not None}
    found = Slurm(environ, run=Saying(code=1), hostname="node2.cluster").allocation()
    return [(host.name, host.gpus, host.cpus) for host in found.hosts]


def test_gpus_are_told_for_this_host_alone() -> None:
    assert allocated(CUDA_VISIBLE_DEVICES="GPU-5a,MIG-7b") == [
        ("node1", ("GPU-5a", "MIG-7b"), 4),
        ("node2", None, 4),
    ]
    assert allocated(CUDA_VISIBLE_DEVICES=None, SLURM_JOB_GPUS="0-2,5")[0][1] == ("0", "1", "2", "5")
    assert allocated(CUDA_VISIBLE_DEVICES=None, SLURM_STEP_GPUS="4", SLURM_JOB_GPUS="0-5")[0][1] == ("4",)
    assert (
        allocated(CUDA_VISIBLE_DEVICES="")[0][1] == allocated(CUDA_VISIBLE_DEVICES="NoDevFiles")[0][1] == ()
    )
    assert allocated(CUDA_VISIBLE_DEVICES=None, SLURM_JOB_GPUS=None)[0][1] is None
    assert allocated(SLURMD_NODENAME="node2")[0][1] is None
    assert allocated(SLURMD_NODENAME=None)[1][1] == ("0", "1", "2", "3", "4", "5")  # by its host name


def test_other_variables() -> None:
    assert [cpus for _, _, cpus in allocated(SLURM_JOB_CPUS_PER_NODE="2,1")] == [2, 1]
    assert [cpus for _, _, cpus in allocated(SLURM_JOB_CPUS_PER_NODE="2(x3)")] == [None, None]
    assert [name for name, _, _ in allocated(SLURM_JOB_NODELIST=None, SLURM_NODELIST="node9")] == ["node9"]
    elsewhere = Slurm({**SLURM_JOB, "SLURMD_NODENAME": "login1"}, run=Saying(), hostname="login1")
    assert elsewhere.allocation().here is None
    again = Slurm(
        {**SLURM_JOB, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1795243063"}, run=Saying(code=1)
    )
    assert again.allocation().restart_count == 2
    assert again.allocation().deadline == 1795243063.0


def test_gpus_by_host_as_recorded() -> None:
    text = (BATCH / "scontrol-uneven-22.05.txt").read_text()
    assert slurm_text.gpu_counts(text) == {"node1": 6, "node2": 2}
    typed = (
        "  Nodes=n[1-2] CPU_IDs=0-3,7 Mem=0 GRES=gpu:a100:2(IDX:0,3),gpu:a100_1g.5gb:3(IDX:4-6),nic:4 MinCPUs"
    )
    assert slurm_text.gpu_counts(typed) == {"n1": 5, "n2": 5}
    assert slurm_text.gpu_counts("  Nodes=n1 CPU_IDs=0 Mem=0 GRES= MinCPUsNode=1") == {"n1": 0}
    assert slurm_text.job_fields(text)["TresPerJob"] == "gres:gpu:8"
    assert "Account" not in slurm_text.job_fields(text)


def on_hosts(environ: Mapping[str, str], hosts: str = "node1 node2", out: str = "") -> list[tuple[str, ...]]:
    batch = Slurm(environ, run=Saying(out, code=0 if out else 1))
    batch.allocation()
    return batch.on_hosts([AllocatedHost(name=name) for name in hosts.split()], ["agent"])


def gpus_said(commands: list[tuple[str, ...]]) -> list[str | None]:
    said = []
    for command in commands:
        words = [word.partition("=")[2] for word in command if word.startswith("--gpus=")]
        said.append(words[0] if words else None)
    return said


def test_steps_name_the_gpus_of_their_host() -> None:
    assert gpus_said(on_hosts(SLURM_JOB)) == ["6", "6"]
    uneven = (BATCH / "scontrol-uneven-22.05.txt").read_text()
    assert gpus_said(on_hosts(SLURM_JOB, out=uneven)) == ["6", "2"]
    none = {key: value for key, value in SLURM_JOB.items() if "GPU" not in key and "CUDA" not in key}
    assert gpus_said(on_hosts(none)) == [None, None]
    per_task = {**none, "SLURM_GPUS_PER_TASK": "a100:2", "SLURM_TASKS_PER_NODE": "2,1"}
    assert gpus_said(on_hosts(per_task)) == ["4", "2"]
    assert gpus_said(on_hosts({**none, "SLURM_GPUS_ON_NODE": "3", "SLURM_GPUS": "6"})) == ["3", "3"]


def test_steps_do_not_inherit_the_jobs_sizes() -> None:
    kept = {"SLURM_CONF": "/x", "SLURM_NETWORK": "y", "SLURM_SPANK_A": "z", "SLURM_JOB_ACCOUNT": "w"}
    gone = [
        "SLURM_CPUS_PER_TASK",
        "SLURM_EXACT",
        "SLURM_GPUS",
        "SLURM_MEM_PER_CPU",
        "SLURM_NTASKS",
        "SRUN_CPUS_PER_TASK",
    ]
    command = on_hosts({**SLURM_JOB, **kept, **dict.fromkeys(gone, "1")})[1]
    assert command[0] == "env"
    taken_out = {after for before, after in pairwise(command) if before == "-u"}
    assert taken_out >= set(gone) and not taken_out & {*kept, "SLURM_JOB_ID", "SLURM_JOB_NODELIST"}
    assert "--nodelist=node2" in command and command[-3:] == ("agent", "--name", "node2")
    assert "--jobid=7" in command and "--overlap" in command and "--exact" not in command


def test_other_launchers() -> None:
    hosts = [AllocatedHost(name="node1"), AllocatedHost(name="node2")]
    assert Slurm(SLURM_JOB, launcher="local").on_hosts(hosts, ["agent"])[1] == ("agent", "--name", "node2")
    ssh = Slurm(SLURM_JOB, launcher="ssh").on_hosts(hosts, ["agent"])[1]
    assert ssh[0] == "ssh" and ssh[-2:] == ("node2", "agent --name node2")


def test_a_scontrol_that_its_own_requeue_ended_was_heard() -> None:
    for code in (-15, 143):
        assert Slurm(SLURM_JOB, run=Saying(code=code)).requeue() == 75
    with pytest.raises(BatchError, match="job 7: Job has already finished"):
        Slurm(SLURM_JOB, run=Saying(code=1, err="Job has already finished\n")).requeue()


SCRIPT = """#!/bin/bash
# a remark
#SBATCH -p main --mem-per-cpu=2G   # why not
#SBATCH --gpus 12
#SBATCH -J "my name"

module load x
#SBATCH --time=5
"""


def test_options_of_a_script() -> None:
    assert slurm_submit.script_options(SCRIPT) == {"--partition", "--mem-per-cpu", "--gpus", "--job-name"}
    assert slurm_submit.script_options('#SBATCH --comment="open\n#SBATCH -t5') == {"--comment", "--time"}


def test_options_that_a_script_does_not_give() -> None:
    fields = slurm_text.job_fields((BATCH / "scontrol-uneven-22.05.txt").read_text())
    environ = {"SLURM_JOB_NAME": "x", "SLURM_NTASKS": "2", "SLURM_MEM_PER_NODE": "100"}
    assert slurm_submit.inherited_options(SCRIPT, fields, environ) == [
        "--time=00:10:00",
        "--nodes=2",
        "--chdir=/home/me",
        "--ntasks=2",
    ]
    assert "--gpus=gpu:8" in slurm_submit.inherited_options("", fields, environ)
    newer = slurm_submit.inherited_options("", {"TresPerNode": "gres/gpu:a100:4,gres/nic:1"}, {})
    assert newer == ["--gres=gpu:a100:4"]


def test_what_a_follow_up_job_does_not_see() -> None:
    environ = {
        **SLURM_JOB,
        "SLURM_CONF": "/x",
        "SLURM_RESTART_COUNT": "1",
        "SBATCH_ACCOUNT": "me",
        "TMPDIR": "/scratch/job7",
        "HPCSCHED_POLICY": "marble",
        "HOME": "/home/me",
    }
    kept = slurm_submit.submit_environ(environ)
    assert set(kept) == {"SLURM_CONF", "SBATCH_ACCOUNT", "HPCSCHED_POLICY", "HOME"}
    assert slurm_submit.submit_environ({"TMPDIR": "/tmp"}) == {"TMPDIR": "/tmp"}


@pytest.mark.parametrize(("said", "job"), [("12\n", "12"), ("12;cluster\n", "12"), ("Welcome!\n12\n", "12")])
def test_submitted_ids(said: str, job: str, tmp_path: Path) -> None:
    script = tmp_path / "next.sh"
    script.write_text("true\n")
    assert Slurm(SLURM_JOB, run=Saying(said)).submit_next(script) == job
    with pytest.raises(BatchError, match="sbatch did not answer with a job id"):
        Slurm(SLURM_JOB, run=Saying("ok\n")).submit_next(script)


def test_one_task_of_an_array_is_followed_by_itself_alone(tmp_path: Path) -> None:
    environ = {**SLURM_JOB, "SLURM_ARRAY_TASK_ID": "1"}
    known = FakeCluster({"7": FakeJob("7")})
    slurm, script = Slurm(environ, run=FakeSlurmCommands(known)), tmp_path / "next.sh"
    for directive in ("#SBATCH --array=0-1\n", "#SBATCH -a 0-1\n", ""):
        script.write_text(directive + "true\n")
        slurm.submit_next(script)
        assert ("--array=1" in known.calls[-1]) == bool(directive)
    slurm.submit_next(None)
    assert "--array=1" in known.calls[-1]


def test_versions() -> None:
    assert Slurm({}, run=Saying("slurm-wlm 22.05.8\n")).version() == "Slurm 22.05.8"
    assert Slurm({}, run=Saying("slurm 25.11.0\n")).version() == "Slurm 25.11.0"
    with pytest.raises(BatchError):
        Slurm({}, run=Saying("bash: no\n")).version()


def test_pyslurm_of_another_release_is_not_used() -> None:
    known = FakeCluster({"7": FakeJob("7")}, release="22.05.8")
    run = FakeSlurmCommands(known)

    def usable(release: str) -> str | None:
        return PySlurm(SLURM_JOB, run=run, ask=asked_directly(fake_pyslurm(known, release=release))).usable()

    why_not = usable("25.11.2")
    assert why_not is not None and "25.11.2" in why_not and "22.05.8" in why_not
    assert usable("22.5.3") is None
    assert usable("unknown") is not None
    gone = PySlurm(SLURM_JOB, run=Saying(code=1, err="no\n"), ask=asked_directly(fake_pyslurm(known)))
    assert gone.usable() == "scontrol failed: no"


def test_pyslurm_leaves_array_elements_to_the_commands() -> None:
    known = FakeCluster()
    batch = PySlurm(SLURM_JOB, run=Saying("31|PENDING|N/A\n"), ask=asked_directly(fake_pyslurm(known)))
    assert batch.job_state("27_3") is BatchJobState.PENDING
    assert batch.job_state("27") is BatchJobState.ENDED


HET_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "node1",
    "SLURMD_NODENAME": "node1",
    "SLURM_GPUS_ON_NODE": "2",
    **{
        f"SLURM_{name}_HET_GROUP_{at}": value
        for name, values in {
            "JOB_ID": ("7", "8"),
            "JOB_NODELIST": ("node1", "node[2-3]"),
            "JOB_CPUS_PER_NODE": ("4", "8(x2)"),
            "GPUS_PER_NODE": ("2", "1"),
        }.items()
        for at, value in enumerate(values)
    },
}
"""The variables that matter, as 22.05 sets them: `sbatch -N1 --gpus-per-node=2 : -N2 --gpus-per-node=1`."""


def test_all_components_of_a_heterogeneous_job_are_used() -> None:
    ends = "7|RUNNING|2026-11-21T06:37:44|None\n8|RUNNING|2026-11-21T06:37:43|None\n"
    ends += "9|RUNNING|2026-11-20T00:00:00|None\n"
    slurm = Slurm(HET_JOB, run=Saying(ends))
    found = slurm.allocation()
    assert [(host.name, host.cpus) for host in found.hosts] == [("node1", 4), ("node2", 8), ("node3", 8)]
    assert found.deadline == 1795243063.0  # of the component that ends first
    steps = slurm.on_hosts(found.hosts, ["agent"])
    for step, (group, gpus) in zip(steps, ((0, 2), (1, 1), (1, 1)), strict=True):
        assert {f"--het-group={group}", f"--gpus={gpus}", "--jobid=7"} <= set(step)
    assert "components" in found.refused["chain"] and "requeue" not in found.refused
    with pytest.raises(BatchError, match="--chain-script"):
        slurm.submit_next(None)


@pytest.mark.parametrize("size", ["", "1", "x", "100000000"])
def test_an_odd_number_of_components_is_none(size: str) -> None:
    assert slurm_steps.components({**HET_JOB, "SLURM_HET_SIZE": size}) == (
        {**HET_JOB, "SLURM_HET_SIZE": size},
    )


def test_a_component_without_hosts_is_named() -> None:
    environ = {key: value for key, value in HET_JOB.items() if key != "SLURM_JOB_NODELIST_HET_GROUP_1"}
    with pytest.raises(BatchError, match="SLURM_JOB_NODELIST"):
        Slurm(environ, run=Saying()).allocation()


def test_the_fields_of_one_component() -> None:
    shown = (BATCH / "scontrol-het-22.05.txt").read_text()
    fields = slurm_text.shown_in(CommandOutput(0, shown), "2")
    assert fields is not None and (fields["HetJobOffset"], fields["NodeList"]) == ("1", "node2")


@pytest.mark.parametrize(
    ("says", "there"),
    [("slurm 20.02.7", False), ("slurm-wlm 20.11.0", True), ("slurm 25.05.1", True), ("srun?", True)],
)
def test_an_old_srun_is_not_told_to_overlap(says: str, there: bool) -> None:
    assert slurm_steps.has_overlap(f"{says}\n") is there
    step = slurm_steps.step_argv("7", "node1", None, {}, ["agent"], overlap=there)
    assert ("--overlap" in step) is there


def test_where_commands_are_missing_it_is_said_what_works() -> None:
    environ = {**SLURM_JOB, "SLURM_JOB_END_TIME": "1795243063"}

    def nothing(argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = "") -> CommandOutput:
        raise BatchError(f"{argv[0]}: command not found")

    slurm = Slurm(environ, run=nothing, there=lambda command: False)
    found = slurm.allocation()
    (note,) = found.notes
    assert "SLURM_JOB_END_TIME" in note and "--launcher ssh" in note and found.deadline == 1795243063.0
    assert set(found.refused) == {"requeue", "chain"}
    with pytest.raises(BatchError, match="no srun here"):
        slurm.on_hosts(found.hosts, ["agent"])


def test_a_job_that_slurm_will_not_requeue_says_so_at_its_start() -> None:
    known = FakeCluster({"7": FakeJob("7", requeueable=False)})
    assert (
        "#SBATCH --requeue" in Slurm(SLURM_JOB, run=FakeSlurmCommands(known)).allocation().refused["requeue"]
    )


def test_a_federations_job_is_asked_about_where_it_runs_and_followed_there() -> None:
    shown = f"JobId={1 << 26} JobName=x UserId=me(1) JobState=RUNNING FedOrigin=one Restarts=0 Requeue=1\n"
    inside = {**SLURM_JOB, "SLURM_JOB_ID": str(1 << 26), "SLURM_CLUSTER_NAME": "two", "SLURM_CLUSTERS": "one"}
    run = Saying(shown)
    slurm = Slurm(inside, run=run)
    (note,) = slurm.allocation().notes
    assert "--clusters=two" in note
    assert all("--local" in call for call in run.calls if call[0] == "squeue" or "job" in call)
    assert not any("SLURM_CLUSTERS" in environ for environ in run.environs)
    outside = Saying("")
    Slurm({}, run=outside, cluster="two").job_state(str(1 << 26))
    asked = [call for call in outside.calls if call[0] == "squeue"]
    assert [("--sibling" in call, "--clusters=two" in call) for call in asked] == [
        (True, False),
        (False, True),
    ]
