"""A worker says that it cannot use its GPU: how far its job is believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcsched.contract.driver import changed
from hpcsched.contract.variables import DRIVER_VARIABLES
from hpcsched.core.model import Device
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.spawn import ProcessStart


def test_a_worker_knows_what_has_been_changed_since_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the agent has inherited itself."""
    shown = {"CUDA_VISIBLE_DEVICES": "3", "HPCSCHED_CUDA_DEVICES": "3"}
    outer = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/site", "NVIDIA_TF32_OVERRIDE": "0"}
    launcher = LocalLauncher(
        device_env=lambda devices: shown, environ=outer | {DRIVER_VARIABLES: "an outer run's"}
    )
    starts: list[ProcessStart] = []
    monkeypatch.setattr(launcher, "_spawn", lambda some, workers, **_: starts.extend(some))
    plan = LaunchPlan(
        job_id=1,
        attempt=1,
        argv=("true",),
        env={"CUDA_LAUNCH_BLOCKING": "1"},
        cwd=tmp_path,
        folder=tmp_path,
        output=tmp_path / "out",
        devices=(Device(index=0, host="here", kind="NVIDIA H200", handle="3"),),
    )
    launcher.launch(plan).close()
    launcher.close()
    env = starts[0].env
    assert changed(env) == []
    assert changed({**env, "LD_LIBRARY_PATH": "/stubs:/site"}) == ["LD_LIBRARY_PATH"]
    assert changed({**env, "LD_PRELOAD": "x", "CUDA_HOME": "/usr"}) == ["CUDA_HOME", "LD_PRELOAD"]
    del env["NVIDIA_TF32_OVERRIDE"]
    assert changed(env) == ["NVIDIA_TF32_OVERRIDE"]
