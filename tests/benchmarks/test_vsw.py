"""The benchmark of stream workers on a GPU, with tiny sizes and as far as a CPU goes."""

from __future__ import annotations

from math import log
from types import ModuleType
from typing import Any

import pytest
from benchmark_programs import load
from packed_trainings import one_thread, torch

from hpcsched.planning.vsw.costs import BatchTimes, Times

pytestmark = pytest.mark.torch
__all__ = ["one_thread"]


@pytest.fixture
def vsw_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("vsw_gpu", monkeypatch)


def test_all_its_parts_as_far_as_there_is_no_gpu(vsw_gpu: Any) -> None:
    bench = vsw_gpu.Bench(torch.device("cpu"), quick=True)
    for part in (bench.check, bench.profile, bench.train):
        part("mlp-3")
    assert [row.ok for row in bench.report.rows] == [True, None, None, None]
    assert max(bench.report.results["mlp-3_differs"]) <= vsw_gpu.CLOSE
    measured = {"mlp-3_local_4_samples_per_s", "mlp-3_usual_s", "mlp-3_compared_s", "mlp-3_decision_s"}
    assert all(min(bench.report.results[name]) > 0 for name in measured)
    assert "local batch" in bench.report.rows[-1].measured


def test_counts_that_the_others_foretell(vsw_gpu: Any) -> None:
    rates = {n: 100.0 * (1 + 0.5 * log(n)) for n in range(1, 6)}
    times = {n: Times(data_s=0.0, forward_s=n / rate, backward_s=0.0) for n, rate in rates.items()}
    assert vsw_gpu.foretold(BatchTimes(local_batch=8, times=times)) == pytest.approx([0.0] * 3)
    times[3] = Times(data_s=0.0, forward_s=1.1 * 3 / rates[3], backward_s=0.0)
    assert vsw_gpu.foretold(BatchTimes(local_batch=8, times=times))[1] == pytest.approx(1 - 1 / 1.1)
    few = {n: times[n] for n in (1, 2, 4)}
    assert vsw_gpu.foretold(BatchTimes(local_batch=8, times=few)) == []


def test_without_a_gpu_it_says_so(vsw_gpu: Any) -> None:
    with pytest.raises(SystemExit, match="no GPU here"):
        vsw_gpu.measure(vsw_gpu.argparse.Namespace(quick=False))
