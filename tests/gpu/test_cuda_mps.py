"""MPS on a real GPU: clients by UUID of one daemon, one of them ended, one held to its memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
    pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="no MPS here"),
]

from hpcsched import mps_control  # noqa: E402
from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.worker.background import mps  # noqa: E402

CLIENT = """
import os, sys, torch
from hpcsched.worker.background.own_process import cap_memory
cap_memory(os.environ, torch.device("cuda", 0))
a = torch.ones(512, 512, device="cuda")
print(torch.cuda.device_count(), torch.cuda.mem_get_info()[1] >> 20, flush=True)
for line in sys.stdin:
    try:
        if line.startswith("take"):
            kept = torch.empty(int(line.split()[1]) << 20, dtype=torch.uint8, device="cuda")
        else:
            (a @ a).sum().item()
        print("ok", flush=True)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        print(type(error).__name__, flush=True)
"""


class Client:
    """A process under MPS that computes when it is told to."""

    def __init__(self, run: str, lane: str, **more: str) -> None:
        self.environ = {
            **os.environ,
            "HPCSCHED_RUN_ID": run,
            "HPCSCHED_LANE": lane,
            "CUDA_VISIBLE_DEVICES": f"GPU-{torch.cuda.get_device_properties(0).uuid}",
            **more,
        }
        try:
            mps.use(self.environ, lane=lane)
        except ConfigError as error:
            pytest.skip(str(error))
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seen = self.answer()

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    for daemon in mps_control.daemons(name):
        daemon.quit(os.environ)
    shutil.rmtree(mps_control.home(name), ignore_errors=True)


def test_clients_by_uuid_see_their_gpu_and_one_that_is_ended_takes_nobody_along(run: str) -> None:
    front, back = (Client(run, lane) for lane in ("foreground", "background"))
    try:
        assert front.seen.split()[0] == back.seen.split()[0] == "1"
        assert (front.ask("step"), back.ask("step")) == ("ok", "ok")
        daemon = mps.daemon(front.environ)
        clients = daemon.clients(os.environ, within_s=5.0)
        assert clients.keys() == {front.process.pid, back.process.pid}
        pid = back.process.pid
        daemon.terminate({pid: clients[pid]}, os.environ, within_s=5.0)
        assert back.ask("step") != "ok"
        assert front.ask("step") == "ok"
        back.end()
        assert front.ask("step") == "ok"
    finally:
        front.end()
        back.end()


@pytest.mark.parametrize(("first", "second"), [("foreground", "background"), ("shared", "shared")])
def test_a_client_takes_no_more_than_its_limit(run: str, first: str, second: str) -> None:
    front = Client(run, first)
    back = Client(run, second, HPCSCHED_LANE_MEMORY_MIB="3000")
    try:
        assert back.ask("take 1500") == "ok"
        assert back.ask("take 4000") == "OutOfMemoryError"
        assert front.ask("take 4000") == "ok"
    finally:
        front.end()
        back.end()
