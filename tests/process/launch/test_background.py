"""How a background job's processes are started: what they are told, and how much of a core they get."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcsched.agent.launch_plans import Site, joining_plan
from hpcsched.contract.orders import Pace, Suspend
from hpcsched.core.actions import Resize
from hpcsched.core.model import Device, Role
from hpcsched.launch import spawn
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.plans import plan_attempt
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job
from hpcsched.testing.conformance_launch import DEADLINE_S, plan, reaped
from hpcsched.worker.background.settings import device_of

SHOWS = "import os; print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"


def shown(folder: Path, *, idle: bool) -> str:
    wanted = replace(plan(folder, ["sh", "-c", f"sleep 0.2; {sys.executable} -c '{SHOWS}'"]), idle=idle)
    workers = LocalLauncher().launch(wanted)
    try:
        assert reaped(workers) == 0
    finally:
        workers.close()
    return (folder / "logs" / "out").read_text().strip()


def attempt(kind: str, lane: str | None, folder: Path, **rest):
    device = Device(index=0, host="n1", kind=kind, handle="0")
    return plan_attempt(
        a_job("b", gpus=1, background=lane == "background", env=rest.pop("env", {})),
        job_id=1,
        attempt=1,
        run_id=str(folder),
        run_dir=folder,
        output=folder / "out",
        devices=(device,),
        resume=False,
        lane=lane,
        **rest,
    )


def test_ranks_that_join_find_their_device_by_their_number_like_the_others(tmp_path):
    devices = tuple(Device(index=i, host="n1", kind="test", handle=str(i)) for i in (2, 5))
    site = Site(rundir=RunDir(tmp_path), run_id="r", user="u", speed=1.0, stand_ins=False)
    driver = Driver(gpus=6)
    driver.submit(a_job("j", gpus=2))
    action = Resize(at=0.0, cause="", job_id=1, attempt=1, gpus=(4, 0, 2, 5), role=Role.PRIMARY)
    plan = joining_plan(driver.job("j"), action, site=site, devices=devices, staying=2, where="h:1")
    assert (plan.first_rank, plan.world_size, plan.devices) == (2, 4, devices)
    assert plan.env["HPCSCHED_DEVICES"] == "4,0,2,5"
    found = [device_of({**plan.env, "HPCSCHED_RANK": str(plan.first_rank + i)}) for i in range(2)]
    assert found == ["2", "5"]


def test_on_cpu_slots_it_and_what_it_starts_get_what_others_leave(tmp_path):
    assert shown(tmp_path, idle=True) == f"{os.SCHED_IDLE} 0"


def busy_ms(pid):
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13])) * 10


def test_it_gets_what_others_leave_though_it_leads_a_session_of_its_own(tmp_path):
    """By SCHED_IDLE alone, sessions of which each has a group of its own in the kernel would share evenly."""
    core = frozenset({min(os.sched_getaffinity(0))})
    launcher = LocalLauncher(cpus=lambda device: core)
    spins = ["sh", "-c", f"echo $$ > {tmp_path}/pid.$KIND; while :; do :; done"]
    started = []
    try:
        for kind, idle in (("idle", True), ("idle2", True), ("front", False)):
            folder = tmp_path / kind
            planned = replace(plan(folder, spins), idle=idle)
            started.append(launcher.launch(replace(planned, env={**planned.env, "KIND": kind})))
        deadline = time.monotonic() + DEADLINE_S
        names = [tmp_path / f"pid.{kind}" for kind in ("idle", "idle2", "front")]
        while not all(name.exists() and name.read_text().strip() for name in names):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)  # the kernel grants a wish in a tenth of a second
        pids = [int(name.read_text()) for name in names]
        before = [busy_ms(pid) for pid in pids]
        time.sleep(1.0)
        first, second, front = (busy_ms(pid) - was for pid, was in zip(pids, before, strict=True))
        assert first + second < 0.4 * front
    finally:
        for workers in started:
            workers.signal(signal.SIGKILL)
        for workers in started:
            reaped(workers)
            workers.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_asked_to_save_it_may_do_so_on_any_core(tmp_path):
    """On a core that is busy it would hardly get to it."""
    pinned = frozenset({min(os.sched_getaffinity(0))})
    shows = f'{sys.executable} -c "import os; print(len(os.sched_getaffinity(0)))"'
    script = f"trap '{shows}; exit 75' TSTP; : > {tmp_path}/ready; while :; do sleep 0.05; done"
    launcher = LocalLauncher(cpus=lambda device: pinned)
    workers = launcher.launch(replace(plan(tmp_path, ["sh", "-c", script]), idle=True))
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        workers.signal(signal.SIGTSTP)
        assert reaped(workers) == 75
    finally:
        workers.close()
    assert (tmp_path / "logs" / "out").read_text() == f"{len(os.sched_getaffinity(0))}\n"


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_its_session_weighs_least_until_it_is_asked_to_save(tmp_path):
    workers = LocalLauncher().launch(
        replace(plan(tmp_path, ["sh", "-c", "trap '' TSTP; echo $$; sleep 60"]), idle=True)
    )
    output = tmp_path / "logs" / "out"

    def weighs(nice):
        deadline = time.monotonic() + DEADLINE_S
        while not output.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        group = Path(f"/proc/{output.read_text().strip()}/autogroup")
        while group.read_text().split()[-1:] != [nice]:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    try:
        weighs("19")
        workers.signal(signal.SIGTSTP)
        weighs("0")
    finally:
        workers.signal(signal.SIGKILL)
        reaped(workers)
        workers.close()


def test_others_are_started_as_ever(tmp_path):
    assert shown(tmp_path, idle=False) == f"{os.SCHED_OTHER} 0"


def test_where_the_system_does_not_allow_that_it_is_as_nice_as_can_be(tmp_path, monkeypatch):
    def forbidden(pid, policy, parameters):
        raise PermissionError

    monkeypatch.setattr(spawn.os, "sched_setscheduler", forbidden)
    assert shown(tmp_path, idle=True) == f"{os.SCHED_OTHER} 19"


def test_that_its_process_is_over_already_is_no_error(tmp_path):
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    spawn.set_idle_priority(pid)


@pytest.mark.parametrize(("kind", "idle"), [("cpu", True), ("test", False)])
def test_its_program_is_told_its_lane_and_yields_on_cpu_slots_alone(tmp_path, kind, idle):
    planned = attempt(kind, "background", tmp_path)
    assert planned.env["HPCSCHED_LANE"] == "background"
    assert planned.idle is idle


def test_it_is_told_what_it_may_take_of_the_memory_unless_its_job_file_says(tmp_path):
    told = attempt("test", "background", tmp_path, room_mib=900.7)
    assert told.env["HPCSCHED_LANE_MEMORY_MIB"] == "900"
    own = {"HPCSCHED_LANE_MEMORY_MIB": "300"}
    assert attempt("test", "background", tmp_path, room_mib=900.7, env=own).env.items() >= own.items()
    assert "HPCSCHED_LANE_MEMORY_MIB" not in attempt("test", "background", tmp_path).env


def test_a_foreground_job_is_told_so_where_there_are_others_and_yields_to_nobody(tmp_path):
    planned = attempt("cpu", "foreground", tmp_path)
    assert (planned.env["HPCSCHED_LANE"], planned.idle) == ("foreground", False)
    assert "HPCSCHED_LANE" not in attempt("cpu", None, tmp_path).env


def test_a_lane_that_the_agent_itself_was_told_reaches_no_worker(tmp_path):
    launcher = LocalLauncher(environ={**os.environ, "HPCSCHED_LANE": "background"})
    workers = launcher.launch(plan(tmp_path, ["sh", "-c", "echo lane=$HPCSCHED_LANE"]))
    try:
        assert reaped(workers) == 0
    finally:
        workers.close()
    assert (tmp_path / "logs" / "out").read_text() == "lane=\n"


def test_one_that_the_zygote_has_forked_yields_before_it_begins(tmp_path):
    class Zygote:
        def spawn(self, start, early):
            permit, go = os.pipe()
            pid = os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", f"read x; {sys.executable} -c '{SHOWS}'"],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, permit, 0), (os.POSIX_SPAWN_DUP2, start.output, 1)],
            )
            os.close(permit)
            return pid, go

    launcher = LocalLauncher()
    launcher._zygotes = SimpleNamespace(of=lambda python, stamp: Zygote())
    workers = launcher.launch(replace(plan(tmp_path, []), module="hpcsched.worker", idle=True))
    try:
        assert reaped(workers) == 0
    finally:
        workers.close()
    assert (tmp_path / "logs" / "out").read_text() == f"{os.SCHED_IDLE} 0\n"


# --- the stand-in -----------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path):
    """A stand-in of 1000 steps a second that can be told its pace."""
    former = signal.signal(signal.SIGUSR1, lambda *_: None)
    course = {"rate": 1000.0, "start_s": 0.0, "suspend_s": 0.0, "steps": 10_000_000, "speed": 1.0}
    env = {
        "HPCSCHED_STANDIN": json.dumps(course),
        "HPCSCHED_JOB_DIR": str(tmp_path),
        "HPCSCHED_ATTEMPT": "1",
        "HPCSCHED_NOTIFY_PID": str(os.getpid()),
    }
    argv = [sys.executable, "-m", "hpcsched.worker.standin"]
    workers = LocalLauncher().launch(replace(plan(tmp_path, argv), env=env, cwd=Path.cwd()))
    yield workers
    workers.signal(signal.SIGKILL)
    reaped(workers)
    workers.close()
    signal.signal(signal.SIGUSR1, former)


def steps_in(workers, seconds: float) -> float:
    """Steps a second, from the first line that comes to the first one so much later."""
    first, rest = None, b""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            data = os.read(workers.progress_fd, 65536)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        *lines, rest = (rest + data).split(b"\n")
        for line in map(json.loads, lines):
            first = first or line
            if line["t"] - first["t"] >= seconds:
                return (line["step"] - first["step"]) / (line["t"] - first["t"])
    raise AssertionError("no progress")


def told(workers, share: float) -> None:
    """Give the order, and let what was said before it go by."""
    workers.tell(Pace(share))
    steps_in(workers, 0.5)


def test_a_stand_in_keeps_to_its_pace(stand_in):
    assert steps_in(stand_in, 0.6) == pytest.approx(1000, rel=0.2)
    told(stand_in, 0.25)
    assert steps_in(stand_in, 0.6) == pytest.approx(250, rel=0.3)
    told(stand_in, 0.0)
    assert steps_in(stand_in, 0.6) == 0
    told(stand_in, 1.0)
    assert steps_in(stand_in, 0.6) == pytest.approx(1000, rel=0.2)


def test_a_stand_in_that_pauses_saves_and_leaves_at_once(stand_in, tmp_path):
    told(stand_in, 0.0)
    stand_in.signal(signal.SIGTSTP)
    assert reaped(stand_in) == 75
    assert json.loads((tmp_path / "STATE.json").read_text())["step"] > 0


def test_a_stand_in_passes_over_orders_that_are_not_for_it(stand_in):
    stand_in.tell(Suspend(quick=True))
    for line in (b'{"pace": "fast"}\n', b'{"pace": null}\n', b"\xff\n", b'{"dance": 1}\n'):
        os.write(stand_in._control, line)
    told(stand_in, 0.5)
    assert steps_in(stand_in, 0.6) == pytest.approx(500, rel=0.3)
