"""An attempt over several hosts as the head keeps it: what is sent to whom, and what it makes of answers."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcsched.contract.orders import Resize, encode
from hpcsched.core.model import Device
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LOST, LaunchPlan
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.workers import AttemptPart, RemoteWorkers, part_launches, plan_from_message

RESIZE = Resize(attempt=3, world_size=3, keep=(0, 1), one_host=False)
PLAN = LaunchPlan(
    job_id=1,
    attempt=2,
    argv=("program",),
    cwd=Path("/"),
    folder=Path("/folder"),
    output=Path("/folder/out"),
    devices=tuple(Device(index=i, host="ab"[i // 2], kind="fake", handle=str(i)) for i in range(4)),
)
JOINING = replace(PLAN, attempt=3, first_rank=2, world_size=6, joins="10.0.0.9:4711")


class Crew:
    """Workers on hosts a and b, and all that has been sent to these."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.sent: list[tuple[str, protocol.HeadMessage]] = []
        shares = [("a", [0, 1]), ("b", [0, 1])]
        orders = part_launches(plan, shares, first_host="a", address="10.0.0.1", first_part=7)
        self.a, self.b = (AttemptPart(host, order) for (host, _), order in zip(shares, orders, strict=True))
        self.workers = RemoteWorkers(
            [self.a, self.b],
            address="10.0.0.1",
            send=lambda host, message: self.sent.append((host, message)),
            pump=lambda: None,
        )
        self.workers.begin()

    def launches(self) -> list[tuple[str, protocol.Launch]]:
        return [(host, message) for host, message in self.sent if isinstance(message, protocol.Launch)]

    def all_run(self) -> None:
        self.workers.launched(self.a, 5000)
        self.workers.launched(self.b, 5000)
        self.sent.clear()


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(PLAN)
    yield crew
    crew.workers.close()


@pytest.fixture
def joiners() -> Iterator[Crew]:
    crew = Crew(JOINING)
    yield crew
    crew.workers.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("there", range(4))
def test_where_descriptors_run_out_none_is_left_open(monkeypatch: pytest.MonkeyPatch, there: int) -> None:
    left = there

    def limited(opens: Callable[..., Any]) -> Callable[..., Any]:
        def take(*args: Any) -> Any:
            nonlocal left
            if not left:
                raise OSError(errno.EMFILE, "Too many open files")
            left -= 1
            return opens(*args)

        return take

    for name in ("eventfd", "pipe2"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))
    before = descriptors()
    with pytest.raises(OSError, match="Too many"):
        Crew(PLAN)
    assert descriptors() == before


def test_ranks_that_join_are_all_asked_for_at_once(crew: Crew, joiners: Crew) -> None:
    assert [host for host, _ in crew.launches()] == ["a"]  # the port is not known yet
    assert [host for host, _ in joiners.launches()] == ["a", "b"]
    for i, (_, order) in enumerate(joiners.launches()):
        assert (order.first_rank, order.world_size, order.ranks) == (2 + 2 * i, 6, 2)
        assert (order.address, order.port, order.joins) == ("10.0.0.9", 4711, "10.0.0.9:4711")
    joiners.workers.launched(joiners.a, 4711)
    assert len(joiners.launches()) == 2


def test_ranks_may_join_over_ipv6() -> None:
    joining = replace(JOINING, joins="fd00::7:4711")
    (order,) = part_launches(joining, [("a", [0])], first_host="a", address="", first_part=1)
    assert (order.address, order.port) == ("fd00::7", 4711)


def test_where_ranks_meet_is_known_once_the_first_have_started(crew: Crew, joiners: Crew) -> None:
    assert crew.workers.where == ""
    crew.workers.launched(crew.a, 5000)
    assert crew.workers.where == "10.0.0.1:5000"
    assert joiners.workers.where == "10.0.0.9:4711"


@pytest.mark.parametrize("index", [-1, 2])
def test_devices_that_a_host_does_not_have_are_no_plan(crew: Crew, index: int) -> None:
    order = msgspec.structs.replace(crew.a.order, devices=(0, index))
    with pytest.raises(LaunchError, match="devices that a does not have"):
        plan_from_message(order, PLAN.devices[:2], "a")
    with pytest.raises(ValueError, match="255"):
        msgspec.structs.replace(crew.a.order, asks=255).__post_init__()


def test_living_ranks_are_those_that_were_told(crew: Crew) -> None:
    assert crew.workers.living == 0
    crew.workers.launched(crew.a, 5000)
    assert crew.workers.living == 2
    crew.workers.launched(crew.b, 5000)
    assert crew.workers.living == 4
    crew.b.living = 1
    assert crew.workers.living == 3
    crew.workers.ended(crew.b, 0)
    assert crew.workers.living == 2 and crew.workers.reap() is None and not crew.workers.failed_early()
    crew.workers.ended(crew.a, 75)
    assert crew.workers.living == 0 and crew.workers.reap() == 75


def test_the_end_is_that_of_the_last_rank_and_not_when_its_host_has_told_of_it(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    crew.all_run()
    crew.workers.ended(crew.a, 0, after_s=2.0)
    crew.workers.ended(crew.b, 0, after_s=9.0)
    assert crew.workers.told_after_s == 2.0


def test_orders_go_to_rank_0_s_host_while_it_lives(crew: Crew, joiners: Crew) -> None:
    crew.all_run()
    crew.workers.tell(RESIZE)
    assert crew.sent == [("a", protocol.Order(7, encode(RESIZE)))]
    crew.workers.ended(crew.a, 75)
    crew.workers.tell(RESIZE)
    crew.workers.expect(3)
    assert len(crew.sent) == 1
    joiners.sent.clear()
    joiners.workers.tell(RESIZE)
    joiners.workers.expect(4)
    assert not joiners.sent


def test_answers_count_for_the_attempt_that_is_expected(crew: Crew) -> None:
    crew.all_run()
    crew.workers.answered(protocol.Ready(7, 2, b""))
    assert crew.workers.ready == b"" and crew.workers.refused is None
    crew.workers.expect(3)
    assert crew.sent == [("a", protocol.Expect(7, 3))] and crew.workers.ready is None
    crew.workers.answered(protocol.Ready(7, 2, b"late"))
    assert crew.workers.ready is None
    crew.workers.answered(protocol.Refused(7, 3, b"no"))
    assert crew.workers.ready is None and crew.workers.refused == b"no"
    crew.workers.expect(4)
    assert crew.workers.refused is None
    crew.workers.answered(protocol.Refused(7, 3, b"late"))
    assert crew.workers.refused is None
    crew.workers.answered(protocol.Ready(7, 4, b"{}"))
    assert crew.workers.ready == b"{}"


def test_a_host_lost_while_ranks_join_takes_the_others_of_them_along(joiners: Crew) -> None:
    joiners.workers.launched(joiners.a, 4711)
    joiners.sent.clear()
    joiners.workers.lost(joiners.b, "gone")
    assert ("a", protocol.Signal(7, signal.SIGKILL)) in joiners.sent and joiners.workers.reap() is None
    joiners.workers.ended(joiners.a, 137)
    with pytest.raises(LaunchError, match="host b was lost: gone") as caught:
        joiners.workers.reap()
    assert caught.value.host_fault


def test_a_host_lost_once_all_have_joined_is_a_failed_rank(joiners: Crew) -> None:
    joiners.all_run()
    joiners.workers.lost(joiners.b, "gone")
    assert joiners.workers.failed_early() and joiners.workers.living == 2
    joiners.workers.ended(joiners.a, 143)
    assert joiners.workers.reap() == LOST


def test_the_first_host_whose_memory_ran_out_is_named(crew: Crew) -> None:
    crew.all_run()
    crew.workers.ran_out(crew.a, "", over_limit=False)
    crew.workers.ran_out(crew.b, "it used 2G\nof the 1G", over_limit=True)
    crew.workers.ran_out(crew.a, "the kernel", over_limit=False)
    assert crew.workers.oom.startswith("on host b it used 2G")
    assert "\n" not in crew.workers.oom
    assert crew.workers.over_limit
