"""The command line: what a user types and sees, exit codes, settings and their origins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT

from hpcsched import __version__
from hpcsched.core import events as ev
from hpcsched.core.machine import Machine
from hpcsched.core.model import Device, JobSpec, Kind
from hpcsched.policy import make_policy
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir
from hpcsched.store.snapshot import SnapshotWriter

Hpcsched = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hpcsched(tmp_path: Path) -> Hpcsched:
    """Runs the real command in a directory of its own, without the caller's settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HPCSCHED_")}
    clean |= {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "xdg"), "COLUMNS": "200"}
    clean["HPCSCHED_SITE_CONFIG"] = str(tmp_path / "site.toml")

    def call(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hpcsched", *words],
            cwd=tmp_path,
            env=clean | env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


@pytest.fixture
def stopped_run(tmp_path: Path) -> RunDir:
    """A run as an agent that was drained leaves it: job 1 done, 2 saved, 3 waits for 2, 4 waits."""
    rundir = RunDir(tmp_path / "hpcsched-run")
    rundir.make()
    machine = Machine(make_policy)
    journal = Journal(rundir.journal)

    def job(name: str, **more: object) -> JobSpec:
        return JobSpec(name=name, kind=Kind.COMMAND, model=name, command=("true",), steps=100, **more)  # type: ignore[arg-type]

    def about(job_id: int, attempt: int = 1) -> dict[str, int]:
        return {"job_id": job_id, "attempt": attempt}

    devices = tuple(Device(index=i, host="n1", kind="k", handle=str(i)) for i in range(2))
    jobs = (job("one", gpus_max=1), job("two", gpus_max=1), job("three", after=("two",)), job("four"))
    events: list[ev.Event] = [
        ev.AgentStarted(at=0.0, wall=1e9, devices=devices, policy="marble"),
        ev.JobsSubmitted(at=0.0, first_id=1, jobs=jobs),
        ev.WorkersSpawned(at=0.1, processes=(), **about(1)),  # type: ignore[arg-type]
        ev.WorkersSpawned(at=0.1, processes=(), **about(2)),  # type: ignore[arg-type]
        ev.WorkersReady(at=0.2, **about(2)),  # type: ignore[arg-type]
        ev.DrainRequested(at=50.0),
        ev.WorkersExited(at=60.0, code=0, step=100, **about(1)),  # type: ignore[arg-type]
        ev.WorkersExited(at=61.0, code=75, step=40, saved_step=40, **about(2)),  # type: ignore[arg-type]
    ]
    journal.append(events)
    for event in events:
        machine.handle(event)
    journal.close()
    writer = SnapshotWriter(rundir, machine, allocation={"kind": "none"}, speed=1.0, user="me")
    writer.write("STOPPED", 61.0)
    return rundir


def test_status_shows_the_unfinished_jobs_and_counts_the_finished(
    hpcsched: Hpcsched, stopped_run: RunDir
) -> None:
    done = hpcsched("status")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["JOBID", "NAME", "USER", "ST", "TIME", "LEFT", "GPUS", "STEP", "NODELIST(REASON)"]
    assert lines[1][:5] == ["2", "two", "me", "S", "1:01"]
    assert lines[2][-1] == "(Dependency)"
    assert lines[-1] == ["finished:", "1", "completed"]
    assert "run --resume" in done.stderr


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (("--states", "all"), ["1", "2", "3", "4"]),
        (("--states", "CD,S"), ["1", "2"]),
        (("-j", "2-3"), ["2", "3"]),
        (("two", "4"), ["2", "4"]),
    ],
)
def test_status_chooses_jobs_like_squeue(
    hpcsched: Hpcsched, stopped_run: RunDir, words: tuple[str, ...], ids: list[str]
) -> None:
    done = hpcsched("status", "--noheader", "-o", "%i", *words)
    assert done.stdout.split() == ids, done.stderr


def test_status_json_has_all_jobs_and_the_promised_keys(hpcsched: Hpcsched, stopped_run: RunDir) -> None:
    page = json.loads(hpcsched("status", "--json").stdout)
    assert page["schema"] == 1
    assert page["run"]["state"] == "STOPPED" and page["run"]["policy"] == "marble"
    assert [job["state"] for job in page["jobs"]] == ["COMPLETED", "SUSPENDED", "PENDING", "PENDING"]
    promised = (
        "id name state reason role gpus hosts step steps elapsed_s eta_s attempt suspensions resizes exit"
    )
    assert set(promised.split()) <= page["jobs"][0].keys()
    assert {"index", "host", "job", "lane", "utilisation", "memory_mib"} <= page["gpus"][0].keys()


def test_explain_tells_the_story_from_the_journal(hpcsched: Hpcsched, stopped_run: RunDir) -> None:
    done = hpcsched("explain", "two")
    assert "job 2 (two) is SUSPENDED" in done.stdout
    assert "saved at step 40" in done.stdout
    page = json.loads(hpcsched("explain", "3", "--json").stdout)
    assert page["reason"]["code"] == "Dependency" and "two" in page["reason"]["text"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("status", "--dir", "nowhere"), 3, "no run in"),
        (("explain", "1", "--dir", "nowhere"), 3, "no run in"),
        (("status", "-j", "99"), 4, "no job '99'"),
        (("explain", "nobody"), 4, "no job 'nobody'"),
        (("suspend", "2"), 3, "no agent runs"),
        (("drain",), 3, "no agent runs"),
        (("status", "--states", "X"), 2, "COMPLETED (CD)"),
        (("status", "-o", "%q"), 2, "%z RESIZED"),
        (("nonsense",), 2, "nonsense"),
        (("run", "missing.toml"), 2, "missing.toml"),
        (("run", "missing.toml", "--policy", "best"), 2, ""),
        (("simulate", "missing.toml", "--gpus-per-node", "2"), 2, "missing.toml"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    hpcsched: Hpcsched, stopped_run: RunDir, words: tuple[str, ...], code: int, says: str
) -> None:
    done = hpcsched(*words)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--help",), ("status",), ("explain", "2"), ("submit", "--", "true")])
def test_login_node_commands_import_nothing_heavy(
    tmp_path: Path, stopped_run: RunDir, words: tuple[str, ...]
) -> None:
    program = (
        "import sys; from hpcsched.cli.main import main; sys.argv[1:] = sys.argv[2:]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print({'torch', 'numpy', 'sqlalchemy', 'alembic', 'rich', 'matplotlib'} & sys.modules.keys(),"
        " file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "-", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "set()"


def test_settings_come_from_flag_environment_project_user_and_site_in_this_order(
    hpcsched: Hpcsched, tmp_path: Path
) -> None:
    def origin(key: str, *words: str, **env: str) -> str:
        page = json.loads(hpcsched(*words, "config", "show", "--json", **env).stdout)
        return str(page["settings"][key]["value"])

    assert origin("devices") == "auto"
    (tmp_path / "site.toml").write_text('devices = "cpu:1"\n')
    assert origin("devices") == "cpu:1"
    (tmp_path / "xdg" / "hpcsched").mkdir(parents=True)
    (tmp_path / "xdg" / "hpcsched" / "config.toml").write_text('devices = "cpu:2"\n')
    assert origin("devices") == "cpu:2"
    (tmp_path / "hpcsched.toml").write_text('devices = "cpu:3"\n')
    assert origin("devices") == "cpu:3"
    assert origin("devices", HPCSCHED_DEVICES="cpu:4") == "cpu:4"
    assert origin("dir", "--dir", "a", HPCSCHED_DIR="b") == "a"


def test_config_show_says_where_a_setting_comes_from(hpcsched: Hpcsched, tmp_path: Path) -> None:
    (tmp_path / "hpcsched.toml").write_text('policy = "exclusive"\n')
    lines = hpcsched("config", "show", "--origin").stdout.splitlines()
    assert any(line.startswith("policy = exclusive") and "hpcsched.toml" in line for line in lines)
    assert any(line.startswith("devices = auto") and "default" in line for line in lines)


def test_a_bad_settings_file_is_refused(hpcsched: Hpcsched, tmp_path: Path) -> None:
    (tmp_path / "hpcsched.toml").write_text("devcies = 1\n")
    done = hpcsched("status")
    assert done.returncode == 2 and "devcies" in done.stderr and "devices" in done.stderr


def test_doctor_finds_what_is_here(hpcsched: Hpcsched) -> None:
    done = hpcsched("doctor", "--devices", "replay:3", "--json")
    findings = {f["what"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done.stdout
    assert findings["devices"]["found"].startswith("3 x replay")
    assert findings["run directory"]["ok"]
    assert hpcsched("doctor", "--devices", "cuda:99").returncode == 1


def test_version(hpcsched: Hpcsched) -> None:
    assert __version__ in hpcsched("--version").stdout


def test_simulate_compares_policies(hpcsched: Hpcsched, tmp_path: Path) -> None:
    profile = {"model": "m", "device": "d", "throughput": {"1": 1.0, "2": 1.5}}
    (tmp_path / "p.json").write_text(json.dumps({"schema": 1, "profiles": [profile]}))
    jobs = "".join(f'[[job]]\nname = "j{i}"\nmodel = "m"\nsteps = 30\nreplay = true\n' for i in range(2))
    (tmp_path / "jobs.toml").write_text("schema = 1\n" + jobs)
    common = (
        "simulate",
        "jobs.toml",
        "--gpus-per-node",
        "2",
        "--profiles",
        "p.json",
        "--policy",
        "marble,exclusive",
    )
    page = json.loads(hpcsched(*common, "--json").stdout)
    by_policy = {r["policy"]: r for r in page["results"]}
    # Both jobs are fastest on two GPUs, so marble runs them one after the other too.
    assert by_policy["exclusive"]["makespan_s"] == pytest.approx(40.0)
    assert by_policy["marble"]["makespan_s"] == pytest.approx(40.0)
    assert by_policy["marble"]["lower_bound_s"] == pytest.approx(30.0)
    table = hpcsched(*common).stdout
    assert "marble" in table and "exclusive" in table and "makespan" in table


def test_the_shipped_site_settings_are_accepted(hpcsched: Hpcsched) -> None:
    for file in (ROOT / "site-config").glob("*.toml"):
        done = hpcsched("config", "show", "--origin", HPCSCHED_SITE_CONFIG=str(file))
        assert done.returncode == 0 and file.name in done.stdout, done.stderr


def test_bash_completes_commands(hpcsched: Hpcsched) -> None:
    done = hpcsched("completion", "bash")
    assert done.returncode == 0 and "_HPCSCHED_COMPLETE=bash_complete" in done.stdout
    told = hpcsched(_HPCSCHED_COMPLETE="bash_complete", COMP_WORDS="hpcsched expl", COMP_CWORD="1")
    assert told.stdout == "plain,explain\n"
