"""The address of this host that the other hosts of the allocation can reach."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable

from hpcsched.errors import ConfigError

LOOPBACK = "127.0.0.1"


def own_address(interface: str | None, others: Iterable[str]) -> str:
    """The address to listen on.

    Args:
        interface: an address, or the name of a network interface; None: the one that the way to the
            other hosts leads through.
        others: names of the other hosts.

    Raises ConfigError for an interface that is not here.
    """
    if interface is not None:
        return _of_interface(interface)
    for host in others:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: only the route is looked up
            return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return LOOPBACK


def _of_interface(interface: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    import psutil

    there = psutil.net_if_addrs()
    for address in there.get(interface, []):
        if address.family == socket.AF_INET:
            return str(address.address)
    accepted = f"an IP address, or one of {', '.join(sorted(there))}"
    raise ConfigError(where="--interface", got=repr(interface), accepted=accepted)
