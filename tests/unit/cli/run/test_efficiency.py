"""`hpcsched efficiency`: what was held, what of it was measured, and nothing that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from simulatebench import make_place

from hpcsched.cli.main import cli
from hpcsched.core.model import JobState
from hpcsched.errors import UnknownJob
from hpcsched.store.job_use import JobUse, append
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir
from hpcsched.store.snapshot import SnapshotWriter
from hpcsched.testing.builders import Driver, a_job, a_profile

LONG = "a-training-with-quite-a-long-name-that-goes-on-and-on-and-on"


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Two GPUs for two hours: `one` on one of them for an hour, then it fails at step 100 of which 50 were
    saved; `two` has the other for both."""
    make_place(tmp_path, monkeypatch)
    profiles = (a_profile("one", [10.0]), a_profile("two", [10.0]))
    two = a_job(LONG, "two", steps=72_000, gpus=1)
    driver = Driver(a_job("one", steps=1200, gpus=1, retries=0), two, gpus=2, profiles=profiles)
    driver.runs("one", LONG)
    driver.now = 3600.0
    driver.exits("one", code=1)
    driver.now = 7200.0
    driver.exits(LONG, code=0, step=72_000)
    rundir = RunDir(tmp_path / "hpcsched-run")
    rundir.make()
    journal = Journal(rundir.journal)
    journal.append(driver.events)
    journal.close()
    SnapshotWriter(rundir, driver.machine, allocation={"kind": "none"}, speed=1.0, user="me").write(
        "FINISHED", driver.now
    )
    return rundir


def shown(*words: str) -> str:
    done = CliRunner().invoke(cli, ["efficiency", *words], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.output


def page(*words: str) -> Any:
    return json.loads(shown("--json", *words).splitlines()[-1])  # after notes, with click 8.1


def test_what_was_held_is_known_and_the_rest_is_not_made_up(rundir: RunDir) -> None:
    found = page()
    one, two = found["jobs"]
    assert found["schema"] == 1 and one["state"] == JobState.FAILED
    assert (one["gpu_hours"], two["gpu_hours"], found["set"]["gpu_hours"]) == (1.0, 2.0, 3.0)
    assert (found["set"]["there_gpu_hours"], found["set"]["unheld_gpu_hours"]) == (4.0, 1.0)
    assert one["lost_gpu_hours"] == pytest.approx(1.0, abs=0.01) and two["lost_gpu_hours"] == 0.0
    assert all(one[key] is None for key in ("utilisation", "busy_gpu_hours", "energy_kwh", "cores"))
    lines = shown().splitlines()
    assert (
        lines[1].split()[3:5] == ["1.000", "-"]
        and "3.000 GPU-hours held of 4.000 (75%), 2 GPUs for 2:00:00" in lines[3]
    )
    assert not any("busy" in line or "energy" in line for line in lines)


def test_what_was_measured(rundir: RunDir) -> None:
    measured = {"cpu_s": 7200.0, "cpu_over_s": 3600.0, "memory_mib": 2048.0}
    uses = [
        JobUse(job=1, attempt=1, gpu_s=1800.0, busy_gpu_s=900.0, energy_j=1.8e6, energy_gpu_s=1800.0),
        JobUse(job=1, attempt=1, gpu_s=1800.0, busy_gpu_s=1800.0, energy_j=1.8e6, energy_gpu_s=1800.0),
        JobUse(job=2, attempt=1, gpu_s=3600.0, busy_gpu_s=3600.0, **measured),
        JobUse(job=0, energy_j=3.6e6, energy_gpu_s=3600.0),
    ]
    append(rundir.job_use, uses)
    found = page()
    one, two = found["jobs"]
    assert (one["utilisation"], one["busy_gpu_hours"], one["idle_gpu_hours"]) == (0.75, 0.75, 0.25)
    assert (one["energy_kwh"], two["energy_kwh"]) == (1.0, None)
    assert (two["cores"], two["cpu_hours"], two["memory_mib"]) == (2.0, 2.0, 2048.0)
    assert (found["set"]["busy_gpu_hours"], found["set"]["energy_unheld_kwh"]) == (1.75, 1.0)
    text = shown()
    assert "75% " in text and "100%*" in text and "2 GiB" in text and "* of 2.000 hours that" in text
    assert "energy 1.00 kWh in 1.000 GPU-hours measured; GPUs that nobody held 1.00" in text
    assert max(map(len, text.splitlines())) <= 80 and "a-training" in text
    chosen = page("one")
    assert [job["name"] for job in chosen["jobs"]] == ["one"] and chosen["set"]["gpus"] is None
    with pytest.raises(UnknownJob):
        shown("none")


def test_what_policies_would_have_taken_is_said_to_be_modelled(rundir: RunDir) -> None:
    assert "modelled" not in page()
    assert [one["policy"] for one in page("--policy", "exclusive,marble")["modelled"][1:]] == [
        "exclusive",
        "marble",
    ]
    text = shown("--policy", "exclusive")
    assert "modelled, by the simulator" in text and max(map(len, text.splitlines())) <= 80
