"""Job files: trainings and programs on CPU cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched import jobfile
from hpcsched.errors import ConfigError

HERE = Path("/somewhere")
PS = {"trainer": "m:T", "strategy": {"kind": "ps", "cpus": 4}}
PROGRAM = {"command": ["prepare"], "strategy": {"kind": "cpu", "cpus": 1.5}}


def parse(**job):
    table = {"schema": 1, "job": [{"name": "a", **job}]}
    return jobfile.parse(table, where="jobs.toml", workdir=HERE).jobs


@pytest.mark.parametrize(("job", "cpus"), [(PS, 4), (PROGRAM, 1.5)])
def test_a_job_on_cores_has_no_gpu(job, cpus):
    (spec,) = parse(**job)
    assert (spec.gpus_min, spec.gpus_max, spec.nodes, spec.cpus) == (0, 0, 1, cpus)
    assert parse(trainer="m:T")[0].cpus is None


@pytest.mark.parametrize(
    ("base", "keys", "said"),
    [
        (PS, {"gpus": 2}, "job a.gpus: 2; accepted: no gpus for a job on CPU cores"),
        (PROGRAM, {"gpus": {"min": 2}}, "accepted: no gpus for a job on CPU cores"),
        (PROGRAM, {"nodes": 2}, "job a.nodes: 2; accepted: 1 for a job on CPU cores"),
        (PROGRAM, {"background": True}, "job a.background: True; accepted: false for a job on CPU cores"),
        (
            PS,
            {"strategy": "ps"},
            "job a.strategy.cpus: missing; accepted: a number of cores of at least 0.3",
        ),
        (PS, {"strategy": {"kind": "ps", "cpus": 0.29}}, "job a.strategy.cpus: 0.29"),
        (PS, {"strategy": {"kind": "ps", "cpus": 1, "servers": 9}}, "at least 0.1 cores a process: 1.1"),
        (PS, {"strategy": {"kind": "ps", "cpus": 1, "start": 0}}, "job a.strategy.start: 0"),
        (PS, {"strategy": {"kind": "ps", "cpus": 1, "staleness": -1}}, "job a.strategy.staleness: -1"),
        (
            PS,
            {"strategy": PROGRAM["strategy"]},
            "job a.strategy: 'cpu'; accepted: cores for jobs with a command",
        ),
        (PROGRAM, {"strategy": PS["strategy"]}, "parameter servers for jobs with a trainer only"),
        (
            PROGRAM,
            {"strategy": "cpu"},
            "job a.strategy.cpus: missing; accepted: a number of cores of at least",
        ),
        (PROGRAM, {"strategy": {"kind": "cpu", "cpus": 0.09}}, "job a.strategy.cpus: 0.09"),
        (PROGRAM, {"strategy": {"kind": "cpu", "cpus": float("nan")}}, "job a.strategy"),
        (
            PROGRAM,
            {"strategy": {"kind": "cpu", "cpus": 1, "workers": 2}},
            "job a.strategy.workers: unknown option; accepted: cpus",
        ),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(base, keys, said):
    with pytest.raises(ConfigError) as error:
        parse(**{**base, **keys})
    assert said in str(error.value)
