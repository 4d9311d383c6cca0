"""What NVML says of a real GPU, and whether CUDA takes the names that we hand on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from hpcsched.contract.visibility import CUDA
from hpcsched.devices.health import Reading
from hpcsched.devices.nvml import NvmlDevices

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

UUIDS = """
import torch
for i in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(i).uuid)
"""


@pytest.fixture
def devices() -> Iterator[NvmlDevices]:
    pytest.importorskip("torch")
    found = NvmlDevices("here")
    if not found.inventory():
        pytest.skip(f"no NVIDIA GPU here: {found.missing}")
    yield found
    found.close()


def seen(shown: Mapping[str, str]) -> list[str]:
    """The UUIDs of the GPUs that torch sees with these variables, in its order."""
    words = [sys.executable, "-c", UUIDS]
    done = subprocess.run(
        words, env={**os.environ, **shown}, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.split()


def test_cuda_takes_uuids_and_sees_the_same_gpus_by_number(devices: NvmlDevices) -> None:
    gpus = [d for d in devices.inventory() if d.handle.startswith(CUDA.whole)][::-1]
    if not gpus:
        pytest.skip("no whole GPU")
    wanted = [gpu.handle.removeprefix(CUDA.whole) for gpu in gpus]
    environment = devices.environment(gpus)
    assert seen(environment) == wanted
    assert seen({**environment, **devices.numbered(gpus)}) == wanted


def test_cuda_takes_the_uuid_of_a_mig_instance(devices: NvmlDevices) -> None:
    parts = [d for d in devices.inventory() if d.handle.startswith(CUDA.part)]
    if len(parts) < 2:
        pytest.skip("fewer than two MIG instances")
    assert all(len(seen(devices.environment([part]))) == 1 for part in parts)
    assert len(seen(devices.environment(parts))) == 1, "of several it shows a process one"


def test_all_questions_are_answered_and_nothing_is_asked_for(devices: NvmlDevices) -> None:
    for gpu in devices._gpus:
        found = devices._asked(gpu)
        assert isinstance(found, Reading) and found.memory_mib is not None
        assert found.recovery in (None, 0), "the driver asks for a reset, or is older than R570"
    assert [sample.why for sample in devices.sample() if not sample.healthy] == []
