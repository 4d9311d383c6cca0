"""`status` says where the next saves may not find room, while the agent lives."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rundirs import a_home, a_run

from hpcsched.cli.main import cli
from hpcsched.store.rundir import RunDir
from hpcsched.store.status import ShortDisk, read_status


def test_a_short_disk_is_a_line_of_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_home(tmp_path, monkeypatch)
    run = RunDir(a_run(tmp_path / "hpcsched-run", host=socket.gethostname(), kind="none"))
    page = read_status(run)
    page.run.short_disks = [ShortDisk(place="/scratch", free_bytes=2**30, needed_bytes=2**31, jobs=[2])]
    run.status.write_bytes(msgspec.json.encode(page))
    shown = CliRunner().invoke(cli, ["status"], standalone_mode=False).output
    assert "/scratch has 1 GiB free, and the next saves of the job that runs take up to 2 GiB" in shown
    page.run.state = "FINISHED"
    run.status.write_bytes(msgspec.json.encode(page))
    assert "/scratch" not in CliRunner().invoke(cli, ["status"], standalone_mode=False).output
