"""An agent is started for a run that has lost its own, and for no other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rundirs import a_run

from hpcsched.agent import next_head
from hpcsched.agent.next_head import NextHead
from hpcsched.store.heads import keep_options
from hpcsched.store.rundir import RunDir

WEBHOOK = "https://example.org/secret"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The commands that are started instead of running, and their environments."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def popen(argv: list[str], *, env: dict[str, str], **_: object) -> Any:
        found.append((argv, env))
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(next_head.subprocess, "Popen", popen)
    monkeypatch.setattr(next_head, "NOT_ALL_AT_ONCE_S", 0.0)
    return found


def a_joinable_run(folder: Path, *, left: bool = False, **about: Any) -> RunDir:
    rundir = RunDir(a_run(folder, **about))
    record = rundir.read_record()
    assert record
    rundir.write_record(msgspec.structs.replace(record, joinable=True, epoch=3, left=left))
    keep_options(rundir, ("--margin=90", f"--notify-webhook={WEBHOOK}"))
    return rundir


def look(rundir: RunDir) -> NextHead:
    head = NextHead(rundir, "token", ("--batch=none",), lambda line: None)
    head.hosts = ("far", "far-2")
    head.look()
    return head


def test_a_run_that_has_lost_its_agent_gets_one_with_its_options(
    tmp_path: Path, started: list[tuple[list[str], dict[str, str]]]
) -> None:
    rundir = a_joinable_run(tmp_path / "run", age_s=60.0)
    head = look(rundir)
    ((argv, env),) = started
    assert head.leads and head.number == 4
    assert argv[-6:] == ["--batch=none", "--margin=90", "--lead", "token", "4", "far,far-2"]
    assert "--resume" in argv and not any(WEBHOOK in word for word in argv), "others see an argv"
    assert env["HPCSCHED_NOTIFY_WEBHOOK"] == WEBHOOK
    head.look()
    assert len(started) == 1


@pytest.mark.parametrize(
    ("about", "starts"),
    [
        ({"age_s": 0.0}, 0),
        ({"age_s": 60.0, "state": "DRAINING"}, 0),
        ({"age_s": 60.0, "state": "FINISHED"}, 0),
        ({"age_s": 60.0, "state": "STOPPED"}, 0),
        ({"age_s": 0.0, "state": "STOPPED", "left": True}, 1),
        ({"age_s": 0.0, "left": True}, 1),
    ],
)
def test_one_that_lives_or_was_stopped_gets_none(
    tmp_path: Path, started: list[object], about: dict[str, Any], starts: int
) -> None:
    look(a_joinable_run(tmp_path / "run", **about))
    assert len(started) == starts


def test_one_that_no_other_agent_can_lead_gets_none(tmp_path: Path, started: list[object]) -> None:
    rundir = a_joinable_run(tmp_path / "run", age_s=60.0)
    (rundir.root / "agent.options").unlink()
    look(rundir)
    assert not started
