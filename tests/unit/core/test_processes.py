"""How many processes a command is: what is known of it, launchers, placeholders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.cli.profile.lookup import parallel_programs
from hpcsched.core import events as ev
from hpcsched.core.actions import Launch, MakePlan
from hpcsched.core.model import AUTO, PER_GPU, JobSpec, Kind
from hpcsched.core.processes import (
    Because,
    KnownLauncher,
    is_told,
    launcher_of,
    program_of,
    shape_of,
    substituted,
)
from hpcsched.core.profile import Profile
from hpcsched.core.reasons import Why
from hpcsched.errors import ConfigError
from hpcsched.jobfile import parse
from hpcsched.store.database import Database
from hpcsched.testing.builders import Driver, a_job

VALUES = {
    "gpus": 4,
    "nodes": 2,
    "world_size": 8,
    "node_rank": 1,
    "master_addr": "n1",
    "master_port": 4711,
}
SEVERAL = Profile(model="m", device="d", throughput={1: 1.0, 2: 1.9})
SAID = {program_of(JobSpec(name="b", kind=Kind.COMMAND, model="m", command=("python", "train.py")))}
ONE = Profile(model="m", device="d", throughput={1: 1.0})


def program(**rest) -> JobSpec:
    told = {"command": ("python", "train.py"), "processes": AUTO, **rest}
    return JobSpec(name="a", kind=Kind.COMMAND, model="m", **told)


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["torchrun", "t.py"], KnownLauncher.TORCHRUN),
        (["/opt/env/bin/torchrun", "t.py"], KnownLauncher.TORCHRUN),
        (["python3.12", "-m", "torch.distributed.run", "t.py"], KnownLauncher.TORCHRUN),
        (["python", "-u", "-m", "torch.distributed.launch", "t.py"], KnownLauncher.TORCHRUN),
        (["python", "-m", "pytest", "torchrun"], None),
        (["python", "torch.distributed.run"], None),
        (["python", "t.py", "-m", "torch.distributed.run"], None),
        (["python", "-m"], None),
        (["accelerate", "launch", "t.py"], KnownLauncher.ACCELERATE),
        (["accelerate", "config"], None),
        (["deepspeed", "t.py"], KnownLauncher.DEEPSPEED),
        (["mpirun.openmpi", "-np", "2", "t"], KnownLauncher.MPIRUN),
        (["mpiexec", "t"], KnownLauncher.MPIRUN),
        (["srun", "t"], KnownLauncher.SRUN),
        (["env", "A=1", "B=2", "torchrun", "t.py"], KnownLauncher.TORCHRUN),
        (["./torchrun.sh", "t.py"], None),
        (["sh", "-c", "torchrun t.py"], None),
        ([], None),
    ],
)
def test_launchers_are_recognised(command, launcher):
    assert launcher_of(tuple(command)) is launcher


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("--nproc-per-node={gpus}", "--nproc-per-node=4"),
        ("{node_rank}/{nodes} {world_size} {master_addr}:{master_port}", "1/2 8 n1:4711"),
        ("${gpus} ${{gpus}}", "${gpus} ${{gpus}}"),
        ("{{gpus}}", "{gpus}"),
        ("{x} {gpus } { gpus} {GPUS} {}", "{x} {gpus } { gpus} {GPUS} {}"),
        ('{"n": {gpus}}', '{"n": 4}'),
        ('{"gpus": 1}', '{"gpus": 1}'),
        ("awk '{print gpus}'", "awk '{print gpus}'"),
    ],
)
def test_only_exact_placeholders_are_replaced(text, becomes):
    assert substituted(text, VALUES.__getitem__) == becomes


@pytest.mark.parametrize(
    ("spec", "profile", "parallel", "per_gpu", "most", "because"),
    [
        (program(), None, (), False, 1, Because.UNKNOWN),
        (program(), ONE, (), False, 1, Because.UNKNOWN),
        (program(gpus_min=4, gpus_max=4), None, (), False, None, Because.UNKNOWN),
        (program(), SEVERAL, (), True, None, Because.PROFILE),
        (program(), replace(SEVERAL, source="learned"), (), False, 1, Because.UNKNOWN),
        (program(), replace(SEVERAL, source="fitted"), (), False, 1, Because.UNKNOWN),
        (program(), None, SAID, True, None, Because.SAID),
        (program(command=("python", "train.py", "--lr", "1")), None, SAID, True, None, Because.SAID),
        (program(command=("python", "evaluate.py")), None, SAID, False, 1, Because.UNKNOWN),
        (program(workdir="/elsewhere"), None, SAID, False, 1, Because.UNKNOWN),
        (program(processes=PER_GPU), None, (), True, None, Because.JOB_FILE),
        (program(processes=1), SEVERAL, SAID, False, None, Because.JOB_FILE),
        (program(processes=3), None, (), False, 3, Because.JOB_FILE),
        (program(processes="one"), None, (), False, None, Because.JOB_FILE),
        (program(command=("torchrun", "t.py")), None, SAID, False, None, Because.LAUNCHER),
        (program(command=("torchrun", "--nproc-per-node=2", "t.py")), None, (), False, 1, Because.UNTOLD),
        (program(command=("deepspeed", "t.py")), None, (), False, None, Because.LAUNCHER),
        (program(command=("mpirun", "-np", "{gpus}", "t")), None, (), False, None, Because.LAUNCHER),
        (
            program(command=("accelerate", "launch"), env={"N": "{gpus}"}),
            None,
            (),
            False,
            None,
            Because.LAUNCHER,
        ),
        (
            program(command=("accelerate", "launch"), args={"a": ["{{gpus}}"]}),
            None,
            (),
            False,
            1,
            Because.UNTOLD,
        ),
        (JobSpec(name="a", kind=Kind.TRAINER, model="m"), None, (), True, None, Because.TRAINER),
    ],
)
def test_a_command_is_one_process_unless_it_is_known_to_be_parallel(
    spec, profile, parallel, per_gpu, most, because
):
    shape = shape_of(spec, profile, parallel)
    assert (shape.per_gpu, shape.most, shape.because) == (per_gpu, most, because)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"command": ["srun", "t"]}, "command"),
        ({"command": ["torchrun", "t"], "processes": "per-gpu"}, "processes"),
        ({"command": ["mpirun", "t"], "nodes": 2}, "nodes"),
        ({"command": ["t"], "processes": 0}, "processes"),
        ({"command": ["t"], "processes": True}, "processes"),
    ],
)
def test_what_would_start_ranks_in_the_wrong_place_is_refused(table, key):
    with pytest.raises(ConfigError, match=rf"job a\.{key}"):
        parse({"schema": 1, "job": [{"name": "a", **table}]}, where="j", workdir=Path())


def command(name: str, model: str = "m", **rest) -> JobSpec:
    return a_job(name, model, kind=Kind.COMMAND, command=("t",), **{"processes": AUTO, **rest})


def test_a_program_that_says_it_is_parallel_starts_wide_the_next_time() -> None:
    driver = Driver(gpus=4)
    (launch,) = driver.submit(command("a"))
    assert (launch.gpus, launch.per_gpu) == ((0,), False)
    assert driver.job("a").story[-1].reason.why is Why.NOT_PARALLEL
    driver.tell(ev.WorkersSpawned, "a", processes=())
    driver.tell(ev.WorkersReady, "a", parallel=True)
    assert driver.job("a").story[-1].reason.why is Why.SAYS_PARALLEL
    (launch,) = driver.submit(command("b"))
    assert (len(launch.gpus), launch.per_gpu) == (2, True)


def test_a_single_process_that_sees_several_gpus_is_not_resized_in_place() -> None:
    driver = Driver(command("a", gpus=2), gpus=4)
    assert driver.job("a").story[-1].reason.why is Why.ONE_PROCESS
    driver.runs("a", in_place=True)
    assert not driver.job("a").in_place


@pytest.mark.parametrize("policy", ["marble", "exclusive", "equal", "optimus", "planner"])
def test_every_policy_gives_a_plain_command_one_gpu(policy: str) -> None:
    driver = Driver(command("a"), command("b", processes=3), gpus=4, policy=policy)
    plans = [action for action in driver.actions if isinstance(action, MakePlan)]
    if plans:
        driver.tell(ev.PlanMade, plan=driver.machine.make_plan())
    launches = {action.job_id: action for action in driver.actions if isinstance(action, Launch)}
    assert (len(launches[1].gpus), launches[1].per_gpu) == (1, False)


def test_what_one_process_does_on_several_gpus_is_not_learnt() -> None:
    driver = Driver(command("a", gpus=2), command("b", gpus=2, processes=PER_GPU, model="w"), gpus=4)
    driver.runs("a", "b")
    driver.trains("a", 10.0)
    driver.trains("b", 10.0)
    assert set(driver.machine.estimates.observed.beliefs) == {("w", 1, "")}


def test_copies_that_have_not_met_are_shown_until_they_have() -> None:
    driver = Driver(command("a", gpus=2, processes=PER_GPU), gpus=2)
    driver.tell(ev.WorkersApart, "a", processes=2, seconds=60.0)
    assert driver.job("a").reason.why is Why.NOT_MET
    driver.tell(ev.WorkersApart, "a", processes=2, seconds=60.0, met=True)
    assert driver.job("a").reason is None


def test_a_program_is_remembered_by_its_model(tmp_path) -> None:
    with Database(tmp_path / "db") as database:
        database.record_parallel([("m", "train.py"), ("n", "train.py")])
        database.record_parallel([("m", "train.py")])
    assert parallel_programs(tmp_path / "db", {"m", "x"}) == (("m", "train.py"),)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (program(processes=PER_GPU), "one process on each GPU: the job file says so"),
        (program(processes=3), "3 processes on each host: the job file says so"),
        (program(), "one process: nothing says that its program is parallel"),
        (program(command=("mpirun", "{gpus}")), "one process: a launcher starts the ranks itself"),
    ],
)
def test_a_shape_is_said_in_a_few_words(spec, words):
    assert str(shape_of(spec, None, ())) == words


@pytest.mark.parametrize(
    ("args", "told"), [({"n": 4, "deep": [1.5, None]}, False), ({"n": [{"k": "{gpus}"}]}, True)]
)
def test_a_launcher_is_told_by_texts_and_not_by_numbers(args, told):
    assert is_told(program(command=("accelerate", "launch"), args=args)) is told
