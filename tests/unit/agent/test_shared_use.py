"""What jobs that share devices are seen to use of them."""

from __future__ import annotations

from dataclasses import replace

from hpcsched.agent.shared_use import WARM_S, SharedUseMeter
from hpcsched.core import events as ev
from hpcsched.core.needs import Needs
from hpcsched.devices.base import Sample
from hpcsched.devices.nvml import NvmlDevices
from hpcsched.devices.simulated_nvml import SimulatedGpu, SimulatedNvml
from hpcsched.testing.builders import Driver, a_job, some_devices

SETTLE_S = 15.0


class Looks:
    """A GPU of some jobs, and what NVML says of it."""

    def __init__(self, names: str) -> None:
        self.run = Driver(gpus=1)
        devices = tuple(replace(one, memory_mib=10_000.0) for one in some_devices(1))
        self.run.tell(ev.AgentStarted, wall=1e9, devices=devices, policy="marble")
        jobs = (a_job(name, gpus=1, needs=Needs(share=0.5)) for name in names)
        self.run.submit(*jobs)
        self.sample = Sample(gpu=0, utilisation=0.5, memory_mib=7000.0)
        self.now = 0.0
        self.use = SharedUseMeter(
            self.run.machine, lambda gpu: self.sample, host="n1", settle_s=SETTLE_S, clock=lambda: self.now
        )

    def after(self, seconds: float, mib: float) -> dict[str, tuple[float | None, float | None]]:
        self.now += seconds
        self.run.now += seconds
        self.sample = replace(self.sample, memory_mib=mib)
        seen = self.use.look(self.run.now)
        for event in seen:
            self.run.handle(event)
        jobs = self.run.machine.run.jobs
        return {jobs[one.job_id].spec.name: (one.memory_mib, one.busy) for one in seen}  # type: ignore[attr-defined]


def test_what_was_in_use_before_is_nobodys() -> None:
    looks = Looks("a")
    looks.run.runs("a")
    assert looks.after(0.0, 7000.0) == {}
    assert looks.after(SETTLE_S - 1, 7000.0) == {}
    assert looks.after(2.0, 3000.0) == {"a": (3000.0, 0.5)}
    assert looks.after(2.0, 3100.0) == {}, "no news"
    assert looks.after(2.0, 4000.0) == {"a": (4000.0, None)}


def test_what_is_more_when_one_comes_is_its_own() -> None:
    looks = Looks("ab")
    looks.run.runs("a", "b")
    looks.run.tell(ev.DeviceUseMeasured, "a", memory_mib=3000.0)
    assert looks.after(0.0, 3000.0) == {}
    assert looks.after(SETTLE_S, 5000.0) == {"b": (2000.0, None)}


def test_how_busy_it_is_counts_from_when_it_is_warm() -> None:
    looks = Looks("a")
    looks.run.runs("a")
    assert looks.after(0.0, 100.0) == {}
    looks.now += SETTLE_S  # of this clock, not of the run's
    assert looks.after(WARM_S - 1, 100.0) == {"a": (100.0, None)}
    assert looks.after(2.0, 100.0) == {"a": (None, 0.5)}


def test_an_instance_of_a_gpu_is_a_gpu_of_its_own() -> None:
    parts = [SimulatedGpu(f"MIG-{i}", "H100 MIG 1g.10gb", 9856.0, 3000.0, busy=None) for i in range(2)]
    nvml = NvmlDevices("n1", nvml=SimulatedNvml([SimulatedGpu("GPU-x", instances=parts)]))
    run = Driver(gpus=2)
    run.tell(ev.AgentStarted, wall=1e9, devices=nvml.inventory(), policy="marble")
    asked = {"a": 6000.0, "b": 6000.0, "c": 3000.0, "d": 6000.0}
    needs = {name: Needs(share=0.25, gpu_memory_mib=mib) for name, mib in asked.items()}
    run.submit(a_job("a", gpus=1, needs=Needs(share=0.0, gpu_memory_mib=6000.0)))
    run.submit(*(a_job(name, gpus=1, needs=needs[name]) for name in "bcd"))
    assert {name: run.job(name).gpus for name in "abcd"} == {"a": (0,), "b": (1,), "c": (1,), "d": ()}
    run.runs("a", "b", "c")
    samples = nvml.sample()
    use = SharedUseMeter(run.machine, lambda gpu: samples[gpu], host="n1", settle_s=0.0)
    (seen,) = use.look(run.now)
    assert isinstance(seen, ev.DeviceUseMeasured)
    assert (seen.job_id, seen.memory_mib, seen.busy) == (run.job("a").id, 3000.0, None)
