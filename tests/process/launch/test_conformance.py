"""The conformance suite for launchers, over the fake and real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from hpcsched.errors import LaunchError
from hpcsched.launch.base import Launcher, LaunchPlan, Workers
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.proc import stat
from hpcsched.testing.conformance_launch import DEADLINE_S, LaunchConformance, plan, reaped
from hpcsched.testing.launch import FakeLauncher, Script


class TestFake(LaunchConformance):
    def ending(self, folder: Path, codes: Sequence[int]) -> tuple[Launcher, LaunchPlan]:
        return FakeLauncher(lambda _: Script(codes=codes)), plan(folder, ["x"], ranks=len(codes))

    def waiting(self, folder: Path, ranks: int) -> tuple[Launcher, LaunchPlan]:
        return FakeLauncher(), plan(folder, ["x"], ranks=ranks)

    def impossible(self, folder: Path) -> tuple[Launcher, LaunchPlan]:
        return FakeLauncher(lambda _: LaunchError("command not found", transient=False)), plan(folder, ["x"])


class TestLocal(LaunchConformance):
    def ending(self, folder: Path, codes: Sequence[int]) -> tuple[Launcher, LaunchPlan]:
        script = f"set -- {' '.join(map(str, codes))}; shift $RANK; exit $1"
        return LocalLauncher(), plan(folder, ["sh", "-c", script], ranks=len(codes))

    def waiting(self, folder: Path, ranks: int) -> tuple[Launcher, LaunchPlan]:
        script = "trap 'exit 75' TSTP; touch ready.$RANK; while :; do sleep 30 & wait; done"
        return LocalLauncher(), plan(folder, ["sh", "-c", script], ranks=ranks)

    def impossible(self, folder: Path) -> tuple[Launcher, LaunchPlan]:
        return LocalLauncher(), plan(folder, ["no-such-command"])

    def test_what_a_rank_leaves_behind_ends_while_others_live(self, tmp_path: Path) -> None:
        script = "[ $RANK = 1 ] && { sleep 600 & echo $! > child; exit 0; }; exec sleep 600"
        workers = LocalLauncher().launch(plan(tmp_path, ["sh", "-c", script], ranks=2))
        try:
            deadline = time.monotonic() + DEADLINE_S
            while workers.living == 2:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            child = int((tmp_path / "child").read_text())
            while (seen := stat(child)) and seen.state != "Z":
                assert time.monotonic() < deadline
                time.sleep(0.002)
            assert workers.living == 1
        finally:
            workers.signal(signal.SIGKILL)
            reaped(workers)
            workers.close()

    def launched(self, case: tuple[Launcher, LaunchPlan]) -> Workers:
        launcher, wanted = case
        workers = launcher.launch(wanted)
        deadline = time.monotonic() + DEADLINE_S
        while "ready" in wanted.argv[-1] and len(list(wanted.cwd.glob("ready.*"))) < len(wanted.devices):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return workers
