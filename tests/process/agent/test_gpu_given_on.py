"""Runs on GPUs that NVML, which is played, sees: what it says of their memory and of their compute mode."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from livebench import Bench, job
from places import DATA

from hpcsched.agent.gpu_memory import FREE_WITHIN_S
from hpcsched.launch.base import LaunchPlan
from hpcsched.testing.nodes import code_of, local_hosts, pump_until


@pytest.fixture
def nvml(bench: Bench) -> Path:
    """The folder that says what NVML says."""
    folder = bench.folder / "nvml"
    folder.mkdir()
    path = os.pathsep.join(filter(None, [str(DATA / "gpu"), bench.env.get("PYTHONPATH")]))
    bench.env |= {"PYTHONPATH": path, "NVML_PLAYED": str(folder)}
    bench.env.pop("CUDA_VISIBLE_DEVICES", None)
    return folder


def test_the_next_job_finds_the_memory_free_that_a_child_of_the_last_one_still_had(
    bench: Bench, nvml: Path
) -> None:
    used, begun = nvml / "used", nvml / "begun"
    child = f"setsid sh -c 'touch {begun}; sleep 1; rm {used}' < /dev/null > /dev/null 2>&1 &"
    first = f"echo 500 > {used}; {child} while [ ! -e {begun} ]; do sleep 0.02; done"
    jobs = bench.set_of(job("first", first, gpus=1), job("next", f"test ! -e {used}", gpus=1, retries=0))
    done = bench("run", jobs, "--devices", "cuda:1")
    assert done.returncode == 0, done.stderr
    assert "given on" not in done.stderr


def test_so_it_is_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = tmp_path / "used"
    used.write_text("0")
    monkeypatch.setenv("NVML_PLAYED", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DATA / "gpu"), *sys.path[1:]]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with local_hosts(tmp_path, ["a"], devices="cuda") as hosts:
        argv = ("sh", "-c", f"echo 500 > {used}")
        first = LaunchPlan(
            job_id=1,
            attempt=1,
            argv=argv,
            cwd=tmp_path,
            folder=tmp_path,
            output=tmp_path / "out",
            devices=hosts.inventory()[:1],
        )
        workers = hosts.launch(first)
        pump_until(hosts, lambda: used.read_text() == "500\n")
        with pytest.raises(TimeoutError):
            code_of(hosts, workers, deadline_s=0.5)
        used.unlink()
        assert code_of(hosts, workers) == 0
        workers.close()
        used.write_text("500")
        hosts.drain()
        workers = hosts.launch(first)
        assert code_of(hosts, workers, deadline_s=FREE_WITHIN_S / 2) == 0, "nobody gets it in a drain"
        workers.close()


@pytest.mark.parametrize(("number", "mode"), [(2, "PROHIBITED"), (3, "EXCLUSIVE_PROCESS")])
def test_a_run_says_in_which_compute_mode_its_gpus_are(
    bench: Bench, nvml: Path, number: int, mode: str
) -> None:
    (nvml / "compute_mode").write_text(str(number))
    done = bench("run", bench.set_of(job("a", "exit 0", gpus=1)), "--devices", "cuda")
    assert f"GPUs 0-1: compute mode {mode}: " in done.stderr
    lost = {} if number == 3 else dict.fromkeys("01", "its compute mode is PROHIBITED")
    assert (done.returncode, bench.status()["run"]["lost_gpus"]) == (75 if lost else 0, lost)
