"""MPS through a stand-in for its control program, which has the rules of NVIDIA's guide."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mpsstandin import MpsHost, connect, mps_host

from hpcsched import mps_control
from hpcsched.errors import ConfigError
from hpcsched.worker import entry
from hpcsched.worker.background import mps

GPUS = ["GPU-1111aaaa", "GPU-2222bbbb", "GPU-3333cccc", "GPU-4444dddd"]
LANES = ("foreground", "background")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[MpsHost]:
    with mps_host(GPUS) as found:
        monkeypatch.setattr(mps_control, "_TEMPORARY", found.folder)
        yield found


def worker(host: MpsHost, visible: str, job: int = 1, **more: str) -> dict[str, str]:
    """The environment of a job's only rank."""
    return {
        "PATH": host.path,
        "HOME": "/home/me",
        "HPCSCHED_RUN_ID": "run",
        "HPCSCHED_JOB_ID": str(job),
        "CUDA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "WANDB_API_KEY": "of one job",
        **more,
    }


def test_a_worker_is_a_client_before_it_touches_a_gpu(host: MpsHost, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"HPCSCHED_LANE": "background", "HPCSCHED_LANE_MODE": "mps"}
    environ = worker(host, GPUS[1], **names)
    monkeypatch.setattr(os, "environ", environ)
    assert entry.before_torch() is None
    assert connect(environ) == [GPUS[1]]


def test_ranks_that_begin_at_once_start_it_once(host: MpsHost) -> None:
    environs = [worker(host, gpu) for gpu in GPUS]
    with ThreadPoolExecutor(len(GPUS)) as pool:
        assert list(pool.map(lambda environ: mps.use(environ, lane="foreground"), environs)) == [None] * 4
    assert (host.folder / f"{mps.CONTROL}.starts").read_text() == "once\n"


@pytest.mark.parametrize("names", [("GPU-2222bbbb", "GPU-4444dddd"), ("1", "3")], ids=["uuid", "index"])
def test_pairs_on_several_gpus_are_clients_of_one_daemon(host: MpsHost, names: tuple[str, str]) -> None:
    folders = set()
    for number, (name, lane) in enumerate((name, lane) for name in names for lane in LANES):
        environ = worker(host, name, job=number)
        mps.use(environ, lane=lane)
        uuid = name if name in GPUS else GPUS[int(name)]
        assert connect(environ) == [uuid]
        folders.add(environ["CUDA_MPS_PIPE_DIRECTORY"])
    assert len(folders) == 1


def test_the_daemon_gets_nothing_of_the_job_that_begins_it(host: MpsHost) -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        mps.use(worker(host, GPUS[1]), lane="foreground")
    finally:
        os.sched_setaffinity(0, mine)
    daemon = mps.daemon(worker(host, GPUS[1]))
    began = host.log(daemon.folder)[0]
    assert set(began["environ"]) - {"LC_CTYPE"} == {"PATH", "HOME", *daemon.variables()}
    assert began["cores"] == len(mine)
    assert began["session"] != os.getsid(0)
    assert daemon.folder.parent.stat().st_mode & 0o777 == 0o700


def test_each_mig_instance_has_a_daemon_that_serves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    instances = ["MIG-aaaa", "MIG-GPU-bbbb/1/0"]
    with mps_host(instances) as host:
        monkeypatch.setattr(mps_control, "_TEMPORARY", host.folder)
        for name in instances:
            for lane in LANES:
                environ = worker(host, name)
                mps.use(environ, lane=lane)
                assert connect(environ) == [name]
            began = host.log(Path(environ["CUDA_MPS_PIPE_DIRECTORY"]).parent)[0]
            assert began["environ"]["CUDA_VISIBLE_DEVICES"] == name
        assert len(mps_control.daemons("run")) == 2


def test_each_rank_on_instances_is_a_client_of_its_own_ones(host: MpsHost) -> None:
    folders = {
        mps.daemon(worker(host, "MIG-a,MIG-b", HPCSCHED_LOCAL_RANK=str(rank))).folder for rank in (0, 1)
    }
    assert folders == {mps.daemon(worker(host, name)).folder for name in ("MIG-a", "MIG-b")}


def test_the_background_is_below_the_foreground_and_limited(host: MpsHost) -> None:
    environ = worker(host, GPUS[0], HPCSCHED_LANE_MEMORY_MIB="9000")
    front, back = (mps.variables(environ, lane=lane) for lane in LANES)
    assert front["CUDA_MPS_CLIENT_PRIORITY"] == "0"
    assert not {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"} & front.keys()
    assert (back["CUDA_MPS_CLIENT_PRIORITY"], back["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("1", "50")
    assert back["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=9000M"
    unlimited = mps.variables(worker(host, GPUS[0]), lane="background")
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in unlimited
    with pytest.raises(ConfigError, match="HPCSCHED_LANE_MEMORY_MIB: '8G'; accepted: a whole number of MiB"):
        mps.variables({**environ, "HPCSCHED_LANE_MEMORY_MIB": "8G"}, lane="background")


def test_those_that_share_evenly_are_limited_in_memory_alone(host: MpsHost) -> None:
    told = mps.variables(worker(host, GPUS[0], HPCSCHED_LANE_MEMORY_MIB="9000"), lane="shared")
    assert told["CUDA_MPS_CLIENT_PRIORITY"] == "0"
    assert told["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=9000M"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in told


def test_without_a_daemon_the_mode_is_refused(host: MpsHost) -> None:
    environ = worker(host, GPUS[0])
    with pytest.raises(ConfigError, match="HPCSCHED_LANE_MODE=mps: no nvidia-cuda-mps-control here"):
        mps.use({**environ, "PATH": "/nowhere"}, lane="background")
    (host.folder / mps.CONTROL).write_text("#!/bin/sh\necho not permitted >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="not permitted"):
        mps.use(dict(environ), lane="background")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps_control, "ANSWERS_WITHIN_S", 1.0)


def test_a_daemon_that_was_killed_is_begun_anew(host: MpsHost) -> None:
    environ = worker(host, GPUS[0])
    mps.use(environ, lane="foreground")
    os.kill(host.pid(mps.daemon(environ).folder), signal.SIGKILL)
    mps.use(environ, lane="foreground")  # its socket lies there still
    assert connect(environ) == [GPUS[0]]


def test_a_daemon_that_does_not_answer_is_none(host: MpsHost) -> None:
    """Its clients would run without MPS, and nobody would know."""
    (host.folder / mps.CONTROL).write_text(
        '#!/bin/sh\nif [ "$1" = -d ]; then touch "$CUDA_MPS_PIPE_DIRECTORY/control"; else exit 1; fi\n'
    )
    with pytest.raises(ConfigError, match="nvidia-cuda-mps-control does not answer"):
        mps.use(worker(host, GPUS[0]), lane="foreground")


def test_a_folder_that_others_can_enter_is_refused(host: MpsHost) -> None:
    mps_control.home("run").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="somebody else's, or open to others"):
        mps.use(worker(host, GPUS[0]), lane="foreground")
    mps_control.home("run").rmdir()
    mps_control.home("run").symlink_to(host.folder)
    with pytest.raises(ConfigError, match="somebody else's"):
        mps.use(worker(host, GPUS[0]), lane="foreground")
