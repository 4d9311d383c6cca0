"""The GPU benchmark of the lanes, as far as it works without a GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_programs import load

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def lanes_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("lanes_gpu", monkeypatch)


def test_its_arguments(lanes_gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = lanes_gpu.arguments(["--models", "vgg16,inception-v3", "--quick"])
    assert options.models == ("vgg16", "inception-v3")
    assert options.window_s <= 0.2
    assert lanes_gpu.arguments([]).models == ("vgg16", "wrn101-2", "inception-v3")
    with pytest.raises(SystemExit):
        lanes_gpu.arguments(["--models", "lenet"])
    assert "unknown networks: lenet" in capsys.readouterr().err


def test_what_fails_or_comes_too_late_is_noted_and_does_no_harm(lanes_gpu: ModuleType) -> None:
    bench = lanes_gpu.Bench(torch.device("cpu"), 0.1, time.monotonic() + 60)
    kept: list[int] = []
    bench.keep = lambda: kept.append(len(bench.outcomes))

    def broken_work(outcome: Any) -> None:
        raise RuntimeError("out of luck\nand more")

    def fine_work(outcome: Any) -> None:
        outcome.foreground_rate, outcome.background_rate = 50.0, 80.0
        lanes_gpu.compare(outcome, (55.0, 160.0))

    bench.stage("vgg16", "broken", broken_work)
    bench.stage("vgg16", "fine", fine_work)
    bench.deadline = 0.0
    bench.stage("vgg16", "late", fine_work)
    broken, fine, late = bench.outcomes
    assert kept == [1, 2, 3]
    assert broken.error == "RuntimeError: out of luck"
    assert fine.slowdown == pytest.approx(0.1) and fine.share == pytest.approx(0.5) and fine.error is None
    assert late.error == "TimeoutError: not reached in time"
    assert "| vgg16 | fine | 10.0 % | 50.0 % |" in lanes_gpu.table(bench.outcomes)


def test_without_a_gpu_it_checks_itself_on_the_cpu(lanes_gpu: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "lanes.json"
    assert lanes_gpu.main(["--cpu", "--models", "vgg16", "--window-s", "0.05", "--output", str(output)]) == 0
    page = json.loads(output.read_text())
    assert (page["schema"], page["device"], page["quick"]) == (1, "cpu", True)
    assert page["versions"]["torch"] == torch.__version__
    stages = {one["stage"]: one for one in page["outcomes"]}
    assert [stage for stage, one in stages.items() if one["error"]] == []
    assert stages["correctness"]["facts"]["same_bits_beside_a_background"]
    measured = {"naive", "priorities", "CUDA graphs", "pacing, 4 outstanding", "pacing, 2 outstanding"}
    measured |= {"pacing, 1 outstanding", "feedback", "small background batch"}
    assert measured <= stages.keys()
    assert all(stages[name]["slowdown"] is not None for name in measured)


def test_without_a_gpu_it_says_so(
    lanes_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lanes_gpu.main([]) == 2
    assert capsys.readouterr().err == "no GPU here; --cpu shows that the program works\n"
