"""How a process of a framework ends that leaves, saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

PROGRAM = """
import atexit, ctypes, sys
from hpcsched.integrations import leaving

class Link:
    def leave(self):
        raise SystemExit(75)

log = open(sys.argv[1], "w")
log.write("step 1\\n")
atexit.register(print, "exit handlers ran")
ctypes.CDLL(None).printf(b"from C\\n")
try:
    leaving.leave(Link())
finally:
    print("finally ran")
"""


def test_nothing_that_was_written_is_lost(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 75, ran.stderr
    assert (tmp_path / "log").read_text() == "step 1\n"
    assert sorted(ran.stdout.splitlines()) == ["exit handlers ran", "finally ran", "from C"]
