"""Cores and memory of jobs that are started here."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.core.model import Device
from hpcsched.core.needs import Needs
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.memory import MemoryLimits
from hpcsched.launch.modules import Loaded
from hpcsched.launch.proc import stat
from hpcsched.launch.workers import LocalWorkers
from hpcsched.testing.conformance_launch import DEADLINE_S, plan, reaped

# Its cores are set right after its start, which is before the launch has returned.
SHOW = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n" + (
    "said = [os.environ['OMP_NUM_THREADS'], *map(str, sorted(os.sched_getaffinity(0)))]\n"
    "os.write(1, (' '.join(said) + chr(10)).encode())"  # in one piece: print() writes several
)
CORES = sorted(os.sched_getaffinity(0))


def a_launcher() -> LocalLauncher:
    return LocalLauncher(gpu_cores=CORES, device_env=lambda devices: {"OMP_NUM_THREADS": "7"})


def ended(workers: LocalWorkers) -> int:
    try:
        return reaped(workers)
    finally:
        workers.close()


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_ranks_are_pinned_to_cores_of_their_own(tmp_path: Path) -> None:
    launcher, each = a_launcher(), len(CORES) // 2
    needs = Needs(cpus_per_gpu=each)
    two = replace(plan(tmp_path, [sys.executable, "-S", "-c", SHOW], ranks=2), needs=needs)
    one = replace(two, per_rank=False, processes=1, parallel=False)
    for wanted, expected in ((two, 2), (one, 1), (two, 2)):
        (tmp_path / "logs/out").unlink(missing_ok=True)
        (tmp_path / "go").unlink(missing_ok=True)
        workers = launcher.launch(wanted)
        (tmp_path / "go").touch()
        assert ended(workers) == 0
        lines = [line.split() for line in (tmp_path / "logs/out").read_text().splitlines()]
        assert len(lines) == expected
        pinned = [set(map(int, words[1:])) for words in lines]
        assert set.union(*pinned) <= set(CORES)
        assert [len(cores) for cores in pinned] == [each * 2 // expected] * expected
        assert len(set.union(*pinned)) == each * 2
        assert {words[0] for words in lines} == {str(each * 2 // expected)}
    launcher.close()


def test_a_job_that_says_nothing_is_as_before(tmp_path: Path) -> None:
    launcher = a_launcher()
    (tmp_path / "go").touch()
    assert ended(launcher.launch(plan(tmp_path, [sys.executable, "-S", "-c", SHOW]))) == 0
    assert (tmp_path / "logs/out").read_text().split() == ["7", *map(str, CORES)]
    launcher.close()


def test_threads_that_modules_have_set_hold_on_a_gpu(tmp_path: Path) -> None:
    launcher = a_launcher()
    launcher._surroundings._loaded[1] = Loaded({"OMP_NUM_THREADS": "3"})
    (tmp_path / "go").touch()
    gpu = Device(index=0, host="h", kind="A100", handle="0")
    wanted = plan(tmp_path, [sys.executable, "-S", "-c", SHOW])
    joining = replace(wanted, devices=(gpu,), joins="127.0.0.1:1", needs=Needs(modules=("omp",)))
    assert ended(launcher.launch(joining)) == 0
    assert (tmp_path / "logs/out").read_text().split()[0] == "3"
    launcher.close()


GROWS = "import time; kept = []\nwhile 1: kept.append(b'x' * 2**22); time.sleep(0.005)"


def test_what_takes_too_much_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    launcher._surroundings._memory = MemoryLimits(period_s=0.05)
    script = f'{sys.executable} -S -c "{GROWS}" & echo $! > pid; wait; sleep 60'
    wanted = replace(plan(tmp_path, ["sh", "-c", script]), needs=Needs(memory_mib=64.0), cwd=tmp_path)
    workers = launcher.launch(wanted)
    assert ended(workers) == 128 + signal.SIGKILL
    assert "of the 64M that it may have" in workers.oom
    assert workers.over_limit
    deadline = time.monotonic() + DEADLINE_S
    while (left := stat(int((tmp_path / "pid").read_text()))) and left.state not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not launcher._surroundings._memory._held
    launcher.close()


def test_what_has_left_its_parents_counts_too(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    launcher._surroundings._memory = MemoryLimits(period_s=0.05)
    much = "import time; x = b'x' * (100 * 2**20); time.sleep(60)"
    script = f'(setsid {sys.executable} -S -c "{much}" & echo $! > pid) & wait; sleep 60'
    marks = {"HPCSCHED_RUN_ID": str(tmp_path), "HPCSCHED_JOB_ID": "1", "HPCSCHED_ATTEMPT": "1"}
    wanted = replace(plan(tmp_path, ["sh", "-c", script]), needs=Needs(memory_mib=64.0), env=marks)
    workers = launcher.launch(wanted)
    assert ended(workers) == 128 + signal.SIGKILL
    assert workers.over_limit
    deadline = time.monotonic() + DEADLINE_S
    while (left := stat(int((tmp_path / "pid").read_text()))) and left.state not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    launcher.close()


def test_ranks_that_join_share_the_limit_of_their_job(tmp_path: Path) -> None:
    limits = MemoryLimits(period_s=0.05)
    launcher = LocalLauncher()
    launcher._surroundings._memory = limits
    grows = "x = b'x' * (40 * 2**20); import time; time.sleep(60)"
    wanted = replace(plan(tmp_path, [sys.executable, "-S", "-c", grows]), needs=Needs(memory_mib=70.0))
    first = launcher.launch(wanted)
    time.sleep(0.3)  # it has all that it takes, and may have that
    assert first.reap() is None
    second = launcher.launch(wanted)
    assert (ended(first), ended(second)) == (137, 137)
    assert first.oom
    limits.close()
    launcher.close()


@pytest.mark.parametrize(
    ("by_us", "struck", "named"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_an_end_by_the_kernels_oom_killer_has_a_name(
    tmp_path: Path, by_us: bool, struck: bool, named: bool
) -> None:
    launcher = LocalLauncher()
    launcher._surroundings._kernel.struck = lambda: struck  # type: ignore[method-assign]
    workers = launcher.launch(plan(tmp_path, ["sleep", "60"]))
    if by_us:
        workers.signal(signal.SIGKILL)
    else:
        os.kill(workers.processes[0][0], signal.SIGKILL)
    assert ended(workers) == 137
    assert ("the kernel's OOM killer" in workers.oom) is named
    assert not workers.over_limit
    launcher.close()
