"""Makes the stored runs of a version: small job sets, run by the hpcsched that this interpreter imports.

    unshare --uts sh -c 'hostname node1; USER=ada LOGNAME=ada python tests/data/runs/make.py /srv/trainings'

A release does this with its own code, under a folder that names nobody, and keeps what lies there afterwards
in tests/data/runs/VERSION/. The files stay as they were written; sockets, locks and big files go.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HEAD = "schema = 1\n"
TINY = '''"""A trainer as small as can be."""

import os
import time

import torch
from torch import nn

from hpcsched.worker import Parts, Trainer


class Tiny(Trainer):
    def build(self, args):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(48, 4, generator=generator)
        y = x.sum(1)
        model = nn.Linear(4, 1)

        def loss(model, batch):
            time.sleep(float(os.environ.get("STEP_S", "0")))
            return (model(batch[0]).squeeze(1) - batch[1]) ** 2

        return Parts(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=args.get("lr", 0.01)),
                     global_batch=8, dataset=(x, y), loss=loss,
                     evaluate=lambda model: {"error": loss(model, (x, y)).mean().item()})
'''
COMMANDS = """
[defaults]
steps = 400
[[job]]
name = "done"
command = ["true"]
[[job]]
name = "failed"
command = ["sh", "-c", "echo 'no such data set' >&2; exit 3"]
retries = 0
[[job]]
name = "after-failed"
command = ["true"]
after = ["failed"]
[[job]]
name = "suspended"
command = ["bash", "counts.sh"]
env = { STEP_S = "0.1" }
[[job]]
name = "drained"
command = ["bash", "counts.sh"]
env = { STEP_S = "0.1" }
[[job]]
name = "held"
command = ["bash", "counts.sh"]
env = { STEP_S = "0.01" }
[[job]]
name = "cancelled"
command = ["true"]
after = ["held"]
[[job]]
name = "waiting"
command = ["bash", "counts.sh"]
env = { STEP_S = "0.01" }
gpus = 2
"""
REPLAYED = """
[defaults]
replay = true
[[job]]
name = "resnet50"
model = "ResNet-50"
steps = 900
[[job]]
name = "inception"
model = "Inception-v3"
steps = 700
[[job]]
name = "vgg16"
model = "VGG-16"
steps = 400
[[job]]
name = "resnet101"
model = "ResNet-101"
steps = 500
after = ["vgg16"]
"""
TRAINERS = """
[defaults]
trainer = "tiny:Tiny"
env = { STEP_S = "0.05" }
steps = 400
[[job]]
name = "plain"
gpus = 1
[[job]]
name = "reproducible"
gpus = 1
strategy = { kind = "ddp", reproducible = true }
"""
PACKED = """
[defaults]
trainer = "tiny:Tiny"
strategy = { kind = "packed", mode = "loop" }
env = { STEP_S = "0.05" }
steps = 400
gpus = 1
[[job]]
name = "lr1"
args = { lr = 0.01 }
[[job]]
name = "lr2"
args = { lr = 0.02 }
"""
CORES = """
[[job]]
name = "server"
trainer = "tiny:Tiny"
strategy = { kind = "ps", cpus = 1 }
env = { STEP_S = "0.02" }
steps = 400
[[job]]
name = "program"
command = ["bash", "counts.sh"]
strategy = { kind = "cpu", cpus = 0.5 }
env = { STEP_S = "0.05" }
steps = 400
"""
SEARCH = """
trainer = "tiny:Tiny"
metric = "error"
mode = "min"
R = 4
eta = 2
seed = 1
packing = "off"
[space]
lr = { log = [1e-3, 1e-1] }
"""
REPLAY = ("--devices", "replay:4@400", "--profiles", "marble-summit")
SLOTS = ("--devices", "cpu:2", "--warm", "off")


class Maker:
    """Runs the command line in a folder, with a database of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HPCSCHED_")}
        paths = {"HPCSCHED_DATABASE": "hpcsched.db", "XDG_STATE_HOME": ".state", "XDG_CONFIG_HOME": ".none"}
        own = {name: str(root / path) for name, path in paths.items()}
        self.env = {**inherited, **own, "HPCSCHED_SITE_CONFIG": str(root / "none.toml")}

    def words(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "hpcsched", *map(str, words)]

    def __call__(self, *words: object, code: int = 0) -> str:
        done = subprocess.run(self.words(*words), cwd=self.root, env=self.env, text=True, capture_output=True)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, *words: object, command: str = "run") -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.words(command, f"{name}.toml", "--dir", f"runs/{name}", "--quiet", *words),
            cwd=self.root,
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def set_of(self, name: str, text: str) -> None:
        (self.root / f"{name}.toml").write_text(HEAD + text)

    def until(self, name: str, true: Callable[[dict[str, dict]], bool]) -> None:
        """Wait until this is true of the run's jobs, by name."""
        for _ in range(1500):
            time.sleep(0.1)
            try:
                page = json.loads((self.root / "runs" / name / "status.json").read_text())
            except FileNotFoundError:
                continue
            if true({job["name"]: job for job in page["jobs"]}):
                return
        raise AssertionError(f"{name}: it never came to that")


def steps(job: dict) -> int:
    return job.get("step") or 0


def make(make: Maker) -> None:
    make("profile", "import", "marble-summit")
    make.set_of("commands", COMMANDS)
    agent = make.start("commands", *SLOTS)
    at = ("--dir", "runs/commands")
    make.until("commands", lambda jobs: jobs.get("waiting", {}).get("state") == "PENDING")
    make("hold", "held", "waiting", *at)
    make.until("commands", lambda jobs: all(steps(jobs[n]) > 2 for n in ("suspended", "drained")))
    make("suspend", "suspended", *at)
    make.until("commands", lambda jobs: jobs["suspended"]["state"] == "SUSPENDED")
    make("cancel", "cancelled", *at)
    make("release", "waiting", *at)
    make("drain", *at)
    assert agent.wait(120) == 75

    for policy in ("marble", "exclusive", "planner", "equal", "optimus"):
        make.set_of(policy, REPLAYED)
        make("run", f"{policy}.toml", "--dir", f"runs/{policy}", "--policy", policy, *REPLAY)

    make.set_of("killed", REPLAYED)
    agent = make.start("killed", "--policy", "planner", "--devices", "replay:4@20", *REPLAY[2:])
    make.until("killed", lambda jobs: any(steps(job) > 20 for job in jobs.values()))
    agent.send_signal(signal.SIGKILL)
    agent.wait()

    for name, text, slots in (("trainers", TRAINERS, 2), ("packed", PACKED, 1), ("cores", CORES, 2)):
        make.set_of(name, text)
        agent = make.start(name, "--devices", f"cpu:{slots}", "--warm", "off")
        make.until(name, lambda jobs: all(steps(job) > 5 for job in jobs.values()))
        make("drain", "--dir", f"runs/{name}")
        assert agent.wait(120) == 75

    make.set_of("search", SEARCH)
    make("tune", "search.toml", "--dir", "runs/search", *SLOTS)


def clean(root: Path) -> None:
    """Leave what is to be kept."""
    with (
        (root / "hpcsched.db").open("rb") as database,
        gzip.GzipFile(root / "hpcsched.db.gz", "wb", mtime=0) as to,
    ):
        shutil.copyfileobj(database, to)
    for left in (
        root / "hpcsched.db",
        *root.glob("runs/*/agent.lock"),
        *root.glob("runs/*/.*"),
        *root.rglob("*.log"),
    ):
        left.unlink()
    for path in root.rglob("*"):
        if path.is_socket() or path.is_fifo() or (path.is_file() and path.stat().st_size > 2**16):
            path.unlink()
    for folder in (root / ".state", root / ".none", root / "__pycache__"):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    root = Path(sys.argv[1])
    root.mkdir()
    import hpcsched

    shutil.copy(Path(hpcsched.__file__).with_name("examples") / "plain.sh", root / "counts.sh")
    (root / "tiny.py").write_text(TINY)
    make(Maker(root))
    clean(root)


if __name__ == "__main__":
    main()
