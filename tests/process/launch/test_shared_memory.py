"""What outlives attempts: arenas, and the keepers that make their content durable."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.contract.orders import Forget, Pace, Suspend
from hpcsched.core.model import JobSpec, Kind
from hpcsched.errors import LaunchError
from hpcsched.launch import proc, shared_memory
from hpcsched.launch.base import RankPlacement
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.plans import plan_attempt
from hpcsched.launch.shared_memory import KeeperTask, SharedMemoryStore
from hpcsched.launch.spawn import ProcessStart, spawn
from hpcsched.launch.workers import LocalWorkers
from hpcsched.testing.conformance_launch import DEADLINE_S, plan, reaped

WRITES = 'eval "echo from-$HPCSCHED_ATTEMPT >&$HPCSCHED_ARENA_FD"; '
HOLDS = "echo '{\"step\": 7}' > held.$HPCSCHED_ATTEMPT; exit 75"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEEPER_DELAY_S", 0.0)


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    before = descriptors()
    one = LocalLauncher()
    yield one
    one.close()
    assert descriptors() == before


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives keepers another program."""

    def be(script: str) -> None:
        monkeypatch.setattr(KeeperTask, "argv", ("/bin/sh", "-c", script))

    return be


def launch(
    launcher: LocalLauncher, folder: Path, script: str, *, attempt: int = 1, **changes: object
) -> LocalWorkers:
    wanted = replace(plan(folder, ["sh", "-c", script]), attempt=attempt, arena=True)
    env = {"HPCSCHED_ATTEMPT": str(attempt)}
    return launcher.launch(replace(wanted, env=env, **changes))  # type: ignore[arg-type]


def end(workers: LocalWorkers) -> int:
    try:
        return reaped(workers)
    finally:
        workers.close()


def said(folder: Path) -> list[str]:
    return (folder / "logs" / "out").read_text().splitlines()


# -- arenas --------------------------------------------------------------------------------------------


def test_an_arena_outlives_attempts_until_the_job_is_forgotten(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    reads = "cat /proc/self/fd/$HPCSCHED_ARENA_FD; "
    assert end(launch(launcher, tmp_path, f"{reads} {WRITES} exit 75")) == 75
    assert end(launch(launcher, tmp_path, f"{reads} {WRITES} exit 75", attempt=2)) == 75
    launcher.forget(1)
    assert end(launch(launcher, tmp_path, f"{reads} exit 0", attempt=3)) == 0
    assert said(tmp_path) == ["from-1"]


def test_all_ranks_of_a_job_share_its_arena_and_no_other_has_it(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    asks = "stat -Lc %i /proc/self/fd/$HPCSCHED_ARENA_FD"
    devices = plan(tmp_path, ["x"], ranks=3).devices
    assert end(launch(launcher, tmp_path, asks, devices=devices)) == 0
    assert end(launch(launcher, tmp_path, asks, job_id=2)) == 0
    *same, other = said(tmp_path)
    assert len(same) == 3 and len(set(same)) == 1 and other not in same


def test_without_an_arena_none_is_named(launcher: LocalLauncher, tmp_path: Path) -> None:
    end(launch(launcher, tmp_path, 'echo "${HPCSCHED_ARENA_FD:-none}"', arena=False))
    assert said(tmp_path) == ["none"]


def test_only_idle_arenas_are_dropped_the_longest_unused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_IDLE_STATES", 2)
    kept = SharedMemoryStore()
    numbers = {job: kept.take(job) for job in (1, 2, 3, 4)}
    assert len(kept._held) == 4
    for job in (3, 1, 2, 4):
        kept.leave(job)
    assert list(kept._held) == [3, 4], "launched last"
    assert kept.take(4) == numbers[4]
    kept.take(5)
    kept.leave(5)
    assert list(kept._held) == [3, 4, 5]
    kept.leave(4)
    kept.close()
    assert not kept._held and not kept._used, "nothing is kept of jobs that are over"
    kept.take(6)
    kept.forget(6)  # while it ends
    assert kept._used
    kept.leave(6)
    assert not kept._used


def test_who_gets_an_arena(tmp_path: Path) -> None:
    def arena(kind: Kind, processes: str = "per-gpu", stand_in: dict[str, float] | None = None) -> bool:
        spec = JobSpec(
            name="a",
            user="u",
            model="m",
            kind=kind,
            command=("x",),
            trainer="a:B",
            workdir="/",
            processes=processes,
        )
        return plan_attempt(
            spec, job_id=1, attempt=1, run_id="r", run_dir=tmp_path, output=tmp_path / "o", devices=(),
            resume=False, per_gpu=processes == "per-gpu", from_step=5, stand_in=stand_in,
        ).arena  # fmt: skip

    assert arena(Kind.TRAINER) and arena(Kind.COMMAND)
    assert not arena(Kind.COMMAND, "one") and not arena(Kind.TRAINER, stand_in={"rate": 1.0})


# -- keepers -------------------------------------------------------------------------------------------


def test_a_held_state_is_kept_by_a_process_with_the_arena(
    launcher: LocalLauncher, tmp_path: Path, keeper: Callable[[str], None]
) -> None:
    keeper(
        'echo "$HPCSCHED_ATTEMPT $RANK $PWD $PPID ${HPCSCHED_PROGRESS_FD-none} ${HPCSCHED_CONTROL_FD-none}"\n'
        "cat /proc/self/fd/$HPCSCHED_ARENA_FD; rm held.1"
    )
    workers = launch(launcher, tmp_path, WRITES + HOLDS)
    assert reaped(workers) == 75
    assert workers.held is not None and json.loads(workers.held) == {"step": 7}
    assert launcher.keeping() == {1}
    assert launcher.wait_kept(DEADLINE_S) == set()
    assert said(tmp_path) == [f"1 0 {tmp_path} {os.getpid()} none none", "from-1"]
    workers.close()


def test_a_keeper_has_what_it_keeps_when_the_job_is_forgotten(
    launcher: LocalLauncher, tmp_path: Path, keeper: Callable[[str], None]
) -> None:
    keeper("cat /proc/self/fd/$HPCSCHED_ARENA_FD")
    end(launch(launcher, tmp_path, WRITES + HOLDS))
    launcher.forget(1)
    assert launcher.wait_kept(DEADLINE_S) == set()
    assert said(tmp_path) == ["from-1"]


def test_the_newest_attempt_that_was_expected_counts(
    launcher: LocalLauncher, tmp_path: Path, keeper: Callable[[str], None]
) -> None:
    keeper("echo $HPCSCHED_ATTEMPT")
    workers = launch(
        launcher,
        tmp_path,
        "while [ ! -e go ]; do sleep 0.01; done; echo 1 > held.1; echo 3 > held.3; exit 75",
    )
    workers.expect(2)
    workers.expect(3)
    workers.expect(4)
    (tmp_path / "go").touch()
    assert reaped(workers) == 75 and workers.held == b"3\n"
    launcher.wait_kept(DEADLINE_S)
    assert said(tmp_path) == ["3"] and not (tmp_path / "held.3").exists()
    workers.close()


@pytest.mark.parametrize(
    ("script", "changes"),
    [("exit 75", {}), ("touch held.1; exit 0", {}), ("touch held.1; exit 1", {}), (HOLDS, {"arena": False})],
)
def test_nothing_is_kept_otherwise(
    launcher: LocalLauncher, tmp_path: Path, script: str, changes: dict[str, object]
) -> None:
    (tmp_path / "held.1").touch()
    if changes:
        (tmp_path / "held.1").unlink()
    end(launch(launcher, tmp_path, script, **changes))
    assert launcher.keeping() == set()


@pytest.mark.parametrize("end_", ["exit 1", "kill -9 $$"])
def test_what_one_says_that_is_killed_as_it_leaves_has_nobody_wait(
    launcher: LocalLauncher, tmp_path: Path, end_: str
) -> None:
    end(launch(launcher, tmp_path, HOLDS.replace("exit 75", end_)))
    assert launcher.keeping() == set() and not (tmp_path / "held.1").exists()


def test_a_state_of_which_nobody_can_have_the_memory_is_waited_for_by_none(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    workers = launch(launcher, tmp_path, HOLDS)
    monkeypatch.setattr(os, "dup", dup)
    end(workers)
    assert workers.held is None and launcher.keeping() == set() and not (tmp_path / "held.1").exists()


def test_only_the_host_of_rank_0_keeps(launcher: LocalLauncher, tmp_path: Path) -> None:
    wanted = replace(plan(tmp_path, ["sh", "-c", "touch held.1; exit 75"]), arena=True)
    end(launcher.launch(wanted, RankPlacement(first_rank=1, world_size=2, port=4711)))
    assert launcher.keeping() == set()


def test_a_keeper_that_fails_is_tried_twice_then_nobody_waits(
    launcher: LocalLauncher, tmp_path: Path, keeper: Callable[[str], None]
) -> None:
    keeper("echo tried; exit 9")
    end(launch(launcher, tmp_path, HOLDS))
    assert launcher.wait_kept(DEADLINE_S) == set()
    assert said(tmp_path) == ["tried", "tried"] and not (tmp_path / "held.1").exists()


def test_a_keeper_that_hangs_is_killed_with_all_its_children(
    launcher: LocalLauncher, tmp_path: Path, keeper: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "KEEPER_HANGS_AFTER_S", 0.3)
    keeper("trap '' TERM; sleep 60 & echo $!; wait")
    end(launch(launcher, tmp_path, HOLDS))
    assert launcher.wait_kept(DEADLINE_S) == set()
    deadline = time.monotonic() + DEADLINE_S
    for child in map(int, said(tmp_path)):
        while (seen := proc.stat(child)) and seen.state != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_keeper_that_moves_has_time_and_what_it_keeps_is_said_to_be_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, moved, killed = 1000.0, (1,), list[int]()
    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(shared_memory, "_moved", lambda pid: moved)
    monkeypatch.setattr(shared_memory.os, "killpg", lambda pid, number: killed.append(pid))
    reader, writer = os.pipe()  # stands for a pidfd: readable means ended
    keepers = shared_memory.Keepers(lambda keep: (4711, reader))
    keep = KeeperTask(1, 1, tmp_path, tmp_path, tmp_path / "out", {}, arena=-1, python="python")
    keep.held.touch()
    keepers.keep(keep)
    for _ in range(50):  # ten times as long as one that does nothing has
        now, moved = now + shared_memory.KEEPER_HANGS_AFTER_S / 5, (moved[0] + 1,)
        os.utime(keep.held, (0, 0))
        assert keepers.keeping() == {1} and not killed
        assert keep.held.stat().st_mtime > 0
    now += shared_memory.KEEPER_HANGS_AFTER_S - 1
    assert keepers.keeping() == {1} and not killed
    now += 2
    keepers.keeping()
    assert killed == [4711]
    keepers.close()
    os.close(writer)


@pytest.mark.parametrize(
    ("error", "for_s", "kept"),
    [
        (OSError(errno.EIO, "a hiccup"), 3.0, True),
        (OSError(errno.EMFILE, "too many"), 3.0, True),
        (LaunchError("not now", transient=True), 3.0, True),
        (OSError(errno.EIO, "for good"), 60.0, False),
        (OSError(errno.EACCES, "never"), 3.0, False),
    ],
)
def test_a_keeper_that_cannot_be_started_for_a_moment_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, for_s: float, kept: bool
) -> None:
    began = now = 1000.0
    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(monotonic=lambda: now))
    reader, writer = os.pipe()  # stands for a pidfd: readable means ended

    def begin(task: KeeperTask) -> tuple[int, int]:
        if now < began + for_s:
            raise error
        return 4711, reader

    keepers = shared_memory.Keepers(begin)
    keep = KeeperTask(1, 1, tmp_path, tmp_path, tmp_path / "out", {}, arena=-1, python="python")
    keep.held.touch()
    keepers.keep(keep)
    while now < began + 30.0:
        keepers.keeping()
        now += 0.25
    assert (keepers.keeping() == {1}, keep.held.exists(), keep.pid == 4711) == (kept, kept, kept)
    keepers.close()
    os.close(writer)
    if not kept:
        os.close(reader)


def test_what_a_process_does_is_seen() -> None:
    before = shared_memory._moved(os.getpid())
    os.write(1, b".")
    assert before and before != shared_memory._moved(os.getpid())
    assert shared_memory._moved(2**22 + 1) == ()


def test_one_keeper_a_job_at_a_time_and_only_the_newest_waits(
    launcher: LocalLauncher, tmp_path: Path, keeper: Callable[[str], None]
) -> None:
    keeper("echo $HPCSCHED_ATTEMPT; while [ ! -e go ]; do sleep 0.01; done")
    for attempt in (1, 2, 3):
        end(launch(launcher, tmp_path, HOLDS, attempt=attempt))
        assert launcher.keeping() == {1}
    assert (tmp_path / "held.1").exists() and not (tmp_path / "held.2").exists()
    (tmp_path / "go").touch()
    assert launcher.wait_kept(DEADLINE_S) == set()
    assert said(tmp_path) == ["1", "3"]


def test_a_keeper_lives_on_when_its_launcher_closes(
    launcher: LocalLauncher, tmp_path: Path, keeper: Callable[[str], None]
) -> None:
    keeper("while [ ! -e go ]; do sleep 0.01; done; touch done")
    end(launch(launcher, tmp_path, HOLDS))
    assert launcher.wait_kept(0.05) == {1}
    launcher.close()
    assert (tmp_path / "held.1").exists() and launcher.keeping() == set()
    (tmp_path / "go").touch()
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_keeper_gives_way_to_launches_first(
    launcher: LocalLauncher, tmp_path: Path, keeper: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "KEEPER_DELAY_S", 3600.0)
    keeper("echo kept")
    end(launch(launcher, tmp_path, HOLDS))
    assert launcher.keeping() == {1} and said(tmp_path) == []
    assert launcher.wait_kept(DEADLINE_S) == set(), "who waits does not wait for that"
    assert said(tmp_path) == ["kept"]


# -- orders and joining ranks --------------------------------------------------------------------------


def test_orders_reach_rank_0_line_by_line(launcher: LocalLauncher, tmp_path: Path) -> None:
    script = 'test $RANK = 1 || { eval "exec 0<&$HPCSCHED_CONTROL_FD"; read a; read b; echo "$a|$b"; }'
    workers = launch(launcher, tmp_path, script, devices=plan(tmp_path, ["x"], ranks=2).devices)
    workers.tell(Suspend(quick=True))
    workers.tell(Forget(4))
    assert end(workers) == 0
    assert said(tmp_path) == ['{"suspend": {"quick": true}}|{"forget": {"attempt": 4}}']


def test_orders_end_when_the_agent_closes(launcher: LocalLauncher, tmp_path: Path) -> None:
    workers = launch(launcher, tmp_path, 'eval "cat <&$HPCSCHED_CONTROL_FD"')
    pidfd = os.dup(workers.pidfds[0])
    workers.close()
    assert proc.stat(workers.processes[0][0]) is not None
    while workers.reap() is None:
        time.sleep(0.002)
    os.close(pidfd)


@pytest.mark.parametrize("changes", [{"per_rank": False, "arena": False}, {"first_rank": 1}])
def test_who_gets_no_orders(launcher: LocalLauncher, tmp_path: Path, changes: dict[str, object]) -> None:
    workers = launch(launcher, tmp_path, 'echo "${HPCSCHED_CONTROL_FD:-none}"', **changes)
    workers.tell(Suspend())
    assert end(workers) == 0
    assert said(tmp_path) == ["none"]


def test_ranks_that_join_are_numbered_after_the_others(launcher: LocalLauncher, tmp_path: Path) -> None:
    asks = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $HPCSCHED_JOINING $MASTER_ADDR $MASTER_PORT"'
    workers = launch(
        launcher, tmp_path, asks,
        devices=plan(tmp_path, ["x"], ranks=2).devices, first_rank=2, world_size=4, joins="10.0.0.7:4711",
    )  # fmt: skip
    assert end(workers) == 0
    assert sorted(said(tmp_path)) == [f"{rank} 4 {rank - 2} 1 10.0.0.7 4711" for rank in (2, 3)]


def test_what_the_agent_was_told_is_not_told_on(tmp_path: Path) -> None:
    names = [f"HPCSCHED_{name}" for name in ("CONTROL_FD", "ARENA_FD", "JOINING", "PROGRESS_FD")]
    launcher = LocalLauncher(environ=os.environ | dict.fromkeys(names, "9"))
    end(launch(launcher, tmp_path, "env", arena=False, first_rank=1, world_size=2))
    launcher.close()
    assert not [line for line in said(tmp_path) if line.startswith(tuple(names))]


def test_descriptors_do_not_get_in_each_other_s_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def posix_spawn(program: str, argv: object, env: dict[str, str], **settings: Any) -> int:
        asked.update(env=env, actions=settings["file_actions"])
        return 1

    monkeypatch.setattr(os, "posix_spawn", posix_spawn)
    inherited = {"A": 4, "B": 3, "C": 6}
    start = ProcessStart(program="x", argv=("x",), env={}, cwd=tmp_path, output=7, inherited=inherited)
    assert spawn(start, frozenset()) == 1
    open_there = {number: number for number in (3, 4, 6, 7)}
    for action, source, target in asked["actions"][1:]:
        assert action == os.POSIX_SPAWN_DUP2 and source != target
        open_there[target] = open_there[source]
    assert {name: open_there[int(number)] for name, number in asked["env"].items()} == inherited


def test_rank_0_can_use_all_that_it_is_given(launcher: LocalLauncher, tmp_path: Path) -> None:
    script = (
        'eval "echo p >&$HPCSCHED_PROGRESS_FD; echo a >&$HPCSCHED_ARENA_FD";'
        'eval "read line <&$HPCSCHED_CONTROL_FD";'
        'echo "$line"; cat /proc/self/fd/$HPCSCHED_ARENA_FD'
    )
    workers = launch(launcher, tmp_path, script)
    workers.tell(Pace(0.5))
    assert reaped(workers) == 0
    assert workers.progress_fd is not None and os.read(workers.progress_fd, 9) == b"p\n"
    assert said(tmp_path) == ['{"pace": 0.5}', "a"]
    workers.close()


def test_a_group_is_cleared_away_with_what_became_ours(launcher: LocalLauncher, tmp_path: Path) -> None:
    from hpcsched.launch import zygote

    zygote._take_orphans(True)
    try:
        # The leader ends once its grandchild, which is ours by then, is a zombie.
        # It ends after the shell between, which would else see to it.
        orphan = "(sleep 0.05 & echo $! > pid); until grep -q ' Z ' /proc/$(cat pid)/stat; do sleep .01; done"
        workers = launch(launcher, tmp_path, orphan)
        assert end(workers) == 0
    finally:
        zygote._take_orphans(False)
    with pytest.raises(ChildProcessError):
        os.waitpid(-workers.processes[0][0], os.WNOHANG)
