"""Attempts on two "hosts" of this machine are told to become others: orders, ranks that join or leave."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hpcsched.contract.orders import Resize, Suspend, decode
from hpcsched.devices import Sample
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.testing.nodes import code_of, local_hosts, no_descriptor_left_open, pump_until

QUICK = Suspend(quick=True)
RESIZE = Resize(attempt=3, world_size=4, keep=(0,), one_host=False)

ECHO = """
import os, signal
signal.signal(signal.SIGTSTP, lambda number, frame: os._exit(75))
rank = os.environ["RANK"]
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HPCSCHED_JOINING"]
with open(f"{rank}.new", "w") as file:
    print(*(os.environ.get(name, "-") for name in names), file=file)
os.rename(f"{rank}.new", f"up.{rank}")
if "HPCSCHED_CONTROL_FD" in os.environ:
    with open(f"orders.{rank}", "a", buffering=1) as file:
        for line in os.fdopen(int(os.environ["HPCSCHED_CONTROL_FD"])):
            file.write(line)
while True:
    signal.pause()
"""
"""Ranks that say who they are, note their orders, and wait for the signal to save."""

LEAVER = (
    "trap 'exit 75' TSTP; echo >up.$RANK; "
    "while :; do test -e leave.$RANK && exit $(cat leave.$RANK); sleep 0.05; done"
)
"""Ranks that leave with the code that they are given in a file."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteLauncher[Sample]]:
    with local_hosts(tmp_path_factory.mktemp("run")) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def no_leaks(hosts: RemoteLauncher[Sample]) -> Iterator[None]:
    with no_descriptor_left_open():
        yield


def plan(hosts: RemoteLauncher[Sample], folder: Path, argv: Sequence[str], gpus: Sequence[int]) -> LaunchPlan:
    return LaunchPlan(
        job_id=3,
        attempt=2,
        argv=tuple(argv),
        cwd=folder,
        folder=folder,
        output=folder / "out",
        devices=tuple(hosts.inventory()[gpu] for gpu in gpus),
    )


def orders(folder: Path, rank: int = 0) -> list[object]:
    file = folder / f"orders.{rank}"
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [order for line in lines for order in decode(line)]


def said(folder: Path, rank: int) -> list[str]:
    return (folder / f"up.{rank}").read_text().split()


def test_orders_reach_rank_0_and_nobody_else(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    workers = hosts.launch(plan(hosts, tmp_path, [sys.executable, "-S", "-c", ECHO], (0, 1, 2, 3)))
    workers.tell(QUICK)  # before it has started
    pump_until(hosts, lambda: len(list(tmp_path.glob("up.*"))) == 4)
    workers.tell(RESIZE)
    pump_until(hosts, lambda: len(orders(tmp_path)) == 2)
    workers.signal(signal.SIGTSTP)
    assert code_of(hosts, workers) == 75
    workers.tell(QUICK)  # to nobody
    workers.close()
    assert orders(tmp_path) == [QUICK, RESIZE]
    assert [file.name for file in tmp_path.glob("orders.*")] == ["orders.0"]


def test_ranks_join_on_other_hosts(
    hosts: RemoteLauncher[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that runs alone may meet others on the loopback; those that join know where it is for them."""
    node = hosts._nodes["a"]
    assert node.hello is not None
    monkeypatch.setattr(node, "hello", msgspec.structs.replace(node.hello, address="127.0.0.9"))
    program = [sys.executable, "-S", "-c", ECHO]
    first = hosts.launch(plan(hosts, tmp_path, program, (0,)))
    # Its first rank may say where it is before its node agent does.
    pump_until(hosts, lambda: bool(first.where) and (tmp_path / "up.0").exists())
    rank, size, local, address, port, joining = said(tmp_path, 0)
    assert [rank, size, local, address, joining] == ["0", "1", "0", "127.0.0.1", "-"]
    assert first.where == f"127.0.0.9:{port}"
    wanted = replace(
        plan(hosts, tmp_path, program, (1, 2, 3)), attempt=3, first_rank=1, world_size=4, joins=first.where
    )
    joiners = hosts.launch(wanted)
    pump_until(hosts, lambda: len(list(tmp_path.glob("up.*"))) == 4)
    assert [said(tmp_path, rank) for rank in (1, 2, 3)] == [
        ["1", "4", "0", "127.0.0.9", port, "1"],
        ["2", "4", "0", "127.0.0.9", port, "1"],
        ["3", "4", "1", "127.0.0.9", port, "1"],
    ]
    assert (first.living, joiners.living) == (1, 3) and joiners.where == first.where
    for workers in (joiners, first):
        workers.signal(signal.SIGTSTP)
        assert code_of(hosts, workers) == 75
        workers.close()


def test_no_two_hosts_write_to_one_file(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    say = ["sh", "-c", "echo $RANK; exec sleep 600"]
    first = hosts.launch(plan(hosts, tmp_path, say, (0,)))
    pump_until(hosts, lambda: bool(first.where))
    crews = [first]
    for rank, gpus in ((1, (2, 3)), (3, (1,))):
        joining = replace(plan(hosts, tmp_path, say, gpus), first_rank=rank, world_size=4, joins=first.where)
        crews.append(hosts.launch(joining))
    files = {tmp_path / "out": ["0", "3"], tmp_path / "out.b": ["1", "2"]}
    pump_until(
        hosts, lambda: all(f.exists() and sorted(f.read_text().split()) == said for f, said in files.items())
    )
    for workers in crews:
        workers.signal(signal.SIGKILL)
        assert code_of(hosts, workers) == 128 + signal.SIGKILL
        workers.close()


@pytest.mark.parametrize("code", [0, 75])
def test_ranks_that_leave_are_counted(hosts: RemoteLauncher[Sample], tmp_path: Path, code: int) -> None:
    workers = hosts.launch(plan(hosts, tmp_path, ["sh", "-c", LEAVER], (0, 1, 2, 3)))
    assert workers.living == 0
    pump_until(hosts, lambda: len(list(tmp_path.glob("up.*"))) == 4 == workers.living)
    for rank, left in ((1, 3), (3, 2), (2, 1)):
        (tmp_path / f"{rank}.new").write_text("0")
        (tmp_path / f"{rank}.new").rename(tmp_path / f"leave.{rank}")
        pump_until(hosts, lambda left=left: workers.living == left)  # type: ignore[misc]
        assert workers.reap() is None and not workers.failed_early()
    if code:
        workers.signal(signal.SIGTSTP)
    else:
        (tmp_path / "0.new").write_text("0")
        (tmp_path / "0.new").rename(tmp_path / "leave.0")
    assert code_of(hosts, workers) == code
    assert workers.living == 0
    workers.close()


def test_the_answer_to_a_resize_is_told(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    script = (
        "trap 'exit 75' TSTP; echo first >new; mv new ready.2; "
        'while read order; do case "$order" in *\'"attempt": 3\'*) echo no >new; mv new refused.3;; '
        "*) echo yes >new; mv new ready.4;; esac; done <&$HPCSCHED_CONTROL_FD"
    )
    for name in ("refused.3", "ready.4"):
        (tmp_path / name).write_text("of an earlier life\n")
    workers = hosts.launch(plan(hosts, tmp_path, ["sh", "-c", script], (0,)))
    pump_until(hosts, lambda: workers.ready == b"first\n")
    workers.expect(3)
    workers.tell(RESIZE)
    pump_until(hosts, lambda: workers.refused == b"no\n")
    assert workers.ready is None
    workers.expect(4)
    workers.tell(replace(RESIZE, attempt=4))
    pump_until(hosts, lambda: workers.ready == b"yes\n")
    assert workers.refused is None
    workers.signal(signal.SIGTSTP)
    assert code_of(hosts, workers) == 75
    workers.close()
