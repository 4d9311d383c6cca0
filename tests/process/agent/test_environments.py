"""Jobs whose Python is another than the scheduler's, under the real agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import livebench
import msgspec
import pytest
from livebench import Bench, job

import hpcsched
from hpcsched.contract.version import VERSION
from hpcsched.launch.interpreters import InterpreterInfo

OWN = str(Path(sys.executable).parents[1])

TRAINER = """
import sys, torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Small(Trainer):
    def build(self, args):
        print("built by", sys.prefix, flush=True)
        model = nn.Linear(4, 1)
        x = torch.ones(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Parts(model=model, optimizer=optimizer, dataset=(x, x[:, :1]), global_batch=8,
                     loss=lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).squeeze(1))
"""

BLOCKS = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Without())
"""


@pytest.fixture
def torchless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of a scheduler in an environment without torch and numpy."""
    venv = tmp_path / "sched"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    site = next((venv / "lib").iterdir()) / "site-packages"
    (site / "blocks.py").write_text(BLOCKS)
    lines = [sysconfig.get_paths()["purelib"], str(Path(hpcsched.__file__).parents[1]), "import blocks"]
    (site / "rest.pth").write_text("\n".join(lines) + "\n")
    script = tmp_path / "hpcsched"
    script.write_text(f'#!/bin/sh\nexec {venv}/bin/python -m hpcsched "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(livebench, "COMMAND", str(script))


def interpreter(folder: Path) -> Path:
    """A script that says that it has all, until the file `broken` is there; then it has no worker."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    good = InterpreterInfo(
        executable=str(python),
        prefix=str(folder),
        python="3.11.7",
        worker="0.2",
        contract=str(VERSION),
        torch="2.4",
        watched={str(folder): folder.stat().st_mtime_ns},
    )
    says = [msgspec.json.encode(has).decode() for has in (good, msgspec.structs.replace(good, worker=None))]
    python.write_text(f"#!/bin/sh\n[ -e {folder}/broken ] && echo '{says[1]}' || echo '{says[0]}'\n")
    python.chmod(0o755)
    return folder


def test_a_scheduler_without_torch_runs_trainers_of_an_environment_that_has_it(
    bench: Bench, torchless: None
) -> None:
    pytest.importorskip("torch")
    bench.env["PATH"] = "/usr/bin:/bin"
    (bench.folder / "small.py").write_text(TRAINER)
    jobs = bench.set_of(job("a", trainer="small:Small", steps=5, gpus=1))
    refused = bench("run", jobs, "--devices", "cpu:1")
    assert refused.returncode == 2 and not bench.dir.exists()
    assert "has no torch; trainers need 2.4 or later" in refused.stderr and "job a" in refused.stderr
    done = bench("run", jobs, "--devices", "cpu:1", "--venv", OWN)
    assert done.returncode == 0, done.stderr
    assert f"built by {OWN}" in bench.output()


def test_an_environment_that_breaks_under_a_run_fails_the_job_once_and_says_why(bench: Bench) -> None:
    env = interpreter(bench.folder / "env")
    jobs = bench.set_of(
        job("breaks", f"touch {env}/broken"),
        job("late", trainer="small:Small", steps=5, gpus=1, venv=str(env), after=["breaks"], retries=3),
    )
    done = bench("run", jobs, "--devices", "cpu:1")
    line = f"{env}/bin/python (Python 3.11.7) has no hpcsched-worker"
    assert done.returncode == 1 and line in done.stderr, done.stderr
    late = bench.job("late")
    assert late["state"] == "FAILED" and late["attempt"] == 1
    assert late["reason"] == "LaunchFailed" and line in late["detail"]
    assert line in bench("explain", "late").stdout
    assert line in bench.output(2)


def test_what_cannot_run_is_refused_by_submit_and_what_can_is_taken(bench: Bench) -> None:
    agent = bench.start(bench.set_of(job("stays", "sleep 600")), "--devices", "cpu:2")
    bench.until(lambda: bench.states().get("stays") == "RUNNING")
    refused = bench("submit", "--venv", bench.folder / "none", "--", "true")
    assert refused.returncode == 2 and "none/bin/python: no such file" in refused.stderr
    assert bench("submit", "--venv", "a", "--conda", "b", "--", "true").returncode == 2
    taken = bench(
        "submit", "--python", sys.executable, "--name", "shows", "--", "sh", "-c", "echo $VIRTUAL_ENV"
    )
    assert taken.returncode == 0, taken.stderr
    bench.until(lambda: bench.states().get("shows") == "COMPLETED")
    assert bench.output(2).strip() == (OWN if (Path(OWN) / "pyvenv.cfg").exists() else "")
    bench("cancel", "stays")
    agent.wait()


def test_a_run_that_is_gone_on_with_has_its_environment(bench: Bench) -> None:
    env = interpreter(bench.folder / "env")
    (env / "pyvenv.cfg").touch()
    first = f"test -e {bench.folder}/stopped || sleep 600"
    jobs = bench.set_of(job("first", first, gpus=1), job("second", "echo in $VIRTUAL_ENV", gpus=1))
    agent = bench.start(jobs, "--devices", "cpu:1", "--venv", env)
    bench.until(lambda: bench.states().get("first") == "RUNNING")
    agent.kill(signal.SIGTERM)
    agent.wait()
    (bench.folder / "stopped").touch()
    done = bench("run", "--resume")
    assert done.returncode == 0, done.stderr
    assert bench.output(2).strip() == f"in {env}"


SEARCH = """
schema = 1
trainer = "small:Small"
metric = "loss"
mode = "min"
R = 3
[space]
lr = { log = [1e-3, 1.0] }
"""


@pytest.mark.slow
def test_a_search_that_is_gone_on_with_has_its_environment(bench: Bench, torchless: None) -> None:
    pytest.importorskip("torch")
    bench.env["PATH"] = "/usr/bin:/bin"
    waits = "while os.path.exists('wait'): time.sleep(0.1)"
    told = 'evaluate=lambda model: {"loss": float(model.weight.sum())},\n                     loss='
    trainer = TRAINER.replace("import sys,", "import os, time, sys,").replace("loss=", told)
    (bench.folder / "small.py").write_text(
        trainer.replace("        model = nn", f"        {waits}\n        model = nn")
    )
    (bench.folder / "wait").touch()
    file = bench.folder / "search.toml"
    file.write_text(SEARCH)
    agent = bench.start(file, "--devices", "cpu:1", "--venv", OWN, command="tune")
    bench.until(lambda: "RUNNING" in bench.states().values())
    agent.kill(signal.SIGTERM)
    agent.wait()
    (bench.folder / "wait").unlink()
    done = bench("tune", file, "--resume")
    assert done.returncode == 0, done.stderr
    assert "best: loss" in done.stdout and f"built by {OWN}" in bench.output()


def test_what_submit_cannot_know_it_only_doubts(bench: Bench) -> None:
    """A name is looked up in the agent's PATH, and without an agent here nobody knows on which host."""
    here, there = bench.folder / "here" / "bin", bench.folder / "there"
    none = bench("submit", "--venv", there, "--parsable", "--", "true")
    assert none.returncode == 0 and none.stdout == "1\n"
    assert "submitted all the same: job true: venv" in none.stderr and "no such file" in none.stderr
    here.mkdir(parents=True)
    (here / "mypython").symlink_to(sys.executable)
    path = bench.env["PATH"]
    bench.env["PATH"] = f"{here}{os.pathsep}{path}"
    bench.start(bench.set_of(job("stays", "sleep 600", gpus=1)), "--devices", "cpu:2")
    bench.until(lambda: bench.states().get("true") == "FAILED")
    bench.env["PATH"] = path
    named = bench("submit", "--python", "mypython", "--name", "named", "--", "true")
    assert named.returncode == 0 and "not found in PATH" in named.stderr
    bench.until(lambda: bench.states().get("named") == "COMPLETED")


def test_a_job_whose_modules_are_being_loaded_is_cancelled_and_drained_at_once(bench: Bench) -> None:
    home = bench.folder / "modules"
    (home / "init").mkdir(parents=True)
    (home / "init/bash").write_text("module() { sleep 300; }\n")
    bench.env["MODULESHOME"] = str(home)
    jobs = bench.set_of(*(job(name, "true", gpus=1, modules=[name], time="1s") for name in ("a", "b")))
    agent = bench.start(jobs, "--devices", "cpu:2")
    bench.until(lambda: len(bench.live_workers()) >= 4)
    time.sleep(1.2)  # their time limit is over, but for that they have not begun
    assert [bench.job(name)["reason"] for name in ("a", "b")] == ["Modules", "Modules"]
    assert "because: its modules are being loaded: a" in bench("explain", "a").stdout
    bench("cancel", "a")
    bench.until(lambda: bench.states().get("a") == "CANCELLED")
    agent.kill(signal.SIGINT)
    began = time.monotonic()
    assert agent.wait() == 75
    assert time.monotonic() - began < 15
    assert bench.states()["b"] == "PENDING"
    assert not bench.live_workers()
