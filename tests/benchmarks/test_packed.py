"""The benchmarks of packs, with tiny sizes: how fast things are is not tested here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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
    for late in (bench.compare, bench.compare_processes):
        late("mlp-3", 2, 2)
    bench.check("mlp-3")
    first, *others = (row.measured for row in bench.report.rows)
    assert "stacked refused: 'stacked' (it is too hot)" in first
    assert others == ["not reached in time", "processes not reached in time", "not reached in time"]
    assert pack_gpu.short(RuntimeError("CUDA out of memory. Tried")) == "out of memory"


def test_without_a_gpu_it_says_so(pack_gpu: Any) -> None:
    with pytest.raises(SystemExit, match="no GPU here"):
        pack_gpu.measure(pack_gpu.argparse.Namespace(quick=False))


def test_as_many_processes_are_what_packs_have_to_beat(pack_gpu: Any) -> None:
    bench = pack_gpu.Bench(torch.device("cpu"), quick=True)
    bench.compare_processes("mlp-3", 2, 2)
    assert bench.report.results["mlp-3_b2_n2_processes_ratio"][0] > 0, bench.report.rows


def test_all_there_is_lies_in_a_file_after_each_combination(
    pack_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "packs.json"
    options = ["pack_gpu.py", "--quick", "--nets", "mlp-3", "--output", str(output), "--budget-s", "0"]
    monkeypatch.setattr(sys, "argv", options)
    seen: list[int] = []
    compare = pack_gpu.Bench.compare

    def compared(bench: Any, *what: Any) -> None:
        seen.append(len(json.loads(output.read_text())["rows"]))
        compare(bench, *what)

    monkeypatch.setattr(pack_gpu.Bench, "compare", compared)
    pack_gpu.main("packs", pack_gpu.measure, options_of=pack_gpu.options_of)
    assert seen == [1]
    measured = {row["measured"] for row in json.loads(output.read_text())["rows"]}
    assert measured == {"not reached in time", "processes not reached in time"}


def test_no_two_trainings_and_not_the_process_have_generators_of_one_seed(
    pack_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph refuses a generator whose seed is another one than that of the capture: in a run they
    always differ."""
    seeds: list[int] = []
    load_ = pack_gpu.load

    def noting(*parts: Any, **options: Any) -> Any:
        seeds.append(torch.initial_seed())
        return load_(*parts, **options)

    monkeypatch.setattr(pack_gpu, "load", noting)
    pack_gpu.Bench(torch.device("cpu"), quick=True).packed("mobilenet-v2", 3, 2, "loop")
    assert len({*seeds, torch.initial_seed()}) == 4


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("mode", ["loop", "stacked", "auto"])
def test_sigterm_in_a_step_of_a_pack_is_no_mode_that_is_refused(
    pack_gpu: Any, mode: str, sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = pack_gpu.Bench(torch.device("cpu"), quick=True)
    parts_of = bench.parts

    def parts(*which: Any) -> Any:
        made = parts_of(*which)
        made.optimizer.zero_grad = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
        loss = made.loss

        def ending(model: Any, batch: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return loss(model, batch)

        made.loss = ending
        return made

    def measure(_: Any) -> Any:
        monkeypatch.setattr(bench, "parts", parts)
        monkeypatch.setattr(bench, "alone_s", lambda *_: ([1.0], 0.0))
        monkeypatch.setattr(type(bench), "modes", (mode,))
        bench.compare("mlp-3", 2, 2)
        return bench.report

    monkeypatch.setattr(sys, "argv", ["pack_gpu.py", "--quick"])
    with pytest.raises(SystemExit) as end:
        pack_gpu.main("packs", measure)
    assert end.value.code == 128 + signal.SIGTERM
    assert bench.report.rows == []
