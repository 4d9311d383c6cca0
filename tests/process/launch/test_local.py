"""Real processes: environment, signals, exit codes, errors."""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.batch.local import Local
from hpcsched.batch.lsf import SIGNALS_ALL
from hpcsched.core.mechanisms.cpu.cores import ON_CORES
from hpcsched.core.model import Device
from hpcsched.devices.nvml import NvmlDevices
from hpcsched.devices.simulated_nvml import SimulatedGpu, SimulatedNvml
from hpcsched.errors import LaunchError
from hpcsched.launch import ports, proc
from hpcsched.launch.base import LOST, LaunchPlan, attempt_code
from hpcsched.launch.cpu_shares import CpuShares
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.proc import stat as proc_stat
from hpcsched.launch.workers import LocalWorkers
from hpcsched.testing.conformance_launch import DEADLINE_S, plan, reaped

PYTHON = Path(sys.executable)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    here = Path.cwd()
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert Path.cwd() == here


def text_of(folder: Path) -> str:
    return (folder / "logs" / "out").read_text()


def run(
    folder: Path, script: str, *, ranks: int = 1, per_rank: bool = True, env: dict[str, str] | None = None
) -> int:
    wanted = replace(plan(folder, ["sh", "-c", script], ranks=ranks, per_rank=per_rank), env=env or {})
    workers = LocalLauncher().launch(wanted)
    try:
        return reaped(workers)
    finally:
        workers.close()


def test_ranks_are_told_who_they_are(tmp_path: Path) -> None:
    script = (
        'echo "$RANK $WORLD_SIZE $LOCAL_RANK $HPCSCHED_RANK $HPCSCHED_WORLD_SIZE $HPCSCHED_LOCAL_RANK '
        '${HPCSCHED_PROGRESS_FD:-none} $MINE $MASTER_ADDR $PWD"'
    )
    assert run(tmp_path, script, ranks=2, env={"MINE": "yes"}) == 0
    assert sorted(text_of(tmp_path).splitlines()) == [
        f"0 2 0 0 2 0 {n} yes 127.0.0.1 {tmp_path}"
        if rank == 0
        else f"1 2 1 1 2 1 none yes 127.0.0.1 {tmp_path}"
        for rank, n in ((0, text_of(tmp_path).split("0 2 0 0 2 0 ")[1][0]), (1, ""))
    ]


def over(gpus: list[SimulatedGpu]) -> tuple[NvmlDevices, LocalLauncher]:
    """Devices of a simulated NVML, and a launcher that starts programs on them."""
    devices = NvmlDevices("here", nvml=SimulatedNvml(gpus))
    return devices, LocalLauncher(device_env=devices.environment, numbered=devices.numbered)


def test_each_rank_sees_its_own_mig_instance_and_all_ranks_all_gpus(tmp_path: Path) -> None:
    # Of several instances CUDA shows a process the first one: with all of them in its list, two ranks would
    # be on one.
    parts = [SimulatedGpu(f"MIG-{i}") for i in range(2)]
    script = 'echo "$RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $CUDA_VISIBLE_DEVICES $HPCSCHED_CUDA_DEVICES"'
    seen = {}
    for kind, gpus in (
        ("mig", [SimulatedGpu("GPU-a", instances=parts)]),
        ("gpu", [SimulatedGpu("GPU-a"), SimulatedGpu("GPU-b")]),
    ):
        devices, launcher = over(gpus)
        wanted = replace(plan(tmp_path, ["sh", "-c", script]), devices=devices.inventory())
        wanted = replace(wanted, output=tmp_path / kind)
        workers = launcher.launch(wanted)
        assert reaped(workers) == 0
        workers.close()
        launcher.close()
        seen[kind] = sorted((tmp_path / kind).read_text().splitlines())
    assert seen["mig"] == ["0 0 2 MIG-0 MIG-0", "1 0 2 MIG-1 MIG-1"]
    assert seen["gpu"] == ["0 0 2 GPU-a,GPU-b GPU-a,GPU-b", "1 1 2 GPU-a,GPU-b GPU-a,GPU-b"]


def test_deepspeed_gets_numbers_and_others_uuids(tmp_path: Path) -> None:
    script = '#!/bin/sh\necho "${0##*/} $CUDA_VISIBLE_DEVICES $HPCSCHED_CUDA_DEVICES $CUDA_DEVICE_ORDER"\n'
    devices, launcher = over([SimulatedGpu(f"GPU-{i}") for i in range(4)])
    for name in ("deepspeed", "torchrun"):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
        wanted = plan(tmp_path, [str(tmp_path / name), "t.py"], per_rank=False)
        workers = launcher.launch(replace(wanted, devices=devices.inventory()[3:1:-1], parallel=False))
        assert reaped(workers) == 0
        workers.close()
    launcher.close()
    assert text_of(tmp_path).splitlines() == [
        "deepspeed 3,2 3,2 PCI_BUS_ID",
        "torchrun GPU-3,GPU-2 GPU-3,GPU-2 PCI_BUS_ID",
    ]


def test_a_single_process_is_told_of_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_PORT", "HPCSCHED_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.setenv(name, "7")  # of whatever the agent was started by
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    script = "env | grep -E 'RANK|WORLD|MASTER|ELASTIC|ROLE_|SLURM|^GROUP_'"
    assert run(tmp_path, script, ranks=3, per_rank=False) == 0
    assert text_of(tmp_path) == "SLURM_JOB_ID=12\n"


def test_output_is_appended_private_and_holds_both_streams(tmp_path: Path) -> None:
    for _ in range(2):
        assert run(tmp_path, "echo out; echo err >&2; cat") == 0  # cat ends: stdin is /dev/null
    assert text_of(tmp_path) == "out\nerr\n" * 2
    assert stat.S_IMODE((tmp_path / "logs" / "out").stat().st_mode) == 0o600


def test_an_output_may_be_a_device_and_a_pipe_without_a_reader_keeps_nobody_waiting(tmp_path: Path) -> None:
    echo = replace(plan(tmp_path, ["echo", "word"]), output=Path(os.devnull))
    workers = LocalLauncher().launch(echo)
    assert reaped(workers) == 0
    workers.close()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(LaunchError, match="pipe: a pipe that nobody reads"):
        LocalLauncher().launch(replace(echo, output=pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        workers = LocalLauncher().launch(replace(echo, output=pipe))
        assert reaped(workers) == 0
        workers.close()
        assert os.read(reader, 100) == b"word\n"
    finally:
        os.close(reader)


def test_progress_comes_from_rank_0_and_ends_with_it(tmp_path: Path) -> None:
    wanted = plan(
        tmp_path, ["sh", "-c", 'test $RANK = 1 || eval "echo hello >&$HPCSCHED_PROGRESS_FD"'], ranks=2
    )
    workers = LocalLauncher().launch(wanted)
    assert reaped(workers) == 0
    assert workers.progress_fd is not None
    assert os.read(workers.progress_fd, 100) == b"hello\n"
    assert os.read(workers.progress_fd, 100) == b""
    workers.close()


def test_only_what_is_meant_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:  # as a wrapper's flock would leave open
        os.set_inheritable(lock.fileno(), True)
        assert run(tmp_path, "exec ls /proc/self/fd") == 0
    # 3: progress, 4: orders, 5: ls reading the folder
    assert text_of(tmp_path).split() == ["0", "1", "2", "3", "4", "5"]


def test_ports_differ(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    for _ in range(5):
        workers = launcher.launch(plan(tmp_path, ["sh", "-c", "echo $MASTER_PORT"]))
        assert reaped(workers) == 0
        workers.close()
    assert len(set(text_of(tmp_path).split())) == 5


def test_a_port_is_looked_for_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(ports.Ports, "take", lambda self: taken.append(4711) or taken[-1])
    alone = replace(plan(tmp_path, ["sh", "-c", "echo $MASTER_PORT"]), per_rank=False, parallel=False)
    workers = LocalLauncher().launch(alone)
    assert reaped(workers) == 0 and taken == [] and text_of(tmp_path) == "\n"
    assert workers.where == workers.where == "127.0.0.1:4711"  # as ranks that join it need one
    workers.close()
    told = replace(alone, argv=("echo", "{master_port}"))
    workers = LocalLauncher().launch(told)
    assert reaped(workers) == 0 and taken == [4711, 4711] and text_of(tmp_path) == "\n4711\n"
    workers.close()


def test_ports_rest_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PORTS_RESTING", 8)
    free = ports.Ports()
    taken = [free.take() for _ in range(50)]
    assert all(len(set(taken[i : i + 7])) == 7 for i in range(40))
    assert len(free._given) <= 8


def test_a_rank_is_pinned_to_its_cores_before_it_begins(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    launcher = LocalLauncher(cpus=lambda device: frozenset({cores[device.index % len(cores)]}))
    ask = "import os\nos.write(1, '{} {}\\n'.format(os.environ['RANK'], os.sched_getaffinity(0)).encode())"
    workers = launcher.launch(plan(tmp_path, [str(PYTHON), "-S", "-c", ask], ranks=2))
    assert sorted(os.sched_getaffinity(0)) == cores
    assert reaped(workers) == 0
    workers.close()
    assert sorted(text_of(tmp_path).splitlines()) == [f"{r} { {cores[r % len(cores)]} }" for r in range(2)]


def test_start_times_are_those_of_proc(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    for _ in range(5):
        workers = launcher.launch(plan(tmp_path, ["sleep", "30"]))
        ((pid, began),) = workers.processes
        assert began == proc_stat(pid).start_ticks
        workers.abandon()


@pytest.mark.parametrize("off", [0, 1])
def test_proc_is_asked_for_start_times_until_the_clock_agrees(
    monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    """`off`: a kernel that counts from another moment is asked for good."""
    asked, ours = [], proc_stat(os.getpid()).start_ticks
    monkeypatch.setattr(proc, "clock_ticks", lambda: ours + off)
    monkeypatch.setattr(proc, "start_ticks", lambda pid: asked.append(pid) or ours)
    times = proc.StartTimes()
    assert times.of(7, since=ours + off - 1) == ours and asked == [7]  # another tick by now
    assert [times.of(7, since=ours + off) for _ in range(3)] == [ours] * 3
    assert len(asked) == (2 if off == 0 else 4)
    assert times.of(8, since=ours + off - 1) == ours and asked[-1] == 8


def test_what_the_agent_ignores_or_blocks_is_default_in_the_worker(tmp_path: Path) -> None:
    ask = (
        "import signal, json, os; print(json.dumps([[int(s) for s in signal.valid_signals() "
        "if signal.getsignal(s) == signal.SIG_IGN], "
        "[int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())], "
        "os.getsid(0) == os.getpid() == os.getpgid(0)]))"
    )
    ignored = (signal.SIGTSTP, signal.SIGHUP, signal.SIGUSR2)
    old = {sig: signal.signal(sig, signal.SIG_IGN) for sig in ignored}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        workers = LocalLauncher().launch(plan(tmp_path, [str(PYTHON), "-S", "-c", ask]))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for sig, handler in old.items():
            signal.signal(sig, handler)
    assert reaped(workers) == 0
    workers.close()
    by_python = [int(signal.SIGPIPE), int(signal.SIGXFSZ)]
    assert json.loads(text_of(tmp_path)) == [by_python, [], True]


def test_a_stop_before_the_handler_is_discarded(tmp_path: Path) -> None:
    workers = LocalLauncher().launch(plan(tmp_path, ["sleep", "30"]))
    workers.signal(signal.SIGTSTP)
    (pid, ticks), *_ = workers.processes
    seen = proc_stat(pid)
    assert seen is not None and seen.state in "RSD" and seen.start_ticks == ticks
    workers.signal(signal.SIGTERM)
    assert reaped(workers) == 128 + signal.SIGTERM
    workers.close()


def test_signals_reach_the_children_and_nothing_is_left_behind(tmp_path: Path) -> None:
    # The leader ends at once and leaves a child that would hold the devices.
    workers = LocalLauncher().launch(plan(tmp_path, ["sh", "-c", "sleep 30 & echo $!"]))
    assert reaped(workers) == 0
    child = int(text_of(tmp_path))
    deadline = time.monotonic() + DEADLINE_S
    while (seen := proc_stat(child)) is not None and seen.state != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.002)
    workers.close()


def test_a_rank_that_fails_while_others_live(tmp_path: Path) -> None:
    workers = LocalLauncher().launch(
        plan(tmp_path, ["sh", "-c", "test $RANK = 1 && exit 9; exec sleep 30"], ranks=3)
    )
    assert select.select([workers.pidfds[1]], [], [], DEADLINE_S)[0]
    assert workers.failed_early()
    assert workers.reap() is None
    workers.signal(signal.SIGTERM)
    assert reaped(workers) == 9  # the first one, not the 143 of those it took along
    assert not workers.failed_early()
    workers.close()


def test_a_child_reaped_by_somebody_else_is_no_success_and_not_signalled(tmp_path: Path) -> None:
    workers = LocalLauncher().launch(plan(tmp_path, ["true"]))
    os.waitpid(workers.processes[0][0], 0)
    workers.signal(signal.SIGKILL)
    assert reaped(workers) == LOST
    workers.close()


@pytest.mark.parametrize("name", ["no-such-command", "./missing", "/no/such/file", ""])
def test_command_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(LaunchError, match="command not found") as caught:
        LocalLauncher().launch(plan(tmp_path, [name]))
    assert not caught.value.transient


def test_relative_commands_are_seen_from_the_job_s_directory(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\necho ran\n")
    with pytest.raises(LaunchError, match="not executable"):
        LocalLauncher().launch(plan(tmp_path, ["./train.sh"]))
    script.chmod(0o700)
    for argv, env in ((["./train.sh"], {}), (["train.sh"], {"PATH": f"/nowhere:{tmp_path}"})):
        workers = LocalLauncher().launch(replace(plan(tmp_path, argv), env=env))
        assert reaped(workers) == 0
        workers.close()
    assert text_of(tmp_path) == f"hpcsched: not executable: {tmp_path}/./train.sh\nran\nran\n"


def test_a_script_without_an_interpreter_line(tmp_path: Path) -> None:
    (tmp_path / "bare").write_text("echo ran\n")
    (tmp_path / "bare").chmod(0o700)
    with pytest.raises(LaunchError, match="#!/bin/sh") as caught:
        LocalLauncher().launch(plan(tmp_path, ["./bare"]))
    assert not caught.value.transient


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="gone: No such file or directory") as caught:
        LocalLauncher().launch(replace(plan(tmp_path, ["true"]), cwd=tmp_path / "gone"))
    assert not caught.value.transient
    assert text_of(tmp_path) == f"hpcsched: {caught.value}\n", "the job's own output says it too"


def test_bad_characters(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        LocalLauncher().launch(plan(tmp_path, ["echo", "a\0b"]))
    assert not caught.value.transient


def test_out_of_descriptors_is_transient(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    launcher = LocalLauncher()
    wanted = plan(tmp_path, ["sleep", "30"], ranks=8)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split()) if children.exists() else set()
    free = [fd for fd in range(soft) if not Path(f"/proc/self/fd/{fd}").exists()]
    for n in range(11):  # run out at every place on the way
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[n], hard))
        try:
            with pytest.raises(LaunchError) as caught:
                launcher.launch(wanted)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert caught.value.transient
    assert not children.exists() or set(children.read_text().split()) <= before


def test_a_failing_rank_ends_those_already_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = os.posix_spawn

    def spawn(*args: object, **kwargs: object) -> int:
        if len(started) == 2:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(real(*args, **kwargs))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(os, "posix_spawn", spawn)
    with pytest.raises(LaunchError, match="temporarily") as caught:
        LocalLauncher().launch(plan(tmp_path, ["sleep", "30"], ranks=3))
    assert caught.value.transient
    assert [proc_stat(pid) for pid in started] == [None, None]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([0, 75], 75), ([75, 1, 2], 1), ([0, 137, 1, 75], 137), ([2, 75], 2)],
)
def test_attempt_code(codes: list[int], expected: int) -> None:
    assert attempt_code(codes) == expected


def test_no_batch_system() -> None:
    allocation = Local().allocation()
    assert (allocation.kind, allocation.id, allocation.deadline, len(allocation.hosts)) == (
        "none",
        None,
        None,
        1,
    )


def test_signals_to_a_whole_job_do_not_reach_workers_but_sigterm_does(tmp_path):
    launcher = LocalLauncher(shielded=SIGNALS_ALL)
    program = f"{sys.executable} -c 'import time; time.sleep(0.3)'; exit 7"  # has no say in what it ignores
    workers = launcher.launch(plan(tmp_path, ["sh", "-c", program]))
    for number in (signal.SIGUSR2, signal.SIGINT):
        workers.signal(number)
    assert reaped(workers) == 7
    workers.close()
    program = "trap 'exit 5' TERM; echo begun; while :; do sleep 0.01; done"
    workers = launcher.launch(plan(tmp_path, ["sh", "-c", program]))
    until_it_begins(tmp_path)
    workers.signal(signal.SIGTERM)
    assert reaped(workers) == 5
    workers.close()


@pytest.mark.parametrize(
    ("shielded", "given", "told"),
    [
        (SIGNALS_ALL, {}, "SIGTERM,SIGHUP,SIGQUIT"),
        (SIGNALS_ALL, {"PET_SIGNALS_TO_HANDLE": "SIGINT"}, "SIGINT"),
        (frozenset(), {}, ""),
    ],
)
def test_torchrun_is_told_not_to_take_over_what_is_shielded(tmp_path, shielded, given, told):
    launcher = LocalLauncher(shielded=shielded, environ={**os.environ, **given})
    workers = launcher.launch(plan(tmp_path, ["sh", "-c", "echo $PET_SIGNALS_TO_HANDLE"]))
    assert reaped(workers) == 0 and text_of(tmp_path).strip() == told
    workers.close()


# -- programs on a share of CPU cores ----------------------------------------------------------------

SPINS = """
import signal, sys, time
signal.signal(signal.SIGTSTP, lambda *_: (print(f"{time.process_time():.3f}"), sys.exit(75)))
print("begun", flush=True)
while True: pass
"""


def on_cores(folder: Path, share: float, cores: str = "0") -> LaunchPlan:
    device = Device(index=-1, host="here", kind=ON_CORES, handle=cores)
    return replace(plan(folder, [sys.executable, "-S", "-c", SPINS]), devices=(device,), share=share)


def until_it_begins(folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "logs" / "out").exists() or "begun" not in text_of(folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_is_held_to_its_share_until_it_is_asked_to_leave(tmp_path: Path) -> None:
    """Most of the time it is stopped, and would miss the signal."""
    launcher = LocalLauncher()
    workers = launcher.launch(on_cores(tmp_path, 0.1))
    try:
        until_it_begins(tmp_path)
        begun = time.monotonic()
        time.sleep(1.5)
        workers.signal(signal.SIGTSTP)
        assert reaped(workers) == 75
        used, lived = float(text_of(tmp_path).split()[-1]), time.monotonic() - begun
        assert used < 0.5 * lived
    finally:
        workers.abandon()
        launcher.close()


def test_whole_cores_need_no_holding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(CpuShares, "hold", hold)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    launcher = LocalLauncher()
    workers = launcher.launch(on_cores(tmp_path, float(len(os.sched_getaffinity(0))), cores))
    try:
        until_it_begins(tmp_path)
        assert os.sched_getaffinity(workers.processes[0][0]) == os.sched_getaffinity(0)
        workers.signal(signal.SIGTSTP)
        assert reaped(workers) == 75
    finally:
        workers.abandon()
        launcher.close()


def test_a_program_is_told_of_as_many_threads_as_it_has_cores(tmp_path: Path) -> None:
    script = 'echo "$OMP_NUM_THREADS [$CUDA_VISIBLE_DEVICES]"'
    device = Device(index=-1, host="here", kind=ON_CORES, handle="0")
    launcher = LocalLauncher()
    for share in (0.3, 1.0, 1.2):
        workers = launcher.launch(
            replace(plan(tmp_path, ["sh", "-c", script]), devices=(device,), share=share)
        )
        assert reaped(workers) == 0
        workers.close()
    launcher.close()
    assert text_of(tmp_path) == "1 []\n1 []\n2 []\n"


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGTERM])
def test_the_order_to_leave_is_a_file_too(tmp_path: Path, number: signal.Signals) -> None:
    # As behind a launcher: the program has a session of its own, and who started it has its own exit code.
    program = "while [ ! -e stop.1 ]; do sleep 0.02; done; : >left.1"
    hard = f"trap '' TSTP TERM; : >begun; setsid -w sh -c '{program}'; exit 3"
    launcher = LocalLauncher()
    for _ in range(2):  # what an earlier attempt of the same number was told does not count
        (tmp_path / "begun").unlink(missing_ok=True)
        workers = launcher.launch(plan(tmp_path, ["sh", "-c", hard], per_rank=False))
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not list(tmp_path.glob("stop.*")) and not list(tmp_path.glob("left.*"))
        workers.signal(number)
        assert json.loads((tmp_path / "stop.1").read_text()) == {"signal": number.name}
        assert reaped(workers) == 75
        workers.close()
    assert run(tmp_path, "kill -KILL $$") == 137
    assert not list(tmp_path.glob("*.tmp")) and not (tmp_path / "stop.1").exists()


@pytest.mark.parametrize(("program", "heard"), [("mpirun", "TERM"), ("other", "TSTP TERM")])
def test_an_mpirun_is_not_sent_what_would_stop_its_ranks(tmp_path: Path, program: str, heard: str) -> None:
    """Open MPI's makes SIGSTOP of SIGTSTP: the ranks hear of it by the file alone."""
    script = tmp_path / program
    script.write_text(
        f"#!{PYTHON} -S\nimport pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTSTP, lambda *_: print('TSTP', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('TERM'))\n"
        "pathlib.Path('begun').touch()\ntime.sleep(60)\n"
    )
    script.chmod(0o755)
    workers = LocalLauncher().launch(plan(tmp_path, [str(script)], per_rank=False))
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    workers.signal(signal.SIGTSTP)
    assert json.loads((tmp_path / "stop.1").read_text()) == {"signal": "SIGTSTP"}
    while "TSTP" in heard and "TSTP" not in text_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.002)
    workers.signal(signal.SIGTERM)
    reaped(workers)
    workers.close()
    assert text_of(tmp_path).split() == heard.split()


def test_a_stop_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    workers = LocalLauncher().launch(plan(tmp_path, ["sleep", "60"]))
    (tmp_path / "stop.1").mkdir()  # nothing can take its place
    workers.signal(signal.SIGTERM)
    assert reaped(workers) == 143
    workers.close()
    assert not list(tmp_path.glob(".stop.*"))


def test_the_stop_file_is_that_of_the_attempt_that_they_are_and_were(tmp_path: Path) -> None:
    workers = LocalLauncher().launch(plan(tmp_path, ["sleep", "60"]))
    workers.expect(2)
    workers.expect(3)
    workers.signal(signal.SIGTERM)
    assert reaped(workers) == 143
    workers.close()
    assert {path.name for path in tmp_path.glob("stop.*")} == {"stop.1", "stop.3"}


def test_who_completes_may_leave_something_behind(tmp_path: Path) -> None:
    marks = {"HPCSCHED_RUN_ID": str(tmp_path), "HPCSCHED_JOB_ID": "1", "HPCSCHED_ATTEMPT": "2"}
    script = (
        "setsid sh -c 'echo $$ >left.new; mv left.new left; exec sleep 60' & while [ ! -e left ]; do :; done"
    )
    assert run(tmp_path, script, per_rank=False, env=marks) == 0
    left = int((tmp_path / "left").read_text())
    assert (seen := proc_stat(left)) and seen.state != "Z"
    os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize(("code", "per_rank"), [(75, False), (0, False), (75, True)])
def test_who_saves_and_leaves_leaves_nothing_behind(tmp_path: Path, code: int, per_rank: bool) -> None:
    """Else one more would be there with each suspend."""
    marks = {"HPCSCHED_RUN_ID": str(tmp_path), "HPCSCHED_JOB_ID": "1", "HPCSCHED_ATTEMPT": "1"}
    script = (
        f"trap 'exit {code}' TSTP; setsid sh -c 'echo $$ >left.new; mv left.new left; exec sleep 60' & "
        "while :; do sleep 0.02; done"
    )
    wanted = replace(plan(tmp_path, ["sh", "-c", script], per_rank=per_rank), env=marks)
    workers, deadline = LocalLauncher().launch(wanted), time.monotonic() + DEADLINE_S
    while not (tmp_path / "left").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    left = int((tmp_path / "left").read_text())
    workers.signal(signal.SIGTSTP)
    assert reaped(workers) == code
    while (seen := proc_stat(left)) and seen.state != "Z" and time.monotonic() < deadline:
        time.sleep(0.002)
    assert seen is None or seen.state == "Z"
    assert not workers.left()
    workers.close()


@pytest.mark.parametrize("differs", [{"HPCSCHED_ATTEMPT": "1"}, {"SLURM_JOB_ID": "8"}])
def test_what_a_killed_launcher_leaves_in_other_sessions_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differs: dict[str, str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    marks = {"HPCSCHED_RUN_ID": str(tmp_path), "HPCSCHED_JOB_ID": "1", "HPCSCHED_ATTEMPT": "2"}
    script = "setsid sh -c 'echo $$ >rank.new; mv rank.new rank; exec sleep 60' & wait"
    wanted = replace(plan(tmp_path, ["sh", "-c", script], per_rank=False), env=marks)
    workers = LocalLauncher().launch(wanted)
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "rank").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    rank = int((tmp_path / "rank").read_text())
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, **marks, **differs})
    try:
        workers.signal(signal.SIGKILL)
        assert reaped(workers) == 137
        while (seen := proc_stat(rank)) and seen.state != "Z" and time.monotonic() < deadline:
            time.sleep(0.002)
        assert seen is None or seen.state == "Z"
        assert other.poll() is None, (
            "another attempt's, or another batch job's, which a program has submitted"
        )
    finally:
        workers.close()
        other.kill()
        other.wait()


@pytest.mark.parametrize(("permitted", "code"), [(True, 0), (False, 1)])
def test_who_waits_for_a_permit_begins_with_it_and_not_without(permitted: bool, code: int) -> None:
    permit, go = os.pipe()
    child = ["sh", "-c", '[ "$(head -c 1)" = . ]']
    actions = [(os.POSIX_SPAWN_DUP2, permit, 0)]
    pid = os.posix_spawnp("sh", child, dict(os.environ), file_actions=actions, setsid=True)
    os.close(permit)
    workers = LocalWorkers()
    workers.add(pid, go)
    if permitted:
        workers.go()
    else:
        workers._close_permits()  # as it is when the launcher gives up, or is gone
    assert reaped(workers) == code
    workers.close()
