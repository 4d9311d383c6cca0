"""Which batch system is found, and how its commands are run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hpcsched.batch import batch_of, kinds, open_batch
from hpcsched.batch.base import AllocatedHost, Allocation, BatchJobState, BatchSystem, EndReason
from hpcsched.config import KEYS
from hpcsched.errors import BatchError, ConfigError
from hpcsched.testing.batch import LSF_JOB, SGE_JOB, SLURM_JOB


@pytest.mark.parametrize(
    ("environ", "hosts", "kind"),
    [
        ({}, [], "none"),
        (SLURM_JOB, [], "slurm"),
        (LSF_JOB, [], "lsf"),
        (SGE_JOB, [], "sge"),
        ({"JOB_ID": "7"}, [], "none"),
        ({**SLURM_JOB, **LSF_JOB}, [], "slurm"),
        (SLURM_JOB, ["a", "b"], "none"),
        ({"SLURM_JOB_ID": ""}, [], "none"),
    ],
)
def test_detection(environ: dict[str, str], hosts: list[str], kind: str) -> None:
    assert open_batch(environ=environ, hosts=hosts).kind == kind


def test_settings_files_name_them_all() -> None:
    assert all(kind in KEYS["batch"].words for kind in ("auto", *kinds.names()))
    launchers = {word for kind in kinds.BUILT_IN for word in kinds.load(kind).launchers}
    assert all(word in KEYS["launcher"].words for word in launchers)


def test_what_is_asked_for_counts() -> None:
    assert open_batch("none", environ=SLURM_JOB).kind == "none"
    assert open_batch("lsf", environ=SLURM_JOB).kind == "lsf"
    assert [host.name for host in open_batch(environ={}, hosts=["a", "b"]).allocation().hosts] == ["a", "b"]
    for kind in kinds.names():
        assert batch_of(kind, environ={}).kind == kind


@pytest.mark.parametrize(
    ("kind", "hosts", "launcher", "where"),
    [
        ("pbs", [], "auto", "--batch"),
        ("auto", [], "mpirun", "--launcher"),
        ("none", [], "srun", "--launcher"),
        ("slurm", [], "jsrun", "--launcher"),
        ("lsf", [], "srun", "--launcher"),
        ("sge", [], "srun", "--launcher"),
        ("slurm", ["a"], "auto", "--hosts"),
    ],
)
def test_what_does_not_go_together(kind: str, hosts: list[str], launcher: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_batch(kind, environ={}, hosts=hosts, launcher=launcher)
    assert caught.value.where == where
    with pytest.raises(ConfigError):
        batch_of("auto")


@pytest.mark.parametrize("environ", [SLURM_JOB, LSF_JOB, SGE_JOB, {}])
@pytest.mark.parametrize("launcher", ["ssh", "local"])
def test_launchers_that_need_no_batch_system(environ: dict[str, str], launcher: str) -> None:
    command = open_batch(environ=environ, launcher=launcher).on_hosts([AllocatedHost(name="a")], ["agent"])[0]
    assert command[0] == {"ssh": "ssh", "local": "agent"}[launcher]


class Pbs(BatchSystem):
    """One of another package, as little as it may say."""

    kind = "pbs"
    launchers = ("pbsdsh", "local")

    def __init__(self, environ: Mapping[str, str], *, launcher: str) -> None:
        if environ["PBS_JOBID"] == "bad":
            raise RuntimeError("no\nserver")
        self.launcher = launcher

    @classmethod
    def inside(cls, environ: Mapping[str, str]) -> bool:
        return "PBS_JOBID" in environ

    @classmethod
    def restarted(cls, environ: Mapping[str, str]) -> bool:
        return environ.get("PBS_RERUN") == "1"

    def allocation(self) -> Allocation:
        return Allocation(kind=self.kind, id="7", hosts=(AllocatedHost(name="a"),), here="a")

    def end_time(self) -> float | None:
        return None

    def reason(self) -> EndReason:
        return EndReason.UNKNOWN

    def job_state(self, job_id: str) -> BatchJobState:
        return BatchJobState.UNKNOWN

    def requeue(self) -> int:
        return 99

    def submit_next(self, script: Path | None) -> str:
        return "8"

    def on_hosts(self, hosts: Sequence[AllocatedHost], argv: Sequence[str]) -> list[tuple[str, ...]]:
        return [(self.launcher, *argv)]

    def version(self) -> str:
        return "PBS"


class Half(Pbs):
    """What one has that was begun."""

    kind = "half"
    end_time = BatchSystem.end_time  # type: ignore[assignment]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Packages with adapters: a good one, one that is not finished, none, and one that is not there."""
    here = __name__
    given = {
        "pbs": f"{here}:Pbs",
        "half": f"{here}:Half",
        "word": f"{here}:SGE_JOB",
        "lost": "no_such_module:X",
    }
    monkeypatch.setitem(sys.modules, here, sys.modules[__name__])
    info = tmp_path / "adapters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adapters\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in sorted(given.items())]
    (info / "entry_points.txt").write_text("\n".join((f"[{kinds.GROUP}]", *lines)) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kinds._added.cache_clear()
    yield
    kinds._added.cache_clear()


@pytest.mark.usefixtures("added")
def test_one_of_another_package() -> None:
    said: list[str] = []
    job = {"PBS_JOBID": "7"}
    batch = open_batch(environ=job, tell=said.append)
    assert batch.kind == "pbs" and batch.on_hosts([], ["agent"]) == [("pbsdsh", "agent")]
    assert not batch.takes_back and batch.kill_wait() is None and batch.script_pid() is None
    with pytest.raises(BatchError, match="pbs takes no hosts"):
        batch.release(["a"])
    assert "pbs" in kinds.names() and batch_of("pbs", environ=job).version() == "PBS"
    assert kinds.restarted({**job, "PBS_RERUN": "1"}) and not kinds.restarted(job)
    # Those at fault are told of, a line each, and are in nobody's way.
    assert [line.split(":")[1].split()[0] for line in said] == ["half", "lost"]
    assert all("\n" not in line and "passed over" in line for line in said)
    assert "`end_time`" in said[0] and "no_such_module" in said[1]
    assert open_batch(environ=SLURM_JOB, pyslurm="off").kind == "slurm"


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("kind", ["half", "word", "lost", "pbs"])
def test_one_that_is_at_fault_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_batch(kind, environ={"PBS_JOBID": "bad"})
    assert kind in str(caught.value) and "\n" not in str(caught.value)
