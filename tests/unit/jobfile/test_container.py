"""The key `container` of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcsched.core.model import Container, JobSpec
from hpcsched.errors import ConfigError
from hpcsched.jobfile import parse
from hpcsched.submission import checked


def spec(container: Any, **more: Any) -> JobSpec:
    job = {"name": "a", "command": ["true"], "container": container, **more}
    return parse({"schema": 1, "job": [job]}, where="jobs.toml", workdir=Path("/w")).jobs[0]


def test_an_image_is_a_path_an_address_or_a_name() -> None:
    for image, found in (
        ("torch.sif", "/w/torch.sif"),
        ("images/torch", "/w/images/torch"),
        ("/a/b", "/a/b"),
        ("docker://nvcr.io/nvidia/pytorch:26.01-py3", "docker://nvcr.io/nvidia/pytorch:26.01-py3"),
        ("pytorch", "/w/pytorch"),
    ):
        assert spec(image).container == Container(image=found)
    for runtime, found in (("bubblewrap", "/w/pytorch"), ("enroot", "pytorch"), ("pyxis", "pytorch")):
        named = spec({"image": "pytorch", "runtime": runtime}).container
        assert named == Container(image=found, runtime=runtime)
    for runtime in ("enroot", "pyxis"):
        at = spec({"image": "nvcr.io#nvidia/pytorch", "runtime": runtime}).container
        assert at == Container(image="nvcr.io#nvidia/pytorch", runtime=runtime)


def test_a_table_says_more_and_comes_through_the_inbox() -> None:
    table = {
        "image": "root",
        "runtime": "bubblewrap",
        "mounts": ["/data", "/a:/b", "/c:/d:ro"],
        "options": ["--unshare-net"],
        "python": "python3.12",
    }
    job = spec(table)
    assert job.container == Container(
        image="/w/root",
        runtime="bubblewrap",
        mounts=(("/data", "/data", "rw"), ("/a", "/b", "rw"), ("/c", "/d", "ro")),
        options=("--unshare-net",),
        python="python3.12",
    )
    assert checked(job, where="submit") == job


@pytest.mark.parametrize(
    ("container", "more", "said"),
    [
        ("", {}, "container"),
        ("--rm", {}, "no option of a command"),
        ({"image": "a", "runtime": "docker"}, {}, '"apptainer", "enroot"'),
        ({"image": "a", "mounts": ["data"]}, {}, "/outside:/inside:ro"),
        ({"image": "a", "mounts": ["/a:/b:rx"]}, {}, "/outside:/inside:ro"),
        ({"image": "a", "options": ["--new-session"]}, {}, "has a session of its own already"),
        ({"image": "a", "colour": 1}, {}, "unknown key"),
        ({"runtime": "enroot"}, {}, "image"),
        ("a.sif", {"venv": "env"}, "no venv beside it"),
        ("a.sif", {"background": True}, "in the foreground"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(container: Any, more: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=r"jobs\.toml: job a") as refused:
        spec(container, **more)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
