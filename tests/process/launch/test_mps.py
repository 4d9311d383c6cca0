"""MPS clients of a launcher are ended before they are killed, and daemons end with the launcher."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mpsstandin
import pytest
from mpsstandin import MpsHost, mps_host

from hpcsched import mps_control
from hpcsched.core.model import Container
from hpcsched.errors import LaunchError
from hpcsched.launch import mps
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.proc import stat
from hpcsched.launch.workers import LocalWorkers
from hpcsched.testing.conformance_launch import plan, reaped

CLIENT = """
import os, signal, sys, time
sys.path.insert(0, os.environ["SUPPORT"])
from mpsstandin import connect
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(connect(os.environ), flush=True)
time.sleep(60)
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[MpsHost]:
    with mps_host(["GPU-1111aaaa", "GPU-2222bbbb"]) as found:
        monkeypatch.setattr(mps_control, "_TEMPORARY", found.folder)
        monkeypatch.setenv("PATH", found.path)
        yield found


def test_a_daemon_of_an_earlier_agent_ends_with_the_run(tmp_path: Path, daemon: mps_control.Daemon) -> None:
    launcher = LocalLauncher()
    workers = launcher.launch(replace(plan(tmp_path, ["true"]), env={"HPCSCHED_RUN_ID": "run"}))
    assert reaped(workers) == 0
    workers.close()
    launcher.close()
    assert not mps_control.home("run").exists()


@pytest.fixture
def daemon(host: MpsHost) -> mps_control.Daemon:
    """The daemon of the run, begun as the first worker begins it."""
    found = mps_control.daemon_for("run", "GPU-1111aaaa")
    found.start(os.environ)
    return found


def client(
    launcher: LocalLauncher, folder: Path, daemon: mps_control.Daemon, mode: str = "mps"
) -> LocalWorkers:
    """A worker that is a client; it does not end by itself, nor by SIGTERM."""
    env = {
        "HPCSCHED_RUN_ID": "run",
        "HPCSCHED_LANE": "background",
        "HPCSCHED_LANE_MODE": mode,
        "CUDA_VISIBLE_DEVICES": "GPU-2222bbbb",
        "SUPPORT": str(Path(mpsstandin.__file__).parent),
        **daemon.variables(),
    }
    folder.mkdir()
    workers = launcher.launch(replace(plan(folder, [sys.executable, "-c", CLIENT]), env=env))
    until = time.monotonic() + 20
    while "GPU-2222bbbb" not in (folder / "logs" / "out").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    return workers


def terminated(host: MpsHost, daemon: mps_control.Daemon) -> list[int]:
    return [line["terminated"] for line in host.log(daemon.folder) if line.get("known")]


def test_the_work_of_a_client_is_ended_before_it_is_killed(
    tmp_path: Path, host: MpsHost, daemon: mps_control.Daemon
) -> None:
    launcher = LocalLauncher()
    one, other = client(launcher, tmp_path / "1", daemon), client(launcher, tmp_path / "2", daemon)
    one.signal(signal.SIGKILL)
    assert reaped(one) == 128 + signal.SIGKILL
    assert terminated(host, daemon) == [one.processes[0][0]]
    assert other.living == 1
    launcher.close()
    assert (daemon.folder / "pipe" / "control").exists()  # it has a client still
    other.signal(signal.SIGKILL)
    assert reaped(other) == 128 + signal.SIGKILL
    one.close()
    other.close()


def test_a_client_whose_daemon_is_silent_is_killed_all_the_same(
    tmp_path: Path, host: MpsHost, daemon: mps_control.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "TERMINATES_WITHIN_S", 0.3)
    workers = client(LocalLauncher(), tmp_path / "1", daemon)
    os.kill(host.pid(daemon.folder), signal.SIGSTOP)
    try:
        began = time.monotonic()
        workers.signal(signal.SIGKILL)
        workers.signal(signal.SIGKILL)  # asked twice, done once
        assert time.monotonic() - began < 0.2  # the agent is not held up
        assert reaped(workers) == 128 + signal.SIGKILL
    finally:
        os.kill(host.pid(daemon.folder), signal.SIGCONT)
    workers.close()


def test_without_a_thread_a_client_is_killed_at_once(
    tmp_path: Path, host: MpsHost, daemon: mps_control.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = client(LocalLauncher(), tmp_path / "1", daemon)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = set(Path("/proc/self/fd").iterdir())
    workers.signal(signal.SIGKILL)
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert reaped(workers) == 128 + signal.SIGKILL
    assert terminated(host, daemon) == []
    workers.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_is_killed_whatever_goes_wrong_before(
    tmp_path: Path, host: MpsHost, daemon: mps_control.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run_id: str) -> list[mps_control.Daemon]:
        raise ValueError(run_id)

    workers = client(LocalLauncher(), tmp_path / "1", daemon)
    monkeypatch.setattr(mps, "daemons", fails)
    workers.signal(signal.SIGKILL)
    assert reaped(workers) == 128 + signal.SIGKILL
    for thread in threading.enumerate():
        if thread.name == "kills MPS clients":
            thread.join(5.0)
    workers.close()


def test_workers_that_are_no_clients_are_killed_at_once(
    tmp_path: Path, host: MpsHost, daemon: mps_control.Daemon
) -> None:
    workers = client(LocalLauncher(), tmp_path / "1", daemon, mode="process")
    workers.signal(signal.SIGKILL)
    assert reaped(workers) == 128 + signal.SIGKILL
    assert terminated(host, daemon) == []
    workers.close()


def test_daemons_end_with_their_launcher(tmp_path: Path, host: MpsHost, daemon: mps_control.Daemon) -> None:
    launcher = LocalLauncher()
    workers = client(launcher, tmp_path / "1", daemon)
    pid = host.pid(daemon.folder)
    workers.signal(signal.SIGKILL)
    assert reaped(workers) == 128 + signal.SIGKILL
    workers.close()
    launcher.close()
    ended(pid)
    assert not mps_control.home("run").exists()


def test_a_daemon_that_does_not_quit_is_killed(
    tmp_path: Path, host: MpsHost, daemon: mps_control.Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "ANSWERS_WITHIN_S", 0.2)
    monkeypatch.setattr(mps, "QUITS_WITHIN_S", 0.2)
    monkeypatch.setattr(mps_control, "QUITS_WITHIN_S", 0.2)
    launcher = LocalLauncher()
    workers = client(launcher, tmp_path / "1", daemon)
    workers.signal(signal.SIGKILL)
    reaped(workers)
    workers.close()
    pid = host.pid(daemon.folder)
    os.kill(pid, signal.SIGSTOP)
    launcher.close()
    ended(pid)


def ended(pid: int) -> None:
    until = time.monotonic() + 5
    while (seen := stat(pid)) is not None and seen.state != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


SHARES = """
import json, os, sys
sys.path.insert(0, os.environ["SUPPORT"])
from mpsstandin import connect
limit = os.environ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
print(json.dumps([connect(os.environ), limit, sys.argv[1:]]), flush=True)
"""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    """A launcher where MPS may be used; what it starts has its folders in /tmp."""
    with mps_host(["GPU-1111aaaa", "GPU-2222bbbb"]) as host:
        monkeypatch.setenv("PATH", host.path)
        launcher = LocalLauncher()
        yield launcher
        launcher.close()


def shares(launcher: LocalLauncher, folder: Path, argv: list[str], **env: str) -> str:
    """The exit code and the output of a program that shares a GPU."""
    folder.mkdir(exist_ok=True)
    told = {
        "HPCSCHED_RUN_ID": f"shares-{os.getpid()}",
        "HPCSCHED_LANE": "shared",
        "HPCSCHED_LANE_MODE": "mps",
        "HPCSCHED_LANE_MEMORY_MIB": "3000",
        "CUDA_VISIBLE_DEVICES": "GPU-2222bbbb",
        "SUPPORT": str(Path(mpsstandin.__file__).parent),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        **env,
    }
    workers = launcher.launch(replace(plan(folder, argv), env=told))
    code = reaped(workers)
    workers.close()
    return f"{code}: {(folder / 'logs' / 'out').read_text()}".strip()


def test_any_program_that_shares_a_gpu_is_a_client_with_a_limit(tmp_path: Path, gpus: LocalLauncher) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(1)")  # in the user's folder
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable} -P\n{SHARES}")
    program.chmod(0o700)
    found = shares(gpus, tmp_path, ["./program", "a b"])
    assert found == '0: [["GPU-2222bbbb"], "0=3000M", ["a b"]]'
    assert mps_control.home(f"shares-{os.getpid()}").is_dir()
    gpus.close()
    assert not mps_control.home(f"shares-{os.getpid()}").exists()


def test_it_has_the_signals_that_any_program_has(tmp_path: Path, gpus: LocalLauncher) -> None:
    asks = ["grep", "SigIgn", "/proc/self/status"]
    assert shares(gpus, tmp_path / "1", asks) == shares(gpus, tmp_path / "2", asks, HPCSCHED_LANE_MODE="")


def test_one_that_cannot_be_a_client_says_so(tmp_path: Path, gpus: LocalLauncher) -> None:
    found = shares(gpus, tmp_path, ["true"], CUDA_VISIBLE_DEVICES="")
    assert found.startswith("2: hpcsched: environment: HPCSCHED_LANE_MODE: 'mps' without a GPU")
    contained = replace(plan(tmp_path, ["true"]), container=Container(image="/image"))
    told = {"HPCSCHED_LANE": "shared", "HPCSCHED_LANE_MODE": "mps", "HPCSCHED_RUN_ID": "run"}
    with pytest.raises(LaunchError, match="mps in a container; accepted: a program outside"):
        gpus.launch(replace(contained, env=told))
