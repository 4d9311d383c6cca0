"""Another host, in a network namespace of its own, and a run of ours over several hosts that goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from livebench import FOREVER, Bench, saves

HERE, THERE = "10.213.47.1", "10.213.47.2"
PORTS = """
import socket, sys
for host, port in (word.rsplit(":", 1) for word in sys.argv[1:]):
    try:
        with socket.create_connection((host, int(port)), timeout=10) as line:
            line.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n" + b"\\xff" * 200)
            print("open")
    except OSError:
        print("closed")
"""


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., list[str]]]:
    """Another host on a network with this one: what it finds of these ports (HOST:PORT)."""
    space = f"hpcsched-{os.getpid()}"
    ours = f"hs{os.getpid()}"

    def ip(words: str) -> None:
        done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr)

    def tries(*ports: str) -> list[str]:
        argv = ["ip", "netns", "exec", space, "python3", "-c", PORTS, *ports]
        return subprocess.run(argv, capture_output=True, text=True, timeout=150, check=True).stdout.split()

    try:
        try:
            ip(f"netns add {space}")
            ip(f"link add {ours} type veth peer name there netns {space}")
            ip(f"addr add {HERE}/30 dev {ours}")
            ip(f"link set {ours} up")
            ip(f"-n {space} addr add {THERE}/30 dev there")
            ip(f"-n {space} link set there up")
        except OSError as error:
            pytest.skip(f"no network of its own to be had: {error}")
        yield tries
    finally:
        for words in (f"link del {ours}", f"netns del {space}"):
            with contextlib.suppress(OSError):
                ip(words)


def listens(pids: list[int]) -> set[tuple[str, int]]:
    """Where these processes listen by TCP or UDP."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for line in psutil.Process(pid).net_connections(kind="inet"):
                if line.status == psutil.CONN_LISTEN or (line.laddr and not line.raddr):
                    found.add((line.laddr.ip, line.laddr.port))
    return found


def test_of_a_run_over_hosts_another_one_reaches_a_single_port_which_turns_it_away(
    tmp_path: Path, elsewhere: Callable[..., list[str]]
) -> None:
    bench = Bench(tmp_path)
    try:
        file = bench.set_of(saves("a", steps=FOREVER, gpus=1), saves("b", steps=FOREVER, gpus=1))
        hosts = ("--hosts", "n1,n2", "--launcher", "local", "--interface", HERE)
        agent = bench.start(file, "--devices", "cpu:1", *hosts, "--grace", "0.1")
        bench.ready("a", "b")
        ((address, port),) = listens([agent.pid, *bench.live_workers()])
        assert address == HERE, "the interface that was asked for, and no other"
        assert elsewhere(f"{HERE}:{port}", f"{HERE}:9") == ["open", "closed"]
        bench.until(lambda: "who is no node agent of this run" in agent.said, "it is turned away")
        assert f"somebody from {THERE}" in agent.said or "somebody who" in agent.said
        assert bench.states() == {"a": "RUNNING", "b": "RUNNING"} and agent.process.poll() is None
    finally:
        bench.close()
