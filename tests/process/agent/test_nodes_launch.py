"""Two "hosts" on this machine: how an attempt over both of them looks from the inside and to the head."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.agent.progress import ProgressMeter
from hpcsched.core.needs import Needs
from hpcsched.devices import Sample
from hpcsched.errors import LaunchError
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.remote import launcher
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.testing.nodes import (
    DEADLINE_S,
    code_of,
    local_hosts,
    no_descriptor_left_open,
    pump_until,
    written,
)

WAITER = "trap 'exit 75' TSTP; touch up.$RANK; while :; do sleep 30 & wait; done"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteLauncher[Sample]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_PROCID", "0")
        patch.setenv("SLURM_JOB_ID", "7")
        home = tmp_path_factory.mktemp("modules")
        (home / "init").mkdir()
        (home / "init/bash").write_text("module() { sleep 300; }\n")
        patch.setenv("MODULESHOME", str(home))
        with local_hosts(tmp_path_factory.mktemp("run")) as hosts:
            yield hosts


@pytest.fixture(autouse=True)
def no_leaks(hosts: RemoteLauncher[Sample]) -> Iterator[None]:
    with no_descriptor_left_open():
        yield


def plan(
    hosts: RemoteLauncher[Sample], folder: Path, argv: Sequence[str], *, per_rank: bool = True
) -> LaunchPlan:
    devices = hosts.inventory()
    return LaunchPlan(
        job_id=3,
        attempt=2,
        argv=tuple(argv),
        env={"HPCSCHED_DEVICES": ",".join(str(d.index) for d in devices)},
        cwd=folder,
        folder=folder,
        output=folder / "out",
        devices=devices,
        per_rank=per_rank,
    )


def sh(hosts: RemoteLauncher[Sample], folder: Path, script: str, *, per_rank: bool = True) -> LaunchPlan:
    return plan(hosts, folder, ["sh", "-c", script], per_rank=per_rank)


def test_devices_are_numbered_host_by_host(hosts: RemoteLauncher[Sample]) -> None:
    assert [(d.index, d.host) for d in hosts.inventory()] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert hosts.kind == "replay" and hosts.speed == 1.0 and not hosts.lost()
    assert [s.gpu for s in hosts.sample()] == [0, 1, 2, 3] and all(s.healthy for s in hosts.sample())
    assert hosts.address_of("b") == "127.0.0.1"
    assert len(hosts.skew_s) == 2
    # By the fastest message: the first one has waited for the handshake.
    pump_until(hosts, lambda: all(abs(skew) < 1 for skew in hosts.skew_s.values()))


def test_programs_on_hosts_are_asked_by_the_signal_that_they_catch(
    hosts: RemoteLauncher[Sample], tmp_path: Path
) -> None:
    """Rank 0 of each host has a handler; a stop file says the same."""
    script = "trap 'touch saved.$RANK; exit 0' USR1; touch up.$RANK; while :; do sleep 30 & wait $!; done"
    wanted = replace(sh(hosts, tmp_path, script), asks=signal.SIGUSR1)
    workers = hosts.launch(wanted)
    pump_until(hosts, lambda: workers.catches(signal.SIGUSR1) and len(list(tmp_path.glob("up.*"))) == 4)
    workers.ask_to_save(signal.SIGUSR1)
    assert code_of(hosts, workers) == 0
    workers.close()
    assert len(list(tmp_path.glob("saved.*"))) == 4
    assert json.loads((tmp_path / "stop.2").read_text()) == {"signal": "SIGUSR1"}


def test_a_command_saves_a_program_on_its_host(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    workers = hosts.launch(sh(hosts, tmp_path, WAITER))
    pump_until(hosts, lambda: len(list(tmp_path.glob("up.*"))) == 4)
    workers.save_by(["sh", "-c", "tr '\\0' ' ' < /proc/{pid}/cmdline; pwd; exit 3"], 20.0)
    pump_until(hosts, lambda: workers.saved_by is not None)
    assert workers.saved_by == (3, f"sh -c {WAITER} {tmp_path}")
    workers.signal(signal.SIGKILL)
    assert code_of(hosts, workers) == 128 + signal.SIGKILL
    workers.close()


def test_a_command_that_ends_the_program_itself_is_heard_of(
    hosts: RemoteLauncher[Sample], tmp_path: Path
) -> None:
    """As `criu dump` does; the program's end is told after what became of the command."""
    workers = hosts.launch(replace(sh(hosts, tmp_path, WAITER), devices=hosts.inventory()[:1]))
    pump_until(hosts, lambda: len(list(tmp_path.glob("up.*"))) == 1)
    workers.save_by(["sh", "-c", "kill -9 {pid}; sleep 0.3"], 20.0)
    assert code_of(hosts, workers) == 128 + signal.SIGKILL
    assert workers.saved_by == (0, "")
    workers.close()


def test_ranks_are_told_who_they_are(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    show = (
        "import os, json; keys = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', "
        "'HPCSCHED_DEVICES', 'HPCSCHED_NOTIFY_PID', 'SLURM_JOB_ID', 'SLURM_PROCID', 'HPCSCHED_NODE']; "
        "os.write(1, (json.dumps([os.environ.get(k) for k in keys] + [os.getppid()]) + '\\n').encode())"
    )
    workers = hosts.launch(plan(hosts, tmp_path, [sys.executable, "-S", "-c", show]))
    assert code_of(hosts, workers) == 0
    workers.close()
    texts = [(tmp_path / name).read_text() for name in ("out", "out.b")]
    lines = [sorted((json.loads(line) for line in text.splitlines()), key=lambda x: x[0]) for text in texts]
    (r0, r1), (r2, r3) = lines
    assert [r[:3] for r in (r0, r1, r2, r3)] == [[str(n), "4", str(n % 2)] for n in range(4)]
    assert len({(r[3], r[4]) for r in (r0, r1, r2, r3)}) == 1 and r0[3] == "127.0.0.1"
    for rank, host in ((r0, "a"), (r1, "a"), (r2, "b"), (r3, "b")):
        assert rank[5] == "0,1,2,3" and rank[6] == str(rank[10]) and rank[7:9] == ["7", None]
        assert rank[9].endswith(f":{host}")


def test_one_process_a_host(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    workers = hosts.launch(sh(hosts, tmp_path, "echo $RANK $WORLD_SIZE $LOCAL_RANK", per_rank=False))
    assert code_of(hosts, workers) == 0
    workers.close()
    assert [(tmp_path / name).read_text() for name in ("out", "out.b")] == ["0 2 0\n", "1 2 0\n"]


def test_progress_ready_and_record_are_relayed(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    script = (
        'if [ $RANK = 0 ]; then touch ready.2; echo \'{"step": 5, "t": 1.0}\' >&$HPCSCHED_PROGRESS_FD; '
        "echo one >STATE.json; kill -USR1 $HPCSCHED_NOTIFY_PID; fi; " + WAITER.replace("exit 75", "save")
    )
    script = "save() { test $RANK = 0 && echo two >STATE.json; exit 75; }\n" + script
    (tmp_path / "ready.2").touch()  # an earlier attempt's that had the same number
    workers = hosts.launch(sh(hosts, tmp_path, script))
    assert workers.progress_fd is not None
    meter = ProgressMeter(workers.progress_fd)
    pump_until(
        hosts,
        lambda: workers.ready == b"" and workers.record == b"one\n" and meter.read() and bool(meter.last),
    )
    assert meter.last is not None and meter.last.step == 5
    pump_until(hosts, lambda: len(list(tmp_path.glob("up.*"))) == 4)
    workers.signal(signal.SIGTSTP)
    assert code_of(hosts, workers) == 75
    assert workers.record == b"two\n"
    assert not meter.read()  # the end
    workers.close()


def test_a_flood_of_progress_holds_nothing_up(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    flood = "if [ $RANK = 0 ]; then head -c 3000000 /dev/zero >&$HPCSCHED_PROGRESS_FD; fi"
    workers = hosts.launch(sh(hosts, tmp_path, flood))
    assert code_of(hosts, workers) == 0  # nobody reads the pipe
    workers.close()


def test_a_failed_rank_is_told_while_others_live(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    fail = "test $RANK = 3 && exit 9; exec sleep 300"
    workers = hosts.launch(sh(hosts, tmp_path, fail))
    pump_until(hosts, workers.failed_early)
    assert workers.reap() is None
    workers.signal(signal.SIGTERM)
    assert code_of(hosts, workers) == 9  # not the 143 of those it took along
    assert not workers.failed_early()
    workers.close()


def test_a_signal_overtakes_no_launch(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    workers = hosts.launch(sh(hosts, tmp_path, "exec sleep 30"))
    workers.signal(signal.SIGTERM)  # the second host has not even been asked
    assert code_of(hosts, workers) == 128 + signal.SIGTERM
    workers.close()


def test_an_attempt_whose_modules_are_being_loaded_ends_at_once(
    hosts: RemoteLauncher[Sample], tmp_path: Path
) -> None:
    waits = sh(hosts, tmp_path, "true")
    group = hosts.launch(replace(waits, needs=Needs(modules=("slow",))))
    group.signal(signal.SIGTERM)
    with pytest.raises(LaunchError, match="host a: it was told to end before it had any processes") as caught:
        code_of(hosts, group)
    assert caught.value.transient
    group.close()


def test_a_host_that_cannot_launch_takes_the_others_along(
    hosts: RemoteLauncher[Sample], tmp_path: Path
) -> None:
    (tmp_path / "out.b").mkdir()  # cannot be opened for writing
    workers = hosts.launch(sh(hosts, tmp_path, "exec sleep 300"))
    with pytest.raises(LaunchError, match=r"host b: .*out\.b: Is a directory") as caught:
        code_of(hosts, workers)
    assert not caught.value.transient
    workers.close()


def test_the_first_host_that_cannot_launch(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    workers = hosts.launch(plan(hosts, tmp_path, ["no-such-command"]))
    with pytest.raises(LaunchError, match="command not found"):
        code_of(hosts, workers)
    workers.close()


def test_many_at_once(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    many = [hosts.launch(sh(hosts, tmp_path, "exit 0")) for _ in range(10)]
    assert [code_of(hosts, workers) for workers in many] == [0] * 10
    for workers in many:
        workers.close()


@pytest.mark.torch
def test_an_all_reduce_over_two_hosts(hosts: RemoteLauncher[Sample], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = (
        "import os, torch, torch.distributed as dist; dist.init_process_group('gloo'); "
        "x = torch.tensor([float(dist.get_rank() + 1)]); dist.all_reduce(x); "
        "os.write(1, f'{x.item()}\\n'.encode()); dist.destroy_process_group()"
    )
    workers = hosts.launch(plan(hosts, tmp_path, [sys.executable, "-c", program]))
    assert code_of(hosts, workers, deadline_s=300) == 0, (tmp_path / "out").read_text()
    workers.close()
    for name in ("out", "out.b"):
        assert (tmp_path / name).read_text().split() == ["10.0", "10.0"]


def test_leaving_ends_what_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LEFT_WITHIN_S", DEADLINE_S)
    with local_hosts(tmp_path, ("a", "b"), devices="replay:1") as hosts:
        workers = hosts.launch(sh(hosts, tmp_path, "echo $$ >pid.$RANK; exec sleep 300"))
        files = [tmp_path / f"pid.{rank}" for rank in (0, 1)]
        pump_until(hosts, lambda: written(files))
        pids = [int(file.read_text()) for file in files]
        assert hosts.close() and hosts.close()
        assert all(command.succeeded for command in hosts._commands)  # as they were told, not by force
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        workers.close()
        assert not list(tmp_path.glob("join-*"))


def test_memory_that_runs_out_on_a_host_is_told_with_its_name(
    hosts: RemoteLauncher[Sample], tmp_path: Path
) -> None:
    grows = (
        "import os, time\nkept = []\n"
        "while os.environ['RANK'] == '0': kept.append(b'x' * 2**22); time.sleep(0.01)\n"
        "time.sleep(60)"
    )
    wanted = plan(hosts, tmp_path, [sys.executable, "-S", "-c", grows])
    workers = hosts.launch(replace(wanted, needs=Needs(memory_mib=100.0)))
    pump_until(hosts, workers.failed_early)
    workers.signal(signal.SIGKILL)
    assert code_of(hosts, workers) == 128 + signal.SIGKILL
    assert workers.oom.startswith(f"on host {hosts.inventory()[0].host} it used ")
    assert workers.over_limit
    workers.close()
