"""The wheel of hpcsched-worker in an environment of its own, and under the scheduler of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import pythons
from livebench import Bench
from places import ROOT

from hpcsched.contract.environment import Environment

BUILD_S, INSTALL_S, IMPORT_S = 300, 300, 120

IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not {"torch", "hpcsched.cli", "hpcsched.core"} & set(sys.modules)
"""


WAITS = """
import socket
from hpcsched.worker.background.protocol import GuestConnection

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line = GuestConnection(ours)
assert line.hear(0.01) is None and not line.closed, "silence was taken for a line that is closed"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "packaging/build.py", "--out", str(out), "hpcsched-worker"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=BUILD_S)
    (found,) = out.glob("*.whl")
    assert len(list(out.glob("*.tar.gz"))) == 1
    return found


@pytest.mark.slow
def test_the_oldest_python_imports_what_needs_no_torch_and_runs_the_standin(
    wheel: Path, tmp_path: Path
) -> None:
    oldest = pythons.oldest()
    if oldest is None:
        pytest.skip("no other Python from 3.9 on is here")
    place, folder = tmp_path / "env", tmp_path / "job"
    folder.mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "HPCSCHED_"))}

    def run(*command: str | Path, seconds: float, **told: str) -> None:
        done = subprocess.run(
            command, cwd=tmp_path, env=environ | told, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, done.stderr

    run(oldest, "-m", "venv", place, seconds=INSTALL_S)
    python = place / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, seconds=INSTALL_S)
    contract = [f"hpcsched.contract.{path.stem}" for path in (ROOT / "hpcsched/contract").glob("[a-z]*.py")]
    planning = ["vsw.batching", "burst.plan", "background.pacing", "ps.stability", "jobs.course"]
    run(
        python,
        "-c",
        IMPORTS,
        *contract,
        *(f"hpcsched.planning.{name}" for name in planning),
        "hpcsched.worker.process.contract",
        "hpcsched.worker.link",
        "hpcsched.worker.keeper",
        seconds=IMPORT_S,
    )
    run(python, "-c", WAITS, seconds=IMPORT_S)
    told = Environment(
        standin={"rate": 1e6, "start_s": 0.0, "suspend_s": 0.0, "steps": 10, "speed": 1.0},
        job_dir=str(folder),
        attempt=1,
        resume=False,
        launched_at=time.monotonic(),
        rank=0,
        world_size=1,
        notify_pid=0,
        checkpoint_every_s=600.0,
    )
    run(python, "-m", "hpcsched.worker.standin", seconds=IMPORT_S, **told.to_environ())
    assert json.loads((folder / "STATE.json").read_text())["step"] == 10


TRAINER = """
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Net(Trainer):
    def build(self, args):
        torch.manual_seed(0)
        x = torch.randn(240, 8)
        y = (x.sum(1) > 0).long()
        width = args.get("width", 16)
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
        return Parts(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            dataset=(x, y),
            global_batch=12,
            loss=loss,
        )

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
"""

JOBS = """
schema = 1
[defaults]
python = "{python}"
env = {{ PYTHONPATH = "{path}" }}
trainer = "net:Net"
steps = 60
[[job]]
name = "ddp"
gpus = 1
[[job]]
name = "ddp-2"
gpus = 2
[[job]]
name = "reproducible"
gpus = 2
strategy = {{ kind = "ddp", reproducible = true }}
[[job]]
name = "burst"
gpus = 2
strategy = {{ kind = "burst" }}
[[job]]
name = "vsw"
gpus = 2
strategy = {{ kind = "vsw", workers = 3 }}
[[job]]
name = "ps"
strategy = {{ kind = "ps", cpus = 2 }}
"""

PACK = """
schema = 1
[defaults]
python = "{python}"
env = {{ PYTHONPATH = "{path}" }}
trainer = "net:Net"
steps = 200
strategy = {{ kind = "packed", mode = "{mode}" }}
[[job]]
name = "a"
[[job]]
name = "b"
[[job]]
name = "c"
"""


SPREAD = """
import torch
from torch import nn
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard
from hpcsched.worker import Session, join

ranks = join()
torch.manual_seed(0)
x, y = torch.randn(48, 8), torch.randint(0, 3, (48,))
model = nn.Linear(8, 3).to(ranks.device)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
session = Session(model=model, optimizer=optimizer, dataset_size=48, global_batch=12, ranks=ranks)
for indices in session.steps():
    optimizer.zero_grad()
    session.backward(nn.functional.cross_entropy(model(x[indices]), y[indices], reduction="none"))
    optimizer.step()
session.finish()
"""

SPREAD_JOB = """
schema = 1
[[job]]
name = "spread"
python = "{python}"
command = ["python", "{path}/spread.py"]
processes = "per-gpu"
gpus = 2
steps = 20
retries = 0
"""


@pytest.fixture(scope="module", params=pythons.named() or [None], ids=str)
def other(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """An environment with the worker on top of another interpreter with torch, and a folder of programs."""
    if request.param is None:
        pytest.skip(f"{pythons.NAMED} names no interpreter with torch")
    folder = tmp_path_factory.mktemp("other")
    place, trainers = folder / "env", folder / "trainers"
    subprocess.run([request.param, "-m", "venv", place], check=True, timeout=INSTALL_S)
    python = place / "bin" / "python"
    command = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel]
    subprocess.run(command, check=True, timeout=INSTALL_S)
    # Not --system-site-packages: the interpreter that is named may be that of a virtual environment itself.
    program = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    theirs, ours = (
        subprocess.run([which, "-c", program], check=True, capture_output=True, text=True, timeout=IMPORT_S)
        for which in (request.param, python)
    )
    Path(ours.stdout.strip(), "torch.pth").write_text(theirs.stdout)
    trainers.mkdir()
    (trainers / "net.py").write_text(TRAINER)
    (trainers / "spread.py").write_text(SPREAD)
    return python, trainers


@pytest.mark.slow
def test_every_module_is_imported_by_another_python(
    other: tuple[Path, Path], wheel: Path, tmp_path: Path
) -> None:
    python, _ = other
    with zipfile.ZipFile(wheel) as archive:
        files = [Path(name) for name in archive.namelist() if name.endswith(".py")]
    names = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if path.name not in ("__main__.py", "digits.py")
    ]
    assert len(names) > 50
    program = IMPORTS.partition("assert")[0]
    subprocess.run([python, "-c", program, *names], check=True, cwd=tmp_path, timeout=IMPORT_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "mode", "devices"),
    [(JOBS, "", 2), (PACK, "stacked", 1), (PACK, "loop", 1)],
    ids=["ranks", "stacked", "loop"],
)
def test_every_strategy_trains_in_another_python(
    jobs: str, mode: str, devices: int, other: tuple[Path, Path], bench: Bench
) -> None:
    python, trainers = other
    file = bench.folder / "jobs.toml"
    file.write_text(jobs.format(python=python, path=trainers, mode=mode))
    done = bench("run", file, "--devices", f"cpu:{devices}", timeout_s=1200)
    assert done.returncode == 0, done.stderr
    assert set(bench.states().values()) == {"COMPLETED"}


@pytest.mark.slow
def test_a_model_spread_by_fully_shard_trains_or_is_refused_in_one_line(
    other: tuple[Path, Path], bench: Bench
) -> None:
    python, trainers = other
    command = [python, "-c", "import torch; print(torch.__version__)"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=IMPORT_S)
    version = said.stdout.strip()
    file = bench.folder / "jobs.toml"
    file.write_text(SPREAD_JOB.format(python=python, path=trainers))
    done = bench("run", file, "--devices", "cpu:2", timeout_s=300)
    if tuple(int(number) for number in version.split(".")[:2]) >= (2, 8):
        assert done.returncode == 0, done.stderr
        assert bench.states() == {"spread": "COMPLETED"}
        return
    assert bench.states() == {"spread": "FAILED"}
    line = f"model: spread over the ranks by fully_shard, under torch {version}; accepted: torch 2.8 or later"
    assert line in bench.job("spread")["detail"], bench.job("spread")
