"""Job files: jobs that are packed, jobs in epochs, jobs that go on from where others ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched import jobfile
from hpcsched.errors import ConfigError

HERE = Path("/somewhere")


def parse(*jobs):
    table = {"schema": 1, "job": [{"trainer": "m:T", **job} for job in jobs]}
    return jobfile.parse(table, where="jobs.toml", workdir=HERE).jobs


def refused(*jobs):
    with pytest.raises(ConfigError) as error:
        parse(*jobs)
    return str(error.value)


def test_a_packed_job_has_one_gpu():
    (job,) = parse({"name": "a", "strategy": "packed"})
    assert (job.gpus_min, job.gpus_max, job.nodes) == (1, 1, 1)
    (job,) = parse({"name": "a", "strategy": {"kind": "packed", "mode": "loop", "most": 4, "pack": "mine"}})
    assert job.strategy == {"kind": "packed", "mode": "loop", "most": 4, "pack": "mine"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gpus": 2}, 'job a.gpus: 2; accepted: "auto" or 1 for a job that is packed'),
        ({"nodes": 2}, "job a.nodes: 2; accepted: 1 for a job that is packed"),
        ({"background": True}, "job a.background: True; accepted: false for a job that is packed"),
        ({"strategy": {"kind": "packed", "mode": "fast"}}, "job a.strategy.mode: 'fast'"),
        ({"strategy": {"kind": "packed", "most": 0}}, "job a.strategy.most: 0"),
        (
            {"strategy": {"kind": "packed", "members": 3}},
            "job a.strategy.members: unknown option; accepted: mode, most, pack",
        ),
    ],
)
def test_what_a_packed_job_cannot_be_is_refused_by_name(keys, said):
    assert said in refused({"name": "a", "strategy": "packed", **keys})


def test_a_length_in_epochs():
    (job,) = parse({"name": "a", "epochs": 2.5})
    assert (job.epochs, job.steps) == (2.5, None)
    for epochs in (0, -1, float("inf"), float("nan")):
        assert "job a.epochs" in refused({"name": "a", "epochs": epochs})
    assert "steps or epochs" in refused({"name": "a", "epochs": 2, "steps": 3})
    program = {"name": "a", "epochs": 2, "trainer": None, "command": ["true"]}
    assert "for a trainer only" in refused(program)


def test_a_job_that_continues_another_waits_for_it():
    first, second = parse({"name": "a"}, {"name": "b", "continues": "a"})
    assert (second.continues, second.after) == ("a", ("a",))
    assert "'c' is no job" in refused({"name": "b", "continues": "c"})
    program = {"name": "b", "continues": "a", "trainer": None, "command": ["true"]}
    assert "job b.continues: 'a'; accepted: a job with a trainer" in refused({"name": "a"}, program)
    del first
