"""The limit of open files (`ulimit -n`): an agent takes all it may have, programs get what it began with."""

from __future__ import annotations

import contextlib
import resource

MOST = 2**16
"""An agent has up to five descriptors for each attempt: enough for ten thousand (chosen)."""

_BEGAN_WITH = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_limit() -> None:
    """Have as many files open as the hard limit allows, up to MOST."""
    soft, hard = _BEGAN_WITH
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def as_it_was(pid: int) -> None:
    """Give a process that was just started the limit that this one began with.

    Its program may have begun by then, and see for a moment that it might open more. Our own limit is not
    lowered for the start instead: other threads open files meanwhile.
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE) != _BEGAN_WITH:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _BEGAN_WITH)
