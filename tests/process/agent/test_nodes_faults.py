"""Node agents, hosts, commands and the head itself fail; nothing may go on that should not."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from nodeplan import plan
from places import ROOT

from hpcsched.agent.node import guard
from hpcsched.batch.base import AllocatedHost
from hpcsched.batch.local import Local
from hpcsched.contract.orders import Resize, encode
from hpcsched.devices import Sample
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LOST
from hpcsched.launch.remote import host, launcher, protocol, sessions
from hpcsched.launch.remote.keys import read_join, write_join
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.testing.nodes import DEADLINE_S, code_of, local_hosts, pump_until, written

WAITER = "trap 'exit 75' TSTP; echo $$ >pid.$RANK; while :; do sleep 30 & wait; done"


def waiting(hosts: RemoteLauncher[Sample], folder: Path) -> tuple[launcher.RemoteWorkers, list[int]]:
    """An attempt over all devices, running as the head knows too, and its ranks' pids."""
    workers = hosts.launch(plan(hosts, folder, WAITER))
    files = [folder / f"pid.{rank}" for rank in range(len(hosts.inventory()))]
    pump_until(hosts, lambda: written(files) and workers.living == len(files))
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


def agent_pid(hosts: RemoteLauncher[Sample], name: str) -> int:
    hello = hosts._nodes[name].hello
    assert hello is not None
    return hello.pid


def leap(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], bool]) -> None:
    """The head's clock is DEADLINE_S ahead once this holds: what then still has to happen comes too late."""

    def monotonic() -> float:
        return time.monotonic() + (DEADLINE_S if condition() else 0.0)

    for module in (sessions, launcher):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, time=time.time))


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection is proof however long this process stood still; nothing else is in time."""
    monkeypatch.setattr(sessions, "STALL_S", DEADLINE_S)
    monkeypatch.setattr(host, "CLOSED_S", DEADLINE_S)
    monkeypatch.setattr(protocol, "silence_s", lambda grace_s, holds_s: 2 * DEADLINE_S)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed sooner, and before ZeroMQ notices it; what the guard and the kernel take stays."""
    monkeypatch.setattr(sessions, "LOST_NODE_S", 4.0)
    monkeypatch.setattr(host, "TERMINATED_S", 0.2)
    monkeypatch.setattr(sessions, "SILENCE_NOTICE_S", 0.2)
    monkeypatch.setattr(protocol, "silence_s", lambda grace_s, holds_s: 6.0)


@pytest.mark.usefixtures("trusting")
def test_a_killed_node_agent(tmp_path: Path) -> None:
    said: list[str] = []
    with local_hosts(tmp_path, say=said.append) as hosts:
        workers, pids = waiting(hosts, tmp_path)
        began = time.monotonic()
        os.kill(agent_pid(hosts, "b"), signal.SIGKILL)
        pump_until(hosts, lambda: bool(hosts.lost()))
        why = "host b was lost: `python3.11` was ended by SIGKILL".replace(
            "python3.11", Path(sys.executable).name
        )
        assert said == [why]
        assert [(s.healthy, s.why) for s in hosts.sample()] == [(True, "")] * 2 + [(False, why)] * 2
        with pytest.raises(LaunchError, match="host b was lost") as caught:
            hosts.launch(plan(hosts, tmp_path, "exit 0"))
        assert caught.value.transient and caught.value.host_fault
        pump_until(hosts, workers.failed_early)
        assert time.monotonic() - began > guard.GRACE_S  # not before its workers are surely gone
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
        assert said[0] == "host a was lost: no word for 4 s"
        words = r"host a is silent: its jobs start elsewhere in \d s, when surely nothing of them is left"
        assert len(said) == 2 and re.match(words, said[1])
        assert [alive(pid) for pid in pids] == [False, False, True, True]
        workers.signal(signal.SIGKILL)
        assert code_of(hosts, workers) == LOST
        workers.close()


def test_a_head_that_stalls_loses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_hosts(tmp_path) as hosts:
        workers, _ = waiting(hosts, tmp_path)
        leap(monkeypatch, lambda: True)
        with monkeypatch.context() as patch:
            # ZeroMQ's thread stood still too: nothing of what they said meanwhile has been taken in.
            patch.setattr(hosts._head_socket, "receive", lambda: iter(()))
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
        pump_until(hosts, lambda: not any(alive(pid) for pid in pids[2:]))
        pump_until(hosts, workers.failed_early)
        workers.signal(signal.SIGKILL)
        assert code_of(hosts, workers) == LOST
        workers.close()
        pump_until(hosts, command.look)


def test_a_lost_one_that_still_hears_us_is_sent_away_at_once(tmp_path: Path) -> None:
    """Nobody waits for a word from it, which may never come."""
    with local_hosts(tmp_path) as hosts:
        workers, pids = waiting(hosts, tmp_path)
        hosts._lose(hosts._nodes["b"], "a test says so")
        wait_until(lambda: not any(alive(pid) for pid in pids[2:]))  # without taking in what it says
        assert "leaving: the head says so" in (tmp_path / "nodes.log").read_text()
        pump_until(hosts, workers.failed_early)
        workers.signal(signal.SIGKILL)
        assert code_of(hosts, workers) == LOST
        workers.close()


HEAD = """
import os, sys, time
from pathlib import Path
from hpcsched.testing.nodes import local_hosts, pump_until
from nodeplan import plan
folder, script = Path(sys.argv[1]), sys.argv[2]
with local_hosts(folder, devices="cpu:1", grace_s=60.0) as hosts:
    workers = hosts.launch(plan(hosts, folder, script))
    (folder / "agents").write_text(" ".join(str(n.hello.pid) for n in hosts._nodes.values()) + "\\n")
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
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    head = subprocess.Popen([sys.executable, "-c", HEAD, str(tmp_path), script], env=environ)
    try:
        files = [tmp_path / name for name in ("agents", "pid.0", "pid.1")]
        wait_until(lambda: written(files))
        pids = [int(pid) for file in files for pid in file.read_text().split()]
    finally:
        head.kill()
        head.wait()
    wait_until(lambda: not any(alive(pid) for pid in pids), deadline_s=30)  # not the whole grace
    assert [(tmp_path / f"saved.{rank}").read_text() for rank in (0, 1)] == [f"{sig}\n"] * 2
    assert (tmp_path / "nodes.log").read_text().count("leaving: the head is gone") == 2


def send_away(hosts: RemoteLauncher[Sample], name: str, log: Path) -> None:
    """Until it leaves, as it does at the third SIGTERM: two that come at once may arrive as one."""

    def told() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return f"{name}: leaving: third SIGTERM" in log.read_text()

    pid = agent_pid(hosts, name)
    wait_until(told)


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
        send_away(hosts, "a", log)
        pump_until(hosts, lambda: set(hosts.lost()) == {"a"})  # by its word or its end: who is first?


def test_a_node_agent_that_leaves_sees_its_jobs_off(tmp_path: Path) -> None:
    """The head starts nothing there any more; what runs there ends by its own code."""
    with local_hosts(tmp_path) as hosts:
        saving = "while ! test -e saved; do sleep 0.05; done; exit 75"
        saves = f"trap '{saving}' TERM; touch up.$RANK; while :; do sleep 30 & wait; done"
        workers = hosts.launch(plan(hosts, tmp_path, saves, on="b"))
        pump_until(hosts, lambda: len(list(tmp_path.glob("up.*"))) == 2)
        os.kill(agent_pid(hosts, "b"), signal.SIGTERM)
        log = tmp_path / "nodes.log"
        pump_until(hosts, lambda: "serving on" in log.read_text())
        send_away(hosts, "b", log)
        late = hosts.launch(plan(hosts, tmp_path, "exit 0"))  # the head does not know yet
        with pytest.raises(LaunchError, match="host b: b's node agent leaves: third SIGTERM") as caught:
            code_of(hosts, late)
        assert caught.value.transient and caught.value.host_fault
        late.close()
        assert hosts.lost() == {"b": "node agent leaves: third SIGTERM"}
        with pytest.raises(LaunchError, match="host b was lost: node agent leaves") as caught:
            hosts.launch(plan(hosts, tmp_path, "exit 0"))
        assert caught.value.host_fault
        assert workers.reap() is None
        (tmp_path / "saved").touch()
        assert code_of(hosts, workers) == 75
        workers.close()
        command = hosts._nodes["b"].command
        assert command is not None
        pump_until(hosts, command.look)
        assert "exit code 0" in command.why


@pytest.mark.usefixtures("trusting")
def test_a_host_that_is_lost_before_it_has_launched(tmp_path: Path) -> None:
    """The job is not to blame."""
    with local_hosts(tmp_path, devices="replay:1") as hosts:
        os.kill(agent_pid(hosts, "b"), signal.SIGSTOP)
        workers = hosts.launch(plan(hosts, tmp_path, "exec sleep 30", on="b"))
        os.kill(agent_pid(hosts, "b"), signal.SIGKILL)
        with pytest.raises(LaunchError, match="host b was lost: ") as caught:
            code_of(hosts, workers)
        assert caught.value.transient and caught.value.host_fault
        workers.close()


class Wire:
    """Carries all connections to an endpoint, while it is not cut: then nothing of either side is told."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._to = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self._streams: list[socket.socket] = []
        self._cut = threading.Event()
        self.swallowed = 0
        """How many bytes have got lost, about: both ways are counted at once."""
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                pair = [self._server.accept()[0], socket.create_connection(self._to)]
                self._streams += pair
                for one, other in (pair, pair[::-1]):
                    self._threads.append(threading.Thread(target=self._carry, args=(one, other)))
                    self._threads[-1].start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if self._cut.is_set():
                    self.swallowed += len(data)
                else:
                    other.sendall(data)

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        """Break the connections of which a part was lost, and carry those that come."""
        self._break(self._streams)
        self._cut.clear()

    @staticmethod
    def _break(streams: Sequence[socket.socket]) -> None:
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._break([self._server, *self._streams])
        for thread in self._threads:
            thread.join()
        for stream in (self._server, *self._streams):
            stream.close()


@pytest.mark.slow
def test_a_network_that_is_cut(tmp_path: Path) -> None:
    """Ending the command ends nothing on the host: its workers go on until its agent has missed the head."""
    wires: list[Wire] = []
    said: list[str] = []
    hosts = make(through(wires, tmp_path), tmp_path, names=("a",), say=said.append, grace_s=1.0)
    try:
        hosts.start(DEADLINE_S)
        script = (
            "trap 'echo saving >saving' TERM; echo $$ >pid; while :; do date +%s.%N >>writes; sleep 0.1; done"
        )
        workers = hosts.launch(plan(hosts, tmp_path, script))
        pump_until(hosts, lambda: workers.living and (tmp_path / "writes").exists())
        wires[0].cut()
        began = time.monotonic()
        pump_until(hosts, lambda: bool(hosts.lost()))
        assert time.monotonic() - began < 20 and not hosts.sample()[0].healthy
        assert code_of(hosts, workers, deadline_s=60) == LOST
        over = time.time()
        workers.close()
        assert said[0] == "host a was lost: no word for 6 s"
        assert sum("host a is silent: its jobs start elsewhere in" in line for line in said) == 1
        assert (tmp_path / "saving").exists()
        assert not alive(int((tmp_path / "pid").read_text()))
        assert float((tmp_path / "writes").read_text().split()[-1]) < over
        wait_until(lambda: not alive(int((tmp_path / "agent").read_text())))
    finally:
        hosts.close()
        for one in wires:
            one.close()


def test_orders_on_their_way_when_a_connection_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come once and in order when it has been made anew."""
    monkeypatch.setattr(sessions, "LOST_NODE_S", DEADLINE_S)
    wires: list[Wire] = []
    hosts = make(through(wires, tmp_path), tmp_path, names=("a",), grace_s=1.0)
    try:
        hosts.start(DEADLINE_S)
        workers = hosts.launch(plan(hosts, tmp_path, "echo >up; exec cat <&$HPCSCHED_CONTROL_FD >>orders"))
        pump_until(hosts, (tmp_path / "up").exists)
        wires[0].cut()
        keep = tuple(range(1900))  # 10 KB each
        orders = [Resize(attempt=n, world_size=1900, keep=keep, one_host=True) for n in range(1, 5)]
        for order in orders[:3]:
            workers.tell(order)
        pump_until(hosts, lambda: wires[0].swallowed > 30_000)
        wires[0].mend()
        workers.tell(orders[3])
        pump_until(hosts, lambda: (tmp_path / "orders").read_text().count("\n") >= 4)
        assert (tmp_path / "orders").read_bytes() == b"".join(encode(order) for order in orders)
        workers.signal(signal.SIGKILL)
        assert code_of(hosts, workers) == 128 + signal.SIGKILL
        workers.close()
    finally:
        hosts.close()
        for one in wires:
            one.close()


def through(
    wires: list[Wire], folder: Path
) -> Callable[[Sequence[AllocatedHost], Sequence[str]], list[tuple[str, ...]]]:
    """A command for host a, that ends nothing by its own end; its node agent comes through a new wire."""

    def commands(hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        join = read_join(folder / argv[-1])
        wires.append(Wire(join.endpoint))
        path = folder / "other" / Path(argv[-1]).name
        path.parent.mkdir()
        write_join(path, msgspec.structs.replace(join, endpoint=wires[0].endpoint))
        script = 'setsid "$@" & echo $! >agent; exec sleep 600'
        return [("sh", "-c", f"cd {folder}; {script}", "sh", *argv[:-1], str(path), "--name", "a")]

    return commands


def test_a_stubborn_orphan_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets its grace although the node agents are to come sooner."""
    monkeypatch.setattr(sessions, "ORPHANS_GRACE_S", 2 * DEADLINE_S)
    run_id = f"test-stubborn-{os.getpid()}"
    stubborn = "trap '' TERM; echo >up; while :; do sleep 1; done"
    environ = {**os.environ, "HPCSCHED_RUN_ID": run_id}
    with subprocess.Popen(
        ["sh", "-c", stubborn], env=environ, cwd=tmp_path, start_new_session=True
    ) as orphan:
        wait_until((tmp_path / "up").exists)
        said: list[str] = []
        batch = Local(("a",), launcher="local")
        hosts = make(batch.on_hosts, tmp_path, names=("a",), run_id=run_id, say=said.append, grace_s=1.0)
        leap(monkeypatch, lambda: bool(said))
        try:
            hosts.start(DEADLINE_S)
            assert orphan.wait(timeout=0) == -signal.SIGKILL
            assert said == ["host a still has processes of an earlier life: they are being ended"]
        finally:
            hosts.close()
            orphan.kill()


def test_an_earlier_life_s_workers_are_ended_first(tmp_path: Path) -> None:
    run_id = f"test-orphan-{os.getpid()}"
    with subprocess.Popen(
        ["sleep", "600"], env={**os.environ, "HPCSCHED_RUN_ID": run_id}, start_new_session=True
    ) as orphan:
        batch = Local(("a",), launcher="local")
        hosts = make(batch.on_hosts, tmp_path, names=("a",), run_id=run_id)
        try:
            hosts.start(DEADLINE_S)
            assert orphan.wait(timeout=0) == -signal.SIGTERM
        finally:
            hosts.close()
            orphan.kill()


# --- starting ---------------------------------------------------------------------------------------


def make(
    commands: Callable[[Sequence[AllocatedHost], Sequence[str]], list[tuple[str, ...]]],
    run_dir: Path,
    *,
    names: Sequence[str] = ("a", "b"),
    say: Callable[[str], None] = lambda line: None,
    run_id: str = f"test-{os.getpid()}",
    devices: str = "replay:1",
    grace_s: float = 30.0,
) -> RemoteLauncher[Sample]:
    return RemoteLauncher(
        hosts=[AllocatedHost(name=name) for name in names],
        commands=commands,
        run_id=run_id,
        run_dir=run_dir,
        devices=devices,
        address="127.0.0.1",
        make_sample=Sample,
        say=say,
        grace_s=grace_s,
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
    assert not caught.value.transient and time.monotonic() - began < 15
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
        hosts.start(DEADLINE_S)


def test_a_host_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commands(hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        return [(*argv, "--name", "a"), ("sh", "-c", "echo waiting for b; exec sleep 120")]

    said: list[str] = []
    hosts = make(commands, tmp_path, say=said.append)
    leap(monkeypatch, lambda: hosts._nodes["a"].hello is not None and written([tmp_path / "nodes.log"]))
    try:
        hosts.start(DEADLINE_S)
        assert said == ["no node agent has come from b: nodes.log ends with: waiting for b"]
        assert hosts.lost() == {"b": "its node agent has not come"}
        assert [d.host for d in hosts.inventory()] == ["a"]
        workers = hosts.launch(plan(hosts, tmp_path, "exit 0"))
        assert code_of(hosts, workers) == 0
        workers.close()
    finally:
        assert hosts.close()


def waits_for(folder: Path) -> str:
    """A script that runs its arguments once `now` is there, and not for ever without it."""
    wait = f"until test -e {folder}/now; do sleep 0.05; done"
    return f"timeout {2 * DEADLINE_S:g} sh -c '{wait}'; exec \"$@\""


def test_one_that_dies_before_all_have_come(tmp_path: Path) -> None:
    def commands(hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        return [(*argv, "--name", "a"), ("sh", "-c", waits_for(tmp_path), "sh", *argv, "--name", "b")]

    hosts = make(commands, tmp_path)

    def kill() -> None:
        wait_until(lambda: hosts._nodes["a"].up)
        os.kill(agent_pid(hosts, "a"), signal.SIGKILL)
        wait_until(lambda: bool(hosts._nodes["a"].why))
        (tmp_path / "now").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        hosts.start(DEADLINE_S)
        assert list(hosts.lost()) == ["a"] and "SIGKILL" in hosts.lost()["a"]
        assert [(d.index, d.host) for d in hosts.inventory()] == [(0, "b")]
        workers = hosts.launch(plan(hosts, tmp_path, "exit 0"))
        assert code_of(hosts, workers) == 0
        workers.close()
    finally:
        killer.join()
        assert hosts.close()


def test_one_that_comes_too_late_or_twice_or_from_elsewhere_is_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commands(hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        return [(*argv, "--name", "a"), ("sh", "-c", waits_for(tmp_path), "sh", *argv, "--name", "b")]

    said: list[str] = []
    hosts = make(commands, tmp_path, say=said.append)
    leap(monkeypatch, lambda: hosts._nodes["a"].hello is not None)
    try:
        hosts.start(DEADLINE_S)
        late = hosts._nodes["b"].command
        assert late is not None and set(hosts.lost()) == {"b"}
        (tmp_path / "now").touch()
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
