"""Hydra's launcher: what `hydra.launcher` says becomes keys of jobs, overrides become names."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hydra", reason="the extra dev")

from hydra import compose, initialize

import hpcsched
from hpcsched import jobfile
from hpcsched.client.keys import Keys
from hpcsched.errors import ConfigError, NoSuchRun
from hydra_plugins.hydra_hpcsched_launcher import _launch, _run
from hydra_plugins.hydra_hpcsched_launcher._launch import job_keys, labels, stem
from hydra_plugins.hydra_hpcsched_launcher.config import HpcschedLauncherConf
from hydra_plugins.hydra_hpcsched_launcher.hpcsched_launcher import HpcschedLauncher

ROOT = Path(__file__).resolve().parents[3]
OF_THE_LAUNCHER = {"_target_", "dir", "wait_for_agent", "run"}


def test_it_has_the_version_of_hpcsched_and_needs_that() -> None:
    project = tomllib.loads((ROOT / "packaging/hydra/pyproject.toml").read_text())["project"]
    assert project["version"] == hpcsched.__version__
    assert f"hpcsched=={hpcsched.__version__}" in project["dependencies"]


def test_all_else_that_hydra_knows_of_it_are_keys_of_job_files() -> None:
    known = {field.name for field in fields(HpcschedLauncherConf)}
    assert known - OF_THE_LAUNCHER <= Keys.__annotations__.keys()


@pytest.mark.long
def test_hydra_finds_it_and_what_is_typed_is_a_job(tmp_path: Path) -> None:
    given = ["gpus=share", "memory=16G", "time=90", "strategy={kind:ddp,micro_batch:4}", "steps=100"]
    overrides = ["hydra/launcher=hpcsched", *(f"hydra.launcher.{one}" for one in given)]
    overrides += ["+hydra.launcher.env.SEED=7", "hydra.launcher.modules=[cuda,gcc]"]
    overrides += ["hydra.launcher.run.devices=cpu:2", "+hydra.launcher.run.warm=off"]
    with initialize(version_base=None, config_path=None):
        config = compose(overrides=overrides, return_hydra_config=True).hydra.launcher
    assert {**config.run} == {
        "devices": "cpu:2",
        "policy": None,
        "profiles": None,
        "idle_timeout": "10m",
        "warm": "off",
    }
    keys = job_keys({key: value for key, value in config.items() if key not in OF_THE_LAUNCHER})
    assert keys == {
        "gpus": "share",
        "memory": "16G",
        "time": "90",
        "strategy": {"kind": "ddp", "micro_batch": 4},
        "steps": 100,
        "env": {"SEED": "7"},
        "modules": ["cuda", "gcc"],
    }
    job = {"name": "x", "command": ["true"], **keys}
    (spec,) = jobfile.parse({"schema": 1, "job": [job]}, where="test", workdir=tmp_path, user="me").jobs
    assert (spec.steps, dict(spec.env)) == (100, {"SEED": "7"})


def test_names_say_the_number_and_what_differs() -> None:
    data = "data=imagenet"
    batch = [[data, "opt.lr=1e-3", "+m='a b'", "hydra.x=1"], [data, "opt.lr=1e-2", "+m='a b'", "hydra.x=1"]]
    assert labels(batch, 4) == ["4-opt.lr-1e-3", "5-opt.lr-1e-2"]
    assert labels(batch[:1], 0) == ["0-data-imagenet-opt.lr-1e-3-m-a-b"]
    assert labels([[], []], 0) == ["0", "1"]
    assert stem("train é") == "train--" and len(stem("x" * 99)) == 30


class FakeRun:
    """A run that does in turn what the list says: an error of `wait`, or rows of `table`."""

    def __init__(self, *turns: Exception | list[dict[str, Any]]) -> None:
        self.turns = [*turns]

    def wait(self, left: set[str], *, timeout: float) -> None:
        """The next error, if that is what comes next; what is still running is no news."""
        if isinstance(self.turns[0], Exception):
            raise self.turns.pop(0)  # type: ignore[misc]

    def table(self) -> list[dict[str, Any]]:
        """The next rows."""
        rows = self.turns.pop(0)
        assert isinstance(rows, list)
        return rows


class Named:
    """A job by its name."""

    def __init__(self, name: str) -> None:
        self.name = name


def waited(run: FakeRun, patience_s: float) -> list[tuple[str, ...]]:
    told: list[tuple[str, ...]] = []
    tell: Callable[..., None] = lambda *words: told.append(words)  # noqa: E731
    _run.SweepRun(run, patience_s).wait([Named("a"), Named("b")], tell)  # type: ignore[arg-type, list-item]
    return told


def test_each_end_is_told_once_also_over_a_time_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run, "LOOKS_EVERY_S", 0.0)
    going, ended = {"name": "a", "state": "RUNNING"}, {"name": "a", "state": "FAILED", "output": "/o"}
    other = {"name": "b", "state": "COMPLETED"}
    turns = [TimeoutError(), [going], NoSuchRun("gone"), [ended], NoSuchRun("gone"), [ended], [ended, other]]
    assert waited(FakeRun(*turns), 60.0) == [("a", "FAILED", "/o"), ("b", "COMPLETED", "")]
    with pytest.raises(NoSuchRun):
        waited(FakeRun(*turns), 0.0)


def test_an_agent_that_has_left_between_two_batches_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = [_run.SweepRun(SimpleNamespace(alive=False), 0.0, own=own) for own in (True, False)]  # type: ignore[arg-type]
    opened = iter([own, own, theirs])
    monkeypatch.setattr(_run.SweepRun, "open", lambda *_: next(opened))
    monkeypatch.setattr(_launch, "launch", lambda _, run, *__: run)
    launcher = HpcschedLauncher()
    assert [launcher.launch([[]], 0) for _ in range(4)] == [own, own, theirs, theirs]


def test_a_wait_that_is_no_duration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.wait_for_agent: 'soon'"):
        _run.SweepRun.open(None, {}, "soon")
