"""What goes on running from one head to the next: whole attempts, and ends that nobody has seen."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hpcsched.core.model import Device
from hpcsched.devices.base import Sample
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.host import RemoteHost
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.launch.remote.survivors import Survivor, survivors
from hpcsched.launch.remote.workers import part_launches

PLAN = LaunchPlan(
    job_id=1,
    attempt=3,
    argv=("program",),
    cwd=Path("/"),
    folder=Path("/folder"),
    output=Path("/folder/out"),
    devices=tuple(Device(index=i, host="ab"[i], kind="fake", handle=str(i)) for i in range(2)),
)
SHARES = [("a", [0]), ("b", [0])]
A, B = (
    protocol.Running(order=order, port=4711, living=1, attempt=3)
    for order in part_launches(PLAN, SHARES, first_host="a", address="10.0.0.1", first_part=7)
)


def found(
    parts: dict[str, protocol.Running], *, active: dict[int, int]
) -> tuple[list[Survivor], list[protocol.HeadMessage]]:
    """The survivors of a part on each of these hosts, and what is sent."""
    sent: list[protocol.HeadMessage] = []
    nodes = {name: RemoteHost(name, guest=True, earlier=True) for name in parts}
    for name, part in parts.items():
        nodes[name].hello = protocol.Hello(
            name=name,
            hostname=name,
            pid=1,
            started=1,
            devices=(),
            kind="fake",
            speed=1.0,
            address="10.0.0.1",
            wall=0.0,
            parts=(part,),
        )
    all_of = survivors(
        nodes, active=active, send=lambda host, message: sent.append(message), pump=lambda: None
    )
    return all_of, sent


def over(part: protocol.Running) -> protocol.Running:
    return protocol.Running(order=part.order, port=4711, living=0, attempt=3, over=True)


def test_ranks_that_run_are_taken_as_they_are_and_none_is_started_again() -> None:
    (one,), sent = found({"a": A, "b": B}, active={1: 3})
    assert (one.job_id, one.attempt, one.whole, one.living) == (1, 3, True, 2)
    assert not [message for message in sent if isinstance(message, protocol.Launch)]


def test_an_attempt_is_not_whole_without_the_ranks_of_a_host() -> None:
    assert [one.whole for one in found({"a": A}, active={1: 3})[0]] == [False]
    assert [one.whole for one in found({"b": B}, active={1: 3})[0]] == [False]


def test_one_of_which_ranks_have_ended_well_goes_on() -> None:
    (one,), _ = found({"a": A, "b": over(B)}, active={1: 3})
    assert (one.whole, one.living) == (True, 1)


def test_an_end_that_is_on_record_is_no_survivor() -> None:
    assert found({"a": over(A), "b": over(B)}, active={})[0] == []
    assert found({"a": over(A), "b": over(B)}, active={1: 4})[0] == []
    assert [one.attempt for one in found({"a": over(A), "b": over(B)}, active={1: 3})[0]] == [3]


def test_no_number_of_an_earlier_heads_parts_is_given_again(tmp_path: Path) -> None:
    """A node agent may have to tell of an end that the head before has on record, and has not answered."""

    def head(epoch: int) -> RemoteLauncher[Sample]:
        return RemoteLauncher(
            hosts=[],
            commands=lambda hosts, argv: [],
            run_id="run",
            run_dir=tmp_path,
            devices="replay:1",
            address="127.0.0.1",
            make_sample=Sample,
            say=lambda line: None,
            epoch=epoch,
        )

    firsts = [head(epoch)._next_part for epoch in (0, 1, 2)]
    assert [b - a > 10**9 for a, b in pairwise(firsts)] == [True, True]
