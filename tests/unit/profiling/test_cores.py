"""Programs on CPU cores on their way through all layers: what is started, and what is not known of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from hpcsched.agent.launch_plans import Site, launch_plan, seat_devices
from hpcsched.agent.node.agent import NodeAgent
from hpcsched.cli.main import cli
from hpcsched.cli.run.report import _configurations
from hpcsched.core.actions import Launch
from hpcsched.core.model import Usage
from hpcsched.devices.cpu import CpuSlots
from hpcsched.errors import ConfigError, LaunchError
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote.workers import part_launches
from hpcsched.planning.ps.training import PsTraining
from hpcsched.policy.cpu.configurations import SeenUsage, trimmed
from hpcsched.profiling.sweep import counts_for
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_core_job, a_program
from profiles.ps.nearchus import CLUSTERS, workload


def planned(driver: Driver) -> LaunchPlan:
    (launch,) = [action for action in driver.actions if isinstance(action, Launch)]
    return launch_plan(
        driver.job(launch.job_id),
        launch,
        site=Site(
            rundir=SimpleNamespace(root=Path("/r"), job=lambda i: Path(f"/r/{i}")),
            run_id="r",
            user="u",
            speed=1.0,
            stand_ins=False,
        ),  # type: ignore[arg-type]
        devices=seat_devices(launch.seats),
        profile=None,
    )


def test_a_program_is_started_with_its_share_and_a_training_keeps_to_it_by_itself() -> None:
    plan = planned(Driver(a_program("p", 1.5), gpus=0, cores=range(4)))
    assert plan.share == 1.5 and plan.argv == ("prepare",)
    assert plan.env["HPCSCHED_DEVICES"] == "" and "HPCSCHED_SEATS" not in plan.env
    training = planned(Driver(a_core_job("a", 1.5), gpus=0, cores=range(4)))
    assert training.share is None and "HPCSCHED_SEATS" in training.env


def test_its_share_reaches_another_host() -> None:
    plan = planned(Driver(a_program("p", 1.5), gpus=0, cores=range(4)))
    (order,) = part_launches(plan, [("n1", (0,))], first_host="n1", address="10.0.0.1", first_part=1)
    started: list[LaunchPlan] = []

    def launch(plan: LaunchPlan, place: Any) -> None:
        started.append(plan)
        raise LaunchError("enough seen", transient=True)

    node: Any = SimpleNamespace(
        left="",
        _name="n1",
        _inventory=(),
        _parts={},
        _head=SimpleNamespace(send=lambda message: None),
        _launcher=SimpleNamespace(launch=launch, ready_for=lambda plan: True),
    )
    NodeAgent._launch(node, order)
    assert started[0].share == 1.5 and started[0].devices == plan.devices


def test_it_has_no_configurations_to_be_drawn(tmp_path: Path) -> None:
    assert _configurations(Driver(a_program("p", 1), gpus=0, cores=range(4)).machine, tmp_path) == ([], 0)


def test_how_long_it_takes_is_not_known(tmp_path: Path) -> None:
    trainings = {"p": PsTraining(model=workload("MobileNet", CLUSTERS["A"]))}
    with pytest.raises(ConfigError, match="a command on CPU cores"):
        Simulation([a_program("p", 1, steps=5)], [], cpus=4, trainings=trainings)
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(
        'schema = 1\n[[job]]\nname = "p"\ncommand = ["x"]\nstrategy = { kind = "cpu", cpus = 1 }\n'
    )
    done = CliRunner().invoke(cli, ["simulate", str(jobs), "--cpus", "4"])
    assert "how long a program takes is not known" in str(done.exception)


def test_it_is_not_profiled() -> None:
    with pytest.raises(ConfigError, match="trainings on CPU cores are not profiled"):
        counts_for(a_program("p", 1), CpuSlots(1, "n1"))


def test_a_little_less_is_not_given_back() -> None:
    """The policy would leave the job what it has, and the change would be for nothing."""

    def seen(used: float) -> SeenUsage:
        driver = Driver(a_core_job("a", 3, start=1.0), gpus=0, cores=range(4))
        seats = driver.job("a").current.seats
        cpu = tuple(used * seat.share for seat in seats)
        return SeenUsage.of(seats, Usage(rate=1.0, cpu=cpu, net=(0.0,) * 3, samples=30, stable=True))

    assert trimmed(seen(0.87)) is None
    assert trimmed(seen(0.5)) is not None
