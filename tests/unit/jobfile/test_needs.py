"""time, cpus_per_gpu, memory, gpu_type, gpu_memory and modules of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcsched import jobfile
from hpcsched.core.definitions import differing
from hpcsched.core.model import Device, HostCores, JobSpec
from hpcsched.core.needs import Needs, said_mib, said_time
from hpcsched.errors import ConfigError
from hpcsched.jobfile.needs import check_needs


def specs(*tables: dict[str, Any]) -> tuple[JobSpec, ...]:
    jobs = [{"name": f"j{i}", "command": ["x"], **table} for i, table in enumerate(tables)]
    return jobfile.parse({"schema": 1, "job": jobs}, where="jobs.toml", workdir=Path("/here")).jobs


def refused(**table: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        specs(table)
    return str(caught.value)


def test_what_a_job_file_says_is_read():
    table = {"time": "2h", "cpus_per_gpu": 4, "memory": "16G", "modules": ["cuda/12.4", "gcc", "gcc"]}
    table |= {"gpu_type": "A100", "gpu_memory": "40G"}
    first, second, none = specs(table, table, {})
    assert first.needs == Needs(
        time_s=7200.0,
        cpus_per_gpu=4,
        memory_mib=16384.0,
        gpu_type="A100",
        gpu_memory_mib=40960.0,
        modules=("cuda/12.4", "gcc"),
    )
    assert first.needs is second.needs
    assert none.needs is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("time", value) for value in (0, "0s", -1, "soon", "2w", True, "1e999h")),
        *(("memory", value) for value in ("16", 16, "16GB", "-1G", "1K", "0G", "", "9" * 60 + "G", "1e3G")),
        *(("gpu_memory", value) for value in ("forty", "40", 40)),
        *(("gpu_type", value) for value in ("", "$(x)", "a\nb", 3, "a" * 99)),
        *(("cpus_per_gpu", value) for value in (0, -1, 1.5, "4", 10**9)),
        *(("modules", value) for value in ("cuda", ["--force"], ["a b"], ["$(x)"], [""], [3], ["a;b"])),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(key, value):
    said = refused(**{key: value})
    assert said.count("\n") == 0
    assert said.startswith(f"jobs.toml: job j0.{key}")


def test_jobs_without_gpus_of_their_own_choose_none():
    assert "no GPU of its own" in refused(background=True, gpu_type="A100")
    assert "no GPU of its own" in refused(strategy={"kind": "cpu", "cpus": 2}, cpus_per_gpu=2)
    assert "other jobs may be in its process" in refused(background=True, memory="1G")
    trainer = {"command": None, "trainer": "a:B", "strategy": "packed"}
    assert "other jobs may be in its process" in refused(**trainer, memory="1G")
    (job,) = specs({"background": True, "time": "1h", "modules": ["gcc"]})
    assert job.needs is not None


def test_differences_are_named_by_their_keys():
    (old,), (new,) = specs({"time": "2h"}), specs({"time": "3h", "memory": "2G"})
    assert differing(old, new) == ("time", "memory")
    assert differing(old, old) == ()


def test_amounts_are_said_as_people_write_them():
    assert [said_time(seconds) for seconds in (7200, 5400, 90, 0.5)] == ["2h", "90m", "90s", "0.5s"]
    assert [said_mib(mib) for mib in (512, 16384, 1536, 2**21)] == ["512M", "16G", "1.5G", "2T"]


class TestWhatNoHostHas:
    DEVICES = tuple(
        Device(index=i, host="n1", kind=kind, handle=str(i), memory_mib=memory)
        for i, (kind, memory) in enumerate([("NVIDIA A100", 81920.0), ("Tesla V100", 16160.0)])
    )
    CORES = (HostCores(host="n1", kept=16, memory_mib=65536.0),)

    def check(self, **table: Any) -> None:
        for spec in specs(table):
            check_needs(spec, self.DEVICES, self.CORES, where="jobs.toml")

    @pytest.mark.parametrize(
        ("table", "words"),
        [
            (
                {"gpu_type": "H100"},
                "job j0.gpu_type: 1 x H100; accepted: at most 0 on a host: here are 1 x NVIDIA A100 with "
                "80G, 1 x Tesla V100 with 15.78G",
            ),
            ({"gpu_type": "A100", "gpus": 2}, "2 x A100; accepted: at most 1 on a host"),
            ({"gpu_memory": "141G"}, "job j0.gpu_memory: 1 x GPU with 141G"),
            ({"cpus_per_gpu": 9, "gpus": 2}, "18 cores on a host; accepted: at most 16"),
            ({"memory": "65G"}, "65G; accepted: at most 64G"),
        ],
    )
    def test_is_refused_in_one_line(self, table, words):
        with pytest.raises(ConfigError) as caught:
            self.check(**table)
        assert words in str(caught.value)

    def test_what_one_has_is_taken(self):
        self.check(gpu_type="v100", gpu_memory="16G", cpus_per_gpu=16, memory="64G")
        self.check(time="1h")

    def test_what_is_not_known_refuses_nothing(self):
        (spec,) = specs({"cpus_per_gpu": 99, "memory": "1T"})
        check_needs(spec, self.DEVICES, (HostCores(host="n1"),), where="x")
