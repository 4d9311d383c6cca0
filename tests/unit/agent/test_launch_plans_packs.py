"""What a packed job's process is told: the name of its pack, and nothing of lanes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpcsched.agent.launch_plans import Site, pack_of, plan_of
from hpcsched.core.actions import Launch
from hpcsched.core.model import Kind
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job

SITE = Site(rundir=RunDir(Path("/run")), run_id="r1", user="ada", speed=1.0, stand_ins=False)


def packed(name, **rest):
    strategy = {"kind": "packed", **rest.pop("strategy", {})}
    return a_job(name, gpus=1, kind=Kind.TRAINER, trainer="m:T", strategy=strategy, **rest)


def launches(driver):
    return {action.job_id: action for action in driver.actions if isinstance(action, Launch)}


def test_jobs_of_one_gpu_and_one_kind_are_told_the_same_pack():
    driver = Driver(gpus=2)
    driver.submit(*(packed(name) for name in "abcd"))
    packs = {
        i: pack_of(driver.job(i), action, driver.machine, SITE) for i, action in launches(driver).items()
    }
    assert packs[1] == packs[3] != packs[2] == packs[4]
    driver.start_agent(2)  # in another life of the agent nobody of the earlier one is there
    later = launches(driver)[1]
    assert pack_of(driver.job(1), later, driver.machine, SITE) != packs[1]


def test_others_on_the_same_gpu_have_another_process():
    driver = Driver(gpus=1)
    driver.submit(packed("a"), packed("b", env={"KEY": "1"}))
    first = pack_of(driver.job("a"), launches(driver)[1], driver.machine, SITE)
    driver.runs("a")
    driver.exits("a", 0, 100, 100)
    second = pack_of(driver.job("b"), launches(driver)[2], driver.machine, SITE)
    assert first != second
    assert (
        pack_of(driver.job("a"), launches(driver)[1], driver.machine, replace(SITE, stand_ins=True)) is None
    )


def test_a_packed_job_knows_of_no_lane_though_there_are_background_jobs():
    driver = Driver(gpus=2)
    driver.submit(packed("a"), a_job("b", gpus=1, background=True))
    plan = plan_of(
        driver.job("a"),
        launches(driver)[1],
        site=SITE,
        devices=(driver.machine.ledger.devices[0],),
        profile=None,
        shared=True,
        pack="r1/1/0/x",
    )
    assert plan.env["HPCSCHED_PACK"] == "r1/1/0/x"
    assert "HPCSCHED_LANE" not in plan.env
