"""An agent has its journal compacted beside its work, again and again, and is not held up by that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcsched.agent import compacting
from hpcsched.agent.compacting import Compacting
from hpcsched.core import events as ev
from hpcsched.errors import StoreError
from hpcsched.policy import make_policy
from hpcsched.store import compaction, journal
from hpcsched.store.journal import Journal

STARTED = ev.AgentStarted(at=0.0, wall=1e9, devices=(), policy="marble")


class Process:
    """One that prepares at once, and has ended when it is told to."""

    killed = False

    def __init__(self, path: Path, words: Sequence[str], code: int) -> None:
        self.words, self.returncode, self.over = words, code, False
        if not code:
            compaction.prepare(path, make_policy, archives="archive" in words)

    def poll(self) -> int | None:
        return self.returncode if self.over else None

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return self.returncode


class Party:
    def __init__(self, path: Path, *, anew: bool = True, code: int = 0) -> None:
        self.processes: list[Process] = []
        self.journal = Journal(path)
        self.journal.append([STARTED])

        def start(path: Path, words: Sequence[str]) -> Any:
            self.processes.append(Process(path, words, code))
            return self.processes[-1]

        self.compacting = Compacting(self.journal, anew=anew, start=start)

    def grows(self, records: int = 3) -> None:
        self.journal.append([ev.InboxRead(at=0.0)] * records)
        self.compacting.look(0.0)

    def is_done(self) -> None:
        self.processes[-1].over = True
        self.compacting.look(0.0)

    @property
    def archived(self) -> list[int]:
        return [end.records for end in journal.Contents(self.journal.path).archived]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compacting, "COMPACTED_BYTES", 600)
    return tmp_path / "journal.jsonl"


def test_it_begins_when_there_is_enough_and_takes_place_beside_the_work(path: Path) -> None:
    party = Party(path)
    party.compacting.look(0.0)
    assert not party.processes
    party.grows(8)
    assert [one.words for one in party.processes] == [["archive"]]
    party.grows(20)
    assert len(party.processes) == 1 and not party.archived
    party.is_done()
    assert party.archived == [9] and party.journal.seq == 29
    party.grows(1)
    assert len(party.processes) == 1
    party.grows(8)
    party.is_done()
    assert len(party.processes) == 2 and party.archived == [9, 38]
    assert len(list(journal.read(path))) == 38


def test_where_another_may_take_over_only_checkpoints_are_written(path: Path) -> None:
    party = Party(path, anew=False)
    party.grows(8)
    assert [one.words for one in party.processes] == [[]]
    party.is_done()
    party.grows(1)
    assert not party.archived and len(party.processes) == 1
    party.grows(8)
    assert len(party.processes) == 2


def test_one_that_fails_is_tried_again_when_there_is_as_much_more(path: Path) -> None:
    party = Party(path, code=1)
    party.grows(8)
    party.is_done()
    party.grows(1)
    assert not party.archived and len(party.processes) == 1
    party.grows(8)
    assert len(party.processes) == 2


def test_a_journal_that_cannot_be_begun_anew_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreError("cannot begin anew: No space left on device")

    party = Party(path)
    monkeypatch.setattr(Journal, "begin_anew", full)
    party.grows(8)
    party.is_done()
    party.grows(1)
    assert not party.archived and len(list(journal.read(path))) == 10


def test_a_process_that_cannot_be_started_is_put_off(path: Path) -> None:
    party = Party(path)

    def none(path: Path, words: Sequence[str]) -> Any:
        raise OSError("no process left")

    party.compacting = Compacting(party.journal, anew=True, start=none)
    party.grows(8)
    party.grows(1)
    assert party.journal.seq == 10


def test_one_that_goes_on_at_the_end_is_ended(path: Path) -> None:
    party = Party(path)
    party.grows(8)
    party.compacting.close()
    party.compacting.close()
    assert party.processes[0].killed and not party.archived
