"""Whose memory counts, which cgroups hold it, and what the kernel's counters say."""

from __future__ import annotations

import os

import pytest

from hpcsched.agent.host_memory import host_memory_mib
from hpcsched.launch.memory import KernelOom, MemoryLimits, trees, used_mib
from hpcsched.launch.proc import Stat


def process(parent: int, group: int) -> Stat:
    return Stat("R", parent, group, 1)


def test_descendants_count_in_whatever_group_they_are():
    stats = {
        10: process(1, 10),  # the rank
        11: process(10, 10),  # its loader
        12: process(10, 12),  # torchrun's rank, in a group of its own
        13: process(12, 12),
        14: process(1, 10),  # its parent has ended
        20: process(1, 20),  # another job
        21: process(20, 20),
    }
    assert trees([10], stats) == {10, 11, 12, 13, 14}
    assert trees([99], stats) == set()


def test_memory_of_this_process_is_found():
    pid = os.getpid()
    much = used_mib([pid], 1e9)
    own = used_mib([pid], 1.0)
    assert much > 5
    assert 1 < own <= much * 1.2
    assert used_mib([2**30], 1.0) == 0


@pytest.fixture
def node(tmp_path):
    """A host whose user has a cgroup with the memory controller, in which we are."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user/run\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:       65536 kB\nMemFree: 1 kB\n")
    run = tmp_path / "sys/fs/cgroup/user/run"
    run.mkdir(parents=True)
    for folder in (run.parent, run):
        (folder / "cgroup.procs").touch()
        (folder / "memory.events").write_text("max 4\noom 0\noom_kill 0\n")
    (run.parent / "cgroup.subtree_control").write_text("cpu memory\n")
    (run / "cgroup.subtree_control").write_text("\n")
    return tmp_path


class TestCgroups:
    def test_all_of_a_jobs_processes_are_in_one_cgroup_with_its_limit(self, node):
        limits = MemoryLimits(node)
        limits.hold(7, [(100, 5), (101, 5)], 16384.0)
        (folder,) = (node / "sys/fs/cgroup/user").glob("hpcsched-*")
        assert folder.name == "hpcsched-memory-100-5"
        assert (folder / "memory.max").read_text() == "17179869184\n"
        assert (folder / "memory.oom.group").read_text() == "1\n"
        assert (folder / "cgroup.procs").read_text() == "101\n"  # a file here, not the kernel's
        assert limits.exceeded(7) == ""
        (folder / "memory.events").write_text("oom 1\noom_kill 2\n")
        assert limits.exceeded(7) == "the kernel ended it, as it wanted more than the 16G that it may have"
        assert limits.exceeded(8) == ""

    def test_what_the_kernel_refuses_is_watched(self, node):
        (node / "sys/fs/cgroup/user/hpcsched-memory-100-5").write_text("in the way")
        limits = MemoryLimits(node, period_s=0.01)
        limits.hold(7, [(100, 5)], 1e6)
        assert limits._held[7].groups == {(100, 5): None}
        limits.release(7, [(100, 5)])
        limits.close()

    def test_a_program_in_a_cgroup_already_is_watched(self, node):
        limits = MemoryLimits(node, period_s=0.01)
        limits.hold(7, [(100, 5)], 1e6, cgroup=False)
        assert not list((node / "sys/fs/cgroup/user").glob("hpcsched-*"))
        limits.close()

    def test_what_an_agent_that_was_killed_has_left_is_removed(self, node):
        left = node / "sys/fs/cgroup/user/hpcsched-memory-1073741824-5"
        left.mkdir()
        MemoryLimits(node)
        assert not left.exists()


class TestKernel:
    def test_a_kill_lately_has_struck(self, node):
        now = [0.0]
        oom = KernelOom(node, clock=lambda: now[0])
        assert not oom.struck()
        (node / "proc/vmstat").write_text("oom_kill 4\n")
        assert oom.struck()

    def test_one_in_our_cgroup_too(self, node):
        oom = KernelOom(node, clock=lambda: 0.0)
        (node / "sys/fs/cgroup/user/run/memory.events").write_text("oom_kill 1\n")
        assert oom.struck()

    def test_one_long_ago_is_not_the_reason(self, node):
        now = [0.0]
        oom = KernelOom(node, clock=lambda: now[0])
        (node / "proc/vmstat").write_text("oom_kill 4\n")
        for now[0] in (10.0, 20.0, 30.0):
            oom.sample()
        assert not oom.struck()

    def test_a_host_that_does_not_count_has_none(self, tmp_path):
        oom = KernelOom(tmp_path)
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/vmstat").write_text("oom_kill\x00 many")
        assert not oom.struck()


class TestMemoryOfTheHost:
    def test_is_the_least_of_what_limits_it(self, node):
        assert host_memory_mib({}, node) == 64.0
        assert host_memory_mib({"SLURM_MEM_PER_NODE": "32"}, node) == 32.0
        (node / "sys/fs/cgroup/user/memory.max").write_text(f"{16 * 2**20}\n")
        assert host_memory_mib({"SLURM_MEM_PER_NODE": "32"}, node) == 16.0

    @pytest.mark.parametrize(
        ("granted", "mib"),
        [
            ({"SLURM_MEM_PER_CPU": "8", "SLURM_CPUS_ON_NODE": "3"}, 24.0),
            ({"SLURM_MEM_PER_GPU": "20", "SLURM_GPUS_ON_NODE": "2"}, 40.0),
            ({"SLURM_MEM_PER_GPU": "20"}, 64.0),
            ({"SLURM_MEM_PER_CPU": "0", "SLURM_CPUS_ON_NODE": "3"}, 64.0),
        ],
    )
    def test_slurm_may_say_it_for_each_cpu_or_gpu(self, node, granted, mib):
        assert host_memory_mib(granted, node) == mib

    @pytest.mark.parametrize("own", ["/slurm/job_7", "/"])
    def test_a_cgroup_v1_may_limit_it(self, node, own):
        (node / "proc/self/cgroup").write_text(f"5:cpu,cpuacct:/x\n4:memory:{own}\n0::/\n")
        mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        (node / "proc/self/mountinfo").write_text(f"34 31 0:3 / /c rw - cgroup cgroup rw,cpu\n{mounts}")
        folder = node / "sys/fs/cgroup/memory" / own.lstrip("/")
        folder.mkdir(parents=True)
        (folder / "memory.stat").write_text(f"cache 1\nhierarchical_memory_limit {24 * 2**20}\n")
        assert host_memory_mib({}, node) == 24.0
        (folder / "memory.stat").write_text("hierarchical_memory_limit 9223372036854771712\n")
        assert host_memory_mib({}, node) == 64.0

    @pytest.mark.parametrize("said", ["0", "", "all", "9" * 50, "-1"])
    def test_odd_words_of_slurm_mean_nothing(self, node, said):
        (node / "sys/fs/cgroup/user/run/memory.max").write_text("max\n")
        assert host_memory_mib({"SLURM_MEM_PER_NODE": said}, node) == 64.0

    def test_is_not_known_where_nobody_says(self, tmp_path):
        assert host_memory_mib({}, tmp_path) is None
