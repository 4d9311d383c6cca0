"""What follows from why a batch job ends, and how long there is; the batch system is a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcsched.batch.pyslurm import PySlurmProcess
from hpcsched.errors import BatchError

HANGS = """
import ctypes
__version__ = "25.11.2"
class RPCError(Exception): ...
class Job:
    @staticmethod
    def load(job):
        if job == 7:
            ctypes.PyDLL(None).sleep(600)  # with Python's lock held, as libslurm does
        if job == 8:
            raise RPCError("Invalid job id specified")
        found = Job()
        found.end_time, found.state = 1000 + job, "RUNNING"
        return found
"""


def test_a_pyslurm_that_hangs_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text(HANGS)
    ask = PySlurmProcess({"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}, timeout_s=20.0)
    assert ask("end_time", 9) == 1009
    first = ask._process
    assert first is not None
    ask._timeout_s = 0.5
    with pytest.raises(BatchError, match=r"pyslurm did not answer: nothing within 0\.5 s"):
        ask("end_time", 7)
    assert first.poll() is not None
    ask._timeout_s = 20.0
    assert ask("state", 9) == "RUNNING"
    with pytest.raises(BatchError, match="Invalid job id specified"):
        ask("state", 8)
    assert ask("version") == "25.11.2"
    ask.close()
