"""Where ranks meet: a store in rank 0's process, and the network interface that their messages take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")

_INTERFACE = "GLOO_SOCKET_IFNAME"
_said: str | None = None
"""What we have said there ourselves."""


def open_store(where: tuple[str, int], *, first: bool, ranks: int, timeout_s: float) -> Any:
    """The store at `where` (address, port): the first rank listens there, and nowhere else; others connect.

    `ranks`: how many come at once; the first waits for them. Behind torchrun all connect: it serves the store
    itself. Raises RuntimeError, OSError.
    """
    address, port = where
    listening: dict[str, Any] = {}
    if served_by_launcher():
        first, ranks = False, 0
    if first:  # torch's own socket would listen on all interfaces
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening["master_listen_fd"] = socket.create_server(where, family=family).detach()
        if torch.__version__ < "2.8":  # the newer kind of store takes no socket in torch 2.4
            listening["use_libuv"] = False
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        ranks if ranks > 1 else None,
        is_master=first,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=ranks > 1,
        **listening,
    )


def served_by_launcher() -> bool:
    """Whether torchrun has started this rank, and has a store of its own at the place where ranks meet."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def life() -> str:
    """What tells ranks that torchrun has started again from those before, which met at the same store."""
    return f"/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}" if served_by_launcher() else ""


def listen_towards(address: str) -> None:
    """Have gloo listen on the interface that leads to `address`, unless the user has said on which.

    By itself it takes what the name of the host leads to, also where all ranks are on one host.
    """
    global _said
    if os.environ.get(_INTERFACE) not in (None, _said):
        return
    name = _interface_towards(address)
    if name is not None:
        os.environ[_INTERFACE] = _said = name


def _interface_towards(address: str) -> str | None:
    own = address
    if not address.startswith("127."):
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: only the route is looked up
                own = probe.getsockname()[0]
    if own.startswith("127.") or own == "::1":
        return "lo"
    return next((name for name, there in _addresses() if own == there), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """Interfaces and their addresses, as Linux tells them."""
    for line in _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else []:
        digits, *_, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    room = array("B", bytes(_IFREQ_BYTES * 256))
    request = struct.pack("iL", len(room), room.buffer_info()[0])  # a struct ifconf
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        size, _ = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    for start in range(0, size, _IFREQ_BYTES):
        one = bytes(room[start : start + _IFREQ_BYTES])  # 16 bytes of name, a sockaddr
        label = os.fsdecode(one[:16].partition(b"\0")[0])
        yield label.partition(":")[0], socket.inet_ntoa(one[20:24])
