"""Workers and servers that die, lag behind, or have a slow link."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from budget import slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from elasticjobs import eventually, expected_samples  # noqa: E402
from psbench import PsJob  # noqa: E402
from pstrainings import alike, plain_one  # noqa: E402
from rankjobs import same, wait, woken_by  # noqa: E402


@pytest.fixture(autouse=True)
def woken() -> Iterator[None]:
    with woken_by():
        yield


# Who dies.


@pytest.mark.parametrize("servers", [slow(1), 2])
def test_a_worker_that_dies_costs_no_step(tmp_path: Path, servers: int) -> None:
    """In the middle of its pushes, after which the first server is a step ahead of the second one."""
    plain = plain_one(tmp_path / "plain", "Drifting", world=2, optimizer="adam", schedule=True)
    job = PsJob(tmp_path / "ps", "Drifting")
    args = {"optimizer": "adam", "schedule": True, "victim": str(servers + 1), "dies_at": 9}
    if servers == 1:  # it dies before a push
        args |= {"dies_at": 10, "dies_to": 0}
    ranks = job.begin_as((servers, 2), **args)
    codes = wait(ranks)
    assert codes[:servers] == [75] * servers, job.output
    assert codes[-1] == -9 and codes[servers] not in (0, None)
    assert "was lost" in job.output
    assert job.state["step"] == (8 if servers == 2 else 9)
    assert wait(job.begin_as((1, 2), optimizer="adam", schedule=True)) == [0] * 3, job.output
    here, there = job.final(), plain.final()
    for name, value in there["model"].items():
        torch.testing.assert_close(here["model"][name], value, rtol=0.0, atol=1e-6)
    for number, state in there["optimizer"]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(here["optimizer"]["state"][number][key], value, rtol=0.0, atol=1e-6)
    assert here["scheduler"] == there["scheduler"]


@pytest.mark.parametrize("victim", [0, slow(1)])
def test_without_a_server_the_others_end_too(tmp_path: Path, victim: int) -> None:
    job = PsJob(tmp_path, steps=10**6)
    ranks = job.begin_as((2, 2), pause=0.01)
    job.word()
    eventually(lambda: len(job.steps_seen()) > 10)
    ranks[victim].kill()
    codes = wait(ranks)
    assert codes.pop(victim) == -9
    assert all(code == 1 for code in codes), (codes, job.output)
    assert not (job.dir / "STATE.json").exists()


def test_an_error_of_the_users_own_is_not_a_lost_rank(tmp_path: Path) -> None:
    job = PsJob(tmp_path, "Failing")
    codes = wait(job.begin_as((1, 2)))
    assert codes[0] == 75 and codes[1:].count(1) == 2, job.output
    assert "RuntimeError: the user's own" in job.output
    assert job.state["step"] == 4


def test_a_joining_rank_that_dies_costs_the_others_nothing(tmp_path: Path) -> None:
    plain = plain_one(tmp_path / "plain", steps=80)
    job = PsJob(tmp_path / "ps", steps=80)
    ranks = job.begin_as((2, 1), pause=0.2)
    job.word()
    serves = job.serves
    (joining,) = job.become((2, 2))
    joining.kill()
    joining.join()
    job.order(forget={"attempt": 2})
    job.serves = serves
    ranks += job.become((2, 2))
    assert job.word(3)["in_place"]
    job.go()
    assert wait(ranks) == [0] * 4, job.output
    alike(job, plain)


@pytest.mark.parametrize(("where", "without"), [slow("meet_anew", None), ("meet", 1), slow("_take_up", 1)])
def test_one_that_dies_while_all_meet_costs_no_step(tmp_path: Path, where: str, without: int | None) -> None:
    """The servers that stay still have everything, over the connections that they had before."""
    plain = plain_one(tmp_path / "plain", steps=80)
    job = PsJob(tmp_path / "ps", steps=80)
    ranks = job.begin_as((3, 1), pause=0.02)
    job.word()
    job.args |= {"joiner_dies": where}
    ranks += job.become((2, 3), without=without)
    codes = wait(ranks)
    assert codes[0] == 75, job.output
    assert 0 < job.state["step"] < 80
    job.go()
    assert wait(job.begin_as((1, 1))) == [0, 0], job.output
    alike(job, plain)


# Who is slow.


def gaps(job: PsJob, workers: list[str]) -> list[int]:
    """How many steps more the first worker has begun than the other one, each time that one begins a step."""
    order = (job.folder / "order").read_text().split()
    counts = dict.fromkeys(workers, 0)
    found = []
    for rank in order:
        counts[rank] += 1
        found.append(counts[workers[0]] - counts[workers[1]])
    return found


def test_a_slow_worker_is_never_left_behind_by_more_than_the_staleness(tmp_path: Path) -> None:
    strict = PsJob(tmp_path / "strict", steps=50)
    assert wait(strict.begin_as((2, 2), slow="3")) == [0] * 4, strict.output
    loose = PsJob(tmp_path / "loose", steps=50, staleness=3)
    assert wait(loose.begin_as((2, 2), slow="3")) == [0] * 4, loose.output
    assert max(map(abs, gaps(strict, ["2", "3"]))) == 1, "one has begun when the other one has not yet"
    assert max(gaps(loose, ["2", "3"])) == 4, "three ahead, and in the next one"
    assert loose.samples_seen() == strict.samples_seen() == expected_samples(strict)
    # So when the slow one has taken as many steps the others are further.
    assert sum(gaps(loose, ["2", "3"])) > 2 * sum(gaps(strict, ["2", "3"])) + 50
    assert loose.state["metrics"]["loss"] < 1.1 * strict.state["metrics"]["loss"] < 1.0


@pytest.mark.slow
def test_bounded_staleness_meets_for_checkpoints_and_changes(tmp_path: Path) -> None:
    job = PsJob(tmp_path, steps=150, staleness=2)
    job.env["HPCSCHED_CHECKPOINT_EVERY_S"] = "0.1"
    ranks = job.begin_as((2, 3), pause=0.02, slow="4")
    assert job.word()["in_place"]
    eventually((job.dir / "STATE.json").exists)
    for config in ((1, 2), (3, 3)):
        ranks += job.become(config)
        job.word()
    job.go()
    assert wait(ranks) == [0] * len(ranks), job.output
    assert (job.state["step"], job.state["samples"]) == (150, 1050)
    assert job.samples_seen() == expected_samples(job)


@pytest.mark.slow
def test_without_staleness_two_runs_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    finals = []
    for name in ("one", "two"):
        job = PsJob(tmp_path / name)
        assert wait(job.begin_as((2, 3))) == [0] * 5, job.output
        finals.append(job.final())
    assert same(finals[0]["model"], finals[1]["model"])
    assert same(finals[0]["optimizer"], finals[1]["optimizer"])


# What is used.


@pytest.mark.slow
def test_a_slow_link_is_seen_and_a_fast_one_is_not_busy(tmp_path: Path) -> None:
    elements = 6 * 16 + 16 + 16 * 3 + 3
    for name, link, busy in (("slow", 0.03, True), ("fast", 1000.0, False)):
        job = PsJob(tmp_path / name, steps=10**6, link=link)
        ranks = job.begin_as((1, 2), sample_s=0.1)
        job.word()
        eventually(job.usages)
        for rank in ranks:
            rank.terminate()
        assert wait(ranks) == [75] * 3, job.output
        steps = job.state["step"]
        inward, outward = json.loads((job.folder / "link.0").read_text())
        least = elements * 8 * 2 * steps
        assert least < inward < least + 2 * steps * 512, "gradients, and a head for each push"
        assert least < outward < least + 2 * steps * 512
        usage = job.usages()[-1]
        assert (usage["net"][0] > 0.1) == busy, usage
        assert usage["net"][1:] == [0.0, 0.0]
        # Whoever is answered last has waited for both answers, and then everybody for its push.
        assert usage["rate"] * (outward + inward / 2) / steps < 1.05 * link * 2**20


def test_the_agent_is_told_what_is_used_anew_after_each_change(tmp_path: Path) -> None:
    job = PsJob(tmp_path, steps=10**6)
    ranks = job.begin_as((1, 2), sample_s=0.1, pause=0.01)
    job.word()
    eventually(job.usages)
    assert job.become((1, 2), share=3.0) == []
    job.word()
    eventually(lambda: job.usages()[-1]["attempt"] == 2)
    for rank in ranks:
        rank.terminate()
    assert wait(ranks) == [75] * 3, job.output
    for usage in job.usages():
        assert set(usage) == {"attempt", "rate", "cpu", "net", "samples", "stable"}
        assert 0 < usage["rate"] < 100 and len(usage["cpu"]) == len(usage["net"]) == 3
        assert all(0 < cores < 2 for cores in usage["cpu"]) and usage["net"] == [0.0] * 3
        assert usage["stable"] and usage["samples"] >= 5
