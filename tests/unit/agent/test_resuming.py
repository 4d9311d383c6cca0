"""What a command is told when it goes on from a checkpoint."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcsched.agent.resuming import Resuming, Start, filled, resumed
from hpcsched.core.actions import Launch
from hpcsched.core.model import Kind, Restart
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan
from hpcsched.testing.builders import Driver, a_job

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


class Scene:
    """A job that saves into `work`, where somebody else has saved before it began, and its launches."""

    def __init__(self, root: Path) -> None:
        self.work, self._job_folder = root / "work", root / "jobs" / "1"
        self.work.mkdir()
        self._job_folder.parent.mkdir()
        restart = Restart(checkpoints=("c-*",), resume_args=("{checkpoint}",))
        self._driver = Driver(gpus=1)
        spec = a_job("a", kind=Kind.COMMAND, command=("train",), workdir=str(self.work), restart=restart)
        (self.launch,) = (a for a in self._driver.submit(spec) if isinstance(a, Launch))
        self.appears("c-900", time.time() - 100)
        self.resuming = self.of_an_agent()

    def appears(self, name: str, at: float) -> None:
        (self.work / name).write_text("x")
        os.utime(self.work / name, (at, at))

    def of_an_agent(self) -> Resuming:
        folder = self._job_folder
        rundir = SimpleNamespace(job=lambda job_id: folder)
        return Resuming(SimpleNamespace(stand_ins=False, rundir=rundir, checkpoints_of=lambda job_id: folder))

    def told(self, attempt: int, resuming: Resuming | None = None) -> tuple[str, ...]:
        """What the command of an attempt is told."""
        plan = replace(PLAN, attempt=attempt, cwd=self.work, output=self.work / "out")
        launch, job, deadline = replace(self.launch, attempt=attempt), self._driver.job("a"), time.time() + 30
        while time.time() < deadline:
            if (made := (resuming or self.resuming).planned(job, launch, plan, lambda _: [job])) is not None:
                return made.argv[len(PLAN.argv) :]
        raise AssertionError("no answer")

    def starts(self) -> None:
        self.resuming.watch(self._driver.job("a"), SimpleNamespace())

    def record(self) -> Path:
        (found,) = self._job_folder.iterdir()
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_second_attempt_goes_on_from_what_the_first_has_saved(scene: Scene) -> None:
    assert scene.told(1) == ()
    scene.starts()
    scene.appears("c-10", time.time() - 50)
    scene.appears("c-20", time.time() - 40)
    assert scene.told(2) == (str(scene.work / "c-20"),)


def test_an_attempt_that_never_had_processes_has_not_begun_its_job(scene: Scene) -> None:
    """What others save until then is not its own."""
    assert scene.told(1) == ()
    scene.appears("c-950", time.time() - 50)
    assert scene.told(2) == ()
    scene.starts()
    scene.appears("c-10", time.time() - 40)
    assert scene.told(3) == (str(scene.work / "c-10"),)


def test_without_a_record_it_begins(scene: Scene) -> None:
    """Its agent was killed before there was one, or the first look has failed."""
    assert scene.told(1) == ()
    scene.record().unlink()
    assert scene.told(2, scene.of_an_agent()) == ()


def test_it_does_not_begin_where_that_cannot_be_put_on_record(scene: Scene) -> None:
    scene._job_folder.write_text("a file in the way")
    with pytest.raises(LaunchError):
        scene.told(1)
