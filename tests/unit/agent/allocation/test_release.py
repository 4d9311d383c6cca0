"""Hosts that are given back: what the batch system answers becomes an event, and is said once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from hpcsched.agent.allocation import release
from hpcsched.agent.allocation.release import HostReleases, release_after_s
from hpcsched.batch.base import AllocatedHost, Allocation
from hpcsched.batch.local import Local
from hpcsched.batch.slurm import Slurm
from hpcsched.core import events as ev
from hpcsched.errors import BatchError


class Batch(Local):
    """Takes hosts back, or says why not."""

    kind = "slurm"

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__()
        self.errors, self.asked = list(errors), list[tuple[str, ...]]()

    def release(self, names: Sequence[str]) -> None:
        self.asked.append(tuple(names))
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error


class Nodes:
    """Node agents that keep the states of `kept` in memory."""

    def __init__(self, *kept: str, guests: tuple[str, ...] = ()) -> None:
        self.kept, self.calls = set(kept), list[tuple[str, tuple[str, ...]]]()
        self.guests = guests

    def guests_among(self, hosts: Sequence[str]) -> tuple[str, ...]:
        return tuple(host for host in hosts if host in self.guests)

    def keeps(self, host: str) -> bool:
        return host in self.kept

    def releasing(self, hosts: Sequence[str]) -> None:
        self.calls.append(("releasing", tuple(hosts)))

    def released(self, hosts: Sequence[str]) -> None:
        self.calls.append(("released", tuple(hosts)))

    def stay(self, hosts: Sequence[str]) -> None:
        self.calls.append(("stay", tuple(hosts)))


def outcome(releases: HostReleases) -> ev.Event:
    deadline = time.monotonic() + 30.0
    while not (events := list(releases.events(7.0))):
        assert time.monotonic() < deadline, "no answer"
        time.sleep(0.005)
    (event,) = events
    return event


def test_they_are_gone() -> None:
    said, nodes, batch = list[str](), Nodes(), Batch()
    releases = HostReleases(batch, nodes, tell=said.append)
    releases.begin(("n2", "n3"))
    assert outcome(releases) == ev.HostsReleased(at=7.0, hosts=("n2", "n3"))
    assert batch.asked == [("n2", "n3")]
    assert nodes.calls == [("releasing", ("n2", "n3")), ("released", ("n2", "n3"))]
    assert said == ["nothing is left that could use hosts n2, n3: given back to slurm"]


@pytest.mark.parametrize("error", [BatchError("disabled"), ValueError("disabled")])
def test_a_refusal_is_said_once(error: Exception) -> None:
    said, nodes = list[str](), Nodes()
    releases = HostReleases(Batch(error, error, None), nodes, tell=said.append)
    for _ in range(2):
        releases.begin(("n2",))
        event = outcome(releases)
        assert isinstance(event, ev.ReleaseFailed) and "disabled" in event.error
    assert nodes.calls[-1] == ("stay", ("n2",))
    assert len(said) == 1 and said[0].startswith("host n2 cannot be given back: ")
    releases.begin(("n2",))
    assert isinstance(outcome(releases), ev.HostsReleased)


def test_what_is_in_memory_alone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, nodes = Batch(), Nodes("n2")
    releases = HostReleases(batch, nodes, tell=lambda line: None)
    releases.begin(("n2",))
    assert list(releases.events(1.0)) == [] and batch.asked == []
    nodes.kept.clear()
    assert isinstance(outcome(releases), ev.HostsReleased)
    nodes.kept.add("n3")
    monkeypatch.setattr(release, "KEPT_WITHIN_S", -1.0)
    releases.begin(("n3",))
    event = outcome(releases)
    assert isinstance(event, ev.ReleaseFailed) and "on their way" in event.error
    assert batch.asked == [("n2",)]


def test_where_it_cannot_be_it_is_said_and_off() -> None:
    hosts = AllocatedHost(name="a"), AllocatedHost(name="b")
    several, one = (Allocation(kind="slurm", id="7", hosts=some) for some in (hosts, hosts[:1]))
    said: list[str] = []
    assert release_after_s(None, Local(), several, 1.0, said.append) is None and said == []
    assert release_after_s(60.0, Slurm({}), several, 20.0, said.append) == 1200.0 and said == []
    assert release_after_s(60.0, Slurm({}), one, 20.0, said.append) is None
    assert release_after_s(60.0, Local(), several, 20.0, said.append) is None
    assert release_after_s(60.0, Local(), one, 20.0, said.append, joinable=True) == 1200.0
    assert [line.split(": ")[1] for line in said] == [
        "this allocation has one host alone",
        "no batch system here takes hosts back",
    ]


def test_a_host_that_has_joined_is_sent_home_and_no_batch_system_asked() -> None:
    batch, nodes, said = Batch(), Nodes(guests=("far",)), list[str]()
    releases = HostReleases(batch, nodes, tell=said.append)
    releases.begin(("far",))
    assert outcome(releases) == ev.HostsReleased(at=7.0, hosts=("far",))
    assert nodes.calls == [("releasing", ("far",)), ("released", ("far",))]
    assert batch.asked == [] and said == ["host far left the run"]
