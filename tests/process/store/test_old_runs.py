"""Runs and databases of earlier versions, as these wrote them (tests/data/runs): they open in this one."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import hpcsched
from hpcsched.cli.main import cli
from hpcsched.errors import HpcschedError
from hpcsched.store import journal
from hpcsched.store.database import Database
from hpcsched.store.rundir import RunDir

STORED = Path(__file__).resolve().parents[2] / "data" / "runs"
VERSIONS = sorted(path.name for path in STORED.iterdir() if path.is_dir() and path.name != "__pycache__")
NEWEST = VERSIONS[-1]
RUNS = [
    (version, path.name) for version in VERSIONS for path in sorted((STORED / version / "runs").iterdir())
]


def promised(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    """Those of the version before, which is promised to open, and as slow tests those of earlier ones."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(*case, marks=marks[case[0] == NEWEST]) for case in cases]


MADE_IN = "/srv/trainings"
"""Where the stored runs were, by their own words."""
PATIENCE_S = 120


@pytest.fixture(autouse=True)
def nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("HPCSCHED_", "SLURM_", "LSB_")):
            monkeypatch.delenv(name)
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("HPCSCHED_DATABASE", str(tmp_path / "hpcsched.db"))


def stored(version: str, run: str, to: Path, *, moved: bool = False) -> Path:
    """A copy of a stored run, its version's database beside it, as old as it is. `moved`: its words about
    where it is are true again, which takes new checksums."""
    shutil.copytree(STORED / version / "runs" / run, to / "runs" / run)
    (to / "hpcsched.db").write_bytes(gzip.decompress((STORED / version / "hpcsched.db.gz").read_bytes()))
    root = to / "runs" / run
    os.utime(root / "status.json", (0, 0))
    if moved:
        for name in ("counts.sh", "tiny.py", f"{run}.toml"):
            shutil.copy(STORED / version / name, to)
        for path in (root / "status.json", *root.glob("jobs/*/STATE.json")):
            path.write_text(path.read_text().replace(MADE_IN, str(to)))
        lines = (root / "journal.jsonl").read_bytes().splitlines()
        (root / "journal.jsonl").write_bytes(b"".join(rewritten(line, to) for line in lines))
    return root


def rewritten(line: bytes, to: Path) -> bytes:
    head, _, body = line.partition(b',"event":')
    record = json.loads(head + b"}")
    event = body.removesuffix(b"}").replace(MADE_IN.encode(), str(to).encode())
    record["crc"] = journal._checksum(record["seq"], record["type"], event)
    return json.dumps(record)[:-1].encode() + b',"event":' + event + b"}\n"


def call(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], standalone_mode=False)


def said(*words: object) -> str:
    """What a command prints, which ends well."""
    done = call(*words)
    assert done.exception is None, f"{words}: {done.exception!r}"
    assert done.return_value in (0, None), f"{words}: {done.output}"
    return done.stdout


def test_there_are_runs_of_the_version_before() -> None:
    major, minor = (int(part) for part in hpcsched.__version__.split(".")[:2])
    assert any(version.startswith(f"{major}.{minor - 1}.") for version in VERSIONS)


@pytest.mark.parametrize(("version", "run"), promised(RUNS))
def test_an_old_run_can_be_looked_at(version: str, run: str, tmp_path: Path) -> None:
    root = stored(version, run, tmp_path)
    at = ("--dir", root)
    if run == "killed":  # its agent is gone, and jobs are left
        done = call("status", *at, "--json")
        assert done.return_value == 3 and json.loads(done.stdout)["run"]["stale"]
        page = json.loads(done.stdout)
    else:
        page = json.loads(said("status", *at, "--json"))
    names = [job["name"] for job in page["jobs"]]
    assert said("journal", "check", *at).endswith("records, nothing is wrong\n")
    for name in names:
        done = call("explain", name, *at)
        assert done.exception is None and name in done.stdout
        assert done.return_value == (3 if run == "killed" else 0)
    finished = {job["name"] for job in page["jobs"] if job["state"] in ("COMPLETED", "FAILED", "CANCELLED")}
    told = json.loads(said("history", *at, "--json"))
    assert {job["name"] for job in told["jobs"]} == (set() if run == "killed" else finished)
    if run in ("commands", "killed", "planner", "search"):
        simulated = json.loads(said("simulate", "--run", root, "--policy", "exclusive", "--json"))
        assert simulated["schema"] == 1


@pytest.mark.parametrize(
    ("version", "run"), promised((v, r) for v, r in RUNS if r in ("commands", "planner", "search"))
)
def test_an_old_run_has_a_report(version: str, run: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said("report", "--dir", stored(version, run, tmp_path), "-o", tmp_path / "page.html")
    assert "<svg" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_database_opens_and_keeps_what_it_holds(version: str, tmp_path: Path) -> None:
    stored(version, "marble", tmp_path)
    with Database(tmp_path / "hpcsched.db") as opened:
        assert {Path(run.directory).name for run in opened.runs()} >= {"marble", "commands", "search"}
        assert {profile.model for profile in opened.profiles()}
        assert len(opened.trials()) > 5
        assert {job.state for job in opened.history()} == {"COMPLETED", "FAILED", "CANCELLED"}


@pytest.mark.parametrize("version", promised((version,) for version in VERSIONS))
def test_an_old_run_of_programs_goes_on_to_its_end(version: str, tmp_path: Path) -> None:
    root = stored(version, "commands", tmp_path, moved=True)
    program = tmp_path / "counts.sh"
    program.write_text(program.read_text().replace('sleep "${STEP_S:-0.05}"', ":"))  # it need not take long
    with going_on("commands", root, tmp_path) as agent:
        for command, name in (("resume", "suspended"), ("release", "held")):
            until(lambda words=(command, name): call(*words, "--dir", root).return_value == 0, agent)
        assert agent.wait(PATIENCE_S) == 1, "a job had failed"
    states = {job["name"]: (job["state"], job.get("step")) for job in page(root)["jobs"]}
    for name in ("suspended", "drained", "held", "waiting"):
        assert states[name] == ("COMPLETED", 400)
    assert json.loads((root / "run.json").read_text())["version"] == hpcsched.__version__
    counted = (root / "jobs" / "4" / "STATE.json").read_text()
    assert json.loads(counted)["attempt"] == 2, "it went on from where it was"


TRAINED = [(NEWEST, "trainers")]
TRAINED += [
    pytest.param(version, run, marks=pytest.mark.slow)
    for version in VERSIONS
    for run in ("trainers", "packed")
    if (version, run) not in TRAINED
]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("version", "run"), TRAINED)
def test_an_old_checkpoint_is_trained_on(version: str, run: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    root = stored(version, run, tmp_path, moved=True)
    program = tmp_path / "tiny.py"
    program.write_text(program.read_text().replace('os.environ.get("STEP_S", "0")', '"0"'))
    before = {job["name"]: job["step"] for job in page(root)["jobs"]}
    assert all(0 < step < 400 for step in before.values())
    with going_on(run, root, tmp_path) as agent:
        assert agent.wait(PATIENCE_S) == 0
    result = json.loads(said("history", "--dir", root, "--json"))
    for job in result["jobs"]:
        assert (job["state"], job["steps"], job["steps_repeated"]) == ("COMPLETED", 400, 0)


@contextmanager
def going_on(run: str, root: Path, to: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = ("run", f"{run}.toml", "--dir", str(root), "--resume", "--warm", "off", "--quiet")
    agent = subprocess.Popen([sys.executable, "-m", "hpcsched", *words], cwd=to, stdout=subprocess.DEVNULL)
    try:
        yield agent
    finally:
        if agent.poll() is None:
            agent.terminate()
            agent.wait(PATIENCE_S)


def until(true: Callable[[], bool], agent: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert agent.poll() is None and time.monotonic() < deadline, "it never came to that"
        time.sleep(0.05)


def page(root: Path) -> dict:
    return json.loads((root / "status.json").read_text())


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("explain", "resnet50"),
        ("history",),
        ("report", "-o", "page.html"),
        ("journal", "check"),
        ("journal", "repair"),
        ("cancel", "resnet50"),
        ("wait",),
        ("logs", "resnet50"),
        ("top",),
        ("run", "--resume"),
        ("simulate", "--run", "."),
    ],
    ids=" ".join,
)
def test_a_run_of_a_newer_version_is_refused_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    root = stored(VERSIONS[0], "marble", tmp_path)
    record = json.loads((root / "run.json").read_text())
    newer = "{}.{}.0".format(*(int(part) + n for n, part in enumerate(hpcsched.__version__.split(".")[:2])))
    # What else a newer version may have changed is none of this one's business.
    (root / "run.json").write_text(json.dumps({**record, "version": newer, "allocation": [], "pid": "none"}))
    at = () if words[0] == "simulate" else ("--dir", root)
    words = tuple(str(root) if word == "." else word for word in words)
    done = call(*words, *at)
    assert isinstance(done.exception, HpcschedError), done.output
    assert done.exception.exit_code == 2
    ours = hpcsched.__version__
    assert str(done.exception).startswith(f"{root} holds a run of hpcsched {newer}, this is {ours}: ")
    assert "\n" not in str(done.exception)


def test_a_record_of_a_newer_version_is_refused_where_run_json_is_lost(tmp_path: Path) -> None:
    root = stored(VERSIONS[0], "marble", tmp_path)
    (root / "run.json").unlink()
    rundir = RunDir(root)
    record = json.loads(rundir.journal.read_bytes().splitlines()[-1])
    event = b'{"at":99.0}'
    crc = journal._checksum(record["seq"] + 1, "Beamed", event)
    head = f'{{"v":2,"seq":{record["seq"] + 1},"crc":"{crc}","type":"Beamed","event":'
    with rundir.journal.open("ab") as file:
        file.write(head.encode() + event + b"}\n")
    done = call("explain", "resnet50", "--dir", root)
    assert isinstance(done.exception, HpcschedError) and done.exception.exit_code == 2
    assert "record version 2, type Beamed, of another hpcsched" in str(done.exception)
