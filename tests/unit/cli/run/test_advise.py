"""`hpcsched advise` without a batch system: what is said, what is missing, and what a script takes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest
from click.testing import CliRunner
from simulatebench import make_place

from hpcsched.batch.slurm_queue import SlurmQueue
from hpcsched.cli.main import cli
from hpcsched.errors import BatchError, HpcschedError
from hpcsched.store.allocations import AllocationEntry, record_allocation
from hpcsched.store.database import Database

SET = ("jobs.toml", "--profiles", "p.json", "--batch", "none")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_place(tmp_path, monkeypatch)


def call(*words: object) -> click.testing.Result:
    return CliRunner().invoke(cli, [*map(str, words)], standalone_mode=False)


def shown(*words: object) -> str:
    done = call(*words)
    assert done.exception is None, done.exception
    return done.stdout


def page(*words: object) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(shown("advise", *words, "--json"))
    return read


def refused(*words: object) -> str:
    done = call(*words)
    assert isinstance(done.exception, HpcschedError), done.stdout
    assert done.exception.exit_code == 2
    return str(done.exception)


def test_one_recommendation_with_the_command_that_follows() -> None:
    text = shown("advise", *SET)
    advice = page(*SET)
    best = advice["rows"][advice["recommended"] - 1]
    assert advice["command"] in text
    assert f"--gpus-per-node {best['gpus_per_node']} --time " in advice["command"]
    assert "how long it waits is not known" in text
    assert "compared without waiting" in text
    assert text.count("One sbatch for each training") == 2
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= 80


def test_the_front_gets_later_and_cheaper_and_more_gpus_than_useful_are_not_offered() -> None:
    front = [row for row in page(*SET)["rows"] if row["front"]]
    ends, hours = ([row[key] for row in front] for key in ("least_s", "gpu_hours"))
    assert ends == sorted(ends) and hours == sorted(hours, reverse=True)
    assert max(row["gpus_per_node"] for row in page(*SET)["rows"]) <= 8


def test_the_users_own_wait_counts_for_each_allocation() -> None:
    for limit, several in (("8m", True), ("1h", False)):
        advice = page(*SET, "--wait", 30, "--gpus", 1, "--time", limit)
        (row,) = advice["rows"]
        assert row["wait_s"] == 1800 * row["allocations"]
        assert (row["allocations"] > 1) is several
        assert row["wait_source"] == "given" and advice["waiting"]


def test_what_costs_too_much_is_left_out_and_what_is_preferred_comes_first() -> None:
    cheap = page(*SET, "--prefer", "gpu-hours")
    least = min(row["gpu_hours"] for row in cheap["rows"])
    assert cheap["rows"][cheap["recommended"] - 1]["gpu_hours"] <= 1.05 * least
    limited = page(*SET, "--max-gpu-hours", 1.1 * least)
    assert all(row["gpu_hours"] <= 1.1 * least for row in limited["rows"])
    assert "the cheapest" in refused("advise", *SET, "--max-gpu-hours", 0)


def test_what_is_known_is_counted_and_the_rest_is_named(place: Path) -> None:
    text = Path("jobs.toml").read_text().replace("steps = 3000", "")
    Path("some.toml").write_text(text.replace('model = "b"', 'model = "unknown"', 1))
    said = shown("advise", "some.toml", *SET[1:])
    assert "some.toml: 2 of 4 jobs under marble" in said
    assert "no steps of one: say `steps` in some.toml" in said
    assert "no profile of two: `hpcsched profile run some.toml --job NAME` measures it" in said
    advice = page("some.toml", *SET[1:])
    assert advice["missing"] == [
        {"name": "one", "missing": ["steps"]},
        {"name": "two", "missing": ["profile"]},
    ]
    nothing = refused("advise", "jobs.toml", "--batch", "none")
    assert "nothing is known of any job" in nothing and "hpcsched profile run jobs.toml" in nothing


def test_a_script_takes_the_recommended_row_or_another_one(place: Path) -> None:
    text = shown("advise", *SET, "--json")
    Path("advice.json").write_text(text)
    advice = json.loads(text)
    for number in (None, 2):
        row = advice["rows"][(number or advice["recommended"]) - 1]
        words = ("script", "slurm", "jobs.toml", "--advice", "advice.json")
        script = shown(*words, *(("--advice-row", number) if number else ()))
        assert f"#SBATCH --gres=gpu:{row['gpus_per_node']}\n" in script
        assert f"gpus_per_node = {row['gpus_per_node']}  (advice.json, row {row['number']})" in script
    over = shown(*words, "--time", "9h")
    assert "#SBATCH --time=9:00:00" in over and "time = 9h  (command line)" in over
    assert "row 99" in refused(*words, "--advice-row", 99)
    assert "with --advice FILE only" in refused("script", "slurm", "jobs.toml", "--advice-row", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "0"), "--gpus-per-node: '0'; accepted: a number"),
        (("--gpus", "8-1"), "--gpus-per-node: '8-1'"),
        (("--nodes", "1-900"), "--nodes: '1-900'"),
        (("--time", "soon"), "--time: 'soon'"),
        (("--time", "61s"), "no allocation in which these jobs end"),
        (("--policy", "marble,planner"), "accepted: one"),
        (("--gpus", "999999"), "--gpus-per-node: 999999; accepted: at most 1024"),
        (
            ("--gpus", "1000", "--nodes", "2"),
            "--nodes: 2000 GPUs on all nodes; accepted: at most 1024 in all",
        ),
        (("--time", "99999999999h"), "accepted: at most a year"),
    ],
)
def test_bad_input_is_one_line(words, said) -> None:
    text = refused("advise", *SET, *words)
    assert said in text and "\n" not in text


@pytest.mark.parametrize("words", [("--margin", "1e9"), ("--wait", "1e300")])
def test_no_time_beyond_a_year_is_taken(words) -> None:
    done = call("advise", *SET, *words)
    assert isinstance(done.exception, click.BadParameter) and "is not in the range" in str(done.exception)


def test_the_job_without_room_is_named() -> None:
    text = Path("jobs.toml").read_text() + "\nnodes = 2\ngpus = 8"
    Path("wide.toml").write_text(text)
    said = refused("advise", "wide.toml", *SET[1:], "--nodes", 1)
    name = text.rpartition('name = "')[2].partition('"')[0]
    assert f"job {name} needs 2 nodes with 8 GPUs: no allocation has them" in said and "\n" not in said


def test_where_nobody_plans_earlier_waits_are_what_is_known(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_: SlurmQueue) -> None:
        raise BatchError("sinfo did not answer within 15 s")

    monkeypatch.setattr(SlurmQueue, "partitions", silent)
    monkeypatch.setenv("HPCSCHED_DATABASE", str(place / "db"))
    with Database(place / "db") as opened:
        for number, minute in enumerate((10, 40, 20)):
            entry = AllocationEntry(
                kind="slurm", cluster="", job_id=str(number), partition="gpu", nodes=1, gpus=2, limit_s=600.0,
                submitted_at="2026-01-01T00:00:00Z", eligible_at="2026-01-01T00:00:00Z",
                started_at=f"2026-01-01T00:{minute}:00Z",
            )  # fmt: skip
            record_allocation(opened, entry)
    words = ("jobs.toml", "--profiles", "p.json", "--batch", "slurm", "--gpus", "2,8", "--time", "20m")
    near, far = sorted(page(*words)["rows"], key=lambda row: row["gpus_per_node"])
    waits = [near[f"wait_{what}s"] for what in ("low_", "", "high_")]
    assert (waits, near["wait_source"], near["wait_of"]) == ([600.0, 1200.0, 2400.0], "history", 3)
    assert (far["wait_s"], far["wait_source"]) == (None, "unknown")
    said = shown("advise", *words)
    assert "3 before" in said and "10:00-40:00" in said
    assert "1 allocation of unknown wait" in said
    assert "sinfo did not answer" in said


@pytest.mark.long
def test_a_picture(place: Path) -> None:
    pytest.importorskip("matplotlib")
    shown("advise", *SET, "--svg", "advice.svg")
    drawn = Path("advice.svg").read_text()
    assert "recommended" in drawn and "GPU-hours charged" in drawn


def test_a_script_goes_to_standard_output(place: Path) -> None:
    words = ("script", "slurm", "jobs.toml", "--gpus-per-node", 1)
    assert "#SBATCH" in shown(*words, "-o", "-") and not Path("-").exists()
