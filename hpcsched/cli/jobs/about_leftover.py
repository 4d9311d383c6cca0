"""What `status` and `top` say of GPUs that are left over, and of hosts that went or came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime

from hpcsched.printing import spans
from hpcsched.store.status import JoinedHost, LeftOver, Status

MOST_HOSTS = 3
"""Hosts that are named; of more it is said how many they are."""


def in_a_line(status: Status, clock: Callable[[float], str]) -> list[str]:
    """What is left over, what was given back, and what has joined, in at most one line each; `clock` makes
    text of seconds."""
    run = status.run
    lines = []
    if run.left_over and run.state == "RUNNING":
        gpus = sum(len(one.gpus) for one in run.left_over)
        for_s = run.clock_s - max(one.since_s for one in run.left_over)
        them = "it" if gpus == 1 else "them"
        which = f"{status.noun}{'s' * (gpus != 1)} {where(run.left_over)}"
        since = f"for {clock(max(0.0, for_s))} or longer"
        lines.append(f"idle, with no job left that could use {them}, {since}: {which}")
    if run.given_back:
        lines.append(f"given back to {run.allocation.get('kind')}: {_some(list(run.given_back))}")
    there = [one for one in run.joined if one.left_s is None]
    if there and run.alive:
        lines.append(f"joined: {_some([_joined(one, clock) for one in there])}")
    return lines


def _joined(one: JoinedHost, clock: Callable[[float], str]) -> str:
    if one.end is None:
        return one.host
    left_s = max(0.0, datetime.fromisoformat(one.end).timestamp() - time.time())
    return f"{one.host} (ends in {clock(left_s)}{', its jobs leave it' * one.closing})"


def where(left_over: Sequence[LeftOver]) -> str:
    """The GPUs, host by host."""
    return _some([f"{spans(one.gpus)} on {one.host}" for one in left_over], "; ")


def _some(words: list[str], between: str = ", ") -> str:
    more = [f"{len(words) - MOST_HOSTS} more hosts"] if len(words) > MOST_HOSTS else []
    return between.join([*words[:MOST_HOSTS], *more])
