"""What jobs use is added up from samples, by attempt, and outlives the agent in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcsched.agent.job_use import PERIOD_S, PROCESSES_EVERY, WRITTEN_EVERY_S, JobUseRecord
from hpcsched.devices.nvml import NvmlDevices
from hpcsched.devices.simulated_nvml import SimulatedGpu, SimulatedNvml
from hpcsched.store.job_use import JobUse, append, read
from hpcsched.testing.builders import Driver, a_job


class Used:
    """Two GPUs of 300 and 100 W, of which jobs have one each, and what is put on record."""

    def __init__(self, folder: Path, *jobs: str) -> None:
        self.run, self.now = Driver(*(a_job(name, "m", gpus=1) for name in jobs), gpus=2), 0.0
        self.gpus = [SimulatedGpu("GPU-a", busy=50, watts=300.0), SimulatedGpu("GPU-b", busy=10, watts=100.0)]
        self.nvml = SimulatedNvml(self.gpus, clock=lambda: self.now)
        devices = NvmlDevices("n1", nvml=self.nvml, visible="0,1", clock=lambda: self.now)
        self.cpu_s = 0.0
        self.path = folder / "job-use.jsonl"
        self.record = JobUseRecord(
            self.path,
            self.run.machine,
            lambda gpu: devices.sample()[gpu],
            processes=lambda leaders: {job: (self.cpu_s, 100.0 * job) for job in leaders},
            start=lambda measure: measure(),
            clock=lambda: self.now,
        )

    def looks(self, number: int = 1, every_s: float = PERIOD_S) -> None:
        for _ in range(number):
            self.now += every_s
            self.run.now += every_s
            self.cpu_s += 2 * every_s
            self.record.look(self.run.now)

    def written(self) -> dict[tuple[int, bool], JobUse]:
        return read(self.path)


def test_gpus_energy_and_processes_by_job(tmp_path: Path) -> None:
    used = Used(tmp_path, "a")
    used.run.runs("a")
    used.looks(11)
    assert used.written() == {}
    used.run.exits("a", code=0)
    used.looks()
    mine = used.written()[1, False]
    assert (mine.gpu_s, mine.busy_gpu_s, mine.energy_j) == (50.0, 25.0, 300.0 * 50)
    assert mine.utilisation == 0.5 and mine.memory_mib == 100.0
    assert mine.cpu_over_s == 2 * PROCESSES_EVERY * PERIOD_S and mine.cpu_s == 2 * mine.cpu_over_s
    used.record.close()
    idle = used.written()[0, False]
    assert idle.energy_j == 100.0 * 55 and idle.gpu_s == 55.0  # the other GPU, all the time


def test_what_several_have_is_nobodys_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = Used(tmp_path, "a")
    used.run.runs("a")
    monkeypatch.setattr(used.record, "_held", lambda: {0: ((1, 1), (2, 1))})
    used.looks(3)
    used.record.close()
    assert used.written()[0, True].gpu_s == 10.0 and (1, False) not in used.written()


def test_counts_that_jump_and_times_that_did_not_run_do_not_count(tmp_path: Path) -> None:
    used = Used(tmp_path, "a")
    used.run.runs("a")
    used.looks(2)
    used.gpus[0].watts = 1e9  # a driver that was loaded anew, or nonsense
    used.looks()
    used.gpus[0].watts = 1.0
    used.looks()
    used.looks(1, every_s=1000.0)  # all of us were stopped
    used.record.close()
    mine = used.written()[1, False]
    assert mine.energy_j == 300.0 * 5 and mine.energy_gpu_s == 5.0 and mine.gpu_s == 15.0


def test_long_attempts_are_written_in_parts_that_add_up(tmp_path: Path) -> None:
    used = Used(tmp_path, "a")
    used.run.runs("a")
    used.looks(int(WRITTEN_EVERY_S / PERIOD_S))
    first = used.written()[1, False].gpu_s
    used.looks(3)
    used.record.close()
    assert first > 0 and used.written()[1, False].gpu_s == first + 15.0


def test_a_file_with_nonsense_in_it(tmp_path: Path) -> None:
    path = tmp_path / "job-use.jsonl"
    good: dict[str, Any] = {"job": 1, "gpu_s": 10, "busy_gpu_s": 5}
    bad = [{**good, "gpu_s": -1}, {**good, "job": "x"}, {**good, "busy_gpu_s": 1e99}, []]
    path.write_text("\n".join([json.dumps(good), *map(json.dumps, bad), '{"job": 1, "gpu_s": 3']))
    append(path, [JobUse(job=1, gpu_s=2.0)])
    assert {key: use.gpu_s for key, use in read(path).items()} == {(1, False): 12.0}
