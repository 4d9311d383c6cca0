"""The cores of a host that are kept for jobs on GPUs."""

from __future__ import annotations

import os

from hpcsched.agent.cpu_cores import gpu_cores, host_cores
from hpcsched.core.model import HostCores
from hpcsched.testing.devices import FakeDevices


def test_what_is_kept_for_gpus_is_counted(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    devices = FakeDevices(2)
    cores = host_cores(devices, "n1", cpus_per_gpu=4)
    assert (cores.kept, len(cores.own)) == (8, 8)
    assert set(gpu_cores(cores)) == set(range(16)) - set(cores.own)
    assert host_cores(devices, "n1", cpus_per_gpu=4, granted=6).kept == 6
    assert cores.memory_mib is None or cores.memory_mib > 0


def test_where_they_are_not_counted_there_are_none():
    assert gpu_cores(HostCores(host="n1")) == ()
