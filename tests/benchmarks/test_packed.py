"""The benchmarks of packs, with tiny sizes: how fast things are is not tested here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import pytest
from benchmark_programs import BENCHMARKS, load
from packed_trainings import one_thread, torch

from hpcsched.errors import ConfigError

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


def test_packed_steps_on_the_cpu() -> None:
    program = [sys.executable, str(BENCHMARKS / "pack_steps.py"), "--quick", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert (page["schema"], page["quick"]) == (1, True)
    for net in ("mlp", "wide", "cnn"):
        for way in ("separate", "again", "loop", "stacked", "auto"):
            assert page["results"][f"{net}_b8_n2_{way}_step_s"][0] > 0
        assert page["results"][f"{net}_b8_n2_setup_s"][0] >= 0
    assert all(sample >= 0 for samples in page["results"].values() for sample in samples)


@pytest.fixture
def pack_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("pack_gpu", monkeypatch)


def test_packs_on_a_gpu_as_far_as_there_is_none(pack_gpu: Any) -> None:
    bench = pack_gpu.Bench(torch.device("cpu"), quick=True)
    bench.check("mlp-3")
    bench.compare("mlp-3", 2, 2)
    assert [row.ok for row in bench.report.rows] == [True, None]
    assert {"mlp-3_stacked_differs", "mlp-3_b2_n2_auto_step_s", "mlp-3_b2_n2_loop_peak_mib"} <= set(
        bench.report.results
    )


def test_what_fails_is_refused_or_comes_too_late_is_noted(
    pack_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = pack_gpu.Bench(torch.device("cpu"), quick=True)
    real = bench.packed_s

    def packed_s(net: str, size: int, batch: int, mode: str) -> Any:
        if mode == "stacked":
            raise ConfigError(where="pack", key="mode", got="'stacked' (it is too hot)", accepted="loop")
        if mode == "auto":
            bench.deadline = time.monotonic() - 1
        return real(net, size, batch, mode)

    monkeypatch.setattr(bench, "packed_s", packed_s)
    bench.compare("mlp-3", 2, 2)
    bench.compare("mlp-3", 2, 2)
    first, second = (row.measured for row in bench.report.rows)
    assert "stacked refused: 'stacked' (it is too hot)" in first
    assert second.startswith(
        "loop not reached in time; stacked not reached in time; auto not reached in time"
    )
    assert pack_gpu.short(RuntimeError("CUDA out of memory. Tried")) == "out of memory"


def test_without_a_gpu_it_says_so(pack_gpu: Any) -> None:
    with pytest.raises(SystemExit, match="no GPU here"):
        pack_gpu.measure(pack_gpu.argparse.Namespace(quick=False))
