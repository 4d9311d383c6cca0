"""Where a run's processes are: namespaces of networks and of process numbers, and who they are."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PID_MAX = 420
"""Process numbers of a namespace for that: those from 300 on come again after 120 others."""

_INIT = f"""
import os, time
with open("/proc/sys/kernel/pid_max", "w") as file:
    file.write("{PID_MAX}")
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""


@dataclass(frozen=True)
class Process:
    """A process that lives; `inner`: its number where it runs."""

    pid: int
    parent: int
    inner: int
    words: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def role(self) -> str:
        """`agent`, `node agent`, `zygote`, `keeper`, `worker`, or `other`."""
        text = " ".join(self.words)
        for part, role in (
            ("worker.keeper", "keeper"),
            ("worker.zygote", "zygote"),
            ("agent.node", "node agent"),
        ):
            if part in text:
                return role
        if "HPCSCHED_JOB_ID" in self.environ:
            return "worker"
        is_run = (
            len(self.words) > 2 and self.words[1].endswith("/hpcsched") and self.words[2] in ("run", "tune")
        )
        return "agent" if is_run else "other"

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def clean_up_after(player: int) -> None:
    """Kill and remove what is left of the schedule that a process has played; its folder has its pid."""
    for path in Path(tempfile.gettempdir()).glob(f"chaos-*-{player}-*"):
        for one in processes(f"CHAOS_MARK={path}"):
            one.kill()
        shutil.rmtree(path, ignore_errors=True)


def processes(mark: str) -> list[Process]:
    """All that live with this entry in the environment that they began with."""
    return list(_processes(mark.encode()))


def _processes(mark: bytes) -> Iterator[Process]:
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError, StopIteration):
            entries = Path("/proc", name, "environ").read_bytes().split(b"\0")
            if mark not in entries:
                continue
            lines = Path("/proc", name, "status").read_text().splitlines()
            if next(line for line in lines if line.startswith("State:")).split()[1] in "ZX":
                continue
            numbers = next(line for line in lines if line.startswith("NSpid:")).split()
            words = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")
            environ = dict(e.decode(errors="replace").split("=", 1) for e in entries if b"=" in e)
            parent = int(next(line for line in lines if line.startswith("PPid:")).split()[1])
            yield Process(int(name), parent, int(numbers[-1]), tuple(words), environ)


class Place:
    """Where commands of a run are started: on this host, as they are."""

    prefix: Sequence[str] = ()

    def environment(self, path: str) -> Mapping[str, str]:
        return {}

    def network(self, host: str, how: str) -> None:
        """The network of a host is `cut`, `thin` or `whole` from now on."""

    def close(self) -> None:
        """Take away what was made."""


class Numbers(Place):
    """A namespace in which process numbers come again soon."""

    def __init__(self) -> None:
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._outer = subprocess.Popen([*words, sys.executable, "-I", "-S", "-c", _INIT])
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        deadline = time.monotonic() + 20.0
        while not (found := children.read_text().split()) or not _has_init(int(found[0])):
            if time.monotonic() > deadline:
                raise RuntimeError("no namespace for process numbers")
            time.sleep(0.01)
        self.prefix = ["nsenter", "-t", found[0], "--pid", "--mount"]

    def many(self) -> None:
        """So many processes that all numbers have come by."""
        script = f"i=0; while [ $i -lt {PID_MAX - 300} ]; do /bin/true; i=$((i + 1)); done"
        subprocess.run([*self.prefix, "sh", "-c", script], check=False)

    def close(self) -> None:
        self._outer.kill()
        self._outer.wait()


def _has_init(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"-I" in Path(f"/proc/{pid}/cmdline").read_bytes() and _settled(pid)
    return False


def _settled(pid: int) -> bool:
    """Whether its namespace has its limit already: it waits for children then."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


class Networks(Place):
    """Two hosts with a network between them: namespaces, and a pair of interfaces."""

    def __init__(self, hosts: Sequence[str], folder: Path, number: int) -> None:
        self._names = {host: f"ch{number:x}{host}" for host in hosts}
        self._folder = folder
        for name in self._names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        one, other = self._names.values()
        _ip("link", "add", "name", one, "netns", one, "type", "veth", "peer", "name", other, "netns", other)
        for last, name in enumerate((one, other), 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{last}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
        self.prefix = ["nsenter", f"--net=/run/netns/{one}"]
        self._ssh()

    def _ssh(self) -> None:
        """An `ssh` that goes into the namespace of a host; its words are those of `batch.local.ssh`."""
        (self._folder / "bin").mkdir()
        path = self._folder / "bin" / "ssh"
        (base,) = {name.removesuffix(host) for host, name in self._names.items()}
        path.write_text(f'#!/bin/sh\nexec nsenter "--net=/run/netns/{base}$6" sh -c "exec $7"\n')
        path.chmod(0o700)

    def environment(self, path: str) -> Mapping[str, str]:
        return {"PATH": f"{self._folder / 'bin'}:{path}"}

    def network(self, host: str, how: str) -> None:
        name = self._names[host]
        subprocess.run(_tc(name, "del", "dev", name, "root"), capture_output=True, check=False)
        _ip("-n", name, "link", "set", name, "down" if how == "cut" else "up")
        if how == "thin":
            words = ("add", "dev", name, "root", "tbf", "rate", "64kbit", "burst", "4kb", "latency", "500ms")
            subprocess.run(_tc(name, *words), check=True, capture_output=True)

    def close(self) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tc(namespace: str, verb: str, *words: str) -> list[str]:
    return ["tc", "-n", namespace, "qdisc", verb, *words]


def can_make_namespaces() -> bool:
    """Whether networks and namespaces of process numbers can be made here."""
    if os.geteuid():
        return False
    tries = (["ip", "netns"], ["tc", "-V"], ["unshare", "--pid", "--net", "--fork", "true"])
    try:
        return not any(subprocess.run(words, capture_output=True, check=False).returncode for words in tries)
    except FileNotFoundError:
        return False
