"""Programs in a container that is really there: bubblewrap, with another root than the host's."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian import need

import hpcsched
from hpcsched.agent.attempts import read_record
from hpcsched.agent.launch_plans import Site, launch_plan
from hpcsched.core.actions import Launch
from hpcsched.core.jobs import Job
from hpcsched.core.model import Container, Device, JobSpec, Kind, Role
from hpcsched.errors import LaunchError
from hpcsched.launch.base import Workers
from hpcsched.launch.containers.bubblewrap import MOST_ENTRIES
from hpcsched.launch.local import LocalLauncher
from hpcsched.store.rundir import RunDir

DEADLINE_S = 60.0
PACKAGE = Path(hpcsched.__file__).parent.parent

PROGRAM = """
import os, sys, time
import hpcsched
link = hpcsched.Link()
print(f"root {open('/etc/os-release').read().strip()} {os.getcwd()} {os.environ['RANK']}", flush=True)
step = link.step
link.ready()
while step < int(sys.argv[1]):
    time.sleep(0.01)
    step += 1
    link.report(step)
    if link.wishes() & 2:
        if link.rank == 0:
            kept = link.checkpoint_dir / "kept"
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(str(step))
            link.saved(step, kept)
        link.leave()
print("done", flush=True)
"""


class Bench:
    """A job whose image has the host's programs, and an /etc of its own."""

    def __init__(self, folder: Path) -> None:
        self.place, self.image = folder / "work", folder / "image"
        self.place.mkdir()
        for name in ("etc", "usr"):
            (self.image / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.image / name).symlink_to(f"usr/{name}")
        (self.image / "etc" / "os-release").write_text("another system\n")
        self.rundir = RunDir(folder / "run")
        self.rundir.make()
        self.folder = self.rundir.job(1)
        self.folder.mkdir()
        self.running: list[Workers] = []
        self.mounts: tuple[tuple[str, str, str], ...] = ()
        self.options: tuple[str, ...] = ()

    def launch(self, attempt: int, *words: str, ranks: int = 1, resume: bool = False) -> Workers:
        # What links lead to: nothing is mounted onto a link, such as a .venv in the package's folder.
        read_only = {os.path.realpath(path) for path in ("/usr", PACKAGE, sys.base_prefix, sys.prefix)}
        container = Container(
            image=str(self.image),
            runtime="bubblewrap",
            options=self.options,
            mounts=(*self.mounts, *((path, path, "ro") for path in sorted(read_only))),
        )
        spec = JobSpec(
            name="boxed",
            model="boxed",
            kind=Kind.COMMAND,
            command=words,
            env={"PYTHONPATH": str(PACKAGE)},
            workdir=str(self.place),
            container=container,
        )
        gpus = tuple(range(ranks))
        devices = tuple(Device(index=i, host="h", kind="cpu", handle=str(i)) for i in gpus)
        site = Site(rundir=self.rundir, run_id=str(self.rundir.root), user="u", speed=1.0, stand_ins=False)
        action = Launch(
            at=0, cause="", job_id=1, attempt=attempt, gpus=gpus, role=Role.PRIMARY, resume=resume
        )
        job = Job(id=1, spec=spec, submit_s=0.0)
        plan = launch_plan(job, action, site=site, devices=devices, profile=None)
        self.running.append(LocalLauncher().launch(plan))
        return self.running[-1]

    def trains(self, attempt: int, steps: int, **how: bool | int) -> Workers:
        return self.launch(attempt, sys.executable, "-S", "-c", PROGRAM, str(steps), **how)  # type: ignore[arg-type]

    def until(self, name: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.005)

    def until_all_listen(self, ranks: int) -> None:
        """`ready` is rank 0's word; a rank prints its line once it has its handlers."""
        deadline = time.monotonic() + DEADLINE_S
        while self.said.count("root another system") < ranks:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.005)

    def code(self, workers: Workers) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while (code := workers.reap()) is None:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.005)
        return code

    @property
    def said(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*.out"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    need(("bwrap",), ("bubblewrap",))
    place = Bench(tmp_path)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield place
    for workers in place.running:
        workers.signal(signal.SIGKILL)
        while workers.reap() is None:
            time.sleep(0.001)
        workers.close()
    signal.signal(signal.SIGUSR1, before)


def test_ranks_see_the_image_and_the_folders_of_the_job(bench: Bench) -> None:
    workers = bench.trains(1, 3, ranks=2)
    assert bench.code(workers) == 0, bench.said
    for rank in (0, 1):
        assert f"root another system {bench.place} {rank}" in bench.said
    assert workers.progress_fd is not None
    assert b'"step": 1' in os.read(workers.progress_fd, 65536)


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGTERM])
def test_saves_and_leaves_when_asked_and_goes_on(bench: Bench, number: signal.Signals) -> None:
    workers = bench.trains(1, 100_000, ranks=2)
    bench.until("ready.1")
    bench.until_all_listen(2)
    workers.signal(number)
    assert bench.code(workers) == 75, bench.said
    record = read_record(bench.folder)
    assert record is not None and record.step > 0
    again = bench.trains(2, record.step + 2, resume=True)
    assert bench.code(again) == 0, bench.said


def test_its_exit_code_and_its_death_are_seen(bench: Bench) -> None:
    assert bench.code(bench.launch(1, "sh", "-c", "exit 7")) == 7
    assert bench.code(bench.launch(2, "sh", "-c", "kill -SEGV $$")) == 128 + signal.SIGSEGV
    ignorant = bench.launch(3, "sh", "-c", "touch started; sleep 600")
    deadline = time.monotonic() + DEADLINE_S
    while not (bench.place / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ignorant.signal(signal.SIGTERM)
    assert bench.code(ignorant) == 128 + signal.SIGTERM
    deadline = time.monotonic() + DEADLINE_S
    while ignorant.left():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_nothing_is_written_where_it_would_be_lost(bench: Bench) -> None:
    bench.options = ("--tmpfs", "/scratch")
    assert bench.code(bench.launch(1, "sh", "-c", "touch /scratch/mine && mkdir /results")) != 0
    assert "/results" in bench.said
    assert "Read-only file system" in bench.said
    assert "/scratch" not in bench.said, "it was asked for"
    assert bench.code(bench.launch(2, "sh", "-c", "touch kept && rm $(mktemp)")) == 0, bench.said


def test_a_mount_in_the_folder_of_the_job_is_there_and_read_only(bench: Bench, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "set").touch()
    bench.mounts = ((str(data), str(bench.place / "data"), "ro"), (str(tmp_path), str(tmp_path), "ro"))
    assert bench.code(bench.launch(1, "sh", "-c", "touch kept; ls data; touch data/more")) != 0
    assert "set" in bench.said.split()
    assert "Read-only file system" in bench.said
    assert (bench.place / "kept").exists(), "a mount above the job's folder does not hide it"


def test_a_folder_is_shown_within_one_of_the_images(bench: Bench) -> None:
    for name in ("home/other", "run", "var"):
        (bench.image / name).mkdir(parents=True)
    (bench.image / "home" / "file").touch()
    (bench.image / "home" / "link").symlink_to("file")
    (bench.image / "var" / "run").symlink_to("/run")
    bench.mounts = tuple((str(bench.place), at, "rw") for at in ("/home/u/job", "/home/other", "/var/run/in"))
    words = "touch /home/u/job/1 /run/in/2 /home/other/3 && ls /home /home/link && touch /home/u/lost"
    assert bench.code(bench.launch(1, "sh", "-c", words)) != 0
    assert bench.said.split()[:6] == ["/home/link", "/home:", "file", "link", "other", "u"]
    assert "/home/u/lost': Read-only file system" in bench.said
    assert sorted(path.name for path in bench.place.iterdir()) == ["1", "2", "3"]


def test_a_folder_that_cannot_be_put_together_is_refused(bench: Bench) -> None:
    for number in range(MOST_ENTRIES + 1):
        (bench.image / "etc" / str(number)).touch()
    bench.mounts = ((str(bench.place), "/etc/12", "ro"),)
    assert bench.code(bench.launch(1, "true")) != 0, "bwrap says it: a folder on a file"
    bench.mounts = ((str(bench.place), "/etc/mine", "ro"),)
    with pytest.raises(LaunchError, match=r"image/etc: more than 256 entries"):
        bench.launch(2, "true")


def test_one_that_cannot_start_is_refused_in_a_line(bench: Bench) -> None:
    (bench.image / "usr").rmdir()
    (bench.image / "bin").unlink()
    with pytest.raises(LaunchError, match=r"image: no root folder of a system") as refused:
        bench.trains(1, 1)
    assert not refused.value.transient
