"""Who may join a run, and under which names."""

from __future__ import annotations

from math import inf, nan

import pytest

from hpcsched.launch.remote import guests
from hpcsched.launch.remote.guests import Guests
from hpcsched.launch.remote.host import RemoteHost
from hpcsched.launch.remote.protocol import Admitted, Hello, Joining, SentAway


def made(*names: str, welcome: bool = True) -> tuple[Guests, dict[str, RemoteHost]]:
    nodes = {name: RemoteHost(name) for name in names}
    return Guests(nodes, welcome=welcome), nodes


def asks(*hosts: str, of: str = "slurm job 7", by: str = "t", left_s: float | None = None) -> Joining:
    return Joining(allocation=of, token=by, hosts=hosts, left_s=left_s)


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
    hosts, nodes = made("n1", "n1-2")
    assert hosts.take(b"p", asks("n1", "n2"), 0.0) == Admitted(("n1-3", "n2"))
    assert hosts.allocation_of("n1-3") == "slurm job 7" and hosts.allocation_of("n1") == ""
    assert nodes["n2"].guest and not nodes["n1"].guest


def test_who_asks_again_is_the_same_and_tells_when_it_ends() -> None:
    hosts, nodes = made("n1")
    answer = hosts.take(b"p", asks("n2"), 100.0)
    assert hosts.take(b"p", asks("n2", left_s=50.0), 110.0) == answer
    assert hosts.ends() == {}, "its node agent has not come"
    comes(nodes["n2"])
    assert hosts.ends() == {"n2": 160.0}
    hosts.take(b"p", asks("n2", left_s=None), 111.0)
    assert hosts.ends() == {"n2": None}


@pytest.mark.parametrize(("left_s", "end"), [(nan, None), (inf, None), (-5.0, 10.0)])
def test_an_end_that_is_none_is_not_believed(left_s: float, end: float | None) -> None:
    hosts, nodes = made("n1")
    hosts.take(b"p", asks("n2", left_s=left_s), 10.0)
    comes(nodes["n2"])
    assert hosts.ends() == {"n2": end}


def test_an_allocation_joins_once_at_a_time() -> None:
    hosts, nodes = made("n1")
    hosts.take(b"p", asks("n2", by="t"), 0.0)
    again = asks("n2", by="u")
    assert hosts.take(b"q", again, 0.0) == SentAway("slurm job 7 has joined already")
    nodes["n2"].why, nodes["n2"].gone = "it left", True
    assert hosts.take(b"q", again, 0.0) == Admitted(("n2-2",))


def test_one_whose_node_agents_have_never_come_is_in_nobodys_way() -> None:
    hosts, _ = made("n1")
    hosts.take(b"p", asks("n2", by="t"), 0.0)
    again = asks("n2", by="u")
    assert isinstance(hosts.take(b"q", again, guests.SILENT_S), SentAway)
    assert hosts.take(b"q", again, guests.SILENT_S + 1) == Admitted(("n2-2",))


def test_who_has_lost_the_run_joins_again_once_nothing_is_left_there() -> None:
    hosts, nodes = made("n1")
    hosts.take(b"p", asks("n2"), 0.0)
    comes(nodes["n2"])
    assert hosts.take(b"q", asks("n2"), 1.0) == SentAway(guests.LATER)
    nodes["n2"].why, nodes["n2"].fenced = "no word for 6 s", True
    assert hosts.take(b"q", asks("n2"), 2.0) == Admitted(("n2-2",))


def test_who_was_given_back_need_not_ask_again() -> None:
    hosts, nodes = made("n1")
    hosts.take(b"p", asks("n2"), 0.0)
    nodes["n2"].releasing, nodes["n2"].why, nodes["n2"].gone = True, "given back", True
    assert hosts.take(b"q", asks("n2"), 1.0) == SentAway(guests.RELEASED)


@pytest.mark.parametrize("names", [(), ("a", "a"), ("a\n",), ("a" * 256,)])
def test_what_are_no_hosts_is_sent_away(names: tuple[str, ...]) -> None:
    hosts, nodes = made("n1")
    assert isinstance(hosts.take(b"p", asks(*names), 0.0), SentAway)
    assert list(nodes) == ["n1"]


def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "MOST_HOSTS", 2)
    hosts, _ = made("n1")
    assert isinstance(hosts.take(b"p", asks("a", "b"), 0.0), SentAway)
    assert isinstance(hosts.take(b"p", asks("a"), 0.0), Admitted)


def test_a_run_that_takes_nobody_in_says_so() -> None:
    hosts, _ = made("n1", welcome=False)
    assert hosts.take(b"p", asks("n2"), 0.0) == SentAway(guests.NOT_JOINABLE)
