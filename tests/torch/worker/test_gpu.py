"""A worker and the GPU that it was given: what it does if torch cannot use it, and whom the agent blames."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent.gpu_faults import GpuFaults, GpuVerdict
from hpcsched.contract import driver
from hpcsched.contract.exits import NO_GPU
from hpcsched.core.model import JobSpec, Kind
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.spawn import ProcessStart
from hpcsched.launch.zygote import Zygote
from hpcsched.worker.process import forked
from hpcsched.worker.process.contract import JobEnv

# --- standbys ---------------------------------------------------------------------------------


def test_the_driver_is_asked_whether_it_is_in_use(stub_libraries: Path) -> None:
    stub = stub_libraries / "libcuda.so.1"
    asks = (
        "import ctypes, sys; from hpcsched.worker.gpu import driver_in_use as used; seen = [used()];"
        "driver = ctypes.CDLL(sys.argv[1]); seen += [used()]; driver.cuInit(0); print(seen + [used()])"
    )
    done = subprocess.run([sys.executable, "-c", asks, stub], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False, True]"


@pytest.mark.parametrize(
    ("used", "visible", "says"), [(True, None, b"x"), (True, "", b"w"), (False, None, b"w")]
)
def test_a_standby_that_has_used_the_driver_too_early_says_so(
    monkeypatch: pytest.MonkeyPatch, used: bool, visible: str | None, says: bytes
) -> None:
    """Unless it is for tasks that all have the GPUs that it knows of: none, on CPU slots."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(forked, "warm", lambda *, fully: None)
    monkeypatch.setattr(forked, "driver_in_use", lambda: used)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            forked.wait_for_task(theirs, warm_up=True, room=None)
        finally:
            os._exit(1)
    theirs.close()
    ours.settimeout(60)
    assert ours.recv(1) == says
    ours.close()
    assert os.waitpid(child, 0)[1] == 0


def test_after_one_that_is_of_no_use_no_other_is_made() -> None:
    zygote = pytest.importorskip("hpcsched.worker.zygote")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = zygote.Server(ours, 2, 1.0)
    child = SimpleNamespace(line=ours, warmed=False)
    theirs.send(forked.NO_USE)
    server._hear(child)
    assert server.most == 0 and not child.warmed
    ours.close()
    theirs.close()


def fits(given: dict[str, str], wanted: dict[str, str]) -> bool:
    """Whether a zygote with one environment is for a worker with another."""
    processes = Zygote(sys.executable, standbys=1, core_sets=(), shielded=frozenset())
    processes._early = dict(given)
    argv = (sys.executable, "-m", "hpcsched.worker")
    return processes._fits(ProcessStart(program=argv[0], argv=argv, env=wanted, cwd=Path("/"), output=1))


def test_a_zygote_that_knows_its_gpus_is_for_these_alone() -> None:
    visible = "CUDA_VISIBLE_DEVICES"
    assert fits({}, {visible: "3"}) and fits({visible: ""}, {visible: ""})
    assert not fits({visible: ""}, {visible: "3"}) and not fits({visible: ""}, {})


def test_zygotes_are_told_of_no_gpu(tmp_path: Path) -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "0", "HPCSCHED_CUDA_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    start = SimpleNamespace(env={"HPCSCHED_RUN_ID": "r"})
    outer = {"CUDA_VISIBLE_DEVICES": "0,1", "HPCSCHED_CUDA_DEVICES": "0,1", "HOME": "/h"}
    launcher = LocalLauncher(device_env=lambda devices: gpus, environ=outer)
    assert launcher._usual_environment(start) == {
        "HOME": "/h",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HPCSCHED_RUN_ID": "r",
    }
    slots = LocalLauncher(device_env=lambda devices: {"CUDA_VISIBLE_DEVICES": ""}, environ=outer)
    assert slots._usual_environment(start)["CUDA_VISIBLE_DEVICES"] == ""


# --- a GPU that torch cannot use ----------------------------------------------------------------


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process rank 1 of 2 on the GPUs named."""

    def be(given: str, visible: str | None = None, rank: int = 1) -> JobEnv:
        told = {"JOB_ID": "3", "ATTEMPT": "2", "JOB_DIR": str(tmp_path), "DEVICES": "4,6"}
        told |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "CUDA_DEVICES": given}
        for name, value in told.items():
            monkeypatch.setenv(f"HPCSCHED_{name}", value)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        [(name, value)] = driver.told(os.environ).items()
        monkeypatch.setenv(name, value)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given if visible is None else visible)
        env = JobEnv.from_environ()
        assert env is not None
        return env

    return be


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch as it is where CUDA is compiled in, with two GPUs."""
    real = pytest.importorskip("torch")
    monkeypatch.setattr(real.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(real.cuda, "init", lambda: None)
    monkeypatch.setattr(real.cuda, "is_available", lambda: True)
    monkeypatch.setattr(real.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(real.cuda, "synchronize", lambda device: None)
    return real


def cannot(said: str) -> Any:
    def call(*_: object) -> None:
        raise RuntimeError(f"{said}\nand more")

    return call


def own_device(env: JobEnv | None) -> Any:
    from hpcsched.worker.ranks import process_group

    return process_group.own_device(env)


def test_a_gpu_that_can_be_used_is_taken(torch: Any, rank: Any) -> None:
    assert own_device(rank("0,3")) == torch.device("cuda", 1)
    assert own_device(rank("0,3", rank=0)) == torch.device("cuda", 0)


@pytest.mark.parametrize("call", ["init", "synchronize"])
def test_one_that_cannot_be_used_ends_the_worker(
    torch: Any,
    rank: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    call: str,
) -> None:
    monkeypatch.setattr(torch.cuda, call, cannot("The NVIDIA driver is too old"))
    with pytest.raises(SystemExit) as end:
        own_device(rank("0,3"))
    why = f"torch {torch.__version__}: The NVIDIA driver is too old"
    assert end.value.code == NO_GPU
    assert capfd.readouterr().err == f"hpcsched: GPU 6 (3) cannot be used: {why}\n"
    said = json.loads((tmp_path / "unusable.2").read_text())
    assert said == {"gpu": 6, "why": why, "torch": torch.__file__, "changed": []}


def test_what_the_program_has_changed_is_said_in_few_bytes(
    torch: Any, rank: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "init", cannot("no"))
    env = rank("0,3")
    for number in range(100):
        monkeypatch.setenv(f"CUDA_{number:03}_{'X' * 1000}", "1")
    with pytest.raises(SystemExit):
        own_device(env)
    (changed,) = [json.loads(text)["changed"] for text in [(tmp_path / "unusable.2").read_text()]]
    assert len(changed) == 8 and changed[0] == f"CUDA_000_{'X' * 1000}"[:64]


@pytest.mark.parametrize(
    "said", ["CUDA error: out of memory", "Cannot re-initialize CUDA in forked subprocess."]
)
def test_what_no_gpu_is_to_blame_for_is_the_jobs_affair(
    torch: Any, rank: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", cannot(said))
    with pytest.raises(RuntimeError, match=said):
        own_device(rank("0,3"))
    assert not (tmp_path / "unusable.2").exists()


def test_without_cuda_it_says_so_too(
    rank: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(SystemExit):
        own_device(rank("0,3"))
    said = f"GPU 6 (3) cannot be used: torch {torch.__version__} was built without CUDA"
    assert said in capfd.readouterr().err


def test_on_cpu_slots_and_without_hpcsched_there_is_no_gpu(
    rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device(rank("", "")).type == "cpu"
    assert own_device(None).type == "cpu"


def test_a_program_that_chooses_for_itself_is_warned_and_believed(
    rank: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert own_device(rank("0,3", "7")).type == "cpu"
    assert "the program has set CUDA_VISIBLE_DEVICES to '7'" in capfd.readouterr().err
    assert own_device(rank("0,3", "")).type == "cpu"
    assert capfd.readouterr().err == ""


def test_two_ranks_never_share_a_mig_instance(
    torch: Any, rank: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA shows a process one of several: nothing is wrong with the other."""
    from hpcsched.errors import LaunchError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError, match="no GPU for local rank 1"):
        own_device(rank("MIG-1,MIG-2"))
    assert not (tmp_path / "unusable.2").exists()
    assert own_device(rank("MIG-1,MIG-2", rank=0)) == torch.device("cuda", 0)


# --- whom the agent blames ------------------------------------------------------------------------


def says(folder: Path, **facts: Any) -> None:
    torch = pytest.importorskip("torch")
    (folder / "unusable.2").write_text(json.dumps({"gpu": 6, "why": "w", "torch": torch.__file__} | facts))


def judged(
    folder: Path,
    code: int = NO_GPU,
    env: dict[str, str] | None = None,
    *,
    trained: bool = False,
    **facts: Any,
) -> Any:
    attempt = SimpleNamespace(job_id=3, folder=folder, attempt=2, gpus=(4, 6), ready=False)
    spec = JobSpec(name="a", kind=Kind.TRAINER, model="m", env=env or {})
    accusations = GpuFaults()
    if trained:
        accusations.note_ready(spec)
    return accusations.judge(SimpleNamespace(**{**vars(attempt), **facts}), code, spec, ())


def test_the_gpu_is_to_blame(tmp_path: Path) -> None:
    says(tmp_path)
    for code in (NO_GPU, 1):  # 1: what torchrun makes of it
        assert judged(tmp_path, code, {"PYTHONPATH": "/mine"}) == GpuVerdict(6, "w")


def test_the_torch_of_another_environment_is_believed_once_it_has_trained(tmp_path: Path) -> None:
    says(tmp_path, torch="/envs/mine/torch/__init__.py")
    assert judged(tmp_path).lost is None
    assert judged(tmp_path, trained=True) == GpuVerdict(6, "w")


@pytest.mark.parametrize(
    ("facts", "ready", "env", "fault"),
    [
        ({}, True, {}, "it was ready, so it had a GPU"),
        ({}, False, {"LD_LIBRARY_PATH": "/mine"}, "it sets LD_LIBRARY_PATH"),
        ({"torch": "/home/me/torch/__init__.py"}, False, {}, "it has another torch than hpcsched"),
        ({"changed": ["LD_PRELOAD"]}, False, {}, "its program has changed LD_PRELOAD"),
    ],
)
def test_the_job_is_to_blame(
    tmp_path: Path, facts: dict[str, Any], ready: bool, env: dict[str, str], fault: str
) -> None:
    """It had a GPU, hides them from itself, or has a torch of its own."""
    says(tmp_path, **facts)
    why = f"GPU 6 cannot be used: w; the job's own failure, as {fault}"
    assert judged(tmp_path, env=env, ready=ready) == GpuVerdict(None, why)


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({}, 0),
        ({}, 75),
        ({"gpu": 5}, NO_GPU),
        ({"gpu": "six"}, NO_GPU),
        ({"changed": 1}, NO_GPU),
    ],
)
def test_it_has_not_failed_or_what_it_says_makes_no_sense(
    tmp_path: Path, facts: dict[str, Any], code: int
) -> None:
    says(tmp_path, **facts)
    assert judged(tmp_path, code) is None


def test_without_a_word_no_gpu_is_to_blame(tmp_path: Path) -> None:
    assert judged(tmp_path) is None
