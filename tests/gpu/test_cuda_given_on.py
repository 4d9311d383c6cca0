"""What only a GPU can show: when the memory of killed processes is free again, by NVML."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hpcsched.agent.gpu_memory import FREE_WITHIN_S
from hpcsched.core.model import ComputeMode
from hpcsched.devices import Devices, open_devices
from hpcsched.errors import ConfigError
from hpcsched.launch.proc import group_exists, living

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

HOLDS = """
import os, time, torch
held = torch.ones(1 << 28, device="cuda")  # 1 GiB
torch.cuda.synchronize()
if os.fork() == 0:  # as a DataLoader worker is: the driver's files are open in it too
    time.sleep(600)
print("holds", flush=True)
time.sleep(600)
"""


@pytest.fixture
def devices() -> Iterator[Devices]:
    pytest.importorskip("torch")
    try:
        devices = open_devices("cuda", "here")
    except ConfigError as error:
        pytest.skip(f"no NVIDIA GPU here: {error}")
    yield devices
    devices.close()


def test_memory_is_free_soon_after_all_of_a_group_are_killed(devices: Devices) -> None:
    """And not before, whoever of them has ended."""
    gpu = devices.inventory()[0]
    if gpu.compute_mode is ComputeMode.PROHIBITED or devices.free(gpu) is None:
        pytest.skip("nobody can say")
    assert devices.free(gpu), "somebody else is on the GPU"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env={**os.environ, **devices.environment([gpu])},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout and process.stdout.readline() == b"holds\n"
        assert devices.free(gpu) is False
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        process.wait(60)
    while not devices.free(gpu) or (group_exists(process.pid) and living({process.pid}, [])):
        assert time.monotonic() < killed + FREE_WITHIN_S
        time.sleep(0.002)
    print(f"free {1000 * (time.monotonic() - killed):.0f} ms after SIGKILL")  # noqa: T201
