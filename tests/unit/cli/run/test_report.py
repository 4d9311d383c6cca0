"""`hpcsched report`: runs that are over, go on, or have lost their agent, as a page; what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import click.testing
import pytest
from click.testing import CliRunner
from simulatebench import make_place

from hpcsched.cli.main import cli
from hpcsched.cli.run.results import result_of
from hpcsched.core.model import JobSpec, Kind, Training
from hpcsched.errors import HpcschedError
from hpcsched.store.device_use import UseRecord
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir, RunRecord, process_started
from hpcsched.store.snapshot import SnapshotWriter
from hpcsched.testing.builders import Driver, a_job, a_profile

pytestmark = pytest.mark.long

VSW = {"kind": "vsw", "local_batch": [16, 64], "global_batch": [64, 512], "similarity": 0.3}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_place(tmp_path, monkeypatch)


def adaptive(name: str, **more: Any) -> JobSpec:
    return a_job(name, kind=Kind.TRAINER, trainer="a.b:C", strategy=VSW, **more)


def write_batches(rundir: RunDir, job_id: int, steps: int = 5) -> None:
    folder = rundir.job(job_id)
    folder.mkdir(parents=True)
    lines = []
    for k in range(steps):
        facts = {"t": 1e9 + k, "attempt": 1, "step": 10 * k, "samples": 640 * k, "epoch": k / 2}
        batch = {"global_batch": 64 << k, "local_batch": 16, "workers": [4 << k], "at_once": [1]}
        lines.append(json.dumps({**facts, **batch, "similarity": 0.4 - k / 10, "loss": 2.0 / (k + 1)}))
    (folder / "batches.jsonl").write_text("\n".join(lines) + '\n{"t": 1')


def a_run(
    driver: Driver,
    state: str = "",
    *,
    alive: bool = True,
    name: str = "hpcsched-run",
    outputs: Sequence[int] = (),
) -> RunDir:
    """What an agent leaves, or has written so far: the journal and, with a `state`, the rest."""
    rundir = RunDir(Path(name).absolute())
    rundir.make()
    journal = Journal(rundir.journal)
    journal.append(driver.events)
    journal.close()
    if state:
        pid = os.getpid()
        started = process_started(pid)
        assert started is not None
        record = RunRecord(
            id="r",
            version="0",
            host=os.uname().nodename,
            pid=pid,
            started=started if alive else started + 1,
            began=1e9,
            devices="cpu:2",
            policy="marble",
        )
        rundir.write_record(record)
        writer = SnapshotWriter(rundir, driver.machine, allocation={"kind": "none"}, speed=1.0, user="me")
        for job_id in outputs:
            writer.output_of(job_id, str(rundir.job(job_id) / "its.out"))
        writer.write(state, driver.now)
    return rundir


def going_on(*, done: bool = False) -> Driver:
    """Two GPUs: `one` takes both for 100 s, then `two` with stream workers."""
    profiles = (a_profile("one", [10.0, 16.0]), a_profile("three", {2: 8.0}))
    driver = Driver(a_job("one", steps=1200), adaptive("two"), a_job("three"), gpus=2, profiles=profiles)
    driver.runs("one")
    driver.now = 100.0
    driver.exits("one", 0, 1200, 1200, metrics={"accuracy": 0.5})
    running = next(job.spec.name for job in driver.machine.run.active.values())
    driver.runs(running)
    driver.now = 150.0
    driver.reports(running, 40)
    if done:
        while driver.machine.run.active:
            name = next(job.spec.name for job in driver.machine.run.active.values())
            if not driver.job(name).ready:
                driver.runs(name)
            driver.now += 50
            driver.exits(name, 0, 100, 100)
    return driver


def call(*words: object) -> click.testing.Result:
    return CliRunner().invoke(cli, ["report", *map(str, words)])


def made(*words: object) -> str:
    """The page's text without its tags."""
    done = call(*words)
    assert done.exit_code == 0, (done.exception, done.output)
    return text_of(Path(done.stdout.rstrip("\n")))


def text_of(path: Path) -> str:
    page = re.sub(r"<style.*?</style>", "", path.read_text(), flags=re.DOTALL)
    return unescape(re.sub(r"(?:\s*<[^>]*>\s*)+", "|", page))


def cells(text: str, name: str) -> list[str]:
    """Of the table's line of a job, from its name on."""
    rest = text.partition("|efficiency|")[2].partition(f"|{name}|")[2]
    return [cell for cell in rest.split("|") if cell]


def refused(*words: object, code: int = 2) -> str:
    done = call(*words)
    assert isinstance(done.exception, HpcschedError) and done.exception.exit_code == code, done.exception
    assert "\n" not in str(done.exception)
    return str(done.exception)


def tree(folder: Path) -> Mapping[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_run_that_is_over() -> None:
    rundir = a_run(going_on(done=True), "FINISHED")
    write_batches(rundir, 2)
    write_batches(rundir, 1)  # nobody's: job 1 has no stream workers
    before = tree(rundir.root)
    done = call()
    assert done.stdout == f"{rundir.root}/report.html\n"
    page = rundir.root / "report.html"
    assert {path: at for path, at in tree(rundir.root).items() if path != page} == before
    text = text_of(page)
    assert f"|hpcsched: {rundir.root}|" in text
    assert "|state|FINISHED|" in text and "|jobs completed|3 of 3|" in text and "|makespan|250.0 s|" in text
    # 1200 steps in 100 s on 2 GPUs, of which one alone does 10 a second.
    assert cells(text, "one")[:11] == [
        "COMPLETED", "2p", "0.0", "0.0", "100.0", "100.0", "1200", "0", "0.0%", "60%", "0.5000",
    ]  # fmt: skip
    assert "|Job 2: two|" in text and "|Job 1: one|" not in text and "|from 64 to 1024 samples|" in text
    assert "|What policies would have taken|Not simulated: the steps, or the speed" in text
    # Its last decision was at step 40, epoch 2, and held until it ended at step 100.
    assert "gradient" in text and "|target 0.3|" in text and "|5|epoch|" in text


def test_what_is_on_record_of_the_run_is_told() -> None:
    rundir = a_run(going_on(), "RUNNING")
    text = made()
    assert "|hpcsched|0, on " in text and "|devices|cpu:2|" in text and "|host|n1: 2 x test|" in text
    assert "batch job" not in text and "agents began" not in text
    page = json.loads(rundir.status.read_bytes())
    page["run"]["allocation"] = {"kind": "slurm", "id": "77", "cluster": "c1", "next": "78"}
    rundir.status.write_text(json.dumps(page))
    assert "|batch job|slurm 77 on c1; 78 goes on|" in made()


def test_versions_are_told_as_jobs_told_them_if_that_is_what_they_are() -> None:
    rundir = a_run(going_on(), "RUNNING")
    told = [{"python": "3.12.1", "packages": {"torch": "2.4.1+cu121"}}]
    told += [{"python": "<b>3"}, {"python": "3.9.1", "packages": {"torch": "4" * 100}}]
    for job_id, table in enumerate(told, 1):
        rundir.job(job_id).mkdir(parents=True)
        (rundir.job(job_id) / "versions.json").write_text(json.dumps(table))
    text = made()
    assert "|trained by|Python 3.12.1, torch 2.4.1+cu121 (1 job)|" in text
    assert text.count("|trained by|") == 2 and "b>3" not in text and "444" not in text


def test_the_use_of_devices_is_drawn_where_it_was_sampled() -> None:
    rundir = a_run(going_on(), "RUNNING")
    assert "Use of the devices" not in made()
    record = UseRecord(rundir.device_use)
    for at in (10.0, 20.0, 9000.0):  # the last is no time of this run
        record.add(at, {0: (0.5, None), 1: (1.0, None), 99: (1.0, None)})
    text = made("--figures", "figures")
    assert "|Use of the devices|" in text and "|n1|" in text and "|busy (%)|" in text and "memory" not in text
    assert Path("figures/device-use.svg").is_file()
    rundir.device_use.unlink()
    rundir.device_use.mkdir()
    done = call()
    assert done.exit_code == 0 and "it is no file: left out" in done.stderr


def test_efficiency_is_told_only_where_one_gpu_was_measured() -> None:
    a_run(going_on(done=True), "FINISHED")
    assert cells(made(), "three")[9] == "-"


def test_a_job_that_continues_another_is_not_credited_with_its_steps() -> None:
    profiles = (a_profile("m", [10.0]),)
    second = a_job("second", "m", 300, after=("first",), training=Training(continues="first"))
    driver = Driver(a_job("first", "m", 100), second, gpus=1, profiles=profiles)
    driver.runs("first")
    driver.now = 10.0
    driver.exits("first", 0, 100, 100)
    driver.runs("second")
    driver.now = 50.0
    driver.exits("second", 0, 300, 300)
    a_run(driver)
    text = made()
    assert cells(text, "first")[9] == "100%" and cells(text, "second")[9] == "50%"


def test_a_run_that_goes_on_is_shown_until_now() -> None:
    rundir = a_run(going_on(), "RUNNING")
    write_batches(rundir, 2)
    text = made()
    assert "|state|RUNNING|" in text and "|jobs completed|1 of 3|" in text and "|time so far|150.0 s|" in text
    assert "until 2:30 into the run" in text and "so far (marble) on 2 GPUs" in text
    assert "is gone" not in text
    assert [cells(text, name)[8] for name in ("one", "two", "three")] == ["0.0%"] * 3


def test_a_run_whose_agent_has_died_says_so() -> None:
    a_run(going_on(), "RUNNING", alive=False)
    text = made()
    assert "|state|STALE|" in text and "is gone" in text and "run --resume" in text


def test_a_run_that_stopped_says_how_it_goes_on() -> None:
    a_run(going_on(), "STOPPED")
    text = made()
    assert "|state|STOPPED|" in text and "stopped with work left" in text


def test_the_journal_is_enough() -> None:
    rundir = a_run(going_on())
    assert "|state|UNKNOWN|" in made()
    rundir.status.write_text("{")
    assert "|state|UNKNOWN|" in made()
    a_run(going_on(done=True), name="over")
    assert "|state|FINISHED|" in made("--dir", "over")


@pytest.mark.long
def test_figures_can_be_kept_beside_the_page(tmp_path: Path) -> None:
    rundir = a_run(going_on(done=True), "FINISHED")
    write_batches(rundir, 2)
    page = tmp_path / "p.html"
    for _ in range(2):
        assert made("-o", page, "--figures", "figures")
    names = sorted(path.name for path in Path("figures").iterdir())
    assert names == ["gantt.svg", "two-batches.svg"]
    assert page.read_text().count("<svg") == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".svg") == []


def test_nobody_has_decided_on_batches_yet() -> None:
    a_run(going_on(), "RUNNING")
    assert "Global batches" not in made()


def test_many_jobs_are_listed_but_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = a_run(going_on(done=True), "FINISHED")
    write_batches(rundir, 2)
    monkeypatch.setattr("hpcsched.cli.run.simulate.MOST_DRAWN", 2)
    monkeypatch.setattr("hpcsched.cli.run.report.MOST_FIGURES", 0)
    text = made()
    assert "3 jobs are too many to be drawn" in text and "batches of 1 more job are left out" in text
    assert cells(text, "one") and "<svg" not in (rundir.root / "report.html").read_text()
    monkeypatch.setattr("hpcsched.cli.run.simulation_inputs.MOST_KEPT", 2)
    assert "3 jobs are too many to be drawn or listed" in made()


def failed() -> Driver:
    """`good` is done, `bad` has failed; `next` waited for it."""
    jobs = a_job("good"), a_job("bad", retries=0, command=("train", "a b")), a_job("next", after=("bad",))
    driver = Driver(*jobs, gpus=2, profiles=(a_profile("m", [10.0]),))
    for name, code in (("good", 0), ("bad", 137)):
        driver.runs(name)
        driver.now += 10.0
        driver.exits(name, code, 100, 100)
    return driver


def test_a_job_that_failed_says_why_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = a_run(failed(), "FINISHED", outputs=(2,))
    rundir.job(2).mkdir(parents=True)
    (rundir.job(2) / "its.out").write_bytes(
        b"x\n" * 10**5 + b"\x1b[31m<script>no room\x1b[0m\x07\xff\n" + b"y" * 10**4 + b"\n"
    )
    text = made()
    section = text.partition("|2 bad|")[2].partition("|1 good|")[0]
    assert section.startswith("FAILED|") and "|exit|0:9|" in section
    assert f"Last lines of {rundir.job(2)}/its.out|" in section
    assert "submitted|" in section and "ended with signal 9 (SIGKILL)" in section
    page = (rundir.root / "report.html").read_text()
    assert "&lt;script&gt;no room\\x07" in page and "y" * 301 not in page and len(page) < 10**6
    for number in (1, 2, 3):
        assert page.count(f'id="job-{number}"') == 1
    assert 'href="#job-2"' in page.partition("<svg")[2].partition("</svg>")[0]
    assert '<a href="#job-2">bad</a>' in page
    monkeypatch.setattr("hpcsched.cli.run.report.MOST_FIGURES", 1)
    text = made()
    assert "|2 bad|" in text and "|1 good|" not in text and "2 more jobs have no section" in text
    assert 'href="#job-1"' not in (rundir.root / "report.html").read_text()


def test_curves_of_a_job_stand_in_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = a_run(failed(), "FINISHED")
    for job_id, text in (
        (1, '{"step": 1, "t": 1.0, "attempt": 1, "loss": 2.5, "val_loss": 2}\n'),
        (2, "{\n"),
    ):
        rundir.job(job_id).mkdir(parents=True)
        (rundir.job(job_id) / "metrics.jsonl").write_text(text)
    text = made("--figures", "figures")
    assert "|loss|" in text.partition("|1 good|")[2] and "|loss|" not in text.partition("|1 good|")[0]
    assert [path.name for path in sorted(Path("figures").iterdir())] == ["gantt.svg", "good-curves.svg"]
    monkeypatch.setattr("hpcsched.cli.run.report_jobs.MOST_CURVE_BYTES", 40)
    assert "the curves of 1 job are left out" in made()


@pytest.mark.long
def test_curves_that_have_not_changed_are_taken_as_they_were_drawn() -> None:
    rundir, kept = a_run(failed(), "FINISHED"), Path("kept")
    kept.mkdir()
    for job_id in (1, 2):
        rundir.job(job_id).mkdir(parents=True)
        line = '{"step": 1, "t": 1.0, "attempt": 1, "loss": 2.5}\n'
        (rundir.job(job_id) / "metrics.jsonl").write_text(line)
    text = made("--kept", kept)
    before = {path.name.partition("-")[0]: path for path in kept.iterdir()}
    assert set(before) == {"1", "2"} and made("--kept", kept) == text
    before["1"].write_text(before["1"].read_text().replace(">loss<", ">as it was<"))
    with (rundir.job(2) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "t": 2.0, "attempt": 1, "more": 2.5}\n')
    text = made("--kept", kept)
    assert "|as it was|" in text and "|more|" in text
    assert before["1"].exists() and not before["2"].exists() and len(list(kept.iterdir())) == 2


def test_work_that_a_failed_attempt_had_saved_is_not_lost() -> None:
    driver = Driver(a_job("x", "m", 100, retries=1), a_job("silent", "m", None, retries=0), gpus=2)
    driver.runs("x")
    driver.runs("silent")
    driver.now = 50.0
    driver.exits("x", 1, 50, 20)
    driver.exits("silent", 2)
    driver.runs("x")
    driver.now = 80.0
    driver.exits("x", 0, 100, 100)
    result = result_of(driver.machine)
    assert [job.lost_s for job in result.jobs] == [pytest.approx(0.6 * 50), 50.0]
    assert result.lost_of_held == pytest.approx((30 + 50) / 130)
    a_run(driver, "FINISHED")
    assert "|work lost|61.5%|" in made()


def test_a_run_that_was_moved_has_its_logs_with_it_and_a_plain_title() -> None:
    rundir = a_run(failed(), "FINISHED", outputs=(2,))
    rundir.job(2).mkdir(parents=True)
    (rundir.job(2) / "its.out").write_text("these words\n")
    rundir.root.rename("moved")
    text = made("--dir", "moved/../moved")
    assert f"|hpcsched: {Path.cwd() / 'moved'}|" in text and "these words" in text
    Path("link").symlink_to("moved/jobs")
    assert f"|hpcsched: {Path.cwd() / 'link/..'}|" in made("--dir", "link/..", "-o", "p.html")


def test_several_runs_stand_side_by_side_on_one_time_scale() -> None:
    a_run(going_on(done=True), "FINISHED", name="base/hpcsched-run")
    a_run(failed(), "FINISHED", name="other/hpcsched-run")
    a_run(going_on(), "STOPPED", name="third")
    text = made("base/hpcsched-run", "other/../other/hpcsched-run", "third", "--figures", "figures")
    assert (Path.cwd() / "report.html").is_file() and "|hpcsched: 3 runs|" in text
    lines = text.partition("|work lost|")[2]
    first, rest = lines.split("|other/hpcsched-run|", 1)
    second, rest = rest.split("|third|", 1)
    assert [cell for cell in first.split("|") if cell][:6] == [
        "base/hpcsched-run", "FINISHED", "marble", "2", "250.0", "3 of 3",
    ]  # fmt: skip
    assert [cell for cell in second.split("|") if cell][4:5] == ["1 of 3"]
    assert rest.split("|")[0] == "STOPPED" and "stopped with work left" in text
    axes = [Path(f"figures/gantt-{n}.svg").read_text() for n in (1, 2, 3)]
    ticks = [re.findall(r">(\d+)</text>", svg[svg.index("xtick_1") : svg.index("ytick_1")]) for svg in axes]
    assert ticks[0] == ticks[1] == ticks[2] and "250" in ticks[0]
    page = Path("report.html").read_text()
    assert {f'href="#run-{n}"' in page and f'id="run-{n}"' in page for n in (1, 2, 3)} == {True}
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_one_run_is_meant_by_name_or_by_dir_and_too_many_are_refused() -> None:
    rundir = a_run(going_on(done=True), "FINISHED", name="one")
    assert f"|hpcsched: {rundir.root}|" in made("one")
    assert "no run in" in refused("one", "nowhere", code=3)
    assert "at most 20 on a page" in refused(*["one"] * 21)
    assert isinstance(call("one", "--dir", "one").exception, SystemExit)


def test_there_is_no_run() -> None:
    assert "no run in" in refused(code=3)
    assert "no run in" in refused("--dir", "nowhere", code=3)
    rundir = RunDir(Path("fresh").absolute())
    rundir.make()
    assert "has not started" in refused("--dir", "fresh", code=3)
    rundir.journal.write_bytes(b'{"v":1,')
    assert "has not started" in refused("--dir", "fresh", code=3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-o", "missing/r.html"), r"--output: no folder missing;"),
        (("-o", "r.pdf"), r"--output: r.pdf; accepted: .*\.html"),
        (("-o", "folder.html"), r"--output: folder.html: a folder"),
        (("--figures", "missing/figures"), r"--figures: missing/figures: No such file"),
        (("--figures", "jobs.toml"), r"--figures: jobs.toml: File exists"),
    ],
)
def test_bad_places_are_refused_before_any_work(words: tuple[str, ...], says: str) -> None:
    a_run(going_on(), "RUNNING")
    Path("folder.html").mkdir()
    assert re.match(says, refused(*words))
    assert not Path("hpcsched-run/report.html").exists()


@pytest.mark.parametrize(
    "words",
    [("--serve", "-o", "r.html"), ("--serve", "--figures", "f"), ("--port", "1")],
)
def test_what_does_not_go_with_serve_is_refused(words: tuple[str, ...]) -> None:
    a_run(going_on(), "RUNNING")
    done = call(*words)
    assert done.exit_code == 2 and "--serve" in done.stderr
    assert not Path("r.html").exists() and not Path("f").exists()


def test_serve_waits_for_a_run_but_not_where_none_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[object]()
    monkeypatch.setattr("hpcsched.cli.run.report_serve.serve", lambda *of: shown.append(of))
    done = call("--serve", "--port", 8765)
    assert done.exit_code == 0 and done.stderr.startswith("hpcsched: no run in") and not done.stdout
    assert shown == [([RunDir(Path("hpcsched-run").absolute())], 8765)]
    assert "no run in" in refused("missing/run", "--serve", code=3)


def test_a_page_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(going_on(), "RUNNING")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcsched.store.files.os.write", full)
    assert "No space left" in refused()


@pytest.mark.parametrize(
    ("missing", "says"), [("matplotlib", "a figure needs matplotlib"), ("jinja2", "a page needs jinja2")]
)
def test_without_its_extra_one_line_says_what_to_install(
    missing: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(going_on(), "RUNNING")
    find = importlib.util.find_spec
    monkeypatch.setattr("hpcsched.cli.common.find_spec", lambda name: None if name == missing else find(name))
    assert refused() == f"{says}: install hpcsched[report]"
