"""What a node agent tells of one host's ranks, by a clock that the test sets."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from hpcsched.agent.node.workers import READY_FAST_POLL_FOR_S, READY_FAST_POLL_S, READY_POLL_S, PartWatcher
from hpcsched.launch.remote import protocol
from hpcsched.launch.workers import LocalWorkers
from hpcsched.testing.launch import FIRST_PID, FakeWorkers, Script

HELD = b'{"step": 9, "samples": 90}'


class Host:
    """Two ranks of attempt 2, from `first_rank` on, and the time."""

    def __init__(self, folder: Path, first_rank: int = 0) -> None:
        order = protocol.Launch(
            part=5,
            job_id=1,
            attempt=2,
            argv=(),
            env={},
            cwd="/",
            folder=str(folder),
            output="",
            devices=(0, 1),
            per_rank=True,
            first_rank=first_rank,
            world_size=2 + first_rank,
            address="",
            port=None,
        )
        self.folder, self.now = folder, 100.0
        self.ranks = FakeWorkers([FIRST_PID, FIRST_PID + 1], Script())
        self.watcher = PartWatcher(order, cast(LocalWorkers, self.ranks), self.now)

    def told(self, after_s: float = 1.0) -> list[protocol.NodeMessage]:
        self.now += after_s
        return list(self.watcher.look(self.now))

    def ends(self, rank: int, code: int) -> list[protocol.NodeMessage]:
        self.ranks.end(rank, code)
        return list(self.watcher.ended())

    def write(self, name: str, data: bytes = b"") -> None:
        (self.folder / name).write_bytes(data)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.ranks.close()


@pytest.fixture
def other_host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path, first_rank=2)
    yield host
    host.ranks.close()


def test_what_the_ready_file_holds_is_told_once(host: Host) -> None:
    assert host.told() == []
    host.write("ready.2", b'{"in_place": true}')
    assert host.told() == [protocol.Ready(5, 2, b'{"in_place": true}')]
    assert host.told() == []


def test_a_resize_is_waited_for_as_closely_as_a_start(host: Host) -> None:
    host.write("ready.2")
    host.now += 10 * READY_FAST_POLL_FOR_S
    assert host.told() == [protocol.Ready(5, 2, b"")]
    host.watcher.expect(3, host.now)
    assert host.watcher.due() <= host.now
    assert host.told(0.0) == [] and host.watcher.due() == pytest.approx(host.now + READY_FAST_POLL_S)
    host.told(READY_FAST_POLL_FOR_S)
    assert host.watcher.due() == pytest.approx(host.now + READY_POLL_S)
    host.write("ready.3", b'{"step": 7}')
    assert host.told() == [protocol.Ready(5, 3, b'{"step": 7}')]


@pytest.mark.parametrize("kind", ["ready", "refused"])
def test_an_older_answer_under_the_same_number_is_not_heard(host: Host, kind: str) -> None:
    host.write(f"{kind}.3", b"of an earlier life")
    host.watcher.expect(3, host.now)
    assert host.told() == []


def test_a_refusal_is_told_and_the_ranks_still_know_how_to_save(host: Host) -> None:
    host.write("ready.2")
    host.told()
    host.watcher.expect(3, host.now)
    host.write("refused.3", b"too late")
    assert host.told() == [protocol.Refused(5, 3, b"too late")]
    assert host.told() == []
    host.watcher.ask_to_save()
    assert host.ranks.signals == [signal.SIGTSTP]


def test_an_answer_given_just_before_the_end_comes_before_it(host: Host) -> None:
    host.watcher.expect(3, host.now)
    host.write("ready.3", b"{}")
    host.ends(0, 75)
    assert host.ends(1, 75) == [protocol.Ready(5, 3, b"{}"), protocol.Exited(5, 75)]


def test_who_leaves_is_counted_and_is_no_failure(host: Host) -> None:
    assert host.ends(1, 0) == [protocol.Living(5, 1)]
    assert host.ends(1, 0) == []
    assert host.ends(0, 75) == [protocol.Exited(5, 75)]


def test_who_fails_is_told_with_how_many_are_left(host: Host) -> None:
    assert host.ends(1, 3) == [protocol.Living(5, 1), protocol.Failing(5)]


def test_what_a_quick_suspend_held_is_told_with_the_end(host: Host) -> None:
    host.ranks.held = HELD
    host.write("STATE.json", b"older")
    host.ends(0, 75)
    assert host.ends(1, 75) == [protocol.Exited(5, 75, b"older", HELD)]


def test_other_hosts_ranks_say_nothing_of_files(other_host: Host) -> None:
    host = other_host
    for name in ("ready.2", "refused.2", "held.2", "STATE.json"):
        host.write(name, b"{}")
    assert host.told() == [] and host.watcher.due() == float("inf")
    host.ends(0, 75)
    assert host.ends(1, 75) == [protocol.Exited(5, 75)]


def test_what_became_of_the_command_that_saved_them_is_told_before_their_end(host: Host) -> None:
    assert host.told() == []
    host.ranks.saved_by = (0, "")  # between two looks
    host.ends(0, 137)
    first, *_, last = host.ends(1, 137)
    assert first == protocol.SavedBy(5, 0, "") and isinstance(last, protocol.Exited)
    assert host.told() == []
