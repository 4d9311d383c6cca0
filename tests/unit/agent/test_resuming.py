"""What a command is told when it goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched.agent.resuming import Start, filled, resumed
from hpcsched.core.model import Restart
from hpcsched.launch.base import LaunchPlan

PLAN = LaunchPlan(
    job_id=7,
    attempt=2,
    argv=("python", "train.py"),
    cwd=Path("/"),
    folder=Path("/"),
    output=Path("/out"),
    devices=(),
)


def start(first: int = 1, now: int = 1, checkpoint: str = "/out/checkpoint-40") -> Start:
    return Start(checkpoint=Path(checkpoint), checkpoint_dir=Path("/dir"), job_id=7, counts=(first, now))


def test_arguments_are_added_and_it_is_told_that_it_resumes() -> None:
    restart = Restart(resume_args=("--resume={checkpoint}", "{job_id}", "{other} {checkpoint_dir}"))
    plan = resumed(PLAN, restart, start())
    assert plan.argv == ("python", "train.py", "--resume=/out/checkpoint-40", "7", "{other} /dir")
    assert plan.env["HPCSCHED_RESUME"] == "1"


def test_a_command_of_its_own_takes_its_place() -> None:
    restart = Restart(resume_args=("not", "these"), resume_command=("restart", "{checkpoint}"))
    assert resumed(PLAN, restart, start()).argv == ("restart", "/out/checkpoint-40")


def test_what_a_path_says_is_not_a_placeholder() -> None:
    assert filled(("{checkpoint}",), {"checkpoint": "/{job_id}/x", "job_id": "7"}) == ("/{job_id}/x",)


@pytest.mark.parametrize(("first", "now", "told"), [(1, 1, "8"), (1, 2, "4"), (2, 1, "16"), (2, 4, "4")])
def test_the_accumulation_keeps_the_global_batch(first: int, now: int, told: str) -> None:
    restart = Restart(resume_args=("--accumulation", "{accumulation}"), accumulation=8, batch="kept")
    assert resumed(PLAN, restart, start(first, now)).argv[-1] == told


@pytest.mark.parametrize(("first", "now"), [(1, 3), (1, 16)])
def test_a_count_that_cannot_keep_it_is_refused(first: int, now: int) -> None:
    restart = Restart(resume_args=("{accumulation}",), accumulation=8, batch="kept")
    with pytest.raises(ValueError, match=f"cannot be kept on {now} GPUs"):
        resumed(PLAN, restart, start(first, now))
