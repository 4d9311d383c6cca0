"""The parts of the whole-cluster simulation do what they promise; what it finds is not tested."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """Both modules; benchmarks are no package."""
    names = ("common", "vsw_policies", "vsw_cluster")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import vsw_cluster
        import vsw_policies

        yield SimpleNamespace(cluster=vsw_cluster, policies=vsw_policies)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in names:
            sys.modules.pop(name, None)


@dataclass
class Line:
    """Hosts of 4 GPUs; a step takes its samples over `speed(GPUs)` seconds."""

    scaling: float
    least: int = 4
    hosts: list[int] = field(default_factory=lambda: [4, 8, 12, 16])
    step: Any = None

    def count(self, gpus: int) -> int:
        return gpus

    def price(self, gpus: int) -> float:
        return float(gpus)

    def slowest(self, gpus: int) -> int:
        return 1

    def equal(self, gpus: int, batch: int) -> Any:
        return self.step(batch=batch, seconds=batch / 100 / gpus**self.scaling, how=(gpus, batch))

    best = equal

    def best_set(self, trajectory: list[int]) -> int:
        return 16


def a_course(bench: SimpleNamespace, noise: float, *, epochs: int = 4) -> Any:
    return bench.policies.Course(
        app="made up",
        size=64_000.0,
        epochs=epochs,
        batches=(64, 1024),
        steps=np.zeros((2, epochs)),
        noise=np.full((2, epochs), noise),
    )


def a_line(bench: SimpleNamespace, scaling: float = 1.0) -> Line:
    return Line(scaling=scaling, step=bench.policies.Step)


def test_measured_trainings_agree_on_progress(bench: SimpleNamespace) -> None:
    """They would not if the noise scale were in another unit than samples."""
    for app in ("imagenet", "cifar10", "deepspeech2", "yolov3"):
        course = bench.cluster.read_course(app)
        assert course.progress() == pytest.approx([course.epochs] * len(course.batches), rel=0.05)


def test_mean_similarity_of_two_halves(bench: SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    size, batch, noise = 20_000, 64, 100.0
    true = rng.normal(size=size) / np.sqrt(size)
    cosines = []
    for _ in range(50):
        one, other = (true + rng.normal(size=size) * np.sqrt(noise / size / (batch / 2)) for _ in range(2))
        cosines.append(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    assert bench.policies.similarity(noise, batch) == pytest.approx(np.mean(cosines), rel=0.03)


def test_steps_on_t4_are_those_measured(bench: SimpleNamespace) -> None:
    cluster = bench.cluster.Alike("cifar10")
    with (BENCHMARKS / "data" / "pollux-t4-placements.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["app"] == "cifar10" and row["placement"] == "44"]
    for row in rows:
        step = cluster.equal("44", 8 * int(row["local_batch"]))
        assert step.batch == 8 * int(row["local_batch"])
        assert step.seconds == pytest.approx(float(row["step_s"]))
    once, thrice = cluster.equal("44", 8 * 1024), cluster.equal("44", 3 * 8 * 1024)
    assert thrice.batch == 3 * once.batch
    assert 2 * once.seconds < thrice.seconds < 3 * once.seconds


@pytest.mark.parametrize("batch", [512, 1000, 5000, 32768])
def test_no_equal_configuration_is_faster_than_the_best(bench: SimpleNamespace, batch: int) -> None:
    for cluster in (bench.cluster.Mixed(1), bench.cluster.Alike("imagenet")):
        for gpus in cluster.hosts[:2]:
            best, equal = cluster.best(gpus, batch), cluster.equal(gpus, batch)
            assert best.batch == pytest.approx(batch, rel=0.05)
            assert equal.batch == pytest.approx(batch, rel=0.05)
            # Batches are rounded differently.
            assert best.batch / best.seconds >= 0.98 * equal.batch / equal.seconds


def test_slow_hosts_come_first_and_cost_less(bench: SimpleNamespace) -> None:
    cluster = bench.cluster.Mixed(2)
    assert [cluster.count(gpus) for gpus in cluster.hosts] == [4, 8, 12, 16]
    assert cluster.price(cluster.hosts[0]) == pytest.approx(4 * 9.52 / 14.13)
    assert cluster.price(cluster.hosts[-1]) == pytest.approx(8 + 8 * 9.52 / 14.13)


def test_a_fixed_batch_takes_its_steps(bench: SimpleNamespace) -> None:
    policy = bench.policies.POLICIES["smallest batch"]
    for reading, share in (("passes", 1.0), ("progress", (300 + 64) / (300 + 128))):
        course = a_course(bench, 300.0)
        out = bench.policies.simulate(a_line(bench), course, policy, (128, 1024), reading=reading)
        step_s = 128 / 100 / 16
        assert out.seconds == pytest.approx(4 * 500 / share * step_s, rel=0.01)
        assert out.cost == pytest.approx(16 * out.seconds)
        assert (out.gpus, out.reallocations) == (16, 0)


def test_batches_follow_the_similarity(bench: SimpleNamespace) -> None:
    """Up to the batch at which it is 0.1, two ninths of the noise scale, and around it."""
    course = a_course(bench, 900.0, epochs=12)
    for name in ("JABAS", "SimiGrad"):
        out = bench.policies.simulate(
            a_line(bench), course, bench.policies.POLICIES[name], (64, 1024), reading="passes"
        )
        assert out.batches[0] < 130
        assert out.batches[-1] == pytest.approx(200, rel=0.12)


def test_pollux_never_shrinks_its_batch_and_grows_where_that_pays(bench: SimpleNamespace) -> None:
    policy = bench.policies.POLICIES["Pollux"]
    course = a_course(bench, 200.0)
    course.noise[:, 2:] = 10.0

    class Latency(Line):
        def equal(self, gpus: int, batch: int) -> Any:
            return self.step(batch=batch, seconds=1 + batch / 1000, how=batch)

    cluster = Latency(scaling=1.0, step=bench.policies.Step)
    batches = bench.policies.simulate(cluster, course, policy, (64, 1024), reading="progress").batches
    assert batches[0] == 64
    # Where B / (1000 + B) / (200 + B) is largest.
    assert batches[1] == pytest.approx((1000 * 200) ** 0.5, rel=0.05)
    assert batches[1:] == sorted(batches[1:])


@pytest.mark.parametrize(("scaling", "gpus"), [(1.0, 16), (0.735, 12), (0.7, 4)])
def test_pollux_as_adds_hosts_while_they_pay(bench: SimpleNamespace, scaling: float, gpus: int) -> None:
    """Goodput over ideal is GPUs ** (scaling - 1): at 0.735, 0.69 on 4, 0.52 on 12, 0.48 on 16 GPUs."""
    out = bench.policies.simulate(
        a_line(bench, scaling),
        a_course(bench, 1e6),
        bench.policies.POLICIES["Pollux-AS"],
        (64, 1024),
        reading="progress",
        epochs=2,
    )
    assert out.reallocations == (gpus > 4)
    first_s = 64_000 / 100 / 4**scaling
    expected = (first_s * 4 + (out.seconds - first_s) * gpus) / out.seconds
    assert out.gpus == pytest.approx(expected, rel=0.01)


def test_changes_cost_time(bench: SimpleNamespace) -> None:
    """A restart more than a change in place; a change of the configuration a step."""

    class Alternating(Line):
        turn = 0

        def best_set(self, trajectory: list[int]) -> int:
            self.turn += 1
            return 16 if self.turn % 2 else 8

    policies = bench.policies
    found = {
        name: policies.simulate(
            Alternating(scaling=0.0, step=policies.Step),
            a_course(bench, 900.0),
            policies.POLICIES[name],
            (64, 1024),
            reading="passes",
        )
        for name in ("JABAS", "JABAS, GPUs changed in place", "SimiGrad")
    }
    restarted, in_place, equal = found.values()
    assert restarted.reallocations == in_place.reallocations == 3
    assert equal.reallocations == equal.reconfiguring_s == 0
    assert restarted.seconds == pytest.approx(
        equal.seconds + restarted.reconfiguring_s + 3 * policies.RESTART_S
    )
    assert equal.seconds + in_place.reconfiguring_s < in_place.seconds < restarted.seconds


def test_it_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "vsw_cluster.py"), "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    for reading in ("passes", "progress"):
        for policy in ("JABAS", "SimiGrad", "Pollux", "Pollux-AS"):
            for what in ("s", "cost", "gpus"):
                assert page["results"][f"mixed_8_{reading}_{policy}_{what}"][0] > 0
    assert all(x >= 0 for samples in page["results"].values() for x in samples)
    assert all(row["ok"] for row in page["rows"] if row["ok"] is not None)
