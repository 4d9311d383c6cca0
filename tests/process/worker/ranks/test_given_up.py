"""How long ranks wait for a new group and in it, and how a process ends that has given one up."""

from __future__ import annotations

import socket
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


LATE = """
import os, sys, time, torch
import torch.distributed as dist
from datetime import timedelta
from hpcsched.worker.ranks import backend, process_group
process_group.MEET_TIMEOUT_S = 0.5
backend.patience_can_change = lambda: False
backend.set_patience = lambda *_: None  # as in torch before 2.9
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=30))
peers = process_group.Peers(rank, 2, torch.device("cpu"))
peers.meet_anew(dist.PrefixStore("keys", store))
if rank == 1:
    time.sleep(1.0)
total = torch.ones(1)
dist.all_reduce(total)
assert total == 2
peers.agree(False)
peers.close(quick=True)
os._exit(0)  # as what closes it so promises: gloo's threads are still there
"""


@pytest.mark.slow
def test_where_patience_cannot_change_it_is_long_from_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen([sys.executable, "-c", LATE, rank, port], stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said


@pytest.mark.slow
def test_a_thread_that_still_waits_for_others_does_not_abort_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "the others have not come to the new group\n", done.stderr
    assert done.returncode == 75, done.stderr
