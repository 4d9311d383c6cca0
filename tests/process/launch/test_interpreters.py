"""Interpreters are asked what they have, and run what needs them. These are scripts that play a part."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcsched.contract.exits import WRONG_CONTRACT
from hpcsched.contract.version import VERSION
from hpcsched.core.model import PythonEnvironment
from hpcsched.errors import BadEnvironment
from hpcsched.launch.bounded_run import MAX_OUTPUT_BYTES, run_bounded
from hpcsched.launch.interpreters import (
    PROBE_FRESH_S,
    InterpreterInfo,
    Interpreters,
    ask_interpreter,
    own_versions,
)
from hpcsched.launch.local import LocalLauncher
from hpcsched.testing.conformance_launch import plan, reaped

PATIENCE_S = 60.0
GOOD = {"python": "3.11.7", "worker": "0.2", "contract": str(VERSION), "torch": "2.4.0", "prefix": "/"}


def interpreter(folder: Path, *, first: str = "", **has: Any) -> Path:
    """A script that says this of itself, counts how often it is asked, and tells what else it is to run."""
    python = folder / "bin" / "python3"
    python.parent.mkdir(parents=True, exist_ok=True)
    says = InterpreterInfo(**{**GOOD, "executable": str(python), **has})

    answer = msgspec.json.encode(says).decode()
    python.write_text(
        f"#!/bin/sh\n{first}\n"
        f"if [ \"$1\" = -c ]; then echo asked >> {folder}/asked; echo noise; echo '{answer}'; exit; fi\n"
        'echo "ran $2 with $HPCSCHED_CONTRACT in $VIRTUAL_ENV"\n'
    )
    python.chmod(0o755)
    (folder / "bin" / "python").unlink(missing_ok=True)
    (folder / "bin" / "python").symlink_to("python3")
    (folder / "pyvenv.cfg").touch()
    return python


def saying(**has: Any) -> str:
    """What a script does that says this of itself, right or wrong."""
    says = json.dumps({**GOOD, "executable": "/p", **has})
    return f"printf '%s\\n' '{says}'; exit"


def asked(folder: Path) -> int:
    path = folder / "asked"
    return len(path.read_text().splitlines()) if path.exists() else 0


def venv(folder: Path) -> PythonEnvironment:
    return PythonEnvironment(kind="venv", name=str(folder))


def environ(*folders: Path) -> dict[str, str]:
    return {"PATH": os.pathsep.join([*(str(folder / "bin") for folder in folders), "/usr/bin:/bin"])}


def later() -> Callable[[], float]:
    """A clock by which every look comes so late that it counts."""
    return partial(next, itertools.count(step=2 * PROBE_FRESH_S))


def test_one_is_asked_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    python = interpreter(tmp_path, watched={str(site): site.stat().st_mtime_ns})
    found = Interpreters(environ(), clock=later())
    stamps = {found.trainers(venv(tmp_path)).stamp for _ in range(3)}
    assert found.trainers(venv(tmp_path)).python == str(python)
    assert asked(tmp_path) == 1
    (site / "new-1.0.dist-info").mkdir()  # pip install
    os.utime(site, (1, 1))
    interpreter(tmp_path, watched={str(site): site.stat().st_mtime_ns})
    stamps.add(found.trainers(venv(tmp_path)).stamp)
    assert asked(tmp_path) == 2 and len(stamps) == 2


def test_between_the_answer_and_the_launch_nobody_is_asked(tmp_path: Path) -> None:
    """The agent's loop launches in the moment in which the answer is there."""
    site = tmp_path / "site"
    interpreter(tmp_path, watched={str(site): 7})
    found = Interpreters(environ(), clock=lambda: 0.0)
    for _ in range(3):
        found.trainers(venv(tmp_path))
    assert asked(tmp_path) == 1


def test_who_knows_the_answer_does_not_wait_for_the_next(tmp_path: Path) -> None:
    python = interpreter(tmp_path)
    found = Interpreters(environ(), clock=lambda: 0.0)
    found.trainers(venv(tmp_path))
    os.utime(python, (1, 1))
    python.write_text(
        python.read_text().replace("#!/bin/sh", f"#!/bin/sh\nuntil [ -e {tmp_path}/go ]; do sleep 0.01; done")
    )
    assert not found.ready(venv(tmp_path), 1)
    assert found.trainers(venv(tmp_path)).named
    (tmp_path / "go").touch()
    until = time.monotonic() + PATIENCE_S
    while not found.ready(venv(tmp_path), 1):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_folders_that_cannot_be_looked_at_are_passed_over(tmp_path: Path) -> None:
    path = os.pathsep.join((f"/{'x' * 300}/site-packages", str(tmp_path / "site-packages")))
    said = ask_interpreter(sys.executable, {**os.environ, "PYTHONPATH": path})
    assert (
        isinstance(said, InterpreterInfo)
        and said.watched
        and not any("xxx" in folder for folder in said.watched)
    )


def test_what_is_put_right_is_seen_by_the_next_launch(tmp_path: Path) -> None:
    interpreter(tmp_path, worker=None)
    found = Interpreters(environ(), clock=later())
    with pytest.raises(BadEnvironment, match="no hpcsched-worker") as raised:
        found.trainers(venv(tmp_path))
    assert not raised.value.transient
    interpreter(tmp_path)
    os.utime(tmp_path / "bin" / "python3", (1, 1))
    assert found.trainers(venv(tmp_path)).named


def test_what_told_nothing_counts_for_those_who_have_waited_and_may_pass(tmp_path: Path) -> None:
    """As on a filesystem that is busy for a minute: the interpreter has not changed, and is asked again."""
    interpreter(tmp_path, first=f"[ -e {tmp_path}/quiet ] || {{ echo asked >> {tmp_path}/asked; exit 9; }}")
    found = Interpreters(environ())

    def known(who: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while not found.ready(venv(tmp_path), who):
            assert time.monotonic() < until
            time.sleep(0.01)

    for who in (1, 2):
        assert not found.ready(venv(tmp_path), who)
        known(who)
        with pytest.raises(BadEnvironment, match="exit code 9") as raised:
            found.trainers(venv(tmp_path))
        assert raised.value.transient
    assert asked(tmp_path) == 2
    (tmp_path / "quiet").touch()
    known(3)
    assert found.trainers(venv(tmp_path)).named


def test_the_first_in_path_runs_trainers_if_it_can_and_else_our_own(tmp_path: Path) -> None:
    good, bare, torchless = (tmp_path / name for name in ("good", "bare", "torchless"))
    interpreter(good)
    interpreter(bare, worker=None, torch=None)
    interpreter(torchless, torch=None)
    assert Interpreters(environ(good, bare)).trainers(None).python == str(good / "bin" / "python3")
    for first in (bare, torchless):
        if own_versions().torch:
            assert Interpreters(environ(first, good)).trainers(None).python == sys.executable
    own = Path(sys.executable).parents[1]
    assert Interpreters(environ(own, good)).ready(None), "our own is asked nothing"
    if own_versions().torch:
        assert Interpreters(environ(own, good)).trainers(None).python == sys.executable


def test_one_in_path_that_can_but_does_not_fit_is_told_and_not_passed_over(tmp_path: Path) -> None:
    interpreter(tmp_path, contract="99.0")
    with pytest.raises(BadEnvironment, match=r"hpcsched-worker 0\.2, but version 99\.0"):
        Interpreters(environ(tmp_path)).trainers(None)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("exit 3", r"it cannot say what it has, as a Python 3 does \(exit code 3: no word\)"),
        ("echo '{\"executable\": 7}'; exit", "it cannot say what it has"),
        ("echo nonsense >&2; exit 1", r"exit code 1: nonsense"),
        ("sleep 60", "it has not said within 0.5 s what it has"),
        ("exec cat /dev/zero", "it has not said within 0.5 s what it has"),
        (saying(watched={"/a\0": 1}), "it cannot say what it has"),
        (saying(python="3." + 5000 * "9"), "it cannot say what it has"),
    ],
)
def test_one_that_says_nothing_of_use_is_named_in_one_line(tmp_path: Path, first: str, says: str) -> None:
    within_s = 0.5 if "0.5" in says else 60
    said = ask_interpreter(str(interpreter(tmp_path, first=first)), environ(), within_s=within_s)
    assert isinstance(said, str) and said.isprintable()
    assert re.search(says, said)


def test_what_it_says_is_held_within_bounds_and_what_it_leaves_is_ended(tmp_path: Path) -> None:
    left = tmp_path / "left"
    first = f"sleep 600 & echo $! > {left}; head -c {3 * MAX_OUTPUT_BYTES} /dev/zero | tr '\\0' x; echo"
    python = interpreter(tmp_path, first=first)
    code, out, err = run_bounded([str(python), "-c", ""], environ=environ(), within_s=PATIENCE_S)
    assert code == 0 and len(out) <= MAX_OUTPUT_BYTES and b"executable" in out and err == b""
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{left.read_text().strip()}/cmdline").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_this_interpreter_says_what_it_has() -> None:
    said = ask_interpreter(sys.executable, dict(os.environ))
    assert isinstance(said, InterpreterInfo)
    assert said.worker and said.contract == str(VERSION)
    assert said.torch == own_versions().torch and said.watched


def test_a_launch_is_not_ready_before_the_answer_and_waits_for_nobody(tmp_path: Path) -> None:
    interpreter(tmp_path / "env", first=f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done")
    launcher = LocalLauncher(environ=environ())
    wanted = replace(plan(tmp_path, []), module="hpcsched.worker", environment=venv(tmp_path / "env"))
    assert not launcher.ready_for(wanted) and not launcher.ready_for(wanted)
    assert launcher.ready_for(plan(tmp_path, ["true"])), "a command asks for nothing"
    (tmp_path / "go").touch()
    until = time.monotonic() + PATIENCE_S
    while not launcher.ready_for(wanted):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert asked(tmp_path / "env") == 1
    workers = launcher.launch(wanted)
    assert reaped(workers) == 0
    workers.close()
    launcher.close()
    said = (tmp_path / "logs" / "out").read_text()
    assert said == f"ran hpcsched.worker with  in {tmp_path}/env\n"


def test_a_command_finds_the_programs_of_its_environment_first(tmp_path: Path) -> None:
    interpreter(tmp_path / "env")
    launcher = LocalLauncher(environ=environ())
    wanted = replace(plan(tmp_path, ["python", "-m", "mine"]), environment=venv(tmp_path / "env"))
    workers = launcher.launch(wanted)
    assert reaped(workers) == 0
    workers.close()
    launcher.close()
    assert (tmp_path / "logs" / "out").read_text() == f"ran mine with  in {tmp_path}/env\n"
    assert asked(tmp_path / "env") == 0


def test_what_does_not_do_is_no_transient_error_and_stands_in_the_output(tmp_path: Path) -> None:
    interpreter(tmp_path / "env", worker=None)
    launcher = LocalLauncher(environ=environ())
    wanted = replace(plan(tmp_path, []), module="hpcsched.worker", environment=venv(tmp_path / "env"))
    with pytest.raises(BadEnvironment) as refused:
        launcher.launch(wanted)
    launcher.close()
    assert not refused.value.transient
    assert (tmp_path / "logs" / "out").read_text() == f"hpcsched: {refused.value}\n"


@pytest.mark.parametrize("contract", [f"{VERSION.major + 1}.0", "nonsense"])
def test_a_worker_that_does_not_fit_its_agent_says_so_and_ends_with_its_code(contract: str) -> None:
    told = {"HPCSCHED_JOB_ID": "1", "HPCSCHED_CONTRACT": contract}
    done = subprocess.run(
        [sys.executable, "-m", "hpcsched.worker"],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == WRONG_CONTRACT
    (line,) = done.stderr.splitlines()
    assert "does not fit the scheduler" in line and "pip install" in line


def test_one_that_is_still_asked_ends_with_the_launcher(tmp_path: Path) -> None:
    asks = f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 300"
    interpreter(tmp_path / "env", first=asks)
    launcher, until = LocalLauncher(environ=environ()), time.monotonic() + PATIENCE_S
    assert not launcher.interpreters.ready(venv(tmp_path / "env"))
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    launcher.close()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
