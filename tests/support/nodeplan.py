"""A launch plan for node agents."""

from __future__ import annotations

from pathlib import Path

from hpcsched.devices import Sample
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote.launcher import RemoteLauncher


def plan(hosts: RemoteLauncher[Sample], folder: Path, script: str, *, on: str | None = None) -> LaunchPlan:
    return LaunchPlan(
        job_id=1,
        attempt=1,
        argv=("sh", "-c", script),
        env={"HPCSCHED_RUN_ID": hosts._run_id},
        cwd=folder,
        folder=folder,
        output=folder / "out",
        devices=tuple(d for d in hosts.inventory() if on in (None, d.host)),
    )
