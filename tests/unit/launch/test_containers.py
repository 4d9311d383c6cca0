"""What each container runtime is called with, by its documents; bubblewrap really runs in tests/process."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hpcsched.core.model import Container, Device
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.containers.apptainer import Apptainer
from hpcsched.launch.containers.base import Inside
from hpcsched.launch.containers.choose import contained, runtime_of
from hpcsched.launch.containers.enroot import Enroot
from hpcsched.launch.containers.pyxis import Pyxis
from hpcsched.launch.spawn import ProcessStart

INSIDE = Inside(
    container=Container(image="torch.sif", mounts=(("/data", "/in", "ro"),), options=("--more",)),
    argv=("python", "train.py"),
    env={"RANK": "1", "HOME": "/home/u", "A": "x,y"},
    told=frozenset({"RANK", "A"}),
    cwd="/job",
    folders=("/run",),
)


def test_mounts_come_outer_ones_first_and_the_users_last() -> None:
    mounts = (("/d", "/job/in/d", "ro"), ("/", "/", "ro"), ("/e", "/job/in", "rw"), ("/run", "/run/", "ro"))
    inside = replace(INSIDE, container=Container(image="a", mounts=mounts), folders=("/run", "/job"))
    assert inside.mounts == [mounts[1], mounts[3], ("/job", "/job", "rw"), mounts[2], mounts[0]]


def test_apptainer() -> None:
    outside = Apptainer().start(replace(INSIDE, gpus=True), "/usr/bin/apptainer")
    assert outside.argv == (
        *("/usr/bin/apptainer", "exec", "--pwd", "/job", "--bind", "/run:/run:rw"),
        *("--bind", "/job:/job:rw"),
        *("--bind", "/data:/in:ro", "--nv", "--more", "torch.sif", "python", "train.py"),
    )
    assert outside.env["APPTAINERENV_RANK"] == "1"
    assert outside.env["APPTAINERENV_A"] == "x,y"
    assert "APPTAINERENV_HOME" not in outside.env
    assert Apptainer().start(INSIDE, "/usr/bin/singularity").env["SINGULARITYENV_RANK"] == "1"


def test_enroot() -> None:
    outside = Enroot().start(INSIDE, "enroot")
    assert outside.argv == (
        *("enroot", "start", "--mount", "/run:/run:none:x-create=auto,rbind,rw"),
        *("--mount", "/job:/job:none:x-create=auto,rbind,rw"),
        *("--mount", "/data:/in:none:x-create=auto,rbind,ro", "--env", "A", "--env", "RANK"),
        *("--more", "torch.sif", "sh", "-c", 'cd "$0" && exec "$@"', "/job", "python", "train.py"),
    )
    with pytest.raises(LaunchError, match="no spaces and colons"):
        Enroot().start(replace(INSIDE, cwd="/a b"), "enroot")


def test_pyxis_is_a_step_without_the_numbers_of_one() -> None:
    env = {**INSIDE.env, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    argv = Pyxis().start(replace(INSIDE, env=env), "srun").argv
    assert argv[:4] == ("srun", "--overlap", "--nodes=1", "--ntasks=1")
    assert "--nodelist=n1" in argv
    assert "--container-mounts=/run:/run:rw,/job:/job:rw,/data:/in:ro" in argv
    assert "--container-env=A,RANK" in argv
    inside = argv[argv.index("env") :]
    assert inside[-3:] == ("CUDA_VISIBLE_DEVICES=GPU-1", "python", "train.py")
    assert ("-u", "SLURM_PROCID") in pairwise(inside)
    with pytest.raises(LaunchError, match="needs a Slurm job"):
        Pyxis().start(INSIDE, "srun")


def test_the_runtime_follows_from_the_image(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("singularity", "enroot", "bwrap"):
        (programs / name).touch(mode=0o755)
    path = str(programs)

    def chosen(image: str, runtime: str = "auto") -> str:
        return Path(runtime_of(Container(image=image, runtime=runtime), path)[1]).name

    assert chosen("a.sif") == chosen("docker://a") == "singularity"
    assert chosen("a.sqsh") == "enroot"
    assert chosen(str(tmp_path)) == "singularity"
    (programs / "singularity").unlink()
    assert chosen(str(tmp_path)) == "bwrap"
    with pytest.raises(LaunchError, match=r"a\.sif: no apptainer or singularity in PATH"):
        chosen("a.sif")
    for missing in ("/no/root", "/no/such.sif"):
        with pytest.raises(LaunchError, match=f"{missing}: not there"):
            chosen(missing)


def test_what_a_process_is_told_holds_against_the_image(tmp_path: Path) -> None:
    (tmp_path / "apptainer").touch(mode=0o755)
    inherited = {"PATH": str(tmp_path), "HOME": "/h", "LANG": "C"}
    plan = LaunchPlan(
        job_id=1,
        attempt=1,
        cwd=tmp_path,
        folder=tmp_path / "run" / "jobs" / "1",
        output=tmp_path / "out",
        devices=(Device(index=0, host="h", kind="A100", handle="GPU-1"),),
        container=Container(image="a.sif"),
    )
    start = ProcessStart(
        program="",
        argv=("python",),
        env={**inherited, "RANK": "0", "LANG": "C"},
        cwd=tmp_path,
        output=1,
        inherited={"HPCSCHED_PROGRESS_FD": 9},
    )
    (outside,), passes = contained([start], plan, inherited)
    assert passes
    assert outside.program == str(tmp_path / "apptainer")
    assert "--nv" in outside.argv
    assert outside.env["APPTAINERENV_RANK"] == "0"
    assert outside.env["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert not {"APPTAINERENV_HOME", "APPTAINERENV_LANG", "APPTAINERENV_PATH"} & outside.env.keys()
    gone = replace(plan, container=Container(image="/no/such.sif"))
    with pytest.raises(LaunchError, match=r"/no/such\.sif: not there"):
        contained([start], gone, inherited)
