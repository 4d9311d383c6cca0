"""Workers from the zygote: like those started from nothing, and never in the way of a launch."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from budget import slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from warmbench import WITHIN_S, Bench, by_zygote, children, output, wait_for  # noqa: E402

from hpcsched.batch.lsf import SIGNALS_ALL  # noqa: E402
from hpcsched.launch import zygote as launch_zygote  # noqa: E402
from hpcsched.launch.proc import stat  # noqa: E402
from hpcsched.launch.workers import LocalWorkers  # noqa: E402
from hpcsched.testing.conformance_launch import reaped  # noqa: E402
from hpcsched.worker import zygote  # noqa: E402
from hpcsched.worker.process import memory  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """On a busy machine an answer may take its time; here it is what it says that matters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_zygote, "ANSWER_TIMEOUT_S", WITHIN_S)
        yield


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_zygote, "ANSWER_TIMEOUT_S", 5.0)


KINDS = {"cold": None, "zygote": 0, "standby": 1}
"""How many standbys the launchers of these have."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(standbys: int | None, **settings: Any) -> Bench:
        folder = tmp_path / f"bench-{len(made)}"
        folder.mkdir()
        made.append(Bench(folder, standbys, **settings))
        return made[-1]

    yield bench
    for one in made:
        one.launcher.close()


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One with a zygote and without standbys, for tests that leave it as it is."""
    bench = Bench(tmp_path_factory.mktemp("steady"), 0)
    bench.warm_up()
    yield bench
    bench.launcher.close()


def told(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"found.{rank}").read_text())
    return found


@pytest.mark.slow
def test_a_warm_worker_finds_what_a_cold_one_finds(make: Callable[..., Bench]) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    found, kinds, drawn = {}, {}, set[float]()
    for kind, standbys in KINDS.items():
        bench = make(
            standbys,
            cpus=lambda device: frozenset({cores[device.index % len(cores)]}),
            environ=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        bench.warm_up()
        standing = bench.waiting() if standbys else []
        job, workers = bench.launch(env={"MINE": "yes", "TORCHELASTIC_RUN_ID": kind}, ranks=2, wait=1.0)
        wait_for((job.folder / "found.1").exists)
        kinds[kind] = by_zygote(bench, workers), workers.processes[0][0] in standing
        assert reaped(workers) == 1
        workers.close()
        for rank in (0, 1):
            news = told(job.folder, rank)
            assert news["leads"] and news["parent"] == os.getpid()
            assert news["frozen"], "a collection walks over all that torch consists of"
            assert all(thread == [cores[rank % len(cores)]] for thread in news.pop("cores"))
            environment = news["environment"]
            assert (environment["MINE"], environment["RANK"], news["cwd"]) == (
                "yes",
                str(rank),
                str(bench.folder),
            )
            fds = [name for name in environment if name.endswith("_FD") and name.startswith("HPCSCHED")]
            assert len(fds) == (3 if rank == 0 else 1)
            ids = (f"{name.removesuffix('FD')}ID" for name in fds)
            about = ("HPCSCHED_LAUNCHED_AT", "MASTER_PORT", "HPCSCHED_JOB_ID", "TORCHELASTIC_RUN_ID")
            for name in (*fds, *ids, *about):
                del environment[name]
            drawn.update(news.pop("drawn"))
            text = json.dumps(news).replace(str(job.folder), "").replace(str(bench.folder), "")
            found[kind, rank] = json.loads(text)
    assert kinds == {"cold": (False, False), "zygote": (True, False), "standby": (True, True)}
    assert len(drawn) == 18, "no two ranks draw the same numbers"
    for (kind, rank), news in found.items():
        assert news == found["cold", rank], kind


def traceback(folder: Path) -> list[str]:
    lines = output(folder).splitlines()
    return lines[lines.index("Traceback (most recent call last):") :]


def test_exit_codes_and_tracebacks_are_the_same(make: Callable[..., Bench], steady: Bench) -> None:
    cold, warm = make(None), steady
    for arguments, code in (({"code": 75}, 75), ({"code": "why"}, 1), ({"code": None}, 0), ({}, 1)):
        folder, found = warm.run(**arguments)
        assert found == code
        if not arguments:
            theirs, _ = cold.run()
            assert traceback(folder) == [
                line.replace(str(cold.folder), str(warm.folder)) for line in traceback(theirs)
            ]
        else:
            assert output(folder) == ("why\n" if code == 1 else "")


@pytest.mark.slow
def test_trained_equal_to_the_last_bit(make: Callable[..., Bench]) -> None:
    final = {}
    for kind, standbys in KINDS.items():
        bench = make(standbys)
        bench.warm_up()
        job, workers = bench.launch(trainer="training:Net", ranks=2)
        assert by_zygote(bench, workers) == (kind != "cold")
        assert reaped(workers) == 0, output(job.folder)
        workers.close()
        (path,) = (job.folder / "checkpoint").glob("*12.pt")
        final[kind] = torch.load(path, weights_only=False)["model"]
    for kind in ("zygote", "standby"):
        assert all(torch.equal(value, final["cold"][name]) for name, value in final[kind].items())


@pytest.mark.slow
@pytest.mark.parametrize("standbys", [0, 2])
def test_without_its_zygote_a_worker_lives_on_and_the_next_is_started(
    make: Callable[..., Bench], standbys: int
) -> None:
    bench = make(standbys)
    bench.warm_up()
    job, workers = bench.launch(wait=600)
    assert by_zygote(bench, workers)
    wait_for((job.folder / "found.0").exists)
    before, standing = bench.zygote, bench.waiting()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, standing)))
    assert bench.run(code=0)[1] == 0
    wait_for(bench.ready)
    assert bench.zygote != before
    assert workers.living == 1 and told(job.folder)["parent"] == os.getpid() == parent(workers)
    workers.signal(signal.SIGTERM)
    assert reaped(workers) == 128 + signal.SIGTERM
    workers.close()


def alive(pid: int) -> bool:
    return (seen := stat(pid)) is not None and seen.state != "Z"


def parent(workers: LocalWorkers) -> int:
    seen = stat(workers.processes[0][0])
    assert seen is not None
    return seen.parent


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_zygote_that_does_not_answer_is_replaced(make: Callable[..., Bench]) -> None:
    bench = make(0)
    bench.warm_up()
    before = bench.zygote
    os.kill(before, signal.SIGSTOP)
    job, workers = bench.launch(code=0)
    assert not by_zygote(bench, workers)
    assert reaped(workers) == 0
    workers.close()
    assert not alive(before) and output(job.folder) == ""
    bench.warm_up()
    assert bench.zygote != before


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_standbys_that_hang_are_passed_over(make: Callable[..., Bench]) -> None:
    bench = make(2)
    bench.warm_up()
    standing = wait_for(lambda: len(bench.waiting()) == 2 and bench.waiting())
    for pid in standing:
        os.kill(pid, signal.SIGSTOP)
    job, workers = bench.launch(code=0)
    assert by_zygote(bench, workers) and workers.processes[0][0] not in standing
    assert reaped(workers) == 0
    workers.close()
    assert [alive(pid) for pid in standing].count(False) == 1
    assert output(job.folder) == ""


@pytest.mark.slow
def test_a_zygote_that_always_ends_is_given_up(make: Callable[..., Bench]) -> None:
    bench = make(0)
    zygote_of_run = bench.warm
    for started in range(1, 6):
        bench.run(code=0)
        assert zygote_of_run._starts == min(started, 4)
        assert (zygote_of_run._socket is None) == (started > 4)
        if zygote_of_run._socket:
            os.kill(bench.zygote, signal.SIGKILL)
            wait_for(lambda: zygote_of_run.look() or zygote_of_run._socket is None)


@pytest.mark.parametrize(
    "env", [{"OMP_NUM_THREADS": "7"}, slow({"MALLOC_ARENA_MAX": "3"}), {"HPCSCHED_RUN_ID": "another"}]
)
def test_what_libraries_read_when_loaded_goes_cold(steady: Bench, env: dict[str, str]) -> None:
    job, workers = steady.launch(env=env, wait=0.5)
    assert not by_zygote(steady, workers)
    wait_for((job.folder / "found.0").exists)
    assert env.items() <= told(job.folder)["environment"].items()
    assert reaped(workers) == 1
    workers.close()


@pytest.mark.slow
def test_another_number_of_cores_goes_cold(make: Callable[..., Bench]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    core_sets = [frozenset(cores[:1]), frozenset(cores[:2])]
    bench = make(0, cpus=lambda device: core_sets[device.index])
    bench.warm_up()
    job, workers = bench.launch(ranks=2, wait=0.5)
    assert not by_zygote(bench, workers)
    reaped(workers)
    assert [set(told(job.folder, rank)["cores"][0]) for rank in (0, 1)] == [set(room) for room in core_sets]
    workers.close()


def test_other_programs_are_started_from_nothing(steady: Bench) -> None:
    job = replace(steady.plan(), module="", argv=("sh", "-c", "echo hello; exit 3"))
    workers = steady.launcher.launch(job)
    assert (reaped(workers), output(job.folder)) == (3, "hello\n")
    workers.close()


def test_sockets_and_memory_of_warm_processes_have_no_name_by_which_anybody_finds_them(steady: Bench) -> None:
    found = [os.getpid(), *children(os.getpid())]
    assert len(found) > 1
    lines = [line for pid in found for line in psutil.Process(pid).net_connections(kind="unix")]
    assert lines and not any(line.laddr and "hpcsched" in line.laddr for line in lines)
    assert not any(psutil.Process(pid).net_connections(kind="inet") for pid in found[1:])
    held = [file.path for pid in found for file in psutil.Process(pid).open_files()]
    assert not any(path.startswith("/dev/shm/") for path in held), "arenas are memfds"


def test_off_means_off(make: Callable[..., Bench]) -> None:
    bench = make(None)
    before = children(os.getpid())
    bench.run(code=0)
    assert children(os.getpid()) == before


def test_a_module_of_the_job_goes_before_one_that_is_loaded(steady: Bench) -> None:
    calendar = steady.folder / "calendar.py"
    calendar.write_text("MINE = True\n")
    (steady.folder / "asks.py").write_text("import calendar\nprint(calendar.MINE)\nfrom told import *\n")
    try:
        folder, code = steady.run(trainer="asks:Told", code=5)
    finally:
        calendar.unlink()  # while it is there the zygote cannot serve workers of this folder
    assert (code, output(folder)) == (5, "True\n")


def test_a_shielded_signal_reaches_no_warm_worker_and_nothing_is_left_when_the_launcher_closes(
    make: Callable[..., Bench],
) -> None:
    bench = make(2, shielded=SIGNALS_ALL)
    bench.warm_up()
    job, workers = bench.launch(wait=1.0, code=7)
    assert by_zygote(bench, workers)
    wait_for((job.folder / "found.0").exists)
    for number in (signal.SIGUSR2, signal.SIGINT):
        workers.signal(number)
    assert reaped(workers) == 7
    workers.close()

    zygote, standing = bench.zygote, wait_for(bench.waiting)
    bench.launcher.close()
    wait_for(lambda: not any(map(alive, [zygote, *standing])))
    assert bench.run(code=0)[1] == 0
    assert bench.zygote == zygote, "no other is started"


def test_a_launch_given_up_begins_nothing(steady: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote has forked the first rank when the second cannot be had: nobody lets it begin."""
    add = LocalWorkers.add
    calls: list[int] = []

    def fail(self: LocalWorkers, pid: int, permit: int | None = None) -> None:
        add(self, pid, permit)
        calls.append(pid)
        if len(calls) == 2:
            raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(LocalWorkers, "add", fail)
    job = steady.plan(ranks=3)
    with pytest.raises(Exception, match="temporarily"):
        steady.launcher.launch(job)
    assert not any(map(alive, calls)) and not list(job.folder.glob("found.*"))


def test_where_memory_is_short_no_standby_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    left = zygote.NEEDED_BYTES - 1
    monkeypatch.setattr(memory, "available", lambda: left)
    monkeypatch.setattr(zygote.Server, "_fork", lambda self, **how: made.append(True))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = zygote.Server(ours, most=1, patience_s=2.0)
        server._refill()
        assert not made and server._refill_at > 0
        left += 1
        server._refill()
        assert made


def test_a_request_too_long_goes_cold_and_the_zygote_stays(steady: Bench) -> None:
    before = steady.zygote
    many = {f"LONG_{number}": "x" * 100_000 for number in range(12)}
    job, workers = steady.launch(env=many, code=0)
    assert not by_zygote(steady, workers)
    assert reaped(workers) == 0, output(job.folder)
    workers.close()
    job, workers = steady.launch(code=0)
    assert by_zygote(steady, workers) and steady.zygote == before
    assert reaped(workers) == 0
    workers.close()


def test_starts_before_an_hour_of_service_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(launch_zygote, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(launch_zygote, "spawn", lambda *how: os.posix_spawnp("sleep", ["sleep", "600"], {}))
    processes = launch_zygote.Zygote(sys.executable, standbys=0, core_sets=(), shielded=frozenset())
    for served, starts in ((3599.0, 1), (10.0, 2), (3600.0, 0), (3599.0, 1)):
        processes._begin({})
        processes.ready = True
        now += served
        processes._end()
        assert processes._starts == starts
    processes._begin({})
    now += 3600.0
    processes.close()
    processes._begin({})
    assert processes._socket is None, "closed is closed"
