"""No batch system: this machine, for as long as we like."""

from __future__ import annotations

import socket

from hpcsched.batch.base import Allocation


def local() -> Allocation:
    """This host, without a deadline."""
    return Allocation(kind="none", id=None, hosts=(socket.gethostname(),), deadline=None, restart_count=0)
