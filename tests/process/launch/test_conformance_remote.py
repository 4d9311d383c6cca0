"""The conformance suite for launchers, over real node agents."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.devices import Sample
from hpcsched.errors import LaunchError
from hpcsched.launch.base import Launcher, LaunchPlan, Workers
from hpcsched.launch.remote.launcher import RemoteLauncher
from hpcsched.testing.conformance_launch import LaunchConformance, plan, reaped
from hpcsched.testing.nodes import local_hosts, pump_until


class OverHosts(LaunchConformance):
    """Ranks are placed on the devices as they are numbered."""

    hosts: RemoteLauncher[Sample]
    orders = 100
    """ZeroMQ holds 1000, and what it does not comes later."""

    def on(self, folder: Path, argv: Sequence[str], ranks: int, *, per_rank: bool = True) -> LaunchPlan:
        devices = self.hosts.inventory()[:ranks]
        return replace(plan(folder, argv, per_rank=per_rank), devices=devices)

    def ending(self, folder: Path, codes: Sequence[int]) -> tuple[Launcher, LaunchPlan]:
        script = f"set -- {' '.join(map(str, codes))}; shift $RANK; exit $1"
        return self.hosts, self.on(folder, ["sh", "-c", script], len(codes))

    def waiting(self, folder: Path, ranks: int) -> tuple[Launcher, LaunchPlan]:
        script = "trap 'exit 75' TSTP; touch ready.$RANK; while :; do sleep 30 & wait; done"
        return self.hosts, self.on(folder, ["sh", "-c", script], ranks)

    def impossible(self, folder: Path) -> tuple[Launcher, LaunchPlan]:
        return self.hosts, self.on(folder, ["no-such-command"], 1)

    def launched(self, case: tuple[Launcher, LaunchPlan]) -> Workers:
        launcher, wanted = case
        workers = launcher.launch(wanted)
        if "ready" in wanted.argv[-1]:
            ranks = len(wanted.devices)  # whose host's word of them may come after their files
            pump_until(self.hosts, lambda: workers.living == len(list(wanted.cwd.glob("ready.*"))) == ranks)
        return workers

    # What differs: the ranks are no processes of this host, and errors come later.

    def test_a_process_a_rank_with_descriptors(self, tmp_path: Path) -> None:
        workers = self.launched(self.waiting(tmp_path, 3))
        assert workers.processes == ()
        assert workers.pidfds and workers.reap() is None and not workers.failed_early()
        assert workers.progress_fd is not None and not os.get_blocking(workers.progress_fd)
        workers.signal(signal.SIGKILL)
        assert reaped(workers) == 128 + signal.SIGKILL
        workers.close()

    def test_one_process_for_all_devices(self, tmp_path: Path) -> None:
        wanted = self.on(tmp_path, ["sh", "-c", "echo ${RANK-none} ${WORLD_SIZE-none}"], 1, per_rank=False)
        wanted = replace(wanted, devices=tuple(d for d in self.hosts.inventory() if d.host == "a"))
        workers = self.hosts.launch(wanted)
        assert reaped(workers) == 0
        workers.close()
        assert wanted.output.read_text() == "none none\n"

    def test_ranks_that_join_meet_where_they_are_told_to(self, tmp_path: Path) -> None:
        _, wanted = self.waiting(tmp_path, 2)
        joining = replace(wanted, attempt=2, first_rank=1, world_size=3, joins="10.0.0.1:4711")
        workers = self.hosts.launch(joining)
        assert workers.where == "10.0.0.1:4711"
        pump_until(self.hosts, lambda: {f.name for f in tmp_path.glob("ready.*")} == {"ready.1", "ready.2"})
        workers.signal(signal.SIGTSTP)
        assert reaped(workers) == 75
        workers.close()

    def test_the_first_ranks_say_where_they_meet(self, tmp_path: Path) -> None:
        workers = self.hosts.launch(self.ending(tmp_path, [0])[1])
        assert workers.where == ""
        assert reaped(workers) == 0
        host, _, port = workers.where.rpartition(":")
        assert host == "127.0.0.1" and 0 < int(port) < 2**16
        workers.close()

    def test_a_missing_command_is_refused(self, tmp_path: Path) -> None:
        launcher, wanted = self.impossible(tmp_path)
        workers = launcher.launch(wanted)
        with pytest.raises(LaunchError, match="command not found") as caught:
            reaped(workers)
        assert not caught.value.transient
        workers.close()


class TestOneNode(OverHosts):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def agents(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with local_hosts(tmp_path_factory.mktemp("run"), ("a",), devices="replay:3") as cls.hosts:
            yield


class TestRanksOverNodes(OverHosts):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def agents(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with local_hosts(tmp_path_factory.mktemp("run"), ("a", "b", "c"), devices="replay:1") as cls.hosts:
            yield
