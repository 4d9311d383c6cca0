"""Parameter servers and workers in real processes: whoever has the parameters, it is the same training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from budget import share, slow

pytestmark = pytest.mark.torch

from elasticjobs import eventually, expected_samples  # noqa: E402
from psbench import Config, PsJob  # noqa: E402
from pstrainings import CLOSE, alike, plain_one, torch  # noqa: E402
from rankjobs import same, wait, woken_by  # noqa: E402


@pytest.fixture(autouse=True)
def woken() -> Iterator[None]:
    with woken_by():
        yield


ALL = [(servers, workers) for servers in (1, 2, 3) for workers in (1, 2, 3, 4)]
WALK: list[Config] = [
    (1, 1),
    (2, 1),
    (2, 2),
    (1, 2),
    (3, 3),
    (3, 1),
    (1, 3),
    (2, 4),
    (3, 4),
    (3, 2),
    (2, 3),
    (1, 4),
]


@pytest.mark.parametrize(
    "args",
    [slow({}), {"optimizer": "adam", "schedule": True}],
    ids=["sgd", "adam"],
)
def test_every_configuration_and_every_change_is_the_training_of_one_process(
    tmp_path: Path, args: dict[str, Any]
) -> None:
    """Servers and workers come and go, one by one and both at once; in the end only the shares change."""
    assert sorted(WALK) == ALL
    walk = share(WALK)
    plain = plain_one(tmp_path / "plain", steps=500, **args)
    job = PsJob(tmp_path / "ps", steps=500)
    ranks = job.begin_as(walk[0], pause=0.03, **args)
    assert job.word() == {"parallel": True, "in_place": True}
    steps = [0]
    for config in walk[1:]:
        ranks += job.become(config)
        steps.append(job.word()["step"])
    assert job.become(walk[-1], share=0.9) == []
    steps.append(job.word()["step"])
    job.go()
    assert wait(ranks) == [0] * len(ranks), job.output
    assert steps == sorted(set(steps)) and steps[-1] < 500, "each configuration has trained"
    alike(job, plain)
    assert job.state["metrics"]["weight"] == pytest.approx(plain.state["metrics"]["weight"], abs=1e-6)


@pytest.mark.slow
def test_servers_and_workers_may_be_replaced_by_others(tmp_path: Path) -> None:
    """All that a server has that leaves goes by way of the chief to one that is not there yet."""
    plain = plain_one(tmp_path / "plain", steps=150, optimizer="adam")
    job = PsJob(tmp_path / "ps", steps=150)
    ranks = job.begin_as((2, 1), pause=0.03, optimizer="adam")
    job.word()
    for config, without in (((2, 1), 1), ((3, 2), 1), ((2, 2), 1), ((1, 1), None)):
        ranks += job.become(config, without=without)
        job.word()
    job.go()
    assert wait(ranks) == [0] * len(ranks), job.output
    alike(job, plain)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_strategy_and_any_configuration(tmp_path: Path) -> None:
    args = {"optimizer": "adam", "schedule": True}
    plain = plain_one(tmp_path / "plain", steps=120, **args)
    job = PsJob(tmp_path / "ps", steps=120)
    done = 0
    for config in ((2, 2), None, (1, 3), (3, 1), None):
        ranks = (
            job.begin(2, pause=0.02, **args) if config is None else job.begin_as(config, pause=0.02, **args)
        )
        job.word()
        eventually(lambda: len(job.steps_seen()) > done + 10)  # noqa: B023
        for rank in ranks:
            os.kill(rank.pid or 0, signal.SIGTSTP)
        assert wait(ranks) == [75] * len(ranks), job.output
        assert job.state["step"] > 0
        job.serves, done = [], len(job.steps_seen())
    job.go()
    assert wait(job.begin_as((2, 3), **args)) == [0] * 5, job.output
    alike(job, plain)


def test_a_quick_suspend_leaves_the_whole_state_in_memory(tmp_path: Path) -> None:
    plain = plain_one(tmp_path / "plain")
    job = PsJob(tmp_path / "ps")
    ranks = job.begin_as((2, 2), pause=0.02)
    job.word()
    eventually(lambda: len(job.steps_seen()) > 10)
    job.order(suspend={"quick": True})
    os.kill(ranks[-1].pid or 0, signal.SIGTSTP)  # one that is told is enough
    assert wait(ranks) == [75] * 4, job.output
    assert (job.dir / "held.1").exists() and not list(job.checkpoints.glob("*"))
    job.go()
    assert wait(job.begin_as((1, 2))) == [0] * 3, job.output
    alike(job, plain)


def test_periodic_checkpoints_are_whole(tmp_path: Path) -> None:
    job = PsJob(tmp_path / "ps", steps=40)
    job.env["HPCSCHED_CHECKPOINT_EVERY_S"] = "0.05"
    ranks = job.begin_as((2, 2), pause=0.02)
    eventually((job.dir / "STATE.json").exists)
    for rank in ranks:
        rank.kill()
    wait(ranks)
    job.go()
    assert wait(job.begin_as((3, 1))) == [0] * 4, job.output
    plain = plain_one(tmp_path / "plain", steps=40)
    for name, value in plain.final()["model"].items():
        torch.testing.assert_close(job.final()["model"][name], value, **CLOSE)


@pytest.mark.slow
def test_what_is_frozen_unused_or_of_another_type_stays_what_it_is(tmp_path: Path) -> None:
    """Also on a worker that joins, which has built other frozen weights."""
    plain = plain_one(tmp_path / "plain", "Odd", steps=120, frozen=2.0)
    job = PsJob(tmp_path / "ps", "Odd", steps=120)
    ranks = job.begin_as((2, 2), pause=0.02, frozen=2.0)
    job.word()
    job.args["frozen"] = 5.0
    ranks += job.become((3, 4))
    job.word()
    job.go()
    assert wait(ranks) == [0] * len(ranks), job.output
    alike(job, plain)
    assert 4 not in job.final()["optimizer"]["state"], "an unused parameter has no state, and does not decay"


@pytest.mark.parametrize(("config", "world"), [((2, 1), 1), ((1, 2), 2)])
def test_buffers_and_random_numbers_are_those_of_as_many_ranks_without_servers(
    tmp_path: Path, config: Config, world: int
) -> None:
    plain = plain_one(tmp_path / "plain", "Normed", world=world)
    job = PsJob(tmp_path / "ps", "Normed")
    assert wait(job.begin_as(config)) == [0] * sum(config), job.output
    alike(job, plain)


@pytest.mark.slow
def test_an_optimizer_of_whole_tensors_gets_them_whole(tmp_path: Path) -> None:
    plain = plain_one(tmp_path / "plain", "Wholes", steps=100)
    job = PsJob(tmp_path / "ps", "Wholes", steps=100)
    ranks = job.begin_as((2, 2), pause=0.03)
    job.word()
    ranks += job.become((3, 1))
    job.word()
    ranks += job.become((1, 1))
    job.word()
    job.go()
    assert wait(ranks) == [0] * len(ranks), job.output
    alike(job, plain)


def test_sparse_gradients_are_made_dense_and_that_is_said_once(tmp_path: Path) -> None:
    plain = plain_one(tmp_path / "plain", "Sparse")
    job = PsJob(tmp_path / "ps", "Sparse")
    assert wait(job.begin_as((2, 2))) == [0] * 4, job.output
    alike(job, plain)
    assert job.output.count("sparse gradients are made dense") == 1


def test_a_single_rank_without_a_seat_trains_alone(tmp_path: Path) -> None:
    plain = plain_one(tmp_path / "plain")
    job = PsJob(tmp_path / "ps")
    job.env["HPCSCHED_STRATEGY"] = json.dumps({"kind": "ps", "staleness": 2, "cpus": 4})
    assert job.run(1) == [0], job.output
    assert same(job.final()["model"], plain.final()["model"])


@pytest.mark.parametrize(
    ("trainer", "config", "strategy", "batch", "message"),
    [
        ("Hooked", (2, 1), {}, 7, "optimizer: has hooks at its step"),
        ("LBFGS", (1, 1), {}, 7, "optimizer: LBFGS, which needs all gradients at once"),
        ("Plain", (1, 2), {"staleness": -1}, 7, "strategy ps: staleness: -1"),
        ("Plain", (1, 2), {"staleness": True}, 7, "strategy ps: staleness: True"),
        ("Plain", (1, 2), {"link": 0}, 7, "strategy ps: link: 0; accepted: a positive number of MiB/s"),
        ("Plain", (1, 3), {}, 2, "a global batch of 2 samples is too small for 3 workers"),
        ("Plain", (2, 0), {}, 7, "HPCSCHED_SEATS: there is no worker"),
        ("Plain", (0, 2), {}, 7, "HPCSCHED_SEATS: rank 0 is no server"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    tmp_path: Path, trainer: str, config: Config, strategy: dict[str, Any], batch: int, message: str
) -> None:
    job = PsJob(tmp_path, trainer, **strategy)
    world = sum(config)
    assert wait(job.begin_as(config, batch=batch)) == [2] * world
    assert job.output.count(message) == world == job.output.count("\n")


@pytest.mark.parametrize(
    ("trainer", "config", "why"),
    [
        ("Hooked", (2, 1), "has hooks at its step"),
        ("Plain", (1, 8), "too small for 8 workers"),
        ("Plain", (1, 0), "there is no worker"),
    ],
)
def test_an_order_that_cannot_be_carried_out_changes_nothing(
    tmp_path: Path, trainer: str, config: Config, why: str
) -> None:
    job = PsJob(tmp_path, trainer, steps=40)
    ranks = job.begin_as((1, 1), pause=0.02)
    job.word()
    told = [{"server": rank < config[0], "share": 1.0} for rank in range(sum(config))]
    keep = list(range(min(2, len(told))))
    order = {"attempt": 2, "world_size": len(told), "keep": keep, "one_host": True, "seats": told}
    job.order(resize=order)
    eventually((job.dir / "refused.2").exists)
    assert why in (job.dir / "refused.2").read_text()
    job.go()
    assert wait(ranks) == [0, 0], job.output
    assert job.samples_seen() == expected_samples(job)
