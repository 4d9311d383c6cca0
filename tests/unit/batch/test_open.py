"""Which batch system is found, and how its commands are run."""

from __future__ import annotations

import pytest

from hpcsched.batch import KINDS, LAUNCHERS, batch_of, open_batch
from hpcsched.batch.base import AllocatedHost
from hpcsched.config import KEYS
from hpcsched.errors import ConfigError
from hpcsched.testing.batch import LSF_JOB, SLURM_JOB


@pytest.mark.parametrize(
    ("environ", "hosts", "kind"),
    [
        ({}, [], "none"),
        (SLURM_JOB, [], "slurm"),
        (LSF_JOB, [], "lsf"),
        ({**SLURM_JOB, **LSF_JOB}, [], "slurm"),
        (SLURM_JOB, ["a", "b"], "none"),
        ({"SLURM_JOB_ID": ""}, [], "none"),
    ],
)
def test_detection(environ: dict[str, str], hosts: list[str], kind: str) -> None:
    assert open_batch(environ=environ, hosts=hosts).kind == kind


def test_settings_files_accept_the_same_words() -> None:
    assert KEYS["batch"].schema["enum"] == list(KINDS)
    assert KEYS["launcher"].schema["enum"] == list(LAUNCHERS)


def test_what_is_asked_for_counts() -> None:
    assert open_batch("none", environ=SLURM_JOB).kind == "none"
    assert open_batch("lsf", environ=SLURM_JOB).kind == "lsf"
    assert [host.name for host in open_batch(environ={}, hosts=["a", "b"]).allocation().hosts] == ["a", "b"]
    for kind in ("slurm", "lsf", "none"):
        assert batch_of(kind, environ={}).kind == kind


@pytest.mark.parametrize(
    ("kind", "hosts", "launcher", "where"),
    [
        ("pbs", [], "auto", "--batch"),
        ("auto", [], "mpirun", "--launcher"),
        ("none", [], "srun", "--launcher"),
        ("slurm", [], "jsrun", "--launcher"),
        ("lsf", [], "srun", "--launcher"),
        ("slurm", ["a"], "auto", "--hosts"),
    ],
)
def test_what_does_not_go_together(kind: str, hosts: list[str], launcher: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_batch(kind, environ={}, hosts=hosts, launcher=launcher)
    assert caught.value.where == where
    with pytest.raises(ConfigError):
        batch_of("auto")


@pytest.mark.parametrize("environ", [SLURM_JOB, LSF_JOB, {}])
@pytest.mark.parametrize("launcher", ["ssh", "local"])
def test_launchers_that_need_no_batch_system(environ: dict[str, str], launcher: str) -> None:
    command = open_batch(environ=environ, launcher=launcher).on_hosts([AllocatedHost(name="a")], ["agent"])[0]
    assert command[0] == {"ssh": "ssh", "local": "agent"}[launcher]
