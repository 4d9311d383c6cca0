"""What the head agent pays for many hosts: 100 node agents, each with a sample of 8 GPUs a second.

    python benchmarks/hosts.py [--json] [--quick]

The node agents are simulated, in two processes: the real protocol over real, encrypted connections on
this machine, but no workers. The head is the real one, in a process of its own whose loop does what the
agent's does for hosts (wait for the descriptor, at most 0.05 s; pump), and no more. A host "has" a message
when the simulated agent has it in hand; the head "has heard" when it knows the last answer. The agents share
this machine's cores with the head: on hosts of their own they would be faster.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, Report, Scratch, main, median, ms

from hpcsched.batch.base import AllocatedHost
from hpcsched.devices import Sample
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.testing.nodes import simulated

HOSTS, QUICK_HOSTS = 100, 5
WATCH_S, QUICK_WATCH_S = 24.0, 1.0
WINDOW_S = 4.0
ROUNDS, QUICK_ROUNDS = 10, 1
GOAL_SHARE, GOAL_S = 0.05, 0.2
HELPERS = 2


def measure(options: argparse.Namespace) -> Report:
    count = QUICK_HOSTS if options.quick else HOSTS
    watch_s, rounds = (QUICK_WATCH_S, QUICK_ROUNDS) if options.quick else (WATCH_S, ROUNDS)
    with Scratch.make() as scratch:
        command = [sys.executable, str(ROOT / "benchmarks" / "hosts.py"), "--head"]
        command += [str(scratch.folder), str(count), str(watch_s), str(rounds)]
        found = scratch.json(command, deadline_s=watch_s + 120)
    report = Report(results=found)
    share = sum(found["window_cpu_s"]) / sum(found["window_wall_s"])
    shares = [cpu / wall for cpu, wall in zip(found["window_cpu_s"], found["window_wall_s"], strict=True)]
    report.row(
        f"CPU of the head with {count} hosts, a sample a second from each",
        f"{share:.1%} of a core (median window {median(shares):.1%}), "
        f"{found['received_per_s'][0]:.0f} messages/s",
        goal="at most 5 %",
        ok=share <= GOAL_SHARE,
    )
    report.row("... all hosts have joined after", ms(found["joined_s"][0]))
    for key, what, goal in (
        ("spread_launch", f"one launch over {count} hosts: the last host has it", True),
        ("spread_launch_heard", "... the head has heard from all", False),
        ("single_launch", f"{count} launches, one a host: the last host has it", True),
        ("single_launch_heard", "... the head has heard from all", False),
        ("signal", f"one signal to {count} hosts: the last host has it", True),
        ("signal_heard", "... the head has heard all exits", False),
    ):
        samples = found[f"{key}_s"]
        report.row(
            what,
            f"median {ms(median(samples))}, max {ms(max(samples))}",
            goal="at most 200 ms" if goal else "",
            ok=max(samples) <= GOAL_S if goal else None,
        )
    return report


# --- the head's process -----------------------------------------------------------------------------


def head(folder: Path, count: int, watch_s: float, rounds: int) -> dict[str, list[float]]:
    """Measure, and give raw samples by name."""
    hosts = RemoteLauncher(
        hosts=[AllocatedHost(name=f"n{i}") for i in range(count)],
        commands=simulated(HELPERS),
        run_id="bench",
        run_dir=folder,
        devices="replay:8",
        address="127.0.0.1",
        make_sample=Sample,
        say=lambda line: print(line, file=sys.stderr),
    )
    results: dict[str, list[float]] = {}
    try:
        began = time.monotonic()
        hosts.start(60)
        results["joined_s"] = [time.monotonic() - began]
        _watch(hosts, watch_s, results)
        told = [_round(hosts, folder, results) for _ in range(rounds)]
        if hosts.lost():
            raise RuntimeError(f"hosts were lost: {hosts.lost()}")
    finally:
        hosts.close()
    _arrivals(folder / "nodes.log", told, results)
    return results


def _watch(hosts: RemoteLauncher[Sample], watch_s: float, results: dict[str, list[float]]) -> None:
    windows = max(1, round(watch_s / WINDOW_S))
    cpu, wall = [], []
    with _told(hosts, protocol.Beat) as beats:
        for _ in range(windows):
            wall_0, cpu_0 = time.monotonic(), time.process_time()
            _until(hosts, lambda end=wall_0 + watch_s / windows: time.monotonic() >= end)  # type: ignore[misc]
            wall.append(time.monotonic() - wall_0)
            cpu.append(time.process_time() - cpu_0)
    results["window_cpu_s"], results["window_wall_s"] = cpu, wall
    results["received_per_s"] = [len(beats) / sum(wall)]


@contextmanager
def _told(hosts: RemoteLauncher[Sample], kind: type) -> Iterator[list[Any]]:
    """All messages of one kind that the head takes in meanwhile."""
    found: list[Any] = []
    inner = hosts._told

    def note(node: Any, message: Any) -> None:
        if isinstance(message, kind):
            found.append(message)
        inner(node, message)

    hosts._told = note  # type: ignore[method-assign]
    try:
        yield found
    finally:
        hosts._told = inner  # type: ignore[method-assign]


def _until(hosts: RemoteLauncher[Sample], condition: Callable[[], bool], deadline_s: float = 60.0) -> float:
    """Go round like the agent; the time (monotonic clock) at which the condition held."""
    selector = select.epoll()
    selector.register(hosts.fileno(), select.EPOLLIN)
    deadline = time.monotonic() + deadline_s
    try:
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError("not in time")
            selector.poll(0.05)
            hosts.pump()
    finally:
        selector.close()
    return time.monotonic()


def _round(hosts: RemoteLauncher[Sample], folder: Path, results: dict[str, list[float]]) -> dict[str, Any]:
    """One launch over all hosts, signalled; then one launch on each host; which parts, and when."""
    with _told(hosts, protocol.Launched) as answers:
        began = time.monotonic()
        spread = hosts.launch(_plan(hosts, folder, range(len(hosts.inventory()))))
        heard = _until(hosts, lambda: len(answers) == len(spread.parts))
    results.setdefault("spread_launch_heard_s", []).append(heard - began)
    signalled = time.monotonic()
    spread.signal(signal.SIGTSTP)
    heard = _until(hosts, lambda: spread.over)
    results.setdefault("signal_heard_s", []).append(heard - signalled)
    assert spread.reap() == 75
    singles_began = time.monotonic()
    firsts = range(0, len(hosts.inventory()), 8)
    singles = [hosts.launch(_plan(hosts, folder, range(first, first + 8))) for first in firsts]
    heard = _until(hosts, lambda: all(workers.ready for workers in singles))
    results.setdefault("single_launch_heard_s", []).append(heard - singles_began)
    for workers in singles:
        workers.signal(signal.SIGKILL)
    _until(hosts, lambda: all(workers.over for workers in singles))
    for workers in (spread, *singles):
        workers.close()
    parts = [part.order.part for part in spread.parts]
    return {
        "spread_launch": (began, [f"launch {part}" for part in parts]),
        "signal": (signalled, [f"signal {part}" for part in parts]),
        "single_launch": (singles_began, [f"launch {w.parts[0].order.part}" for w in singles]),
    }


def _plan(hosts: RemoteLauncher[Sample], folder: Path, gpus: range) -> LaunchPlan:
    inventory = hosts.inventory()
    return LaunchPlan(
        job_id=1,
        attempt=1,
        argv=("python", "-m", "train", "--config", "some/where.toml"),
        env={f"HPCSCHED_VARIABLE_{i}": "some value" * 5 for i in range(20)},
        cwd=folder,
        folder=folder,
        output=folder / "out",
        devices=tuple(inventory[gpu] for gpu in gpus),
    )


def _arrivals(log: Path, told: list[dict[str, Any]], results: dict[str, list[float]]) -> None:
    """From what the simulated agents wrote at their end: when the last one had got it."""
    arrived: dict[str, float] = {}
    for line in log.read_text().splitlines():
        if line.startswith("[["):
            arrived |= dict(json.loads(line))
    for name in ("spread_launch", "single_launch", "signal"):
        results[f"{name}_s"] = [max(arrived[what] for what in said[name][1]) - said[name][0] for said in told]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--head"]:
        os.umask(0o077)
        print(json.dumps(head(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))))
    else:
        main("a head with many hosts", measure)
