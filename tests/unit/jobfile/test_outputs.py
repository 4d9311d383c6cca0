"""Names of output files, as sbatch's users write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.agent.launch_plans import Site, output_path
from hpcsched.core.model import Array
from hpcsched.errors import ConfigError
from hpcsched.jobfile import spec_of
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job

NAMES = {
    "hpcsched-%j.out": ("hpcsched-1.out", "hpcsched-3.out"),
    "%A_%a": ("1_1", "2_8"),
    "%3A-%02a-%4j": ("001-01-0001", "002-08-0003"),
    "%x.%u@%N": ("alone.ada@n1", "many-8.ada@n1"),
    "%9u": ("ada", "ada"),
    "100%%-%%j-%5x-%q": ("100%-%j-alone-%q", "100%-%j-many-8-%q"),
}


def test_the_id_of_an_array_is_that_of_its_first_job():
    array = [a_job(f"many-{i}", array=Array(name="many", index=i)) for i in (7, 8)]
    driver = Driver(a_job("alone"), *array)
    site = Site(
        rundir=RunDir(Path("/run")),
        run_id="r",
        user="ada",
        speed=1.0,
        stand_ins=False,
        arrays=lambda: driver.machine.run.arrays,
    )
    for pattern, names in NAMES.items():
        for key, name in zip(("alone", "many-8"), names, strict=True):
            job = driver.job(key)
            job.spec = replace(job.spec, output=pattern)
            assert output_path(job, site, 1, "n1") == Path(f"/run/jobs/{job.id}/{name}")


@pytest.mark.parametrize("output", ["log-%t", "%j.%4n", "%%%J"])
def test_what_means_nothing_here_is_refused(output: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="%A") as raised:
        spec_of(
            {"name": "a", "command": ["true"], "output": output},
            where="f",
            place="job",
            workdir=tmp_path,
            user="",
        )
    assert raised.value.key == "job a.output" and "\n" not in str(raised.value)
