"""Searches under the real agent: what they print, what they leave, that a crash changes nothing."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from livebench import Bench  # noqa: E402

from hpcsched.core.model import Role  # noqa: E402
from hpcsched.worker import load_checkpoint  # noqa: E402

TRAINER = """
import os, time
import torch
from torch import nn
from hpcsched.worker import Parts, Trainer

class Line(Trainer):
    def build(self, args):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(96, 8, generator=generator)
        y = x @ torch.arange(8.0) + 1
        model = nn.Sequential(nn.Linear(8, args["width"]), nn.Tanh(), nn.Linear(args["width"], 1))

        def loss(model, batch):
            if os.path.exists("slow") and args["width"] == 12:
                time.sleep(0.05)
            return (model(batch[0]).squeeze(1) - batch[1]) ** 2

        @torch.no_grad()
        def evaluate(model):
            return {"error": ((model(x).squeeze(1) - y) ** 2).mean().item()}

        optimizer = torch.optim.SGD(model.parameters(), lr=args["lr"], momentum=0.9)
        return Parts(model=model, optimizer=optimizer, dataset=(x, y), global_batch=16, loss=loss,
                     evaluate=evaluate)
"""

SEARCH = """
schema = 1
trainer = "line:Line"
metric = "error"
mode = "min"
R = 9
eta = 3
seed = {seed}
packing = "{packing}"
[space]
lr = {{ log = [1e-4, 1e-2] }}
width = {{ choice = [4, 12] }}
"""


def prepare(bench, *, packing, seed=7):
    (bench.folder / "line.py").write_text(TRAINER)
    file = bench.folder / "search.toml"
    file.write_text(SEARCH.format(packing=packing, seed=seed))
    return file


def search(bench, file, folder, *words):
    done = bench("tune", file, "--devices", "cpu:2", "--dir", bench.folder / folder, "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_packed_or_not_a_search_finds_the_same_winner(bench: Bench) -> None:
    alone, said = search(bench, prepare(bench, packing="off"), "alone")
    assert "5 of 6 rungs done" in said and "best so far: error" in said
    packed, _ = search(bench, prepare(bench, packing="auto"), "packed")
    assert packed["best"]["job"] == alone["best"]["job"]
    assert packed["best"]["metric"] == pytest.approx(alone["best"]["metric"], rel=1e-5)
    pairs = zip(alone["trials"], packed["trials"], strict=True)
    for one, other in pairs:
        assert one["args"] == other["args"] and one["state"] == other["state"]
        assert one["metric"] == pytest.approx(other["metric"], rel=1e-5)
    machine, _ = bench.replayed(bench.folder / "packed")
    assert Role.PACKED in {attempt.role for job in machine.run.jobs.values() for attempt in job.attempts}
    told = json.loads(bench("history", "--trials", "--dir", bench.folder / "packed", "--json").stdout)[
        "trials"
    ]
    assert [trial["args"] for trial in told] == [trial["args"] for trial in packed["trials"]]
    (kept,) = [trial for trial in told if trial["best"]]
    assert (kept["value"], kept["job"]) == (packed["best"]["metric"], packed["best"]["job"])
    assert kept["checkpoint"] == packed["best"]["checkpoint"]
    best = load_checkpoint(packed["best"]["checkpoint"])
    assert best["step"] == packed["best"]["budget"] * 6  # 96 samples, 16 a step
    kept = [path.parent.parent.name for path in (bench.folder / "packed" / "jobs").glob("*/checkpoint/*.pt")]
    assert len(kept) == 1, "the checkpoints of the others are gone"


@pytest.mark.slow
def test_what_packing_gains_is_told_by_searching_once_more_without(bench: Bench) -> None:
    file = prepare(bench, packing="auto")
    page, said = search(bench, file, "here", "--compare", "off")
    assert page["against"]["packing"] == "off" and page["against"]["same_best"]
    assert page["against"]["wall_s"] > 0 and "the same search once more, with packing off" in said
    words = ("--devices", "cpu:2", "--dir", bench.folder / "here", "--resume", "--compare", "off")
    again = bench("tune", file, *words)
    assert "times as long, with the same best training" in again.stdout
    refused = bench("tune", file, "--devices", "cpu:2", "--dir", bench.folder / "here", "--compare", "off")
    assert refused.returncode == 2 and "holds a run already" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["off", "auto"])
def test_a_search_that_is_killed_goes_on_to_the_same_end(bench: Bench, packing: str) -> None:
    file = prepare(bench, packing=packing)
    whole, _ = search(bench, file, "whole")
    (bench.folder / "slow").touch()
    agent = bench.start(file, "--devices", "cpu:2", command="tune")
    bench.until(lambda: sum(state == "COMPLETED" for state in bench.states().values()) > 2, "some are done")
    agent.kill()
    agent.wait()
    (bench.folder / "slow").unlink()
    done = bench("tune", file, "--devices", "cpu:2", "--resume", "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["best"]["job"] == whole["best"]["job"]
    assert again["best"]["metric"] == pytest.approx(whole["best"]["metric"], rel=1e-5)


@pytest.mark.slow
def test_asha_goes_on_after_a_kill_with_what_it_had_decided(bench: Bench) -> None:
    file = prepare(bench, packing="auto")
    file.write_text(file.read_text().replace("eta = 3", 'eta = 3\nmethod = "asha"\ntrials = 20'))
    (bench.folder / "slow").touch()
    agent = bench.start(file, "--devices", "cpu:2", command="tune")
    bench.until(lambda: any("-r1" in name for name in bench.states()), "one was chosen to go on")
    agent.kill()
    agent.wait()
    before = bench.states()
    assert sum("-r0" in name for name in before) <= 20
    (bench.folder / "slow").unlink()
    done = bench("tune", file, "--devices", "cpu:2", "--resume", "--json")
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    machine, _ = bench.replayed()
    jobs = machine.run.by_name
    assert before.keys() <= jobs.keys()
    assert all(len(machine.run.job_of(name).attempts) == 1 for name in before if before[name] == "COMPLETED")
    assert len(page["trials"]) == 20 and "3 of 3 rungs done" in done.stderr
    assert {trial["state"] for trial in page["trials"]} == {"stopped", "finished"}
    assert page["best"]["metric"] == min(trial["metric"] for trial in page["trials"])
    best = load_checkpoint(page["best"]["checkpoint"])
    assert best["step"] == page["best"]["budget"] * 6


@pytest.mark.slow
def test_a_search_does_not_go_on_as_another_one(bench: Bench) -> None:
    search(bench, prepare(bench, packing="off"), "run")
    refused = bench("tune", prepare(bench, packing="off", seed=8), "--devices", "cpu:2", "--resume")
    assert refused.returncode == 2
    assert "search.toml: seed: not what it was when this search began" in refused.stderr


def test_a_metric_that_is_not_reported_ends_the_search(bench: Bench) -> None:
    file = prepare(bench, packing="off")
    file.write_text(file.read_text().replace('metric = "error"', 'metric = "accuracy"'))
    refused = bench("tune", file, "--devices", "cpu:2")
    assert refused.returncode == 2, refused.stderr
    assert "metric: 'accuracy'; accepted: error" in refused.stderr
