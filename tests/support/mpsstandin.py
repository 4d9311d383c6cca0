"""A stand-in for `nvidia-cuda-mps-control`, with the rules of NVIDIA's guide "Multi-Process Service".

One daemon for each pipe directory. If CUDA_VISIBLE_DEVICES is set for the daemon, only these devices are
served, with new numbers; what a client then names in its own CUDA_VISIBLE_DEVICES, by number or by UUID, has
to be among them. Commands are read from standard input, one a line.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys, time

GPUS = {gpus!r}
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
where = pipe + "/control"

def ask(message):
    line = socket.socket(socket.AF_UNIX)
    line.connect(where)
    line.sendall(json.dumps(message).encode())
    line.shutdown(socket.SHUT_WR)
    return line.makefile().read()

def devices(visible, known):
    if visible is None:
        return known
    found = []
    for word in visible.split(","):
        if word.isdecimal() and int(word) < len(known):
            found.append(known[int(word)])
        elif len(match := [gpu for gpu in known if not word.isdecimal() and gpu.startswith(word)]) == 1:
            found += match
        else:
            return found
    return found

if "-d" not in sys.argv:
    try:
        for command in sys.stdin.read().splitlines():
            sys.stdout.write(ask({{"command": command}}))
    except OSError:
        print("Cannot find MPS control daemon process")
        sys.exit(1)
    sys.exit(0)

with open(sys.argv[0] + ".starts", "a") as file:
    file.write("once\\n")
try:
    ask({{"command": "get_server_list"}})
    print("An instance of this daemon is already running")
    sys.exit(1)
except OSError:
    pass
if os.path.exists(where):
    os.unlink(where)
listener = socket.socket(socket.AF_UNIX)
listener.bind(where)
listener.listen(8)
served = devices(os.environ.get("CUDA_VISIBLE_DEVICES"), GPUS)
if os.fork():
    os._exit(0)
with open(pipe + "/nvidia-cuda-mps-control.pid", "w") as file:
    file.write(str(os.getpid()))
clients = []
def log(**what):
    with open(os.environ["CUDA_MPS_LOG_DIRECTORY"] + "/standin.log", "a") as file:
        file.write(json.dumps(what) + "\\n")
log(environ=dict(os.environ), cores=len(os.sched_getaffinity(0)), session=os.getsid(0))
while True:
    line, _ = listener.accept()
    asked = json.loads(line.makefile().read() or "{{}}")
    answer, command = "", asked.get("command", "").split()
    clients = [pid for pid in clients if os.path.exists(f"/proc/{{pid}}")]
    if "client" in asked:
        found = devices(asked["visible"], served)
        if found:
            clients.append(asked["client"])
        answer = json.dumps(found)
    elif command[0] == "get_server_list" and clients:
        answer = f"{{os.getpid()}}\\n"
    elif command[0] == "get_client_list" and command[1] == str(os.getpid()):
        answer = "".join(f"{{pid}}\\n" for pid in clients)
    elif command[0] == "terminate_client":
        known = command[1] == str(os.getpid()) and int(command[2]) in clients
        log(terminated=int(command[2]), known=known)
    elif command[0] == "quit":
        log(quit=command)
        os.unlink(where)
    line.sendall(answer.encode())
    line.close()
    if command[:1] == ["quit"]:
        break
"""


@dataclass
class MpsHost:
    """A host with GPUs of these UUIDs, and the control program on `path`."""

    folder: Path
    gpus: list[str]

    @property
    def path(self) -> str:
        return f"{self.folder}:/usr/bin:/bin"

    def log(self, folder: Path) -> list[dict[str, Any]]:
        """What a daemon has noted."""
        return [json.loads(line) for line in (folder / "log" / "standin.log").read_text().splitlines()]

    def pid(self, folder: Path) -> int:
        """Of a daemon."""
        return int((folder / "pipe" / "nvidia-cuda-mps-control.pid").read_text())


def connect(environ: Mapping[str, str], pid: int | None = None) -> list[str]:
    """Be a client, as a process that calls `cuInit` in this environment: the UUIDs of its GPUs, by number.

    [] where the driver has an error for it.
    """
    line = socket.socket(socket.AF_UNIX)
    line.connect(environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    line.sendall(json.dumps({"client": pid or os.getpid(), "visible": visible}).encode())
    line.shutdown(socket.SHUT_WR)
    with line, line.makefile() as answer:
        found: list[str] = json.loads(answer.read())
    return found


@contextmanager
def mps_host(gpus: list[str]) -> Iterator[MpsHost]:
    """A host for a while; its daemons are ended. In a folder with a short name, as sockets need one."""
    folder = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(PROGRAM.format(python=sys.executable, gpus=gpus))
    program.chmod(0o755)
    try:
        yield MpsHost(folder, gpus)
    finally:
        for socket_ in folder.glob("*/*/pipe/control"):
            with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
                line.connect(str(socket_))
                line.settimeout(10.0)
                line.sendall(b'{"command": "quit"}')
                line.shutdown(socket.SHUT_WR)
                line.recv(1)  # it writes its log until then
        shutil.rmtree(folder)
