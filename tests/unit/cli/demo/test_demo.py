"""`hpcsched demo`, part by part: what it says is what was measured, and it overwrites nothing."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rundirs import a_home

from hpcsched import jobfile
from hpcsched.cli.demo import command, queue
from hpcsched.cli.demo.live import HIGHLIGHT, progress, told
from hpcsched.cli.demo.outcome import Stretch, Work, alone_s, best_rates, pace, timeline, value
from hpcsched.cli.jobs.explain import explain
from hpcsched.cli.main import cli
from hpcsched.cli.run.results import result_of
from hpcsched.cli.run.run import run
from hpcsched.cli.run.simulate import simulate
from hpcsched.cli.site.script import script
from hpcsched.core.actions import Action
from hpcsched.sim.engine import Simulation
from hpcsched.testing.builders import Driver, a_job, a_profile

SMALL, WIDE = a_profile("small", [100.0, 40.0]), a_profile("wide", [5.0, 8.0])
PROFILES = {"small": SMALL, "wide": WIDE}
COMMANDS = {"explain": explain, "run": run, "script": script, "simulate": simulate}


def test_its_worth_is_said_and_where_there_is_none_that_is() -> None:
    assert value("trainings", 3, 125.0, 220.0) == (
        "3 trainings in 2:05; one after the other they take 3:40: 1.8x sooner."
    )
    assert value("trainings", 3, 100.0, 103.0).endswith("take 1:43: it did not pay here just now.")
    assert value("trainings", 3, 100.0, 60.0).endswith("take 1:00: it did not pay here just now.")


def test_one_after_the_other_is_as_fast_as_each_was_seen_to_be() -> None:
    works = [Work("small", 2.0, 1000), Work("wide", 3.0, 80)]
    alone = best_rates(PROFILES, [Stretch("wide", 1, 20, 10.0), Stretch("small", 1, 900, 10.0)], 2)
    assert alone == {"small": 100.0, "wide": 8.0}, "slower in the run: what was measured counts"
    assert alone_s(works, alone) == 2 + 10 + 3 + 10
    seen = [Stretch("small", 1, 2000, 10.0), Stretch("small", 1, 1000, 5.0), Stretch("wide", 2, 90, 1.0)]
    assert best_rates(PROFILES, seen, 2) == {"small": 200.0, "wide": 8.0}, "a second says nothing"


def test_how_fast_the_run_was_beside_what_was_measured() -> None:
    assert pace(PROFILES, [Stretch("small", 1, 500, 10.0), Stretch("wide", 2, 40, 10.0)]) == 0.5
    assert pace(PROFILES, []) is None


def test_the_chart_shows_who_ran_where_and_when_it_got_more() -> None:
    jobs = [a_job("a", "small", 1000), a_job("b", "small", 2000), a_job("long-name", "wide", 140)]
    machine = Simulation(
        jobs, list(PROFILES.values()), gpus=2, policy="marble", options={"promote": "always"}
    ).run()
    lines = timeline(result_of(machine).jobs, 2, "CPU slot", 60)
    assert all(len(line) <= 60 for line in lines)
    assert lines[0].startswith("CPU slot 0 │a ━") and "│long-name ━" in lines[0]
    assert lines[1].startswith("CPU slot 1 │b ━")
    assert "long-name: 1 to 2" in lines[2] and "▲" in lines[2]
    assert lines[-1].split()[0] == "0:00"
    assert timeline([], 2, "CPU slot", 60) == timeline(result_of(machine).jobs, 2, "CPU slot", 12) == []


def test_a_promotion_in_place_is_told_with_what_it_gains_and_costs() -> None:
    driver = Driver(
        a_job("a", "small", 100),
        a_job("b", "wide", 100),
        gpus=2,
        kind="cpu",
        profiles=PROFILES.values(),
        promote="always",
    )

    def said(actions: list[Action]) -> list[str]:
        return told(driver.machine, driver.events[-1], actions)

    launched = told(driver.machine, driver.events[-1], driver.actions)
    assert launched == [
        "a starts on CPU slot 0: 1 is fastest for it (100 steps/s)",
        "b starts on CPU slot 1: 2 would be fastest for it, no more are free yet",
    ]
    driver.runs("a", "b", in_place=True)
    driver.reports("b", 25)
    assert progress(driver.machine) == "a 0%, b 25%"
    ended, begun = said(driver.exits("a", 0))
    assert ended == "a has ended"
    assert begun == "b is to have CPU slots 0 and 1 while it trains: its fastest count is free"
    assert said(driver.resized("b", 30, stopped_s=0.041)) == [
        f"{HIGHLIGHT}: b goes on with 2 CPU slots from step 30, without a restart; it stood still for 41 ms."
    ]


def test_the_trainings_last_as_long_as_they_shall_wherever_they_run() -> None:
    text = Path(queue.__file__).with_name("trainings.toml").read_text()
    trainings = jobfile.parse(tomllib.loads(text), where="x", workdir=Path.cwd()).jobs
    assert {job.name for job in trainings} == set(queue.SHARES)
    steps = queue.steps_for(trainings, PROFILES, 60.0)
    assert steps["small-b"] == round(60 * 0.32 * 100) and steps["wide"] == round(60 * 0.28 * 8)
    made = jobfile.parse(tomllib.loads(queue.with_steps(text, steps)), where="x", workdir=Path.cwd()).jobs
    assert {job.name: job.steps for job in made} == steps
    assert queue.said_speeds(WIDE) == "wide: 5 steps/s on 1 CPU slot, 8 steps/s on 2 CPU slots; fastest on 2"


def test_a_demo_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_home(tmp_path, monkeypatch)
    names = [str(command.new_folder(None)) for _ in range(2)]
    assert names == ["hpcsched-demo", "hpcsched-demo-2"]
    assert command.new_folder("hpcsched-demo") == Path("hpcsched-demo"), "it is empty"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    for words in (["demo", "--dir", "full"], ["--dir", "full", "demo"]):
        done = CliRunner().invoke(cli, words, standalone_mode=False)
        assert "full is not empty; accepted: a new or an empty folder" in str(done.exception)
        assert getattr(done.exception, "exit_code", 0) == 2


def test_without_torch_it_says_what_to_install_and_that_it_pretends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_home(tmp_path, monkeypatch)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    queues: list[queue.Queue] = []
    monkeypatch.setattr(command, "_run", lambda ctx, found: queues.append(found) or 0)
    done = CliRunner().invoke(cli, ["demo"], standalone_mode=False)
    said = " ".join(done.output.split())
    assert done.return_value == 0
    assert "PyTorch is not installed here" in said and "install hpcsched[torch,report]" in said
    assert "pretended GPUs" in said and "compute nothing" in said
    (found,) = queues
    assert found.pretended and found.devices.startswith("replay:")
    for job in found.specs:
        assert found.profiles[job.model].throughput


@pytest.mark.parametrize("speed", [1.0, 40.0])
def test_what_it_says_to_try_next_can_be_typed(speed: float, tmp_path: Path) -> None:
    shown = queue.Queue(
        folder=tmp_path,
        jobs=tmp_path / "a b/jobs.toml",
        specs=[a_job("wide")],
        profiles=PROFILES,
        devices="cpu:2",
        gpus=2,
        speed=speed,
    )
    lines = command.next_commands(shown, tmp_path / "run")
    assert len(lines) == 3
    for line in lines:
        program, name, *rest = shlex.split(line)
        assert program == "hpcsched"
        COMMANDS[name].make_context(name, rest, parent=click.Context(cli, **cli.context_settings))
