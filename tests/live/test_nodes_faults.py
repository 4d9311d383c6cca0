"""Node agents, hosts, commands and the head itself fail; nothing may go on that should not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hpcsched.batch.base import Host
from hpcsched.batch.local import Local
from hpcsched.devices import Sample
from hpcsched.errors import LaunchError
from hpcsched.launch import host, remote
from hpcsched.launch.base import LOST, LaunchPlan
from hpcsched.launch.remote import Hosts
from hpcsched.testing.nodes import DEADLINE_S, code_of, local_hosts, pump_until

WAITER = "trap 'exit 75' TSTP; echo $$ >pid.$RANK; while :; do sleep 30 & wait; done"


def plan(hosts: Hosts[Sample], folder: Path, script: str, *, on: str | None = None) -> LaunchPlan:
    return LaunchPlan(
        job_id=1,
        attempt=1,
        argv=("sh", "-c", script),
        env={"HPCSCHED_RUN_ID": hosts._run_id},
        cwd=folder,
        folder=folder,
        output=folder / "out",
        devices=tuple(d for d in hosts.inventory() if on in (None, d.host)),
    )


def waiting(hosts: Hosts[Sample], folder: Path) -> tuple[remote.RemoteWorkers, list[int]]:
    """An attempt over all devices, running, and its ranks' pids."""
    workers = hosts.launch(plan(hosts, folder, WAITER))
    files = [folder / f"pid.{rank}" for rank in range(len(hosts.inventory()))]
    pump_until(hosts, lambda: all(f.exists() and f.read_text().endswith("\n") for f in files))
    return workers, [int(f.read_text()) for f in files]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(condition: Callable[[], bool], *, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def agent_pid(hosts: Hosts[Sample], name: str) -> int:
    hello = hosts._nodes[name].hello
    assert hello is not None
    return hello.pid


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed sooner; what the guard and the kernel take stays as it is."""
    monkeypatch.setattr(remote, "LOST_NODE_S", 2.5)
    monkeypatch.setattr(host, "TERMINATED_S", 0.2)


def test_a_killed_node_agent(tmp_path: Path) -> None:
    said: list[str] = []
    with local_hosts(tmp_path, say=said.append) as hosts:
        workers, pids = waiting(hosts, tmp_path)
        began = time.monotonic()
        os.kill(agent_pid(hosts, "b"), signal.SIGKILL)
        pump_until(hosts, lambda: bool(hosts.lost()))
        assert time.monotonic() - began < 1
        why = "host b was lost: `python3.11` was ended by SIGKILL".replace(
            "python3.11", Path(sys.executable).name
        )
        assert said == [why]
        assert [(s.healthy, s.why) for s in hosts.sample()] == [(True, "")] * 2 + [(False, why)] * 2
        with pytest.raises(LaunchError, match="host b was lost") as caught:
            hosts.launch(plan(hosts, tmp_path, "exit 0"))
        assert caught.value.transient
        assert not workers.failed_early()  # not before its workers are surely gone
        pump_until(hosts, workers.failed_early)
        assert time.monotonic() - began < 10
        assert [alive(pid) for pid in pids] == [True, True, False, False]
        workers.signal(signal.SIGTERM)
        assert code_of(hosts, workers) == LOST
        workers.close()
        again = hosts.launch(plan(hosts, tmp_path, "exit 0", on="a"))
        assert code_of(hosts, again) == 0
        again.close()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_node_agent_that_hangs(tmp_path: Path) -> None:
    said: list[str] = []
    with local_hosts(tmp_path, say=said.append) as hosts:
        workers, pids = waiting(hosts, tmp_path)
        os.kill(agent_pid(hosts, "a"), signal.SIGSTOP)
        pump_until(hosts, workers.failed_early)
        assert said == ["host a was lost: no word for 2.5 s"]
        assert [alive(pid) for pid in pids] == [False, False, True, True]
        workers.signal(signal.SIGKILL)
        assert code_of(hosts, workers) == LOST
        workers.close()


def test_a_head_that_stalls_loses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOST_NODE_S", 1.5)
    with local_hosts(tmp_path) as hosts:
        workers, _ = waiting(hosts, tmp_path)
        time.sleep(2.5)
        hosts.pump()
        assert not hosts.lost()
        workers.signal(signal.SIGTSTP)
        assert code_of(hosts, workers) == 75
        workers.close()


def test_a_lost_one_that_speaks_again_is_sent_away(tmp_path: Path) -> None:
    """As after a network that was cut: its jobs run elsewhere by now."""
    with local_hosts(tmp_path) as hosts:
        workers, pids = waiting(hosts, tmp_path)
        node = hosts._nodes["b"]
        command, node.command = node.command, None  # out of reach
        assert command is not None
        peer, node.peer = node.peer, b"nobody"
        hosts._lose(node, "a test says so")
        assert all(alive(pid) for pid in pids)
        node.peer = peer
        pump_until(hosts, lambda: not any(alive(pid) for pid in pids[2:]), deadline_s=3)
        pump_until(hosts, workers.failed_early)
        workers.signal(signal.SIGKILL)
        assert code_of(hosts, workers) == LOST
        workers.close()
        pump_until(hosts, command.look)


HEAD = """
import os, sys, time
from pathlib import Path
from hpcsched.testing.nodes import local_hosts, pump_until
from test_nodes_faults import plan
folder, script = Path(sys.argv[1]), sys.argv[2]
with local_hosts(folder, devices="cpu:1") as hosts:
    workers = hosts.launch(plan(hosts, folder, script))
    (folder / "agents").write_text(" ".join(str(n.hello.pid) for n in hosts._nodes.values()))
    pump_until(hosts, lambda: False, deadline_s=60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_the_head_is_killed(tmp_path: Path, known: bool) -> None:
    """Workers that have said that they know SIGTSTP get it, others SIGTERM; the agents then leave."""
    ready = "touch ready.1; " if known else ""
    sig = "TSTP" if known else "TERM"
    save = f"trap 'echo {sig} >saved.$RANK; exit 75' {sig}; {ready}echo $$ >pid.$RANK; "
    script = save + "while :; do sleep 30 & wait; done"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    head = subprocess.Popen([sys.executable, "-c", HEAD, str(tmp_path), script], env=environ)
    try:
        wait_until(lambda: len([*tmp_path.glob("pid.*"), *tmp_path.glob("agents")]) == 3)
        agents = [int(pid) for pid in (tmp_path / "agents").read_text().split()]
        pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in (0, 1)]
    finally:
        head.kill()
        head.wait()
    began = time.monotonic()
    wait_until(lambda: not any(alive(pid) for pid in [*agents, *pids]))
    assert time.monotonic() - began < 12
    assert [(tmp_path / f"saved.{rank}").read_text() for rank in (0, 1)] == [f"{sig}\n"] * 2
    assert (tmp_path / "nodes.log").read_text().count("leaving: the head is gone") == 2


def test_sigterm_to_a_node_agent_leaves_the_head_in_charge(tmp_path: Path) -> None:
    with local_hosts(tmp_path) as hosts:
        workers, _ = waiting(hosts, tmp_path)
        for name in "ab":
            os.kill(agent_pid(hosts, name), signal.SIGTERM)
        log = tmp_path / "nodes.log"
        pump_until(hosts, lambda: log.read_text().count("serving on") == 2)
        workers.signal(signal.SIGTSTP)
        assert code_of(hosts, workers) == 75  # neither 143 nor lost
        workers.close()
        os.kill(agent_pid(hosts, "a"), signal.SIGTERM)
        pump_until(hosts, lambda: set(hosts.lost()) == {"a"})
        assert "second SIGTERM" in hosts.lost()["a"]


def test_an_earlier_life_s_workers_are_ended_first(tmp_path: Path) -> None:
    with subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "HPCSCHED_RUN_ID": "test-orphan"}, start_new_session=True
    ) as orphan:
        batch = Local(("a",), launcher="local")
        hosts = make(batch.on_hosts, tmp_path, names=("a",), run_id="test-orphan")
        try:
            hosts.start(DEADLINE_S)
            assert orphan.wait(timeout=0) == -signal.SIGTERM
        finally:
            hosts.close()
            orphan.kill()


# --- starting ---------------------------------------------------------------------------------------


def make(
    commands: Callable[[Sequence[Host], Sequence[str]], list[tuple[str, ...]]],
    run_dir: Path,
    *,
    names: Sequence[str] = ("a", "b"),
    say: Callable[[str], None] = lambda line: None,
    run_id: str = "test",
    devices: str = "replay:1",
) -> Hosts[Sample]:
    return Hosts(
        hosts=[Host(name=name) for name in names],
        commands=commands,
        run_id=run_id,
        run_dir=run_dir,
        devices=devices,
        address="127.0.0.1",
        make_sample=Sample,
        say=say,
    )


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    hosts = make(lambda hosts, argv: [("no-such-srun", *argv)], tmp_path)
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match="no node agent has come from a, b: no-such-srun: No such file"
    ) as caught:
        hosts.start(30)
    assert not caught.value.transient and time.monotonic() - began < 3
    assert not list(tmp_path.glob("join-*"))


def test_a_command_that_fails_at_once(tmp_path: Path) -> None:
    script = "echo 'srun: error: Invalid job id'; exit 3"
    hosts = make(lambda hosts, argv: [("sh", "-c", script) for _ in hosts], tmp_path)
    words = "`sh` ended with exit code 3; nodes.log ends with: srun: error: Invalid job id"
    with pytest.raises(LaunchError, match=words):
        hosts.start(30)


def test_devices_that_cannot_be_opened(tmp_path: Path) -> None:
    hosts = make(Local(launcher="local").on_hosts, tmp_path, devices="cuda:77")
    with pytest.raises(LaunchError, match="77"):
        hosts.start(30)


def test_a_host_that_never_comes(tmp_path: Path) -> None:
    def commands(hosts: Sequence[Host], argv: Sequence[str]) -> list[tuple[str, ...]]:
        return [(*argv, "--name", "a"), ("sh", "-c", "echo waiting for b; exec sleep 60")]

    said: list[str] = []
    hosts = make(commands, tmp_path, say=said.append)
    try:
        hosts.start(1.5)
        assert said == ["no node agent has come from b: nodes.log ends with: waiting for b"]
        assert hosts.lost() == {"b": "its node agent has not come"}
        assert [d.host for d in hosts.inventory()] == ["a"]
        workers = hosts.launch(plan(hosts, tmp_path, "exit 0"))
        assert code_of(hosts, workers) == 0
        workers.close()
    finally:
        assert hosts.close()


def test_one_that_comes_too_late_or_twice_or_from_elsewhere_is_sent_away(tmp_path: Path) -> None:
    def commands(hosts: Sequence[Host], argv: Sequence[str]) -> list[tuple[str, ...]]:
        return [(*argv, "--name", "a"), ("sh", "-c", 'sleep 1; exec "$@"', "sh", *argv, "--name", "b")]

    said: list[str] = []
    hosts = make(commands, tmp_path, say=said.append)
    try:
        hosts.start(0.7)
        late = hosts._nodes["b"].command
        assert late is not None and set(hosts.lost()) == {"b"}
        pump_until(hosts, lambda: bool(late.look()))
        assert "exit code 0" in late.why
        argv = [sys.executable, "-m", "hpcsched.agent.node", "--join", str(hosts._join), "--name", "a"]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as second:
            pump_until(hosts, lambda: second.poll() == 0)
        assert "says it is a, which has come twice" in said[-1]
        workers = hosts.launch(plan(hosts, tmp_path, "exit 0"))
        assert code_of(hosts, workers) == 0
        workers.close()
    finally:
        assert hosts.close()


def test_no_address_to_listen_on(tmp_path: Path) -> None:
    hosts = make(Local().on_hosts, tmp_path)
    hosts._address = "192.0.2.1"
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1"):
        hosts.start(5)
