"""What every `Launcher` must do. A test class that inherits it says how to get ranks of each sort."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcsched.contract.orders import Resize, Suspend
from hpcsched.core.model import Device
from hpcsched.errors import LaunchError
from hpcsched.launch.base import Launcher, LaunchPlan, Workers

DEADLINE_S = 25.0  # shorter than the sleeps of the programs, which must not end by themselves


def plan(folder: Path, argv: Sequence[str], *, ranks: int = 1, per_rank: bool = True) -> LaunchPlan:
    """A plan for `ranks` pretended devices, with its output in `folder`/logs/out."""
    devices = tuple(Device(index=i, host="here", kind="fake", handle=str(i)) for i in range(ranks))
    return LaunchPlan(
        job_id=1,
        attempt=1,
        argv=tuple(argv),
        env={},
        cwd=folder,
        folder=folder,
        output=folder / "logs" / "out",
        devices=devices,
        per_rank=per_rank,
        parallel=per_rank,
    )


def reaped(workers: Workers) -> int:
    """The attempt's exit code, by waiting on pidfds as the agent does; TimeoutError after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    poll = select.poll()
    for fd in workers.pidfds:
        poll.register(fd, select.POLLIN)
    while (code := workers.reap()) is None:
        for fd, _ in poll.poll(100):
            poll.unregister(fd)
        if time.monotonic() > deadline:
            raise TimeoutError("ranks still live")
    return code


class LaunchConformance:
    """Tests over the launchers that the methods without `test_` give."""

    orders = 10_000
    """That are given and not read."""

    def ending(self, folder: Path, codes: Sequence[int]) -> tuple[Launcher, LaunchPlan]:
        """Ranks that end at once with these codes."""
        raise NotImplementedError

    def waiting(self, folder: Path, ranks: int) -> tuple[Launcher, LaunchPlan]:
        """Ranks that live until a signal, and end with 75 on SIGTSTP once they have been launched."""
        raise NotImplementedError

    def impossible(self, folder: Path) -> tuple[Launcher, LaunchPlan]:
        """A command that does not exist."""
        raise NotImplementedError

    def launched(self, case: tuple[Launcher, LaunchPlan]) -> Workers:
        """Launch, and wait until the ranks can hear signals."""
        launcher, wanted = case
        return launcher.launch(wanted)

    def ends_with(self, folder: Path, codes: Sequence[int]) -> int:
        workers = self.launched(self.ending(folder, codes))
        try:
            return reaped(workers)
        finally:
            workers.close()

    def test_all_done_is_0(self, tmp_path: Path) -> None:
        assert self.ends_with(tmp_path, [0, 0]) == 0

    def test_some_suspended_is_75(self, tmp_path: Path) -> None:
        assert self.ends_with(tmp_path, [0, 75, 75]) == 75

    def test_a_failure_outweighs_a_suspension(self, tmp_path: Path) -> None:
        assert self.ends_with(tmp_path, [75, 3, 0]) == 3

    def test_a_process_a_rank_with_descriptors(self, tmp_path: Path) -> None:
        workers = self.launched(self.waiting(tmp_path, 3))
        try:
            assert len({pid for pid, _ in workers.processes}) == len(workers.pidfds) == 3
            assert workers.reap() is None
            assert not workers.failed_early()
            assert workers.progress_fd is None or not os.get_blocking(workers.progress_fd)
        finally:
            workers.signal(signal.SIGKILL)
            assert reaped(workers) == 128 + signal.SIGKILL
            workers.close()

    def test_suspension_reaches_every_rank(self, tmp_path: Path) -> None:
        workers = self.launched(self.waiting(tmp_path, 2))
        workers.signal(signal.SIGTSTP)
        assert reaped(workers) == 75
        assert workers.reap() == 75
        workers.signal(signal.SIGKILL)  # to nobody
        assert workers.reap() == 75
        workers.close()
        workers.close()

    def test_asked_by_what_nobody_catches_they_are_told_to_end(self, tmp_path: Path) -> None:
        workers = self.launched(self.waiting(tmp_path, 2))
        try:
            assert not workers.catches(signal.SIGUSR1)
            workers.ask_to_save(signal.SIGUSR1)
            assert reaped(workers) == 128 + signal.SIGTERM
            assert workers.saved_by is None
        finally:
            workers.close()

    def test_one_process_for_all_devices(self, tmp_path: Path) -> None:
        launcher, wanted = self.ending(tmp_path, [0])
        two = plan(tmp_path, wanted.argv, ranks=2, per_rank=False)
        workers = launcher.launch(two)
        assert len(workers.processes) == 1
        assert reaped(workers) == 0
        workers.close()

    def test_the_living_are_counted(self, tmp_path: Path) -> None:
        workers = self.launched(self.waiting(tmp_path, 3))
        try:
            assert workers.living == 3
        finally:
            workers.signal(signal.SIGKILL)
            reaped(workers)
            assert workers.living == 0
            workers.close()

    def test_orders_are_taken_by_the_living_and_the_dead(self, tmp_path: Path) -> None:
        workers = self.launched(self.waiting(tmp_path, 2))
        workers.expect(2)
        for _ in range(self.orders):  # more than a pipe holds that nobody reads
            workers.tell(Resize(2, 1, keep=(0,), one_host=True, where="." * 2000))
        workers.signal(signal.SIGTSTP)
        assert reaped(workers) == 75
        workers.tell(Suspend(quick=True))
        workers.close()
        workers.tell(Suspend(quick=True))

    def test_ranks_that_join_meet_where_they_are_told_to(self, tmp_path: Path) -> None:
        launcher, wanted = self.waiting(tmp_path, 2)
        joining = replace(wanted, attempt=2, first_rank=1, world_size=3, joins="10.0.0.1:4711")
        workers = self.launched((launcher, joining))
        try:
            assert workers.where == "10.0.0.1:4711"
            assert len(workers.processes) == 2
            assert workers.progress_fd is None or not select.select([workers.progress_fd], [], [], 0)[0]
        finally:
            workers.signal(signal.SIGKILL)
            reaped(workers)
            workers.close()

    def test_the_first_ranks_say_where_they_meet(self, tmp_path: Path) -> None:
        workers = self.launched(self.ending(tmp_path, [0]))
        host, _, port = workers.where.rpartition(":")
        assert host and 0 < int(port) < 2**16
        reaped(workers)
        workers.close()

    def test_nothing_is_kept_of_a_job_that_held_nothing(self, tmp_path: Path) -> None:
        launcher, wanted = self.ending(tmp_path, [75])
        workers = launcher.launch(wanted)
        assert reaped(workers) == 75
        assert workers.held is None
        assert launcher.keeping() == set()
        launcher.forget(wanted.job_id)
        launcher.forget(wanted.job_id)
        workers.close()

    def test_a_missing_command_is_refused(self, tmp_path: Path) -> None:
        launcher, wanted = self.impossible(tmp_path)
        try:
            launcher.launch(wanted)
        except LaunchError as error:
            assert not error.transient
        else:
            raise AssertionError("launched")
