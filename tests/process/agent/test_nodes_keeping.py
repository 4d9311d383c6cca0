"""What node agents start beside attempts, keepers of states and warm processes: none outlives them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.agent.node import guard
from hpcsched.devices import Sample
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.orphans import Process, find_orphans
from hpcsched.launch.remote import host, launcher, protocol, sessions
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.testing.nodes import DEADLINE_S, code_of, local_hosts, pump_until, written

HELD = '{"step": 9, "samples": 90}'

KEEPER = """
import os, signal, sys, time
if "hpcsched.worker.keeper" in sys.orig_argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = os.environ["HPCSCHED_JOB_DIR"]
    with open(f"{folder}/keeper", "w") as file:
        print(os.environ["HPCSCHED_NODE"], os.environ["HPCSCHED_ATTEMPT"], file=file)
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
    with open(f"{folder}/STATE.json", "w") as file:
        file.write("durable")
    os.unlink(f"{folder}/held.{os.environ['HPCSCHED_ATTEMPT']}")
    os._exit(0)
"""
"""Run when any Python starts: in place of the real one, is a keeper that waits for permission."""


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def saver(hosts: RemoteLauncher[Sample], folder: Path, gpus: tuple[int, ...]) -> LaunchPlan:
    """Rank 0 leaves its state in memory, and all leave."""
    job = folder / "job"
    job.mkdir()
    (folder / "sitecustomize.py").write_text(KEEPER)
    held = f"test $RANK = 0 && echo '{HELD}' >new && mv new held.2; exit 75"
    return LaunchPlan(
        job_id=3,
        attempt=2,
        argv=("sh", "-c", held),
        env={"PYTHONPATH": str(folder), "HPCSCHED_JOB_DIR": str(job), "HPCSCHED_ATTEMPT": "2"},
        cwd=job,
        folder=job,
        output=folder / "out",
        devices=tuple(hosts.inventory()[gpu] for gpu in gpus),
        arena=True,
    )


def started(hosts: RemoteLauncher[Sample], name: str = "") -> set[Process]:
    """All that lives of what the node agents have started, or that of one host."""
    found = find_orphans(hosts._run_id, [])
    return (
        guard.marked(found, [guard.mark(hosts.life, name)]) if name else guard.marked(found, life=hosts.life)
    )


def agent_pid(hosts: RemoteLauncher[Sample], name: str) -> int:
    hello = hosts._nodes[name].hello
    assert hello is not None
    return hello.pid


def arenas(hosts: RemoteLauncher[Sample], name: str) -> set[int]:
    """Those that a node agent holds, by inode."""
    found = set()
    for link in Path(f"/proc/{agent_pid(hosts, name)}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if "memfd:hpcsched-" in str(link.readlink()):
                found.add(link.stat().st_ino)
    return found


def heard(
    hosts: RemoteLauncher[Sample], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, protocol.NodeMessage]]:
    """What the head is told from now on of ends and of what is being made durable."""
    messages: list[tuple[str, protocol.NodeMessage]] = []
    told = hosts._told

    def note(node: host.RemoteHost, message: protocol.NodeMessage) -> None:
        if isinstance(message, protocol.Keeping | protocol.Exited):
            messages.append((node.name, message))
        told(node, message)

    monkeypatch.setattr(hosts, "_told", note)
    return messages


def test_a_state_is_made_durable_on_rank_0_s_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_hosts(tmp_path, devices="replay:1") as hosts:
        messages = heard(hosts, monkeypatch)
        wanted = saver(hosts, tmp_path, (1, 0))  # rank 0 on b
        workers = hosts.launch(wanted)
        assert code_of(hosts, workers) == 75
        assert workers.held == f"{HELD}\n".encode() and workers.record is None
        workers.close()
        assert hosts.keeping() == {3}
        keeper = wanted.folder / "keeper"
        pump_until(hosts, lambda: written([keeper]))
        assert keeper.read_text() == f"{guard.mark(hosts.life, 'b')} 2\n"
        (wanted.folder / "go").touch()
        pump_until(hosts, lambda: not hosts.keeping())
        assert (wanted.folder / "STATE.json").read_text() == "durable"
        on_b = [message for name, message in messages if name == "b"]
        # Never does it look as if the job were over and its state nobody's.
        assert [type(message) for message in on_b] == [protocol.Keeping, protocol.Exited, protocol.Keeping]
        assert [message.jobs for message in on_b if isinstance(message, protocol.Keeping)] == [(3,), ()]
        assert not any(isinstance(message, protocol.Keeping) for name, message in messages if name == "a")
    assert not started(hosts)


def test_one_that_hangs_does_not_outlive_its_node_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LEFT_WITHIN_S", DEADLINE_S)
    monkeypatch.setattr(launcher, "LEAVE_GRACE_S", 0.2)
    with local_hosts(tmp_path, ("a",), devices="replay:1") as hosts:
        workers = hosts.launch(saver(hosts, tmp_path, (0,)))
        assert code_of(hosts, workers) == 75
        workers.close()
        pump_until(hosts, lambda: written([tmp_path / "job" / "keeper"]))
        assert started(hosts)
        assert hosts.close()
        assert all(command.succeeded for command in hosts._commands) and not started(hosts)
        assert not hosts.keeping()


def test_a_node_agent_that_leaves_lets_a_state_become_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LEFT_WITHIN_S", DEADLINE_S)
    monkeypatch.setattr(launcher, "LEAVE_GRACE_S", DEADLINE_S)
    with local_hosts(tmp_path, ("a",), devices="replay:1") as hosts:
        workers = hosts.launch(saver(hosts, tmp_path, (0,)))
        assert code_of(hosts, workers) == 75
        workers.close()
        pump_until(hosts, lambda: written([tmp_path / "job" / "keeper"]))
        sent = hosts._send

        def send(name: str, message: protocol.HeadMessage) -> None:
            sent(name, message)
            if isinstance(message, protocol.Leave):
                (tmp_path / "job" / "go").touch()

        monkeypatch.setattr(hosts, "_send", send)
        assert hosts.close()
        assert (tmp_path / "job" / "STATE.json").read_text() == "durable"


def test_a_killed_node_agent_takes_its_keepers_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until that is sure, the job's state may still be written there."""
    monkeypatch.setattr(sessions, "STALL_S", DEADLINE_S)
    monkeypatch.setattr(host, "CLOSED_S", DEADLINE_S)
    with local_hosts(tmp_path, devices="replay:1") as hosts:
        workers = hosts.launch(saver(hosts, tmp_path, (0,)))
        assert code_of(hosts, workers) == 75
        workers.close()
        pump_until(hosts, lambda: written([tmp_path / "job" / "keeper"]))
        assert started(hosts, "a")
        os.kill(agent_pid(hosts, "a"), signal.SIGKILL)
        pump_until(hosts, lambda: bool(hosts.lost()))
        assert hosts.keeping() == {3}
        pump_until(hosts, lambda: not hosts.keeping())
        assert not started(hosts, "a")


def test_arenas_go_with_the_job_and_when_it_moves(tmp_path: Path) -> None:
    with local_hosts(tmp_path, devices="replay:1") as hosts:

        def leaves(gpus: tuple[int, ...]) -> None:
            wanted = LaunchPlan(
                job_id=3,
                attempt=1,
                argv=("sh", "-c", "echo >seen.$HPCSCHED_ARENA_FD; exit 75"),
                cwd=tmp_path,
                folder=tmp_path,
                output=tmp_path / "out",
                devices=tuple(hosts.inventory()[gpu] for gpu in gpus),
                arena=True,
            )
            workers = hosts.launch(wanted)
            assert code_of(hosts, workers) == 75
            workers.close()

        leaves((0, 1))
        on_a = arenas(hosts, "a")
        assert len(on_a) == len(arenas(hosts, "b")) == 1 and not (tmp_path / "seen.").exists()
        leaves((0,))
        pump_until(hosts, lambda: not arenas(hosts, "b"))
        assert arenas(hosts, "a") == on_a
        leaves((1,))
        pump_until(hosts, lambda: not arenas(hosts, "a"))
        assert len(arenas(hosts, "b")) == 1
        hosts.forget(3)
        pump_until(hosts, lambda: not arenas(hosts, "b"))


def test_the_arena_of_a_host_stays_while_ranks_join_on_another(tmp_path: Path) -> None:
    with local_hosts(tmp_path, devices="replay:1") as hosts:
        plans = [
            LaunchPlan(
                job_id=3,
                attempt=1 + rank,
                argv=("sleep", "600"),
                cwd=tmp_path,
                folder=tmp_path,
                output=tmp_path / "out",
                devices=hosts.inventory()[rank : rank + 1],
                first_rank=rank,
                world_size=1 + rank,
                joins="127.0.0.1:1" if rank else None,
                arena=True,
            )
            for rank in (0, 1)
        ]
        crews = [hosts.launch(plan) for plan in plans]
        pump_until(hosts, lambda: all(crew.living == 1 for crew in crews))
        assert len(arenas(hosts, "a")) == len(arenas(hosts, "b")) == 1
        for crew in crews:
            crew.signal(signal.SIGKILL)
            assert code_of(hosts, crew) == 128 + signal.SIGKILL
            crew.close()
        hosts.forget(3)
        pump_until(hosts, lambda: not arenas(hosts, "a") and not arenas(hosts, "b"))


@pytest.mark.torch
@pytest.mark.slow
def test_warm_processes_go_with_their_node_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to leave, or killed."""
    pytest.importorskip("torch")
    monkeypatch.setattr(launcher, "LEFT_WITHIN_S", DEADLINE_S)
    with local_hosts(tmp_path, devices="cpu:1", standbys=1) as hosts:
        for name in "ab":
            folder = tmp_path / name
            folder.mkdir()
            workers = hosts.launch(
                LaunchPlan(
                    job_id=1,
                    attempt=1,
                    argv=(),
                    module="hpcsched.worker",  # fails, having been told of no job
                    cwd=folder,
                    folder=folder,
                    output=folder / "out",
                    devices=tuple(device for device in hosts.inventory() if device.host == name),
                )
            )
            assert code_of(hosts, workers) not in (0, 75)
            workers.close()
        for name in "ab":
            pump_until(hosts, lambda name=name: zygote_in(started(hosts, name)))  # type: ignore[misc]
        os.kill(agent_pid(hosts, "b"), signal.SIGKILL)
        pump_until(hosts, lambda: not started(hosts, "b"))
        assert started(hosts, "a")
        hosts.close()
        assert not started(hosts)


def zygote_in(processes: set[Process]) -> bool:
    return any(b"hpcsched.worker.zygote" in command(pid) for pid, _ in processes)


def command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
