"""Who may join a run, and under which names."""

from __future__ import annotations

from math import inf, nan

import pytest

from hpcsched.launch.remote import guests
from hpcsched.launch.remote.guests import Guests
from hpcsched.launch.remote.host import RemoteHost
from hpcsched.launch.remote.protocol import Admitted, Hello, Joining, SentAway


def made(*names: str, welcome: bool = True) -> tuple[Guests, dict[str, RemoteHost], list[str]]:
    nodes, said = {name: RemoteHost(name) for name in names}, list[str]()
    return Guests(nodes, said.append, welcome=welcome), nodes, said


def asks(*hosts: str, of: str = "slurm job 7", left_s: float | None = None) -> Joining:
    return Joining(allocation=of, hosts=hosts, left_s=left_s)


def comes(node: RemoteHost) -> None:
    node.hello = Hello(
        name=node.name,
        hostname="x",
        pid=1,
        started=1,
        devices=(),
        kind="cpu",
        speed=1.0,
        address="",
        wall=0.0,
    )


def test_hosts_get_names_that_the_run_has_not_had() -> None:
    hosts, nodes, said = made("n1", "n1-2")
    assert hosts.take(b"p", asks("n1", "n2"), 0.0) == Admitted(("n1-3", "n2"))
    assert said == ["slurm job 7 joins the run with hosts n1-3, n2"]
    assert nodes["n2"].guest and not nodes["n1"].guest


def test_who_asks_again_is_the_same_and_tells_when_it_ends() -> None:
    hosts, nodes, said = made("n1")
    answer = hosts.take(b"p", asks("n2"), 100.0)
    assert hosts.take(b"p", asks("n2", left_s=50.0), 110.0) == answer and len(said) == 1
    assert hosts.ends() == {}, "its node agent has not come"
    comes(nodes["n2"])
    assert hosts.ends() == {"n2": 160.0}
    hosts.take(b"p", asks("n2", left_s=None), 111.0)
    assert hosts.ends() == {"n2": None}


@pytest.mark.parametrize(("left_s", "end"), [(nan, None), (inf, None), (-5.0, 10.0)])
def test_an_end_that_is_none_is_not_believed(left_s: float, end: float | None) -> None:
    hosts, nodes, _ = made("n1")
    hosts.take(b"p", asks("n2", left_s=left_s), 10.0)
    comes(nodes["n2"])
    assert hosts.ends() == {"n2": end}


def test_an_allocation_joins_once_at_a_time() -> None:
    hosts, nodes, _ = made("n1")
    hosts.take(b"p", asks("n2"), 0.0)
    assert hosts.take(b"q", asks("n2"), 0.0) == SentAway("slurm job 7 has joined already")
    nodes["n2"].why, nodes["n2"].gone = "it left", True
    assert hosts.take(b"q", asks("n2"), 0.0) == Admitted(("n2-2",))


@pytest.mark.parametrize("names", [(), ("a", "a"), ("a\n",), ("a" * 256,)])
def test_what_are_no_hosts_is_sent_away(names: tuple[str, ...]) -> None:
    hosts, nodes, said = made("n1")
    assert isinstance(hosts.take(b"p", asks(*names), 0.0), SentAway)
    assert list(nodes) == ["n1"] and not said


def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "MOST_HOSTS", 2)
    hosts, _, _ = made("n1")
    assert isinstance(hosts.take(b"p", asks("a", "b"), 0.0), SentAway)
    assert isinstance(hosts.take(b"p", asks("a"), 0.0), Admitted)


def test_a_run_that_takes_nobody_in_says_so() -> None:
    hosts, _, _ = made("n1", welcome=False)
    assert hosts.take(b"p", asks("n2"), 0.0) == SentAway(guests.NOT_JOINABLE)
