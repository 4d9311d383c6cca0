"""A part of a day on a GPU ends in its time box, and all that it has started with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from gpudays import boxes
from places import ROOT

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
away = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(away.pid, flush=True)
time.sleep(600)
"""
"""Takes no notice of SIGTERM, and has a child in a session of its own."""


def run(program: str, tmp_path: Path, **options: Any) -> tuple[Any, str]:
    log = tmp_path / "log"
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = boxes.run_in_box(command, log=log, env=dict(os.environ), **options)
    return ended, log.read_text()


def gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have waited for it yet."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_a_part_that_takes_no_notice_of_sigterm_is_killed_with_all_it_has_started(tmp_path: Path) -> None:
    ended, said = run(STUBBORN, tmp_path, box_s=1.0, kill_after_s=0.2)
    assert (ended.over_time, ended.code) == (True, -signal.SIGKILL)
    assert ended.stray == 1
    assert gone(int(said))


def test_a_part_that_ends_at_sigterm_is_over_time_all_the_same(tmp_path: Path) -> None:
    program = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("kept", flush=True), sys.exit(143)))
        time.sleep(600)
    """
    ended, said = run(program, tmp_path, box_s=1.0)
    assert (ended.over_time, ended.code, ended.stray, said) == (True, 143, 0, "kept\n")


def test_a_part_in_time_says_its_own_exit_code_and_leaves_nothing_behind(tmp_path: Path) -> None:
    program = """
        import subprocess, sys
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        sys.exit(3)
    """
    ended, said = run(program, tmp_path, box_s=60.0)
    assert (ended.over_time, ended.code, ended.stray, said) == (False, 3, 1, "")


def test_a_daemon_that_is_started_with_few_variables_ends_with_the_part_too(tmp_path: Path) -> None:
    """As NVIDIA's MPS daemon is: the name of its folder tells whose it is."""
    program = """
        import os, subprocess
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"/nowhere/bench-{os.environ['GPU_DAY_PART']}/pipe"}
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True, env=env)
        print(daemon.pid)
    """
    ended, said = run(program, tmp_path, box_s=60.0)
    assert (ended.code, ended.stray) == (0, 1)
    assert gone(int(said))


DRIVER = """
import os, sys
from pathlib import Path
sys.path.append(sys.argv[2])
from common import Terminated, ending_on_sigterm
from gpu_day.boxes import run_in_box
from gpu_day.day import Day, Part
folder = Path(sys.argv[1])
programs = {"quick": "print('done')", "endless": (folder / "stubborn.py").read_text()}

def run(part, found, log):
    command = [sys.executable, "-c", programs[part.name]]
    return run_in_box(command, box_s=part.box_s, log=log, env=os.environ, kill_after_s=0.2)

ending_on_sigterm()
parts = [Part("quick", 50, ""), Part("endless", 50, ""), Part("never", 50, "")]
try:
    Day(parts, folder, {}, 1000, run).go()
except Terminated:
    sys.exit(143)
"""


def test_sigterm_in_the_midst_of_a_part_ends_its_processes_and_leaves_what_was_done(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    command = [sys.executable, "-c", DRIVER, str(tmp_path), str(ROOT / "benchmarks")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    log = tmp_path / "endless.log"
    try:
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().endswith("\n")):
            assert time.monotonic() < deadline and driver.poll() is None
            time.sleep(0.02)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 143
    finally:
        driver.kill()
        driver.wait()
    assert gone(int(log.read_text()))
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["quick.json"]
