"""Schedules of faults on the virtual clock, and that they find faults which are put in on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from hpcsched.core.model import JobSpec, Kind
from tests.chaos.__main__ import main
from tests.chaos.planted import FAULTS, Fault, found_in
from tests.chaos.virtual import day
from tests.chaos.virtual.campaign import played as play
from tests.chaos.virtual.disk import Disk
from tests.chaos.virtual.schedule import Doing, Habits, Schedule

ROOT = Path(__file__).resolve().parents[2]


def played(*words: object, seconds: float) -> None:
    """Play schedules in processes of their own."""
    command = [sys.executable, "-m", "tests.chaos", "--seconds", str(seconds), *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_violated_in_the_first_schedules() -> None:
    played(seconds=8)


def one_job(habits: Habits, *doings: Doing, time_limit_s: float | None = None) -> Schedule:
    job = JobSpec(
        name="a",
        kind=Kind.TRAINER,
        model="a",
        trainer="some.module:Name",
        steps=300,
        gpus_min=1,
        gpus_max=1,
        retries=3,
        checkpoint_every_s=5.0,
        workdir="/",
    )
    return Schedule(
        seed=0,
        gpus=1,
        policy="marble",
        options={},
        jobs=(job,),
        later={},
        habits={"a": habits},
        doings=doings,
        time_limit_s=time_limit_s,
    )


def test_without_a_journal_too_a_state_in_memory_reaches_the_disk() -> None:
    keeps = Habits(saves=False, suspend_s=1.0, keeps_s=6.0)
    violated, world = play(one_job(keeps, Doing(8.0, "suspend", ("a",)), Doing(8.3, "no room", (2.5,))))
    assert violated == [] and any("waiting for that" in line for line in world.said)


@pytest.mark.parametrize("at", [2.8, 2.9])
def test_who_begins_because_another_is_ready_is_known_after_a_loss_of_power(at: float) -> None:
    alone = one_job(Habits(save_every_s=30.0), Doing(at, "node dies"))
    behind = replace(alone.jobs[0], name="b", background=True)
    habits = {"a": alone.habits["a"], "b": Habits(save_every_s=2.2)}
    violated, world = play(replace(alone, seed=2, jobs=(alone.jobs[0], behind), habits=habits))
    assert violated == [] and world.ledger.of("b")[1].begin == 22


def test_a_warning_is_heard_that_comes_before_the_agent_listens() -> None:
    deaf = Habits(deaf=True)  # what the agent before has left takes all of its grace to end
    warned = [Doing(5.0 + at / 2, "ends sooner", (25.0,)) for at in range(1, 60)]
    violated, world = play(one_job(deaf, Doing(5.0, "kill agent"), *warned, time_limit_s=200.0))
    assert violated == [] and any(line.startswith("SIGUSR2 from the batch system") for line in world.said)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_to_plant_are_in_the_code_as_it_is(fault: Fault) -> None:
    assert fault.wrong in fault.planted((ROOT / "hpcsched" / fault.file).read_text())


def test_a_copy_that_is_broken_is_no_fault_that_was_found() -> None:
    said = "seed 3: j1 is lost"
    assert found_in(f"{said}\n7 schedules in 2 s, 1 with violations\n") == said
    assert not found_in("0 schedules in 2 s, 0 with violations\n")
    assert not found_in("Traceback (most recent call last):\nImportError: no core\n")
    for broken in ("the player ended with exit code 1", "NameError: name 'job' is not defined (loop.py:87)"):
        assert not found_in(f"{said}\nseed 4: {broken}\n")


def test_to_play_none_is_no_success() -> None:
    assert main(["--at-once", "0"]) == 1


@pytest.mark.parametrize("synced", [0, 3])
def test_what_was_not_synchronised_is_lost_with_the_node(tmp_path: Path, synced: int) -> None:
    lengths = set[int]()
    for seed in range(40):
        disk, path = Disk(tmp_path, Random(seed)), tmp_path / f"journal{seed}"
        with disk.instead_of_os():
            disk.living = True
            file = os.open(path, os.O_RDWR | os.O_CREAT)
            os.write(file, b"123")
            if synced:
                os.fdatasync(file)
            os.write(file, b"456")
            os.close(file)
            disk.node_dies(path)
        lengths.add(path.stat().st_size)
    assert lengths == {*range(synced, 7)}


@pytest.mark.slow
def test_a_day_needs_no_more_in_its_last_hours_than_in_its_first() -> None:
    violated, hours = day.played(24, every_s=20.0)
    assert violated == [] and len(hours) == 24
    assert hours[-1].ended > 4000
    assert max(hour.status_bytes for hour in hours) < 400_000
    assert max(hour.journal_bytes for hour in hours) < 3 * day.COMPACTED_BYTES
    early, late = hours[4:10], hours[-6:]
    assert sum(hour.calls for hour in late) < 1.2 * sum(hour.calls for hour in early)
    assert sum(hour.cpu_s for hour in late) < 2 * sum(hour.cpu_s for hour in early)


@pytest.mark.slow
def test_nothing_is_violated_in_schedules_that_are_new_each_day(pytestconfig: pytest.Config) -> None:
    in_part = pytestconfig.getoption("--part")  # which always tries the same ones
    played("--first", 10_000 if in_part else int(time.time() // 86400) * 100_000, seconds=240)
