"""Shares of cores for programs that are not ours: the duty cycle, cgroups; and where the cores are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcsched.launch import cpu_shares
from hpcsched.launch.cgroups import delegated_cgroup
from hpcsched.launch.cpu_shares import CgroupShare, CpuShares, DutyCycle, numa_nodes
from hpcsched.launch.orphans import Process
from hpcsched.launch.proc import stat

DEADLINE_S = 15.0
SPIN = "while True: pass"
TWO = "import os\nos.fork()\nwhile True: pass"
FOLLOWED = "import os, time\nif os.fork(): time.sleep(60)\nwhile True: pass"
"""Uses nothing itself."""
THREAD = """
import threading, time
def spin():
    while True: pass
threading.Thread(target=spin).start()
time.sleep(60)
"""

HOLDER = """
import os, sys, time
from hpcsched.launch.proc import stat
from hpcsched.launch.cpu_shares import DutyCycle
duty = DutyCycle()
for pid in map(int, sys.argv[1:]):
    duty.hold((pid, stat(pid).start_ticks), 0.01)
time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Start a command, leader of a session of its own."""
    children: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> Process:
        child = subprocess.Popen(command, start_new_session=True)
        children.append(child)
        seen = stat(child.pid)
        assert seen is not None
        return child.pid, seen.start_ticks

    yield start
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(DEADLINE_S)


@pytest.fixture
def duty() -> Iterator[DutyCycle]:
    with DutyCycle() as duty:
        yield duty


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-S", "-c", code


def state(pid: int) -> str:
    seen = stat(pid)
    return "gone" if seen is None else seen.state


def ignores(pid: int, number: signal.Signals) -> bool:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def until(condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)


def group_cpu_s(group: int) -> float:
    """By another way than the tested one: clock ticks of all its processes and of the children they had."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (seen := stat(int(entry.name))) and seen.group == group:
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def used_over(group: int, seconds: float) -> float:
    """Cores used over that time."""
    began, used = time.monotonic(), group_cpu_s(group)
    time.sleep(seconds)
    return (group_cpu_s(group) - used) / (time.monotonic() - began)


# -- the duty cycle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        python(SPIN),
        python(TWO),
        python(FOLLOWED),
        ("sh", "-c", "while :; do /bin/true; done"),
    ],
    ids=["one", "two processes", "a child", "many short ones"],
)
def test_a_program_uses_its_share_and_no_more(
    start: Callable[..., Process], duty: DutyCycle, command: tuple[str, ...]
) -> None:
    process = start(*command)
    time.sleep(0.2)
    duty.hold(process, 0.3)
    used = used_over(process[0], 1.5)
    assert 0.1 < used < 0.45  # a busy machine can only make it less


def test_a_thread_of_a_program_counts(start: Callable[..., Process], duty: DutyCycle) -> None:
    process = start(*python(THREAD))
    time.sleep(0.2)
    duty.hold(process, 0.25)
    assert 0.05 < used_over(process[0], 1.0) < 0.4


def test_a_process_that_comes_later_is_found(start: Callable[..., Process], duty: DutyCycle) -> None:
    process = start(*python(f"import os, time\ntime.sleep(0.5)\nif os.fork(): time.sleep(60)\n{SPIN}"))
    duty.hold(process, 0.2)
    time.sleep(1)
    assert 0.05 < used_over(process[0], 1.5) < 0.35


def test_two_programs_have_shares_of_their_own(start: Callable[..., Process], duty: DutyCycle) -> None:
    processes = [start(*python(SPIN)) for _ in range(2)]
    for process, share in zip(processes, (0.1, 0.5), strict=True):
        duty.hold(process, share)
    (little, _), (much, _) = processes
    began_s, before = time.monotonic(), group_cpu_s(little)
    start_s = group_cpu_s(much)
    until(lambda: group_cpu_s(much) - start_s > 0.5)  # later on a busy machine
    took_s = time.monotonic() - began_s
    assert group_cpu_s(little) - before < 0.25 * took_s
    assert group_cpu_s(much) - start_s < 0.8 * took_s


def test_another_share_counts_at_once(start: Callable[..., Process], duty: DutyCycle) -> None:
    process = start(*python(SPIN))
    duty.hold(process, 0.01)
    until(lambda: state(process[0]) == "T")
    duty.hold(process, 100.0)
    until(lambda: state(process[0]) == "R")
    assert used_over(process[0], 0.5) > 0.2


def test_released_and_closed_programs_go_on(start: Callable[..., Process]) -> None:
    first, second = start(*python(SPIN)), start(*python(SPIN))
    duty = DutyCycle()
    for process in (first, second):
        duty.hold(process, 0.001)
        until(lambda process=process: state(process[0]) == "T")  # type: ignore[misc]
    duty.release(first)
    assert state(first[0]) != "T"
    time.sleep(0.05)
    assert state(first[0]) != "T"
    assert state(second[0]) == "T"
    duty.close()
    assert state(second[0]) != "T"
    duty.release(second)  # not held any more: nothing
    duty.close()
    duty.hold(first, 0.001)  # and it can be used again
    until(lambda: state(first[0]) == "T")
    duty.close()


def test_a_program_that_somebody_else_continues_is_stopped_again(
    start: Callable[..., Process], duty: DutyCycle
) -> None:
    process = start(*python(SPIN))
    duty.hold(process, 0.001)
    until(lambda: state(process[0]) == "T")
    os.killpg(process[0], signal.SIGCONT)
    until(lambda: state(process[0]) == "T")


def test_all_go_on_when_the_holder_is_killed(start: Callable[..., Process]) -> None:
    processes = [start(*python(SPIN)) for _ in range(2)]
    holder = start(sys.executable, "-c", HOLDER, *(str(pid) for pid, _ in processes))
    for pid, _ in processes:
        until(lambda pid=pid: state(pid) == "T")  # type: ignore[misc]
    os.kill(holder[0], signal.SIGKILL)
    for pid, _ in processes:
        until(lambda pid=pid: state(pid) == "R")  # type: ignore[misc]


def test_who_watches_over_them_ends_with_it_and_is_replaced(
    start: Callable[..., Process], duty: DutyCycle
) -> None:
    process = start(*python(SPIN))
    duty.hold(process, 0.01)
    first = duty._watch
    assert first
    until(lambda: ignores(first.pid, signal.SIGTERM))
    first.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert first.poll() is None  # sent to all of a job: it has to stay longest
    first.kill()
    first.wait(DEADLINE_S)
    duty.hold(start(*python(SPIN)), 0.5)
    second = duty._watch
    assert second and second.poll() is None
    duty.close()
    assert second.poll() is not None


def test_only_the_process_that_is_meant(start: Callable[..., Process], duty: DutyCycle) -> None:
    pid, ticks = start(*python(SPIN))
    duty.hold((pid, ticks + 1), 0.001)  # the pid was used again
    time.sleep(0.05)
    assert state(pid) != "T"
    ended = start("true")
    until(lambda: state(ended[0]) == "Z")
    duty.hold(ended, 0.5)
    os.waitpid(ended[0], 0)
    duty.hold(ended, 0.5)


def test_a_program_that_ends_is_forgotten(start: Callable[..., Process], duty: DutyCycle) -> None:
    process = start(*python(SPIN))
    duty.hold(process, 0.01)
    thread = duty._thread
    assert thread
    os.killpg(process[0], signal.SIGKILL)
    os.waitpid(process[0], 0)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_what_cannot_be_held_is_refused(start: Callable[..., Process], duty: DutyCycle) -> None:
    child = subprocess.Popen(["sleep", "30"])  # in our own group
    try:
        seen = stat(child.pid)
        assert seen
        with pytest.raises(ValueError, match="no process group of its own"):
            duty.hold((child.pid, seen.start_ticks), 0.5)
    finally:
        child.kill()
        child.wait(DEADLINE_S)
    process = start("sleep", "30")
    with pytest.raises(ValueError, match="share of 0"):
        duty.hold(process, 0)
    assert duty._thread is None


def test_time_that_nobody_inherits_is_not_forgotten(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, inherited = {1: 5.0, 2: 3.0}, {1: 1.0, 2: 0.0, 3: 0.0}
    monkeypatch.setattr(cpu_shares, "_cpu_s", own.__getitem__)
    monkeypatch.setattr(cpu_shares, "_state", lambda pid: (False, inherited[pid]))
    group = cpu_shares._Group(1, [1, 2], 0.5, 0.0)
    assert group.used_s() == 9
    inherited[1] = 4.0  # 2 has ended, 1 has waited for it
    group.count([1])
    assert group.used_s() == 9
    own[3] = 2.0
    group.count([1, 3])
    group.count([1])  # 3 has ended, nobody has waited for it
    assert group.used_s() == 11


FORKS = """
import os, time
if child := os.fork():
    os.waitpid(child, 0)
    while True:
        pass
time.sleep(1)
"""


@pytest.mark.parametrize("when", ["held", "released", "closed"])
def test_a_child_that_stopped_after_its_group_was_let_go_on_goes_on_too(
    start: Callable[..., Process], duty: DutyCycle, when: str
) -> None:
    """As the kernel leaves one that was forked between SIGSTOP and SIGCONT."""
    program = start(*python(FORKS))
    until(lambda: len(cpu_shares._members({program[0]})[program[0]]) == 2)
    (child,) = set(cpu_shares._members({program[0]})[program[0]]) - {program[0]}
    if when == "closed":
        duty.hold(program, 0.5)
        os.kill(child, signal.SIGSTOP)
        duty.close()
    else:
        duty.hold(program, 0.5)
        if when == "released":
            duty.release(program)
        os.kill(child, signal.SIGSTOP)
    until(lambda: state(program[0]) == "R")


# -- cgroups -----------------------------------------------------------------------------------------------


def tree(root: Path, own: str, mounted: str, enabled: dict[str, str]) -> Path:
    """A pretended machine; `enabled`: the controllers by cgroup. Returns the mount point."""
    proc, mount = root / "proc/self", root / "sys/fs/cgroup/unified"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(f"4:memory:/elsewhere\n0::{own}\n")
    (proc / "mountinfo").write_text(
        "25 24 0:22 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        f"26 24 0:23 {mounted} /sys/fs/cgroup/unified rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    )
    for name, controllers in enabled.items():
        place = mount / name
        place.mkdir(parents=True)
        (place / "cgroup.procs").write_text("")
        (place / "cgroup.subtree_control").write_text(f"{controllers}\n")
    return mount


def test_the_nearest_cgroup_that_may_be_used(tmp_path: Path) -> None:
    mount = tree(
        tmp_path,
        "/user/session/scope",
        "/",
        {"": "cpu memory", "user": "cpuset cpu", "user/session": "memory cpuset", "user/session/scope": ""},
    )
    assert delegated_cgroup(tmp_path) == mount / "user"
    (mount / "user/cgroup.procs").unlink()  # nothing to write to
    assert delegated_cgroup(tmp_path) == mount


def test_no_cgroup_above_the_mount_and_none_without_the_controller(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.procs").write_text("")
    (tmp_path / "sys/fs/cgroup/cgroup.subtree_control").write_text("cpu\n")
    tree(tmp_path, "/a", "/", {"": "memory", "a": "cpuset"})
    assert delegated_cgroup(tmp_path) is None


@pytest.mark.parametrize(("own", "found"), [("/box/a", "a"), ("/other/a", None), ("/box/../a", None)])
def test_a_mount_shows_a_part_of_the_tree(tmp_path: Path, own: str, found: str | None) -> None:
    mount = tree(tmp_path, own, "/box", {"": "", "a": "cpu", "../a": "cpu"})
    assert delegated_cgroup(tmp_path) == (mount / found if found else None)


def test_no_cgroups_of_the_second_version(tmp_path: Path) -> None:
    assert delegated_cgroup(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/a\n")
    (tmp_path / "proc/self/mountinfo").write_text("25 24 0:22 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw\n")
    assert delegated_cgroup(tmp_path) is None


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_cgroup_of_somebody_else(tmp_path: Path) -> None:
    mount = tree(tmp_path, "/a", "/", {"a": "cpu"})
    (mount / "a").chmod(0o555)
    assert delegated_cgroup(tmp_path) is None
    (mount / "a").chmod(0o755)


def test_this_machine_is_looked_at() -> None:
    found = delegated_cgroup()
    assert found is None or "cpu" in (found / "cgroup.subtree_control").read_text().split()


def test_a_cgroup_has_its_share(tmp_path: Path) -> None:
    share = CgroupShare(tmp_path, "job-1", 0.5)
    place = tmp_path / "job-1"
    assert (place / "cpu.max").read_text() == "50000 100000\n"
    share.set(2.25)
    assert (place / "cpu.max").read_text() == "225000 100000\n"
    share.set(0.01)
    assert (place / "cpu.max").read_text() == "1000 100000\n"
    share.add(4711)
    assert (place / "cgroup.procs").read_text() == "4711\n"
    share.close()  # somebody is in it: it stays, and holds nobody
    assert (place / "cpu.max").read_text() == "max 100000\n"
    CgroupShare(tmp_path, "job-1", 0.5).close()


def test_an_empty_cgroup_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[Path] = []
    monkeypatch.setattr(Path, "rmdir", lambda path: gone.append(path))  # a real one may have files
    CgroupShare(tmp_path, "job-1", 0.5).close()
    assert gone == [tmp_path / "job-1"]


@pytest.mark.parametrize("share", [0.0, 0.005, -1.0, float("nan")])
def test_a_share_that_the_kernel_does_not_know_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match="a share of"):
        CgroupShare(tmp_path, "job-1", share)


# -- one or the other --------------------------------------------------------------------------------------


def test_a_program_is_held_by_a_cgroup_where_one_may_be_made(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    place = tree(tmp_path, "/a", "/", {"": "", "a": "cpu"}) / "a"
    program = start(*python("import time; time.sleep(60)"))
    holder = CpuShares(tmp_path)
    let_go = holder.hold(program, 0.3)
    (group,) = (path for path in place.iterdir() if path.is_dir())
    assert (group / "cpu.max").read_text() == "30000 100000\n"
    assert (group / "cgroup.procs").read_text() == f"{program[0]}\n"
    let_go()
    let_go()
    assert (group / "cpu.max").read_text() == "max 100000\n"
    until(lambda: state(program[0]) == "S")
    holder.close()


def test_what_a_program_has_started_before_is_in_its_cgroup_too(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    place = tree(tmp_path, "/a", "/", {"": "", "a": "cpu"}) / "a"
    program = start(*python("import os, time; os.fork(); time.sleep(60)"))
    until(lambda: len(cpu_shares._members({program[0]})[program[0]]) == 2)
    held = CpuShares(tmp_path)
    held.hold(program, 0.3)
    (group,) = (path for path in place.iterdir() if path.is_dir())
    last = int((group / "cgroup.procs").read_text())  # a real one would have both
    assert last != program[0] and os.getpgid(last) == program[0]
    held.close()


def test_cgroups_of_an_agent_that_was_killed_go(start: Callable[..., Process], tmp_path: Path) -> None:
    place = tree(tmp_path, "/a", "/", {"": "", "a": "cpu"}) / "a"
    pid, start_ticks = start(*python("import time; time.sleep(60)"))
    for name in (f"{pid}-{start_ticks}", f"{pid}-{start_ticks - 1}", f"{2**22 + 1}-5"):
        (place / f"hpcsched-{name}").mkdir()
    (place / "hpcsched-of-mine").mkdir()
    CpuShares(tmp_path).close()
    left = {path.name for path in place.glob("hpcsched-*")}
    assert left == {f"hpcsched-{pid}-{start_ticks}", "hpcsched-of-mine"}


def test_nobody_stays_stopped_while_the_machine_cannot_be_looked_at(
    start: Callable[..., Process], duty: DutyCycle, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = start(*python(SPIN))
    duty.hold(program, 0.01)
    until(lambda: state(program[0]) == "T")
    with monkeypatch.context() as patch:

        def fails(groups: set[int]) -> None:
            raise OSError(24, "Too many open files")

        patch.setattr(cpu_shares, "_members", fails)
        until(lambda: state(program[0]) == "R")
    until(lambda: state(program[0]) == "T")


def test_what_the_kernel_refuses_a_duty_cycle_does(start: Callable[..., Process], tmp_path: Path) -> None:
    tree(tmp_path, "/a", "/", {"": "", "a": "cpu"})
    holder = CpuShares(tmp_path)
    program = start(*python(SPIN))
    let_go = holder.hold(program, 0.005)
    until(lambda: state(program[0]) == "T")
    let_go()
    until(lambda: state(program[0]) == "R")
    holder.close()


# -- NUMA --------------------------------------------------------------------------------------------------


def test_cores_by_numa_node(tmp_path: Path) -> None:
    for node, cores in {0: "0-1,4-5\n", 1: "2-3,6\n", 2: "\n"}.items():  # 2 has memory only
        place = tmp_path / f"sys/devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cores)
    found = numa_nodes(tmp_path)
    assert {core: found[core] for core in range(7)} == {0: 0, 1: 0, 4: 0, 5: 0, 2: 1, 3: 1, 6: 1}


def test_one_node_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == dict.fromkeys(os.sched_getaffinity(0), 0)
    assert os.sched_getaffinity(0) <= numa_nodes().keys()
