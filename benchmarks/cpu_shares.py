"""How exactly processes keep to shares of a core, without root.

    python benchmarks/cpu_shares.py [--json] [--quick]

Trainings that rest by themselves between their steps (matrix products of about 5, 20 and 100 ms), and foreign
programs that are stopped and continued (one that computes, and a shell that starts a short program after
another); then two of each with half a core on the same core. What each uses over windows of 5 s, by the clock
ticks that the kernel counts for it; each is pinned to one core. If others use that core it may get less than
its share: what a process alone on its core waited for it in a window, ready to run, is no error. The cost of
`rest()` where there is nothing to rest for, and of holding one program.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from common import Report, main, median

from hpcsched.launch.cpu_shares import DutyCycle
from hpcsched.launch.proc import stat

TARGETS = (0.1, 0.25, 0.5, 0.8)
STEPS_MS = (5, 20, 100)
WINDOW_S, WINDOWS, SETTLE_S = 5.0, 2, 0.5
GOAL = 0.03
STOP_S = 30.0

TRAINING = """
import sys, threading, time
import torch
from hpcsched.worker.ps.cpu_throttle import CpuShare

step_s, core = float(sys.argv[1]), int(sys.argv[2])
share = CpuShare(1.0, [core])
wanted = [1.0]

def listen():
    for line in sys.stdin:
        wanted[0] = float(line)

a = torch.randn(192, 192)
def work(count):
    for _ in range(count):
        a @ a

work(200)
began = share.used_s
work(500)
count = max(1, round(step_s * 500 / (share.used_s - began)))
threading.Thread(target=listen, daemon=True).start()
print("ready", flush=True)
while True:
    if share.share != wanted[0]:
        share.set(wanted[0], [core])
    work(count)
    share.rest()
"""
REST = """
import os, time
from hpcsched.worker.ps.cpu_throttle import CpuShare

def time_calls():
    began = time.perf_counter()
    for _ in range(1000):
        share.rest()
    return (time.perf_counter() - began) / 1000

core = min(os.sched_getaffinity(0))
for cores in (0.5, 1.0):
    share = CpuShare(cores, [core])
    time.sleep(0.5)
    print(*(time_calls() for _ in range(9)))
"""
FOREIGN = {
    "spin": [sys.executable, "-S", "-c", "while True: pass"],
    "shell": ["/bin/sh", "-c", "while :; do /bin/true; done"],
}


def measure(options: argparse.Namespace) -> Report:
    report = Report()
    targets, steps = (TARGETS[2:3], STEPS_MS[:1]) if options.quick else (TARGETS, STEPS_MS)
    window_s, windows = (0.3, 1) if options.quick else (WINDOW_S, WINDOWS)
    core = max(os.sched_getaffinity(0))

    def sample(name: str, pids: Sequence[int], target: float) -> list[float]:
        time.sleep(SETTLE_S)
        found = [pair for _ in range(windows) for pair in _used(pids, window_s)]
        report.results[f"{name}_{target:g}_cores"] = [used for used, _ in found]
        report.results[f"{name}_{target:g}_waited_cores"] = [waited for _, waited in found]
        alone = len(pids) == 1
        return [max(used - target, target - used - waited * alone, 0.0) for used, waited in found]

    def judge(what: str, errors: list[float]) -> None:
        worst = max(errors)
        report.row(
            f"{what}: largest error of the share, windows of {window_s:g} s",
            f"{worst:.2%} of a core",
            goal=f"{GOAL:.0%}",
            ok=None if options.quick else worst <= GOAL,
        )

    for step in steps:
        with _training(step, core) as child:
            errors = []
            for target in targets:
                _ask(child, target)
                errors += sample(f"rests_{step}ms", [child.pid], target)
        judge(f"a training that rests, steps of {step} ms", errors)
    with _training(20, core) as one, _training(20, core) as other:
        _ask(one, 0.5)
        _ask(other, 0.5)
        judge("two that rest on one core", sample("rest_together", [one.pid, other.pid], 0.5))

    own = []
    for name, command in FOREIGN.items():
        errors = []
        with _child(command, core) as child, DutyCycle() as duty:
            for target in targets:
                _hold(duty, child, target)
                before, began = time.process_time(), time.monotonic()
                errors += sample(f"stopped_{name}", [child.pid], target)
                own.append((time.process_time() - before) / (time.monotonic() - began))
        judge(f"a foreign program that is stopped ({name})", errors)
    with _child(FOREIGN["spin"], core) as one, _child(FOREIGN["spin"], core) as other, DutyCycle() as duty:
        _hold(duty, one, 0.5)
        _hold(duty, other, 0.5)
        judge("two that are stopped on one core", sample("stopped_together", [one.pid, other.pid], 0.5))
    report.results["holder_cores"] = own
    report.row("holding one foreign program", f"{median(own):.2%} of a core")

    command = [sys.executable, "-c", REST]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=STOP_S * 2).stdout
    for name, line in zip(("rest_s", "rest_with_whole_cores_s"), lines.splitlines(), strict=True):
        report.results[name] = list(map(float, line.split()))
    report.row(
        "a rest() without anything to rest for",
        f"{median(report.results['rest_s']) * 1e6:.2g} us "
        f"({median(report.results['rest_with_whole_cores_s']) * 1e6:.2g} us with whole cores)",
    )
    return report


def _used(pids: Sequence[int], window_s: float) -> list[tuple[float, float]]:
    """For each over the window: cores used, by the children it has waited for too, and cores waited for."""

    def counted() -> list[tuple[float, float]]:
        return [(sum(process.cpu_times()[:4]), _waited_s(process.pid)) for process in processes]

    processes = [psutil.Process(pid) for pid in pids]
    began, before = time.monotonic(), counted()
    time.sleep(window_s)
    wall_s, after = time.monotonic() - began, counted()
    return [((u - u0) / wall_s, (w - w0) / wall_s) for (u, w), (u0, w0) in zip(after, before, strict=True)]


def _waited_s(pid: int) -> float:
    """How long the threads of a process have been ready to run on a core that another one had."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[1]) for thread in threads) / 1e9


@contextlib.contextmanager
def _training(step_ms: float, core: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", TRAINING, str(step_ms / 1000), str(core)]
    with _child(command, core) as child:
        assert child.stdout
        if child.stdout.readline() != b"ready\n":
            raise RuntimeError("the training did not start")
        yield child


def _ask(child: subprocess.Popen[bytes], target: float) -> None:
    assert child.stdin
    child.stdin.write(f"{target}\n".encode())
    child.stdin.flush()


def _hold(duty: DutyCycle, child: subprocess.Popen[bytes], target: float) -> None:
    seen = stat(child.pid)
    assert seen
    duty.hold((child.pid, seen.start_ticks), target)


@contextlib.contextmanager
def _child(command: Sequence[str], core: int) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as child:
        os.sched_setaffinity(child.pid, [core])
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(STOP_S)


if __name__ == "__main__":
    main(__doc__ or "", measure)
