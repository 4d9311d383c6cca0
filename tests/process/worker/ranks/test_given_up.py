"""A new group that is given up while it is made: the process still ends as it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROGRAM = """
import sys, time, torch
import torch.distributed as dist
from hpcsched.worker.ranks import process_group
process_group.MEET_TIMEOUT_S = 0.6
class Slow:
    def __del__(self):  # when the interpreter is taken apart already, and the other thread comes back
        time.sleep(1.0)
slow = Slow()
peers = process_group.Peers(0, 2, torch.device("cpu"))
keys = dist.HashStore()
keys.set("meets 1", "yes")  # and then it dies
try:
    peers.meet_anew(keys, lambda: True)
except RuntimeError as error:
    print(error)
sys.exit(75)
"""


def test_a_thread_that_still_waits_for_others_does_not_abort_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "the others have not come to the new group\n", done.stderr
    assert done.returncode == 75, done.stderr
