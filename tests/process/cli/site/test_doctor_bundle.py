"""`doctor --bundle`: what is in the archive, and what never is."""

from __future__ import annotations

import json
import os
import platform
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcsched.cli.main import cli
from hpcsched.cli.site import bundle
from hpcsched.errors import ConfigError

SECRET = "s3cr3t-V4lue"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("HPCSCHED_", "SLURM_", "LSB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HPCSCHED_SITE_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("HPCSCHED_DATABASE", str(tmp_path / "db"))
    monkeypatch.setenv("HPCSCHED_STORE_KEY", SECRET)
    monkeypatch.setenv("USUAL_NAME", SECRET)
    monkeypatch.setenv("HOME", str(tmp_path / "home-of-ada"))
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    job = folder / "jobs" / "1"
    (job / "checkpoint").mkdir(parents=True)
    (job / "checkpoint" / "step-1.pt").write_text("weights")
    (job / "hpcsched-1.out").write_text(f"loss 1\nWANDB_API_KEY={SECRET}\n")
    (folder / "run.json").write_text(json.dumps({"host": platform.node(), "user": "ada"}))
    (folder / "status.json").write_text("{}")
    line = json.dumps({"env": {"HF_TOKEN": SECRET}, "at": 1}) + "\n"
    (folder / "journal.jsonl").write_text(line * 40_000)  # more than is taken
    return folder


def call(*words: object) -> Result:
    words = ("doctor", "--devices", "cpu:2", "--batch", "none", "--pyslurm", "off", *map(str, words))
    return CliRunner().invoke(cli, words, standalone_mode=False)


def content(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        assert all(m.isfile() and m.mode == 0o600 and m.uid == 0 and not m.uname for m in members)
        found = {}
        for member in members:
            file = archive.extractfile(member)
            assert file
            found[member.name.partition("/")[2]] = file.read().decode()
    return found


def test_a_bundle_holds_what_a_ticket_needs_and_no_secret(root: Path, tmp_path: Path) -> None:
    done = call("--dir", root, "--bundle")
    assert done.return_value == 0, done.output
    path = tmp_path / "hpcsched-bundle.tar.gz"
    assert path.stat().st_mode & 0o777 == 0o600
    files = content(path)
    assert set(files) == {
        *(
            "README.txt",
            "doctor.txt",
            "versions.txt",
            "settings.txt",
            "environment.txt",
            "gpus.txt",
            "batch.txt",
        ),
        *("run/run.json", "run/status.json", "run/journal.jsonl"),
    }
    assert not any(SECRET in text or "weights" in text for text in files.values())
    assert "devices: 2 x cpu" in files["doctor.txt"] and "devices: 2 x cpu" in done.stdout
    assert files["versions.txt"].startswith("hpcsched ") and "\nmsgspec " in files["versions.txt"]
    assert "policy = marble    # default" in files["settings.txt"]
    assert "HPCSCHED_STORE_KEY=<removed>" in files["environment.txt"]
    assert "USUAL_NAME" not in files["environment.txt"]
    first, *lines = files["run/journal.jsonl"].splitlines()
    assert first == "... the last 1024 KiB" and len(lines) > 10_000
    assert set(lines) == {'{"env": {"HF_TOKEN": "<removed>"}, "at": 1}'}, "whole lines only"
    assert all(name in files["README.txt"] and name in done.stderr for name in set(files) - {"README.txt"})
    assert "look through it before you send it" in done.stderr


def test_outputs_come_if_asked_for_and_names_go(root: Path, tmp_path: Path) -> None:
    call("--dir", root, "--bundle", tmp_path / "b.tar.gz", "--with-logs", "--anonymise")
    files = content(tmp_path / "b.tar.gz")
    assert files["run/jobs/1/hpcsched-1.out"] == "loss 1\nWANDB_API_KEY=<removed>\n"
    assert json.loads(files["run/run.json"]) == {"host": "HOST", "user": "USER"}
    assert not any("home-of-ada" in text for text in files.values())
    assert not any("checkpoint" in name for name in files)


def test_outputs_of_any_name_come_each_hosts_too(root: Path, tmp_path: Path) -> None:
    folder = root / "jobs" / "1"
    other = tmp_path / "train.txt"
    for path in (folder / "train.txt", folder / "train.txt.node2", folder / "x.out.node3", other):
        path.write_text("words of a job")
    jobs = [{"id": 1, "output": str(folder / "train.txt")}, {"id": 1, "output": str(other)}]
    (root / "status.json").write_text(json.dumps({"jobs": jobs}))
    call("--dir", root, "--bundle", tmp_path / "b.tar.gz", "--with-logs")
    files = content(tmp_path / "b.tar.gz")
    found = {name.rpartition("/")[2] for name, text in files.items() if text == "words of a job"}
    assert found == {"train.txt", "train.txt.node2", "x.out.node3"}
    assert files["run/jobs/1/elsewhere.txt"] == f"left out: {other} is not in the job's folder\n"


def test_names_of_the_allocation_go_too(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "tux[1-3],login7")
    monkeypatch.setenv("SLURM_JOB_USER", "grace")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "ibm1 4 ibm2 8")
    (root / "jobs" / "1" / "a.out").write_text("grace on tux2, ibm2 and login7: 4 GPUs\n")
    call("--dir", root, "--bundle", tmp_path / "b.tar.gz", "--with-logs", "--anonymise")
    files = content(tmp_path / "b.tar.gz")
    assert files["run/jobs/1/a.out"] == "USER on HOST, HOST and HOST: 4 GPUs\n"
    assert not any("tux" in text or "ibm1" in text for text in files.values())


def test_names_of_the_run_go_where_there_is_no_allocation(root: Path, tmp_path: Path) -> None:
    status = {
        "run": {"agent": {"host": "tux1.site.org"}, "allocation": {"cluster": "arctic"}},
        "gpus": [{"host": "tux2"}],
        "jobs": [{"id": 1, "user": "grace", "hosts": [], "output": str(root / "jobs/1/a.out")}],
    }
    (root / "status.json").write_text(json.dumps(status))
    for name in ("a.out", "a.out.tux2"):
        (root / "jobs" / "1" / name).write_text("grace on tux1 and tux2 of arctic\n")
    call("--dir", root, "--bundle", tmp_path / "b.tar.gz", "--with-logs", "--anonymise")
    files = content(tmp_path / "b.tar.gz")
    assert files["run/jobs/1/a.out"] == files["run/jobs/1/a.out.HOST"] == "USER on HOST and HOST of CLUSTER\n"
    assert not any(name in text for text in files.values() for name in ("tux", "grace", "arctic"))


def test_what_is_missing_is_said(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("--dir", tmp_path / "no-run", "--bundle", tmp_path / "b.tar.gz")
    for said in (done.stderr, content(tmp_path / "b.tar.gz")["README.txt"]):
        assert f"no run: {tmp_path}/no-run is not there (--dir)" in said

    (tmp_path / "other").mkdir()
    call("--dir", tmp_path / "other", "--bundle", tmp_path / "o.tar.gz")
    assert "no run/journal.jsonl: it is not there" in content(tmp_path / "o.tar.gz")["README.txt"]

    def full(*words: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle.tarfile, "open", full)
    done = call("--dir", root, "--bundle", tmp_path / "c.tar.gz")
    assert isinstance(done.exception, ConfigError) and "No space left" in str(done.exception)
    assert not (tmp_path / "c.tar.gz").exists()


def test_nothing_behind_a_link_is_taken(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.out").write_text("private words")
    (root / "status.json").unlink()
    (root / "status.json").symlink_to(outside / "x.out")
    (root / "nodes.log").symlink_to("/etc/passwd")
    (root / "jobs" / "2").symlink_to(outside)
    (root / "jobs" / "1" / "y.out").symlink_to(outside / "x.out")
    os.mkfifo(root / "jobs" / "1" / "z.out")
    call("--dir", root, "--bundle", tmp_path / "b.tar.gz", "--with-logs")
    files = content(tmp_path / "b.tar.gz")
    assert not any("private words" in text or "root:" in text for text in files.values())
    assert files["run/status.json"] == files["run/nodes.log"] == "left out: it is a link\n"
    assert files["run/jobs/2/x.out"] == "left out: it lies behind a link\n"
    assert files["run/jobs/1/z.out"] == "left out: it is no file\n"


def test_a_bundle_has_a_bound(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_IN_ALL", 2**15)
    call("--dir", root, "--bundle", tmp_path / "b.tar.gz")
    files = content(tmp_path / "b.tar.gz")
    assert "doctor.txt" in files and "run/journal.jsonl" not in files
    assert "run/status.json" in files and "no run/journal.jsonl: " in files["README.txt"]
    assert sum(map(len, files.values())) < 2**16


def test_a_full_bundle_reads_no_more(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_IN_ALL", 2**17)
    for host in range(50):
        (root / "jobs" / "1" / f"a.out.node{host:02}").write_text("x\n" * 2**14)
    call("--dir", root, "--bundle", tmp_path / "b.tar.gz", "--with-logs")
    readme = content(tmp_path / "b.tar.gz")["README.txt"]
    assert "a.out.node02 (" in readme and "node20" not in readme
    assert "nor what comes after it" in readme


def test_an_interrupt_leaves_no_part_of_a_bundle(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*words: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle.tarfile, "open", interrupted)
    call("--dir", root, "--bundle", tmp_path / "b.tar.gz")
    assert not (tmp_path / "b.tar.gz").exists()


def test_a_bundle_replaces_nothing_and_its_options_need_it(root: Path, tmp_path: Path) -> None:
    there = tmp_path / "b.tar.gz"
    there.write_text("mine")
    done = call("--dir", root, "--bundle", there)
    assert isinstance(done.exception, ConfigError) and "is there already" in str(done.exception)
    assert there.read_text() == "mine"
    assert isinstance(call("--bundle", tmp_path / "no" / "b.tar.gz").exception, ConfigError)
    assert "give that too" in str(call("--with-logs").exception)
    # A run of a newer version can be asked about too.
    (root / "run.json").write_text('{"version": "99.0.0"}')
    assert call("--dir", root, "--bundle", tmp_path / "c.tar.gz").return_value == 0
