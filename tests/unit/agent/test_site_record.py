"""Records for a site: what trainings held and what was idle is all that there was; files are one owner's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from hpcsched.accounts import name_of
from hpcsched.agent.site_record import SiteRecord, held_in
from hpcsched.cli.run.efficiency_records import sums
from hpcsched.core.machine import Machine
from hpcsched.store import job_use, site_records
from hpcsched.store.job_use import JobUse
from hpcsched.store.site_records import Life, Training
from hpcsched.testing.builders import Driver, a_job, a_profile

BATCH = {"kind": "slurm", "id": "7", "cluster": "one", "account": "proj"}


@pytest.fixture
def driver() -> Driver:
    """A life of an hour."""
    jobs = (a_job("a", "m", gpus=1), a_job("b", "m", gpus=2))
    driver = Driver(*jobs, gpus=4, profiles=(a_profile("m", [1.0, 2.0]),))
    driver.runs("a", "b")
    driver.now = 3600.0
    return driver


def goes_on(driver: Driver) -> Driver:
    """A second life, of half an hour, in which `b` ends and `a` goes on."""
    driver.start_agent(4)
    driver.runs("a", "b")
    driver.now = 4500.0
    driver.exits("b", 0)
    driver.now = 5400.0
    driver.reports("a", 50)
    return driver


def record_of(machine: Machine, folder: Path, told: list[str] | None = None) -> SiteRecord:
    return SiteRecord(
        folder,
        machine,
        uses=folder / "job-use",
        user="ada",
        run_id="0123",
        allocation=BATCH,
        speed=1.0,
        tell=(told if told is not None else []).append,
    )


def test_trainings_and_idle_make_up_each_life(driver: Driver) -> None:
    goes_on(driver)
    first, last = held_in(driver.machine, 0), held_in(driver.machine)
    for life, there in ((first, 4 * 3600.0), (last, 4 * 1800.0)):
        assert life.gpu_s == there == pytest.approx(sum(life.by_attempt.values()) + life.idle_s)
    assert last.idle_s == pytest.approx(1800.0 + 2 * 900.0)


def test_what_a_life_leaves_is_replaced_as_a_whole_and_summed_up(driver: Driver, tmp_path: Path) -> None:
    use = JobUse(job=1, attempt=2, gpu_s=1800, busy_gpu_s=900, cpu_s=60, cpu_over_s=1800, memory_mib=2)
    job_use.append(tmp_path / "job-use", [use])
    record = record_of(driver.machine, tmp_path)
    record.close()
    assert not [*tmp_path.glob("*.jsonl")], "this agent has not begun: the life on record was another's"
    goes_on(driver)
    record.look(0.0)
    record.close()
    (file,) = tmp_path.glob("*.jsonl")
    assert file.name == "ada-0123-2.jsonl" and file.stat().st_mode & 0o777 == 0o600
    life, a, b = map(json.loads, file.read_text().splitlines())
    assert (life["kind"], life["over"], life["gpus"]) == ("life", True, 4)
    assert (a["name"], a["state"], a["gpu_s"], a["busy_gpu_s"]) == ("a", "RUNNING", 1800.0, 900.0)
    assert (a["account"], a["batch_job"], a["max_rss_bytes"], a["cpu_s"]) == ("proj", "7", 2**21, 60.0)
    assert (b["state"], b["gpu_s"], b["busy_gpu_s"]) == ("COMPLETED", 1800.0, None)
    told = {*life, *a}
    assert not {key for key in told if "command" in key or "path" in key or "args" in key}
    wrong: list[str] = []
    (total,) = sums(site_records.read(tmp_path, wrong=wrong), ["account"])
    assert not wrong and (total.runs, total.trainings) == (1, 2)
    assert total.gpu_hours == pytest.approx(2.0) == total.held_gpu_hours + total.idle_gpu_hours


def test_of_an_adopted_attempt_each_life_tells_what_was_of_its_time(driver: Driver, tmp_path: Path) -> None:
    driver.reports("a", 30)
    before = JobUse(job=1, attempt=1, gpu_s=3600, busy_gpu_s=3000, cpu_s=50, cpu_over_s=3600, memory_mib=3)
    job_use.append(tmp_path / "job-use", [before])
    record = record_of(driver.machine, tmp_path)
    driver.take_over("a", "b")
    driver.now = 5400.0
    driver.reports("a", 50)
    after = JobUse(job=1, attempt=1, gpu_s=1800, busy_gpu_s=900, cpu_s=60, cpu_over_s=1800, memory_mib=2)
    job_use.append(tmp_path / "job-use", [after])
    for number, (seconds, gpu_s) in enumerate(((3600.0, 10_800.0), (1800.0, 5400.0))):
        held = held_in(driver.machine, number)
        assert sum(held.by_attempt.values()) == gpu_s and held.idle_s == seconds
    record.close()
    (file,) = tmp_path.glob("*.jsonl")
    life, a, b = map(json.loads, file.read_text().splitlines())
    assert (a["start"], a["end"], a["attempts"]) == (life["start"], life["end"], 1)
    assert (a["steps"], a["gpu_s"], b["gpu_s"]) == (20, 1800.0, 3600.0)
    assert (a["sampled_gpu_s"], a["busy_gpu_s"], a["cpu_s"]) == (1800.0, 900.0, 60.0)


def test_a_folder_that_cannot_be_written_is_said_once(driver: Driver, tmp_path: Path) -> None:
    told: list[str] = []
    record = record_of(driver.machine, tmp_path / "none", told)
    goes_on(driver)
    record.look(0.0)
    record.close()
    assert len(told) == 1 and "the site has no record of this run" in told[0]


def test_records_of_others_are_not_taken_on_trust(driver: Driver, tmp_path: Path) -> None:
    """One that says it is of somebody who does not own the file, a torn one, a link."""
    life, trainings = record_of(goes_on(driver).machine, tmp_path).records(over=True)
    site_records.write(tmp_path, life, trainings)
    forged = (tmp_path / "ada-0123-2.jsonl").read_text().replace(f'"uid":{os.geteuid()}', '"uid":12345')
    (tmp_path / "forged.jsonl").write_text(f"{forged}torn")
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    wrong: list[str] = []
    found = list(site_records.read(tmp_path, wrong=wrong))
    assert [type(one) for one in found] == [Life, Training, Training]
    assert [line.partition(":")[0] for line in wrong] == ["forged.jsonl", "link.jsonl"]


def test_no_record_ends_the_sums_and_none_is_of_another_user(driver: Driver, tmp_path: Path) -> None:
    life, trainings = record_of(goes_on(driver).machine, tmp_path).records(over=True)
    site_records.write(tmp_path, life, trainings)
    file = tmp_path / "ada-0123-2.jsonl"
    first, *rest = map(json.loads, file.read_text().splitlines())
    late = [{**first, "start": 1e12}, {**first, "start": 253402300800}]
    file.write_text("".join(json.dumps(line) + "\n" for line in (first, *rest, *late)))
    wrong: list[str] = []
    (total,) = sums(site_records.read(tmp_path, wrong=wrong), ["user", "month"])
    assert total.by["user"] == name_of(os.geteuid()) != "ada"
    assert total.trainings == 2 and len(wrong) == 1 and "2 lines are left out" in wrong[0]
    last = msgspec.structs.replace(life, start=253402300799.0)
    assert sums([last], ["month"])[0].by == {"month": "9999-12"}
