"""`top`: a page fits the terminal, running jobs come first, and it outlives the run it shows."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rundirs import a_status

from hpcsched.store.rundir import RunDir


@pytest.fixture
def run_here(tmp_path: Path) -> Path:
    rundir = RunDir(tmp_path / "hpcsched-run")
    rundir.make()
    page = a_status(state="FINISHED")
    page.run.allocation = {"kind": "none", "id": None}
    rundir.status.write_bytes(msgspec.json.encode(page))
    return tmp_path


def command(cwd: Path, *words: str) -> dict[str, object]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HPCSCHED_")}
    env = clean | {"HPCSCHED_SITE_CONFIG": str(cwd / "none"), "TERM": "xterm", "COLUMNS": "80"}
    return {"args": [sys.executable, "-m", "hpcsched", "top", *words], "cwd": cwd, "env": env}


def test_into_a_pipe_it_prints_pages_until_the_run_is_finished(run_here: Path) -> None:
    done = subprocess.run(**command(run_here), capture_output=True, text=True, timeout=30, check=False)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FINISHED  marble") and "\x1b" not in done.stdout


def test_without_a_run_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(**command(tmp_path), capture_output=True, text=True, timeout=30, check=False)  # type: ignore[call-overload]
    assert done.returncode == 3 and "no run in" in done.stderr


@pytest.mark.parametrize("leave", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_on_a_terminal_it_stays_until_told_to_leave(run_here: Path, leave: bytes) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        **command(run_here, "-d", "0.2"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )  # type: ignore[call-overload]
    os.close(theirs)
    try:
        assert _read_until(ours, lambda text: b"FINISHED" in text)
        assert process.poll() is None
        os.write(ours, leave)
        _read_until(ours, lambda text: process.poll() is not None)
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(descriptor: int, enough: Callable[[bytes], bool]) -> bool:
    import select

    text, until = b"", time.monotonic() + 20
    while time.monotonic() < until:
        if enough(text):
            return True
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                text += os.read(descriptor, 65536)
            except OSError:  # the other end is closed
                return enough(text)
    return False
