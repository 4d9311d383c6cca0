"""`doctor`: says of the batch system, the hosts and the optional parts what works and what does not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from places import DATA

import hpcsched
from hpcsched import batch
from hpcsched.batch.base import AllocatedHost, Allocation
from hpcsched.batch.local import Local
from hpcsched.cli.main import cli
from hpcsched.cli.site import gpu_check, host_check
from hpcsched.cli.site.host_check import check_hosts
from hpcsched.devices import open_devices
from hpcsched.errors import BatchError
from hpcsched.launch.interpreters import Interpreter

OWN = Interpreter(python=sys.executable, folder="", named=False)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("HPCSCHED_", "SLURM_", "LSB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("HPCSCHED_DATABASE", str(tmp_path / "db"))
    monkeypatch.chdir(tmp_path)


def findings(*words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(cli, ["doctor", "--json", *words], standalone_mode=False)
    assert done.return_value == code, done.output
    return {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}


class Granted(Local):
    """A batch system that has granted two hosts; its node agents start on this machine."""

    kind = "slurm"

    def __init__(self, *, gpus: tuple[str, ...] | None = None, argv: tuple[str, ...] | None = None) -> None:
        super().__init__(("n1", "n2"), launcher="local")
        self._gpus, self._argv = gpus, argv

    def allocation(self) -> Allocation:
        hosts = tuple(AllocatedHost(name=name, gpus=self._gpus) for name in ("n1", "n2"))
        return Allocation(
            kind="slurm", id="123", hosts=hosts, here="n1", deadline=time.time() + 3605.0, restart_count=1
        )

    def version(self) -> str:
        return "Slurm 22.05.8"

    def on_hosts(self, hosts: Any, argv: Any) -> list[tuple[str, ...]]:
        return super().on_hosts(hosts, self._argv or argv)


def test_outside_a_job_it_says_so_and_all_is_well() -> None:
    found = findings("--devices", "replay:2")
    assert found["batch system"]["found"].startswith("not inside a job")
    assert "CURVE" in found["pyzmq"]["found"]
    assert "commands are used" in found["pyslurm"]["found"]


def test_inside_an_allocation_every_host_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(batch, "open_batch", lambda kind, **_: Granted())
    monkeypatch.setenv("PATH", "")  # no scontrol to ask whether the job can be requeued
    found = findings("--devices", "replay:2")
    assert found["batch system"]["found"] == "Slurm 22.05.8"
    assert "slurm job 123 on 2 hosts (n1, n2), started again 1 time so far" in found["allocation"]["found"]
    assert found["time left"]["found"].startswith("1:00:0")
    assert found["requeue"]["found"].startswith("not known")
    for host in ("host n1", "host n2"):
        assert (
            found[host]["ok"]
            and f"hpcsched {hpcsched.__version__}, sees the run directory" in found[host]["found"]
        )
    assert not list(tmp_path.glob(".hpcsched-doctor-*"))


def test_granted_gpus_that_cannot_be_seen_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "open_batch", lambda kind, **_: Granted(gpus=("0", "1")))
    monkeypatch.setattr("hpcsched.devices.nvml.NvmlDevices.inventory", lambda self: ())
    found = findings(code=1)
    assert "2 GPUs granted, but NVML sees none" in found["devices"]["found"]


def test_a_batch_system_that_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Granted):
        def version(self) -> str:
            raise BatchError("scontrol has not answered within 15 s")

        allocation = version  # type: ignore[assignment]

    monkeypatch.setattr(batch, "open_batch", lambda kind, **_: Silent())
    found = findings("--devices", "replay:2", code=1)
    assert not found["batch system"]["ok"] and "15 s" in found["batch system"]["found"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("/no/such/python",), "cannot be started"),
        ((sys.executable, "-c", "raise SystemExit('no module named hpcsched')"), "no module named hpcsched"),
        ((sys.executable, "-c", "print('noise')"), "noise"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "no answer within 1 s"),
    ],
)
def test_a_host_that_does_not_answer_is_a_problem_soon(
    tmp_path: Path, argv: tuple[str, ...], says: str
) -> None:
    system = Granted(argv=argv)
    patience_s = 1 if "1 s" in says else 30
    began = time.monotonic()
    verdicts = check_hosts(system, system.allocation().hosts, tmp_path, need_gpus=False, within_s=patience_s)
    assert time.monotonic() - began < 30
    assert [(v.what, v.ok) for v in verdicts] == [("host n1", False), ("host n2", False)]
    assert says in verdicts[0].found


SAID = {
    "host": "n1",
    "python": "3.11",
    "hpcsched": hpcsched.__version__,
    "time": 100.5,
    "lag_s": 0.0,
    "locked": True,
    "gpus": 2,
    "why": "",
}


@pytest.mark.parametrize(
    ("more", "ok", "says"),
    [
        ({}, True, "2 GPUs"),
        ({"time": 90.0}, False, "its clock is 10 s or more behind"),
        ({"time": 111.0}, False, "its clock is 10 s or more ahead"),
        ({"lag_s": None}, False, "does not see what was just written"),
        ({"host": "n9"}, False, "what it writes to the run directory is not seen"),
        ({"hpcsched": "9"}, False, "hpcsched here is"),
        ({"gpus": 0, "why": "no driver"}, False, "no GPU is seen there"),
        ({"gpus": 1}, False, "2 were granted"),
        ({"locked": False}, True, "signs of life are used instead"),
    ],
)
def test_what_a_host_says_is_judged(more: dict[str, Any], ok: bool, says: str) -> None:
    host = AllocatedHost(name="n1", gpus=("0", "1"))
    verdict = host_check._judge(host, 101.0, {**SAID, **more}, began=100.0, back={"n1"}, need_gpus=True)
    assert verdict.ok is ok and says in verdict.found and "\n" not in verdict.found


def test_over_there_it_says_what_it_sees_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "lock").touch()
    words = ["--dir", str(tmp_path), "--token", "t", "--name", "n7"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcsched.cli.site.host_check", *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    said = json.loads(done.stdout.removeprefix("hpcsched-hostcheck "))
    assert said["host"] == "n7" and said["lag_s"] < 5 and said["locked"] is False
    assert (tmp_path / "answer.n7").exists()


def test_a_word_that_is_not_accepted_is_refused_in_one_line() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--batch", "pbs"])
    assert "auto, slurm, lsf, sge, none" in str(done.exception)


def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVML tells of them."""
    spec = importlib.util.spec_from_file_location("pynvml", DATA / "gpu/pynvml.py")
    assert spec and spec.loader
    nvml = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nvml)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_that_torch_cannot_use_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    two_gpus(monkeypatch)
    found = findings("--devices", "cuda:1", code=1)
    assert found["devices"]["ok"]
    assert not found["GPU 0"]["ok"] and found["GPU 0"]["found"].startswith(f"torch {torch.__version__}")


@pytest.mark.parametrize(("number", "mode", "ok"), [(2, "PROHIBITED", False), (3, "EXCLUSIVE_PROCESS", True)])
def test_a_compute_mode_that_keeps_processes_out_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, mode: str, ok: bool
) -> None:
    two_gpus(monkeypatch)
    monkeypatch.setenv("NVML_PLAYED", str(tmp_path))
    (tmp_path / "compute_mode").write_text(str(number))
    monkeypatch.setattr(gpu_check, "PROGRAM", ("-c", "print('{}')"))
    found = findings("--devices", "cuda", code=1)["compute mode"]
    assert found["ok"] is ok and found["found"].startswith(f"GPUs 0-1: compute mode {mode}: ")


@pytest.mark.parametrize(
    ("program", "ok", "says"),
    [
        ('import os; gpu = os.environ["CUDA_VISIBLE_DEVICES"]; print("noise")\n'
         'print(\'{"ok": true, "found": "computes on %s"}\' % gpu)', True, "computes on {}"),
        ("import os; os.abort()", False, "exit code -6: no word"),
        ("print('{')", False, "exit code 0: {{"),
        ("import time; time.sleep(60)", False, "torch has not computed anything there within 1 s"),
    ],
)  # fmt: skip
def test_each_gpu_is_tried_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, program: str, ok: bool, says: str
) -> None:
    two_gpus(monkeypatch)
    monkeypatch.setattr(gpu_check, "PROGRAM", ("-c", program))
    devices = open_devices("cuda:2", "here")
    within_s = 1.0 if "sleep" in program else 60.0
    found = gpu_check.check_gpus(devices, devices.inventory(), OWN, within_s=within_s)
    assert found == [(f"GPU {gpu}", ok, says.format(f"GPU-{gpu}")) for gpu in (0, 1)]


def test_a_gpu_that_hangs_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    program = (
        "import os, time; os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-0' and time.sleep(60);"
        'print(\'{"ok": true, "found": "computes"}\')'
    )
    monkeypatch.setattr(gpu_check, "PROGRAM", ("-S", "-c", program))
    devices = open_devices("cuda:2", "here")
    (_, hangs, _), works = gpu_check.check_gpus(devices, devices.inventory(), OWN, within_s=1.0)
    assert not hangs and works == ("GPU 1", True, "computes")


def test_cpu_slots_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PROGRAM", ("-c", "import no_such_module"))
    assert not [what for what in findings("--devices", "cpu:2") if what.startswith("GPU")]


def test_a_python_that_is_to_run_trainers_and_does_not_fit_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run refuses it too: it is first in PATH, and has what a trainer needs."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    says = json.dumps(
        {
            "executable": "/p",
            "prefix": "/",
            "python": "3.11.7",
            "worker": "9",
            "contract": "99.0",
            "torch": "2.4",
        }
    )
    python.write_text(f"#!/bin/sh\necho '{says}'\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    found = findings(code=1)[f"python {python}"]
    assert not found["ok"] and "but version 99.0" in found["found"]
