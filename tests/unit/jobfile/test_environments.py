"""python, venv and conda of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcsched import jobfile
from hpcsched.cli.run.environments import filled_in
from hpcsched.core.definitions import differing
from hpcsched.core.mechanisms.packing.packs import key_of
from hpcsched.core.model import Container, JobSpec, PythonEnvironment
from hpcsched.errors import ConfigError


def specs(*tables: dict[str, Any], **defaults: Any) -> tuple[JobSpec, ...]:
    jobs = [{"name": f"j{i}", "trainer": "a:B", **table} for i, table in enumerate(tables)]
    table = {"schema": 1, "defaults": defaults, "job": jobs}
    return jobfile.parse(table, where="jobs.toml", workdir=Path("/here")).jobs


def test_paths_are_relative_to_where_programs_run_and_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    tables = [{"python": "bin/python"}, {"python": "python3.12"}, {"venv": ".venv"}, {"conda": "torch"}]
    tables += [{"conda": "../envs/a"}, {"venv": "/abs"}, {}, {"venv": "~/e"}, {"conda": "~"}]
    named = [job.environment and (job.environment.kind, job.environment.name) for job in specs(*tables)]
    assert named == [
        ("python", "/here/bin/python"),
        ("python", "python3.12"),
        ("venv", "/here/.venv"),
        ("conda", "torch"),
        ("conda", "/here/../envs/a"),
        ("venv", "/abs"),
        None,
        ("venv", "/home/ada/e"),
        ("conda", "~"),
    ]


def test_a_jobs_own_replaces_the_default_of_another_kind() -> None:
    own, default = specs({"conda": "c"}, {}, venv="v")
    assert own.environment == PythonEnvironment(kind="conda", name="c")
    assert default.environment == PythonEnvironment(kind="venv", name="/here/v")


def test_an_environment_and_a_container_replace_each_other() -> None:
    boxed, default = specs({"container": "a.sif"}, {}, venv="v")
    assert (boxed.environment, boxed.container) == (None, Container(image="/here/a.sif"))
    assert default.environment == PythonEnvironment(kind="venv", name="/here/v")
    own, default = specs({"conda": "c"}, {}, container="a.sif")
    assert (own.environment, own.container) == (PythonEnvironment(kind="conda", name="c"), None)
    assert default.container == boxed.container
    assert filled_in([boxed, own], PythonEnvironment(kind="venv", name="/v")) == [boxed, own]


def test_jobs_of_a_file_share_the_object() -> None:
    one, other = specs({}, {}, venv="v")
    assert one.environment is other.environment


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            {"python": "p", "venv": "v"},
            "job j0: python and venv; accepted: at most one of python, venv, conda",
        ),
        ({"venv": ""}, "job j0.venv: ''; accepted: the folder of a virtual environment"),
        ({"conda": " "}, "job j0.conda: ' '; accepted: the name or the folder of a conda environment"),
        ({"python": "a\0b"}, "job j0.python: 'a\\x00b'; accepted: a Python interpreter"),
        ({"python": 3}, "job j0.python: 3; accepted: a Python interpreter"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(table: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        specs(table)
    assert f"jobs.toml: {line}" in str(refused.value)


def test_an_edit_is_named_by_its_keys() -> None:
    none, venv, other, conda = specs({}, {"venv": "v"}, {"venv": "w"}, {"conda": "c"})

    def keys(old: JobSpec, new: JobSpec) -> tuple[str, ...]:
        return tuple(key for key in differing(old, new) if key != "model")

    assert keys(none, venv) == keys(venv, none) == keys(venv, other) == ("venv",)
    assert keys(venv, conda) == ("conda", "venv") and keys(venv, venv) == ()


def test_jobs_of_different_environments_never_ride_together() -> None:
    packed = {"strategy": "packed", "model": "m"}
    none, venv, same, conda = specs(
        packed, {**packed, "venv": "v"}, {**packed, "venv": "v"}, {**packed, "conda": "v"}
    )
    assert key_of(venv) == key_of(same)
    assert len({repr(key_of(job)) for job in (none, venv, conda)}) == 3


def test_a_record_of_before_there_were_environments_still_opens() -> None:
    old = msgspec.json.encode(specs({})[0])
    table = msgspec.json.decode(old)
    del table["environment"]
    assert msgspec.convert(table, JobSpec) == specs({})[0]
