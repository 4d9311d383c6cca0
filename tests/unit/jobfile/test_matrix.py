"""[job.matrix]: a job for each combination."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcsched import jobfile
from hpcsched.core.model import Array, JobSpec
from hpcsched.errors import ConfigError

SH = ["sh", "-c", "train --lr {lr} --seed {seed}"]


def made(**job: Any) -> tuple[JobSpec, ...]:
    table = {"schema": 1, "job": [{"name": "train", **job}]}
    return jobfile.parse(table, where="x", workdir=Path("/w")).jobs


def test_one_job_for_each_combination_the_last_key_first() -> None:
    jobs = made(command=SH, matrix={"lr": [0.1, 1e-5], "seed": "1..2"}, at_once=3)
    assert [job.name for job in jobs] == ["train-0.1-1", "train-0.1-2", "train-1e-05-1", "train-1e-05-2"]
    assert jobs[3].command == ("sh", "-c", "train --lr 1e-05 --seed 2")
    assert [job.array for job in jobs] == [Array(name="train", index=i, at_once=3) for i in (1, 2, 3, 4)]
    assert {job.model for job in jobs} == {"train"}


@pytest.mark.parametrize(
    ("name", "names", "array"),
    [
        ("train-{lr}", ["train-a-b", "train-c"], "train"),
        ("{lr}", ["a-b", "c"], "sweep"),
        ("x_{index}-{lr}", ["x_1-a-b", "x_2-c"], "x"),
        ("train", ["train-a-b", "train-c"], "train"),
        ("train-{seed}", ["train-1-1", "train-1-2"], "train"),
        ("resnet_lr={lr}", ["resnet_lr=a-b", "resnet_lr=c"], "resnet"),
        ("xlr={lr}-seed={seed}", ["xlr=a-b-seed=1", "xlr=c-seed=1"], "xlr"),
        ("n" * 64, [f"{'n' * 56}-a-b", f"{'n' * 56}-c"], "n" * 56),
    ],
)
def test_names_are_told_apart(name: str, names: list[str], array: str) -> None:
    jobs = made(name=name, command=SH, matrix={"lr": ["a/b", "c"], "seed": [1]})
    assert [job.name for job in jobs] == names
    assert {job.array.name for job in jobs if job.array} == {array}


def test_values_that_make_the_same_name_get_their_number() -> None:
    jobs = made(command=["x{v}"], matrix={"v": ["+", "*"]})
    assert [job.name for job in jobs] == ["train---1", "train---2"]


def test_values_keep_their_type_where_they_stand_alone_and_are_text_elsewhere() -> None:
    jobs = made(
        trainer="a:B",
        args={"lr": "{lr}", "on": ["{on}", "{on}!"], "{lr}": 1},
        steps="{n}",
        env={"LR": "{lr}"},
        matrix={"lr": [0.5], "on": [True], "n": [7]},
        command=None,
    )
    assert dict(jobs[0].args) == {"lr": 0.5, "on": [True, "true!"], "{lr}": 1}
    assert jobs[0].steps == 7 and jobs[0].env == {"LR": "0.5"}


def test_other_braces_stay_and_doubled_ones_become_single() -> None:
    (job,) = made(command=["sh", "-c", "awk '{print $1}' ${HOME} {{lr}} {lr} {other}"], matrix={"lr": [1]})
    assert job.command[2] == "awk '{print $1}' ${HOME} {lr} 1 {other}"


def test_a_model_that_is_said_stays() -> None:
    assert [j.model for j in made(command=["x{a}"], model="m-{a}", matrix={"a": [1, 2]})] == ["m-1", "m-2"]


def test_defaults_and_jobs_after_it() -> None:
    jobs = [
        {"name": "train-{lr}", "command": ["x", "{lr}"], "matrix": {"lr": [1, 2]}},
        {"name": "test", "command": ["y"], "after": ["train-1"]},
        {"name": "all", "command": ["y"], "after": ["train", "test"]},
    ]
    table = {"schema": 1, "defaults": {"retries": 0}, "job": jobs}
    found = jobfile.parse(table, where="x", workdir=Path("/w")).jobs
    assert [(job.name, job.retries, job.array is None) for job in found] == [
        ("train-1", 0, False),
        ("train-2", 0, False),
        ("test", 0, True),
        ("all", 0, True),
    ]
    assert found[3].after == ("train-1", "train-2", "test")


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"matrix": {"lr": [1]}}, "matrix.lr: used nowhere"),
        ({"matrix": {}}, "matrix: {}"),
        ({"matrix": 7}, "matrix: 7"),
        ({"matrix": {"a": []}}, "matrix.a: []"),
        ({"matrix": {"a": [[1]]}}, "matrix.a: [1]"),
        ({"matrix": {"a": "5..1"}}, "a range that goes up"),
        ({"matrix": {"a": "1..9..0"}}, "a range that goes up"),
        ({"matrix": {"a": "0..10000"}}, "a range that goes up"),
        ({"matrix": {"name": [1]}}, "another name than"),
        ({"matrix": {"checkpoint": [1]}}, "another name than"),
        ({"matrix": {"a b": [1]}}, "a name"),
        ({"command": ["{a}{b}"], "matrix": {"a": "1..200", "b": "1..200"}}, "40000 jobs"),
        ({"command": ["{a}"], "matrix": {"a": [1]}, "at_once": 0}, "at_once: 0"),
        ({"at_once": 2}, "at_once: 2; accepted: a job with a matrix"),
        ({"command": ["{a}"], "matrix": {"a": [1]}, "array": {"name": "x", "index": 1}}, "array"),
        ({"array": {"name": "../x", "index": 1}}, "array"),
        ({"array": {"name": "x"}}, "array"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(job: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**{"command": ["x"], **job})
    assert says in str(refused.value) and "\n" not in str(refused.value)
