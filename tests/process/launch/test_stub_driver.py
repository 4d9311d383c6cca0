"""`hpcsched run` on eight GPUs of a stub driver: who calls CUDA's driver, when, and for which GPU.

The driver and NVML are stubs (tests/support/stubdriver): no GPU is needed, and nothing here says what a GPU
computes. Each test is run for every torch that there is:

- that of the tests ("own"), and of each interpreter in HPCSCHED_TEST_PYTHONS if it is a CUDA build;
- a CPU build, as in CI, is made to call the driver where a CUDA build does (stubdriver/as_cuda_build.py), and
  trains on the CPU;
- a CUDA build calls it itself. Its runtime calls cuInit, but does not take the stub for NVIDIA's driver after
  that. So jobs end after a backward pass and a step on the CPU, and one that trains finds that it cannot use
  its GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pythons
from livebench import FOREVER, PATIENCE_S, Bench, job
from places import ROOT
from stubdriver import StubDriver
from warmbench import children, used

from hpcsched.contract.exits import NO_GPU
from hpcsched.core import events
from hpcsched.core.actions import Launch
from hpcsched.store import journal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

GPUS = 8
STANDBYS = 4

TRAINER = '''
"""Says what it was given; trains, or leaves after a backward pass and a step on the CPU."""
import json, os, sys, time
from pathlib import Path
import torch
from hpcsched.worker import Parts, Trainer

class Looks(Trainer):
    def build(self, args):
        name, rank = os.environ["HPCSCHED_JOB_NAME"], os.environ.get("HPCSCHED_RANK", "0")
        say = Path(f"found.{name}.{rank}.{os.getpid()}")
        part = say.with_suffix(".part")
        part.write_text(json.dumps({
            "job": int(os.environ["HPCSCHED_JOB_ID"]), "rank": int(rank), "pid": os.getpid(),
            "cuda": torch.version.cuda, "cores": sorted(os.sched_getaffinity(0)),
            "omp": os.environ.get("OMP_NUM_THREADS"), "threads": torch.get_num_threads(),
        }))
        part.rename(say)
        deadline = time.monotonic() + 120
        while len(list(Path().glob("found.solo-*.0.*[0-9]"))) < args.get("wait_for", 0):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        if torch.version.cuda and not args.get("train"):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            while args.get("stays"):
                time.sleep(0.01)
            sys.exit(0)

        return parts(model, optimizer, args.get("pause", 0))

class Plain(Trainer):
    def build(self, args):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        return parts(model, torch.optim.AdamW(model.parameters()), args.get("pause", 0))

def parts(model, optimizer, pause):
    def loss(model, batch):
        time.sleep(pause)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return Parts(model=model, optimizer=optimizer, dataset=(torch.ones(8, 4), torch.zeros(8).long()),
                 global_batch=4, loss=loss)
'''

CALLS = [sys.executable, "-S", "-c", "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"]


def with_cuda() -> Iterator[Path]:
    """The interpreters that somebody named whose torch is a CUDA build."""
    for python in pythons.named():
        asks = [python, "-c", "import torch; raise SystemExit(torch.version.cuda is None)"]
        if subprocess.run(asks, capture_output=True, timeout=PATIENCE_S).returncode == 0:
            yield python


TORCHES = [pytest.param("", id="own"), *(pytest.param(str(python), id=str(python)) for python in with_cuda())]


class Place:
    """A run on eight GPUs, four near each half of the cores that there are."""

    def __init__(self, bench: Bench, driver: StubDriver, python: str) -> None:
        self.bench, self.driver, self.keys = bench, driver, {"python": python} if python else {}
        self.cuda = bool(python) or torch.version.cuda is not None
        self.all = sorted(os.sched_getaffinity(0))
        half = max(1, len(self.all) // 2)
        self.sides = [self.all[:half], self.all[half:] or self.all]
        cores = [self.sides[gpu // (GPUS // 2)] for gpu in range(GPUS)]
        roots = f"{ROOT}:{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else str(ROOT)
        bench.env = driver.environ({**bench.env, "PYTHONPATH": roots}, gpus=GPUS, cores=cores)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            bench.env.pop(name, None)
        (bench.folder / "looks.py").write_text(TRAINER)

    def looks(self, name: str, **keys: Any) -> str:
        return job(name, trainer="looks:Looks", **{"steps": 2, "gpus": 1, **self.keys, **keys})

    def found(self, name: str = "*") -> list[dict[str, Any]]:
        """What the processes of jobs have said."""
        return [json.loads(path.read_text()) for path in self.bench.folder.glob(f"found.{name}.*.*[0-9]")]

    def standing(self, agent: int) -> list[int]:
        """The standbys: they are children of who stands between them and the zygote, and asleep."""
        zygotes = [pid for pid in children(agent) if b"hpcsched.worker.zygote" in command_of(pid)]
        return [p for zygote in zygotes for between in children(zygote) for p in children(between) if used(p)]

    def warm(self, agent: int) -> list[int]:
        """The standbys once they are all there and have nothing more to do."""
        before: dict[int, list[bytes]] = {}

        def quiet() -> list[int]:
            nonlocal before
            now = {pid: used(pid) for pid in self.standing(agent)}
            same, before = now == before, now
            time.sleep(0.2)
            return list(now) if same and len(now) == STANDBYS else []

        return list(self.bench.until(quiet, "standbys"))

    def submit(self, *jobs: str) -> None:
        done = self.bench("submit", self.bench.set_of(*jobs, name="more.toml"))
        assert done.returncode == 0, done.stderr

    def completed(self, *names: str) -> None:
        def all_have() -> bool:
            states = self.bench.states()
            assert "FAILED" not in states.values(), self.bench.status()
            return all(states.get(name) == "COMPLETED" for name in names)

        self.bench.until(all_have, f"{names} completed")

    def exits(self, name: str) -> list[events.WorkersExited]:
        number = self.bench.job(name)["id"]
        found = [event for event, _ in journal.read(self.bench.rundir.journal)]
        return [e for e in found if isinstance(e, events.WorkersExited) and e.job_id == number]

    def is_near(self, found: dict[str, Any], gpu: int) -> bool:
        """Whether a rank on this GPU has the cores near it, and its part of them as threads."""
        side = self.sides[gpu // (GPUS // 2)]
        threads = max(1, len(side) // (GPUS if self.sides[0] == self.sides[1] else GPUS // 2))
        return (found["cores"], found["omp"], found["threads"]) == (side, str(threads), threads)

    def attempts(self) -> dict[int, tuple[int, ...]]:
        """The GPUs of each process of an attempt, by its pid, as the run's journal has them."""
        gpus = {(a.job_id, a.attempt): a.gpus for a in self.bench.replayed()[1] if isinstance(a, Launch)}
        return {
            pid: gpus[event.job_id, event.attempt]
            for event, _ in journal.read(self.bench.rundir.journal)
            if isinstance(event, events.WorkersSpawned)
            for pid, _ in event.processes
        }


@pytest.fixture(params=TORCHES)
def place(bench: Bench, driver: StubDriver, request: pytest.FixtureRequest) -> Place:
    return Place(bench, driver, request.param)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def links(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


def test_only_a_worker_calls_the_driver_and_finds_its_own_gpu(place: Place) -> None:
    bench, driver = place.bench, place.driver
    bench.env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(GPUS)))  # as a batch system grants them
    first = place.looks("solo-0", steps=FOREVER, args={"wait_for": GPUS, "pause": 0.01, "stays": True})
    agent = bench.start(
        bench.set_of(first), "--devices", f"cuda:{GPUS}", "--cpus-per-gpu", 0, "--monitor", 60
    )
    bench.until(lambda: place.found("solo-0"), "the first job")
    standbys = place.warm(agent.pid)
    # There before a device is known: the agent, which asks NVML; standbys, whose torch links the driver.
    assert links(agent.pid, "libnvidia-ml.so") and not links(agent.pid, "libcuda.so")
    assert all(links(pid, "libcuda.so") for pid in standbys)
    assert not driver.calls()

    # Eight at a time, then two ranks, and a program; and two jobs on CPU cores.
    solos = [place.looks(f"solo-{i}", args={"wait_for": GPUS}) for i in range(1, GPUS)]
    strategy = {"kind": "ps", "cpus": 0.3, "start": 1, "servers": 1, "workers": 2}
    place.submit(
        *solos,
        place.looks("pair", gpus=2),
        job("servers", trainer="looks:Looks", strategy=strategy, steps=2, **place.keys),
        job("program", command=CALLS, gpus=1),
        job("on-cores", command=CALLS, strategy={"kind": "cpu", "cpus": 0.1}),
    )
    place.completed(*(f"solo-{i}" for i in range(1, GPUS)), "pair", "program", "servers", "on-cores")
    (stays,) = [found["pid"] for found in place.found("solo-0")]
    bench.until(lambda: stays in [call.pid for call in driver.calls()], "the first job's step")
    calls, attempts = driver.calls(), place.attempts()
    of_gpus = {call.pid: call.gpus for call in calls if call.gpus}
    assert of_gpus == {pid: gpus for pid, gpus in attempts.items() if gpus}
    assert sorted(of_gpus[found["pid"]] for found in place.found("solo-*")) == [(gpu,) for gpu in range(GPUS)]
    assert [len(of_gpus[found["pid"]]) for found in place.found("pair")] == [2, 2]
    assert of_gpus.keys() & set(standbys)  # all, but where a machine is too busy for one to answer in time
    on_cores = {call.pid for call in calls if not call.gpus}
    assert on_cores == {pid for pid, gpus in attempts.items() if not gpus}
    assert on_cores > {found["pid"] for found in place.found("servers")}
    for found in [*place.found("solo-*"), *place.found("pair")]:
        assert place.is_near(found, of_gpus[found["pid"]][found["rank"]])

    # A keeper makes durable what was saved in memory, and does not ask for a GPU either.
    broken = 1
    if not place.cuda:
        bench.ready("solo-0")
        assert bench("suspend", "solo-0").returncode == 0
        bench.until(lambda: bench.states()["solo-0"] == "SUSPENDED", "suspended")
        assert place.exits("solo-0")[0].held
        broken = 0
    # A GPU that torch cannot use: the job does not train on the CPU instead, and the run knows why.
    driver.broken.write_text(str(broken))
    place.submit(place.looks("unlucky", retries=0, args={"train": True}))
    bench.until(lambda: bench.states().get("unlucky") in ("COMPLETED", "FAILED"), "its end")
    assert place.exits("unlucky")[0].code == NO_GPU
    lost, unlucky = bench.status()["run"]["lost_gpus"], bench.job("unlucky")
    assert " cannot be used: torch" in Path(unlucky["output"]).read_text()
    if place.keys:  # to the agent it is another torch than its own, which may be the fault
        assert f"GPU {broken} cannot be used: torch" in unlucky["detail"]
        assert "it has another torch than hpcsched" in unlucky["detail"]
        assert not lost
    else:
        assert (list(lost), unlucky["attempt"]) == ([str(broken)], 2)
        if place.cuda:  # on no GPU of a stub can it train
            assert unlucky["detail"].endswith(f"as it could not use GPU {broken} either")
        else:
            assert unlucky["state"] == "COMPLETED"
            assert "no CUDA-capable device is detected" in lost[str(broken)]
    assert bench("cancel", "solo-0").returncode == 0
    assert agent.wait() == int(place.cuda), agent.said

    # All in all: once in a process, by workers alone, and by none that began in a process that had.
    calls = driver.calls()
    assert len(calls) == len({call.pid for call in calls}) and not driver.calls("forked")
    assert {call.pid for call in calls} <= place.attempts().keys()


@pytest.mark.slow
def test_in_every_strategy_a_process_finds_the_gpus_of_its_job_on_its_host(place: Place) -> None:
    """Two hosts, which are this one twice: GPU 4 of the run is the first one of the second host.

    With a background job in the run, all others are told that they are in a foreground.
    """
    if place.cuda:
        pytest.skip("a CUDA build cannot train on a stub")
    bench, of_a_host = place.bench, 4
    bench.env["STUB_GPUS"] = str(of_a_host)
    keys: dict[str, dict[str, Any]] = {
        "back": {"background": True},
        "packed-1": {"strategy": {"kind": "packed", "mode": "loop"}, "gpus": 1},
        "packed-2": {"strategy": {"kind": "packed", "mode": "loop"}, "gpus": 1},
        "vsw": {"strategy": {"kind": "vsw", "local_batch": 2}, "gpus": 2},
        "burst": {"strategy": "burst", "gpus": 2},
        "hosts": {"nodes": 2, "gpus": 1},
    }
    jobs = [job(name, trainer="looks:Plain", **{"steps": 4, **more}) for name, more in keys.items()]
    done = bench("run", bench.set_of(*jobs), "--devices", "cuda", "--hosts", "n1,n2", "--launcher", "local")
    assert done.returncode == 0, done.stderr
    assert set(bench.states().values()) == {"COMPLETED"}
    placed: dict[int, Counter[tuple[int, ...]]] = {}
    for action in bench.replayed()[1]:
        if isinstance(action, Launch):
            hosts = [[gpu % of_a_host for gpu in action.gpus if gpu // of_a_host == host] for host in (0, 1)]
            placed.setdefault(action.job_id, Counter()).update(tuple(gpus) for gpus in hosts for _ in gpus)
    found = Counter(call.gpus for call in place.driver.calls())
    guest = placed.pop(1)  # its process does not call the driver while it is a guest in another
    others = sum(placed.values(), Counter[tuple[int, ...]]())
    assert found in (others, others + guest), done.stderr
    assert not place.driver.calls("forked")


@pytest.mark.slow
def test_doctor_says_of_each_gpu_what_torch_says(place: Place) -> None:
    place.driver.broken.write_text("1")
    named = ("--python", place.keys["python"]) if place.keys else ()
    place.bench.env["STUB_GPUS"] = "2"
    done = place.bench("doctor", "--devices", "cuda:2", *named)
    assert done.returncode == 1, done.stderr
    first, second = [line for line in done.stdout.splitlines() if " GPU " in line]
    if place.cuda:
        assert first.startswith("PROBLEM") and "cudaGetDeviceCount" in first
    else:
        assert first.startswith("ok") and first.endswith("computes on NVIDIA H100 80GB HBM3")
        assert second.endswith("CUDA driver: no CUDA-capable device is detected")
    assert second.startswith("PROBLEM") and "torch" in second
    assert sorted(call.gpus for call in place.driver.calls()) == [(), (0,)]
    assert all("hpcsched.worker.gpu" in call.program for call in place.driver.calls())
