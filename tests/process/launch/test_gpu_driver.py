"""Standbys and CUDA's driver, which reads CUDA_VISIBLE_DEVICES once for the life of a process.

The driver is a stub that notes each `cuInit`. With a CUDA build of torch it is torch itself that calls it.
With a CPU build, as in CI, torch is made to call it where the CUDA build of 2.11 was seen to: in a backward
pass (autograd counts the GPUs) and in AdamW's step, also of a model on the CPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from places import DATA

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from warmbench import WITHIN_S, Bench, by_zygote, output  # noqa: E402

from hpcsched.devices.nvml import NvmlDevices  # noqa: E402
from hpcsched.launch import zygote  # noqa: E402
from hpcsched.testing.conformance_launch import reaped  # noqa: E402

AS_IN_A_CUDA_BUILD = """
import ctypes, torch
if torch.version.cuda is None:
    driver = ctypes.CDLL("libcuda.so.1")
    def asking(call):
        def asks(*words, **options):
            driver.cuInit(0)
            return call(*words, **options)
        return asks
    torch.Tensor.backward = asking(torch.Tensor.backward)
    torch.optim.AdamW.step = asking(torch.optim.AdamW.step)
"""

DRIVES = """
import ctypes, sys
from hpcsched.worker.session.trainer import Trainer

class Drives(Trainer):
    def build(self, args):
        ctypes.CDLL("libcuda.so.1").cuInit(0)
        sys.exit(0)
"""


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """On a busy machine an answer may take its time; here it is what it says that matters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zygote, "ANSWER_TIMEOUT_S", WITHIN_S)
        yield


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """The folder of a stub driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = DATA / "gpu/libcuda.c"
    made = tmp_path / "libcuda.so.1"
    words = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(made), str(source)]
    subprocess.run(words, check=True)
    return tmp_path


def test_a_standby_leaves_the_driver_alone_until_it_knows_its_gpu(driver: Path) -> None:
    gpus = NvmlDevices("here")
    gpus._near = [None, None]  # as if there were two
    hooks, log, folder = driver / "hooks", driver / "log", driver / "bench"
    hooks.mkdir()
    folder.mkdir()
    (hooks / "sitecustomize.py").write_text(AS_IN_A_CUDA_BUILD)
    (folder / "drives.py").write_text(DRIVES)
    environ = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "0,1",  # as a batch system grants them to the agent
        "LD_LIBRARY_PATH": str(driver),
        "PYTHONPATH": str(hooks),
        "STUB_CUDA_LOG": str(log),
    }
    bench = Bench(folder, 1, device_env=gpus.environment, environ=environ)
    try:
        bench.warm_up()
        standing = bench.waiting()
        job = replace(bench.plan(trainer="drives:Drives"), devices=(bench.devices[1],))
        workers = bench.launcher.launch(job)
        assert by_zygote(bench, workers) and [pid for pid, _ in workers.processes] == standing
        assert reaped(workers) == 0, output(job.folder)
        workers.close()
    finally:
        bench.launcher.close()
    assert log.read_text().splitlines() == ["1"]
