"""What is left of jobs on CPU cores: results, tables, charts, history, and the report's configurations."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace
from simulatebench import make_place

from hpcsched.cli.main import cli
from hpcsched.cli.run.archive import archive
from hpcsched.cli.run.results import bounds_of, overhead_s, result_of
from hpcsched.contract.seats import Seat
from hpcsched.core.model import Ended, Role, SeatedAttempt, Usage
from hpcsched.core.reasons import Reason, Why
from hpcsched.printing import said_cores
from hpcsched.report.cores import draw
from hpcsched.report.gantt import _stacked, gantt_svg
from hpcsched.report.result import AttemptResult, JobResult, Result, to_json
from hpcsched.report.tables import comparison_table, headline, job_table, side_by_side, stretches
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_core_job, a_job, a_profile

pytestmark = pytest.mark.long


def two_stretches(driver: Driver) -> Driver:
    """`a` has 0.6 cores for 100 s, measured at 2 steps/s, then 0.9 for 50 s, never measured."""
    driver.runs("a", in_place=True)
    driver.now += 99.0
    driver.uses("a", 2.0)
    driver.now += 1.0
    driver.resized("a", 200, stopped_s=0.5)
    driver.now += 50.0
    driver.exits("a", 0, step=300, saved=300)
    return driver


def on_cores(**rest: Any) -> Driver:
    return two_stretches(Driver(a_core_job("a", 2, start=0.3, steps=300), gpus=0, cores=range(2), **rest))


def beside_gpus() -> Driver:
    profile = a_profile("g", [1.0], start_s=1.0, suspend_s=1.0)
    driver = Driver(
        a_core_job("a", 2, start=0.3, steps=300), a_job("g", steps=90), gpus=1, cores=[1], profiles=[profile]
    )
    driver.runs("g")
    two_stretches(driver)
    driver.now += 50.0
    driver.exits("g", 0, step=90, saved=90)
    return driver


# --- results and tables -----------------------------------------------------------------------------


def test_attempts_have_their_configuration_and_why() -> None:
    page = json.loads(to_json([result_of(on_cores().machine)]))
    (job,) = page["jobs"]
    first, second = job["attempts"]
    assert (first["gpus"], first["role"], first["host"], first["ended"]) == ([], "cores", "n1", "resized")
    assert (first["servers"], first["workers"], first["rate"]) == ([0.2], [0.2, 0.2], 2.0)
    assert first["why"].startswith("starts with 1 server x 0.2")
    assert (second["servers"], second["workers"]) == ([0.3], [0.3, 0.3])
    assert "rate" not in second and second["why"].startswith("more cores, from 1 server x 0.2")
    hours = (0.6 * 100 + 0.9 * 50) / 3600
    assert (page["core_hours"], job["core_hours"]) == (pytest.approx(hours), pytest.approx(hours))
    assert (page["cores"], page["gpus"], page["gpu_hours"], page["utilisation"]) == ({"n1": 2.0}, 0, 0.0, 0.0)
    assert (job["switches"], job["overhead_s"]) == (1, 0.5)


def test_what_is_of_cores_is_left_out_for_others() -> None:
    driver = Driver(a_job("g", gpus=1), gpus=1, cores=range(4))
    driver.runs("g")
    driver.now = 10.0
    driver.exits("g", 0)
    page = json.loads(to_json([result_of(driver.machine)]))
    assert not {"cores", "core_hours"} & (page.keys() | page["jobs"][0].keys())
    assert page["jobs"][0]["attempts"][0].keys() == {
        "start_s", "end_s", "gpus", "role", "ended", "overhead_s", "suspend_s"
    }  # fmt: skip
    mixed = json.loads(to_json([result_of(beside_gpus().machine)]))
    assert ["core_hours" in job for job in mixed["jobs"]] == [True, False]
    assert mixed["gpu_hours"] == pytest.approx(200 / 3600)


def test_a_profile_of_the_same_name_says_nothing_of_cores() -> None:
    driver = on_cores(profiles=[a_profile("a", [5.0], start_s=30.0, suspend_s=30.0)])
    job = driver.job("a")
    assert [overhead_s(driver.machine, job, attempt) for attempt in job.attempts] == [0.5, 0.0]
    assert bounds_of(driver.machine) == (None, None)
    assert bounds_of(beside_gpus().machine) == (None, None)


def test_tables_show_cores_and_core_hours() -> None:
    only, mixed = result_of(on_cores().machine), result_of(beside_gpus().machine)
    assert [stretches(job) for job in mixed.jobs] == ["0.6c > 0.9c", "1p"]
    assert "0.6c > 0.9c" in job_table(only)
    assert headline(only) == "marble on 2 CPU cores: makespan 150.0 s, mean JCT 150.0 s, 0.03 core-hours"
    assert headline(mixed).endswith("0.06 GPU-hours, utilisation 100%, 0.03 core-hours")
    assert headline(mixed).startswith("marble on 1 GPU and 1 CPU core: ")
    rows = [line.split()[0] for line in comparison_table([only, only]).splitlines()[1:]]
    assert "core-hours" in rows and not {"GPU-hours", "utilisation(%)"} & set(rows)
    rows = [line.split()[0] for line in comparison_table([mixed, only]).splitlines()[1:]]
    assert {"core-hours", "GPU-hours", "utilisation(%)"} <= set(rows)
    assert "or CPU cores (c):" in side_by_side([mixed])
    waits = Driver(a_core_job("a", 2), gpus=1)
    assert headline(result_of(waits.machine)).startswith("marble on 0 CPU cores: ")


@pytest.mark.parametrize(
    ("cores", "text"), [(0.1 + 0.2, "0.3c"), (0.96, "0.96c"), (2, "2c"), (11.99, "12c"), (1234.5, "1234.5c")]
)
def test_a_number_of_cores_is_short(cores: float, text: str) -> None:
    assert said_cores(cores) == text


# --- history ----------------------------------------------------------------------------------------


def test_history_has_the_most_cores_and_core_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_place(tmp_path, monkeypatch)
    database = tmp_path / "h.sqlite"

    def kept(driver: Driver, run_id: str) -> None:
        record = SimpleNamespace(id=run_id, host="n1", policy="marble", allocation={})
        life = SimpleNamespace(machine=driver.machine, run=record, speed=1.0, device_kind="cpu")
        archive(life, database, str(tmp_path))  # type: ignore[arg-type]

    def shown() -> list[dict[str, str]]:
        done = CliRunner().invoke(cli, ["history", "--all", "-P", "--database", str(database)])
        assert done.exit_code == 0, (done.exception, done.output)
        head, *rows = [line.split("|") for line in done.stdout.splitlines()]
        return [dict(zip(head, row, strict=True)) for row in rows]

    alone = Driver(a_job("g", gpus=1), gpus=1)
    alone.runs("g")
    alone.exits("g", 0)
    kept(alone, "one")
    assert "CORE-H" not in shown()[0]
    kept(beside_gpus(), "two")
    by_name = {(row["NAME"], row["GPUS"]): row["CORE-H"] for row in shown()}
    assert by_name == {("g", "1"): "-", ("a", "0.9c"): f"{105 / 3600:.3f}"}


# --- charts -----------------------------------------------------------------------------------------


def texts(path: Path) -> list[str | None]:
    return [element.text for element in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_a_chart_has_panels_of_gpus_and_of_cores(tmp_path: Path) -> None:
    only, mixed = result_of(on_cores().machine), result_of(beside_gpus().machine)
    gantt_svg([only], tmp_path / "only.svg")
    found = texts(tmp_path / "only.svg")
    assert {"CPU cores", "a", "all CPU cores", "time (s)"} <= set(found)
    assert not {"GPU", "resized"} & set(found)
    gantt_svg([mixed, only], tmp_path / "both.svg")
    found = texts(tmp_path / "both.svg")
    assert (found.count("GPU"), found.count("CPU cores")) == (1, 2)
    assert [text.split()[0] for text in found if text and " on " in text] == ["marble", "marble"]


def test_hosts_have_panels_of_their_own(tmp_path: Path) -> None:
    jobs = (a_core_job("a", 2, start=1.0), a_core_job("b", 2, start=1.0), a_core_job("c", 2))
    driver = Driver(*jobs, gpus=0, hosts=2, cores=range(2))
    driver.now = 60.0
    driver.tell(type(driver.events[-1]), first_id=4, jobs=())  # time passes
    result = result_of(driver.machine)
    assert {job.attempts[0].host for job in result.jobs[:2]} == {"n1", "n2"}
    gantt_svg([result], tmp_path / "g.svg")
    found = texts(tmp_path / "g.svg")
    assert found.count("CPU cores") == 2 and {"n1", "n2"} <= set(found)


@pytest.mark.parametrize(
    "driver", [Driver(a_core_job("a", 2), gpus=0), Driver(gpus=0), Driver(gpus=0, cores=[1])]
)
def test_a_chart_without_anything_to_show_is_one(driver: Driver, tmp_path: Path) -> None:
    result = result_of(driver.machine)
    gantt_svg([result], tmp_path / "g.svg")
    assert texts(tmp_path / "g.svg")
    assert headline(result) and job_table(result) is not None and comparison_table([result])


def results(histories: list[list[tuple[float, float, float]]]) -> list[JobResult]:
    """Job i has had so many cores, after so many idle seconds, for so many."""
    found = []
    for i, history in enumerate(histories, 1):
        at, attempts = 0.0, []
        for idle_s, lasted_s, cores in history:
            at += idle_s
            attempts.append(
                AttemptResult(
                    start_s=at,
                    end_s=at + lasted_s,
                    gpus=(),
                    role=Role.CORES,
                    ended=Ended.RESIZED,
                    host="n1",
                    servers=(0.1,),
                    workers=(cores,),
                    overhead_s=0.5,
                    suspend_s=0.25,
                )
            )
            at += lasted_s
        job: Any = {"id": i, "name": f"j{i}", "model": "m", "submit_s": 0.0, "start_s": 0.0, "end_s": at}
        rest: Any = {"state": "RUNNING", "steps": 1, "step": 1, "steps_repeated": 0}
        found.append(JobResult(**job, **rest, attempts=tuple(attempts)))
    return found


IDLE_S, LASTED_S = st.sampled_from([0.0, 0.0, 3.0]), st.sampled_from([0.0, 0.5, 2.0, 7.0])
STRETCH = st.tuples(IDLE_S, LASTED_S, st.integers(1, 4))


@given(st.lists(st.lists(STRETCH, max_size=5), max_size=5))
def test_what_is_drawn_is_what_was_held_and_nothing_overlaps(
    histories: list[list[tuple[float, float, float]]],
) -> None:
    jobs = results(histories)
    pieces = _stacked(jobs, "n1", 100.0)
    for job in jobs:
        held = sum(a.cores * (a.end_s - a.start_s) for a in job.attempts if a.end_s is not None)
        mine = pieces.get(job.id, [])
        assert sum((p.high - p.low) * (p.end_s - p.start_s) for p in mine) == pytest.approx(held)
        assert all(one.end_s <= other.start_s for one, other in pairwise(mine))
    for at in (k + 0.25 for k in range(60)):
        there = sorted((p.low, p.high) for mine in pieces.values() for p in mine if p.start_s <= at < p.end_s)
        assert [low for low, _ in there[1:]] == [high for _, high in there[:-1]]
        assert not there or there[0][0] == 0.0
    assert _stacked(jobs, "elsewhere", 100.0) == {}


def test_a_stack_with_gaps_is_drawn(tmp_path: Path) -> None:
    jobs = results([[(0, 5, 1), (0, 5, 2), (3, 5, 1)], [(2, 30, 2)]])
    result = Result(
        policy="p", gpus=0, makespan_s=32.0, mean_jct_s=None, gpu_hours=0.0, utilisation=0.0,
        overhead_share=0.0, lower_bound_s=None, core_hours=1.0, jobs=tuple(jobs),
    )  # fmt: skip
    failed = replace(jobs[1].attempts[0], ended=Ended.FAILED)
    gantt_svg([replace(result, jobs=(jobs[0], replace(jobs[1], attempts=(failed,))))], tmp_path / "g.svg")
    found = texts(tmp_path / "g.svg")
    assert {"j2", "failed", "start, resume, suspend"} <= set(found)
    assert not {"all CPU cores", "resized"} & set(found)


# --- the report -------------------------------------------------------------------------------------


def an_attempt(
    number: int, start_s: float, end_s: float | None, shares: list[float], **rest: Any
) -> SeatedAttempt:
    """The first of the shares is that of the only server."""
    seats = tuple(Seat(server=rank == 0, share=share, host="n1") for rank, share in enumerate(shares))
    ended = None if end_s is None else Ended.RESIZED
    usage = Usage(rate=rest.pop("rate"), cpu=tuple(shares), net=(0.0,) * len(shares), samples=5, stable=True)
    return SeatedAttempt(
        number=number, gpus=(), role=Role.CORES, start_s=start_s, end_s=end_s, ended=ended, seats=seats,
        usage=usage if usage.rate else None, **rest,
    )  # fmt: skip


SEARCH = [
    an_attempt(1, 0.0, 100.0, [0.5, 0.5], rate=2.0),
    an_attempt(2, 100.0, 140.0, [0.5, 1.0, 1.0], rate=None, in_place=True),
    an_attempt(3, 160.0, 200.0, [0.5, 1.5, 1.5], rate=4.0),
    an_attempt(4, 200.0, None, [0.25, 0.5, 0.5, 0.5], rate=6.0, in_place=True),
]


def drawn(attempts: list[SeatedAttempt], now_s: float) -> list[Any]:
    from matplotlib.figure import Figure

    figure = Figure()
    draw(figure, attempts, budget=4.0, now_s=now_s, title="t")
    figure.canvas.draw()
    return figure.axes


def steps(axes: Any, style: str) -> list[list[tuple[float, float]]]:
    """The points of the lines of a panel that are drawn in steps."""
    lines = [line for line in axes.get_lines() if line.get_drawstyle() == style]
    return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in lines]


def test_the_history_of_a_configuration_is_three_panels() -> None:
    panels = drawn(SEARCH, 220.0)
    assert [axes.get_ylabel() for axes in panels] == ["CPU cores", "processes", "steps/s"]
    assert [axes.get_xlim() for axes in panels] == [(0.0, 220.0)] * 3
    assert "budget 4" in [text.get_text() for text in panels[0].texts]
    tops = [max(y for path in c.get_paths() for _, y in path.vertices) for c in panels[0].collections]
    assert tops == [0.5, 3.5]
    servers, workers = steps(panels[1], "steps-post")
    assert [y for x, y in servers if x < 140] == [1, 1] and [y for _, y in workers[-2:]] == [3, 3]
    assert workers[2] == (140.0, pytest.approx(float("nan"), nan_ok=True)), "it had none for 20 s"
    (rate,) = steps(panels[2], "steps-post")
    assert [(x, y) for x, y in rate if y == y] == [(0.0, 2.0), (160.0, 4.0), (200.0, 6.0), (220.0, 6.0)]
    dots = [line for line in panels[2].get_lines() if line.get_marker() == "o"]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [50.0, 180.0, 210.0]


def test_after_the_last_change_the_picture_does_not_go_on_for_long() -> None:
    panels = drawn(SEARCH, 7200.0)
    assert panels[0].get_xlim() == (0.0, 260.0)
    assert panels[-1].get_xlabel() == "time into the run (s); no more changes until 7200 s"
    assert drawn(SEARCH[:1], 7200.0)[0].get_xlim() == (0.0, 100.0)
    assert drawn([an_attempt(1, 60.0, None, [1.0, 1.0], rate=None)], 60.0)[0].get_xlim() == (60.0, 61.0)


def test_what_was_never_measured_has_no_panel() -> None:
    assert len(drawn([an_attempt(1, 0.0, None, [0.5, 0.5], rate=None)], 10.0)) == 2


def reported(driver: Driver, path: Path) -> tuple[str, list[str]]:
    """The page's text without its tags, and the figures that were kept."""
    rundir = RunDir(path / "run")
    rundir.make()
    journal = Journal(rundir.journal)
    journal.append(driver.events)
    journal.close()
    words = ["report", "--dir", str(rundir.root), "--figures", str(path / "figures")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, (done.exception, done.output)
    page = (rundir.root / "report.html").read_text()
    text = unescape(
        re.sub(r"(?:\s*<[^>]*>\s*)+", "|", re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL))
    )
    return text, sorted(file.name for file in (path / "figures").iterdir())


def test_the_page_tells_what_led_from_one_configuration_to_the_next(tmp_path: Path) -> None:
    text, figures = reported(on_cores(), tmp_path)
    assert figures == ["a-cores.svg", "gantt.svg"]
    assert "|CPU cores over time|" in text and "|GPU-hours|" not in text
    assert "|CPU cores|2|" in text and "|core-hours|0.03|" in text
    assert "|Configurations on CPU cores|" in text
    assert "|configuration|1 server x 0.3 + 2 workers x 0.3|" in text
    table = text.partition("|why|")[2]
    first = "|0.0|1 x 0.2|2 x 0.2|0.6|2|100%|starts with 1 server x 0.2 + 2 workers x 0.2, on 0.6 of the 2"
    assert f"|{table}".startswith(first)
    assert "|100.0|1 x 0.3|2 x 0.3|0.9|-|-|more cores, from 1 server x 0.2" in table


def test_a_page_of_gpus_and_cores_has_both(tmp_path: Path) -> None:
    text, figures = reported(beside_gpus(), tmp_path)
    assert figures == ["a-cores.svg", "gantt.svg"]
    assert "|GPUs and CPU cores over time|" in text
    assert "|GPU-hours|0.06|" in text and "|core-hours|0.03|" in text
    assert "|Job 1: a|" in text and "|Job 2: g|" not in text


def test_a_page_of_jobs_that_wait_for_cores_has_no_configurations(tmp_path: Path) -> None:
    text, figures = reported(Driver(a_core_job("a", 2), gpus=0), tmp_path)
    assert figures == ["gantt.svg"] and "Configurations" not in text


def test_processes_of_different_shares_are_told_as_a_range() -> None:
    from hpcsched.report.html import _shares

    seats = SEARCH[2].seats
    assert _shares(seats[1:]) == "2 x 1.5"
    assert _shares(seats) == "3 x 0.5-1.5"


def test_a_reason_is_kept_with_the_stretch_it_led_to() -> None:
    job = on_cores().job("a")
    assert [attempt.why.why for attempt in job.attempts if attempt.why] == [Why.SEATED, Why.MORE_CORES]
    assert isinstance(job.attempts[0].why, Reason)
    assert result_of(on_cores().machine).jobs[0].attempts[1].rate is UNSET
