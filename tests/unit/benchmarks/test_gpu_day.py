"""The order of a day on a GPU, its time, and what is kept of it: no part is really done here."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpudays import day, device, found

Part, Ended = day.Part, day.Ended
PARTS = (Part("first", 30, "one"), Part("long", 200, "two"), Part("short", 20, "three"))
PLACE = {"code": "c0de", "driver": "580.1", "device": "NVIDIA H100", "torch": "2.11"}
DONE = Ended(code=0, over_time=False, seconds=10.0, stray=0)


class Bench:
    """A day with a clock of its own, whose parts take ten seconds and find what the test says."""

    def __init__(self, state: Path) -> None:
        self.state, self.now, self.done = state, 100.0, list[str]()
        self.ends: dict[str, Ended] = {}
        self.finds: dict[str, dict[str, Any]] = {}
        self.ready: Callable[[], str | None] = lambda: None
        self.said: list[str] = []

    def day(self, budget_s: float = 1000.0, **place: str) -> Any:
        return day.Day(
            PARTS,
            self.state,
            {**PLACE, **place},
            budget_s,
            self.run,
            lambda: self.ready(),
            dict,
            self.said.append,
            lambda: self.now,
        )

    def run(self, part: Any, file: Path, log: Path) -> Ended:
        self.done.append(part.name)
        log.write_text(f"{part.name} speaks\n")
        if (said := self.finds.get(part.name)) is not None:
            file.write_text(json.dumps(said))
        self.now += 10.0
        return self.ends.get(part.name, DONE)

    def page(self, name: str) -> dict[str, Any]:
        page: dict[str, Any] = json.loads((self.state / f"{name}.json").read_text())
        return page


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_no_part_begins_that_would_not_end_in_the_budget(bench: Bench) -> None:
    bench.day(60.0).go()
    assert bench.done == ["first", "short"]
    assert "long: not begun: it takes up to 200 s, 50 s are left" in bench.said
    bench.day(210.0).go()  # what is done is not done again, and the rest is
    assert bench.done == ["first", "short", "long"]


def test_a_part_is_done_again_only_elsewhere(bench: Bench) -> None:
    bench.day().go()
    bench.day().go()
    assert bench.done == ["first", "long", "short"]
    for other in ({"code": "c0ff"}, {"driver": "590"}, {"device": "NVIDIA H200"}, {"torch": "2.12"}):
        bench.done.clear()
        bench.day(**other).go()
        assert bench.done == ["first", "long", "short"], other


def test_a_part_that_was_refused_is_tried_again(bench: Bench) -> None:
    bench.ends["first"] = Ended(day.REFUSED, False, 1.0, 0)
    bench.day().go()
    assert bench.page("first")["status"] == "refused"
    bench.done.clear()
    del bench.ends["first"]
    bench.day().go()
    assert (bench.done, bench.page("first")["status"]) == (["first"], "pass")


def test_a_part_that_was_interrupted_or_whose_file_is_broken_is_done_again(bench: Bench) -> None:
    bench.day().go()
    (bench.state / "long.json").unlink()
    (bench.state / "long.found.json").write_text('{"numbers": {"from": "before"}}')
    (bench.state / "short.json").write_text('{"schema": 1, "part": "sho')
    (bench.state / "first.json").write_text(json.dumps({"schema": 1, "place": PLACE}))
    bench.done.clear()
    bench.day().go()
    assert bench.done == ["first", "long", "short"]
    assert bench.page("long")["numbers"] == {}, "what an interrupted one has found is not another's"


@pytest.mark.parametrize(
    ("end", "checks", "status"),
    [
        (DONE, [], "pass"),
        (DONE, [True, None], "pass"),
        (DONE, [True, False], "fail"),
        (Ended(1, False, 1.0, 0), [True], "fail"),
        (Ended(-9, True, 30.0, 2), [True], "over time"),
        (Ended(3, False, 1.0, 0), [], "refused"),
    ],
)
def test_what_becomes_of_a_part(bench: Bench, end: Any, checks: list[bool | None], status: str) -> None:
    made = [{"name": "a", "goal": "b", "found": "c", "ok": ok} for ok in checks]
    bench.finds["first"] = {"numbers": {"x": 1.5}, "checks": made}
    bench.ends["first"] = end
    bench.day().go()
    page = bench.page("first")
    assert (page["status"], page["numbers"], page["checks"]) == (status, {"x": 1.5}, made)
    assert (page["schema"], page["part"], page["place"]) == (1, "first", PLACE)
    assert (page["seconds"], page["stray_processes"]) == (end.seconds, end.stray)
    assert page["log_tail"] == "first speaks\n"


def test_somebody_else_on_the_gpu_ends_the_day(bench: Bench) -> None:
    answers = iter([None, "GPU 0 is in use by process 7"])
    bench.ready = lambda: next(answers)
    one = bench.day()
    one.go()
    assert bench.done == ["first"]
    assert one.stopped == "GPU 0 is in use by process 7"


def test_a_part_that_has_ended_is_kept_whatever_comes_then(bench: Bench) -> None:
    def ended_early() -> Mapping[str, Any]:
        raise KeyboardInterrupt

    one = bench.day()
    one.after = ended_early
    with pytest.raises(KeyboardInterrupt):
        one.go()
    assert bench.page("first")["status"] == "pass"
    bench.day().go()
    assert bench.done == ["first", "long", "short"]


def test_the_table_says_what_is_wrong_and_what_was_not_begun(bench: Bench) -> None:
    good = {"name": "a", "goal": "1", "found": "1", "ok": True}
    bad = {"name": "copy", "goal": ">= 2 | 3", "found": "1", "ok": False}
    bench.finds["first"] = {"checks": [good, bad, {**bad, "ok": None}]}
    bench.finds["short"] = {"why": "no program here"}
    bench.ends["short"] = Ended(3, False, 1.0, 0)
    one = bench.day(100.0)
    one.go()
    pages = {part.name: page for part in PARTS if (page := one.stored(part))}
    assert day.table(PARTS, pages).splitlines()[2:] == [
        "| first | fail | 10 | 1 of 2 | copy: 1 (goal: >= 2 / 3) |",
        "| long | not begun | | | |",
        "| short | refused | 1 |  | no program here |",
    ]


def test_a_day_is_packed_into_two_files(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "MOST_LOG", 7)
    bench.day().go()
    out = bench.state / "new" / "out"
    day.pack(out, {"schema": 1}, [bench.state / "first.log", bench.state / "short.log"])
    assert sorted(file.name for file in out.iterdir()) == ["day.json", "logs.tgz"]
    assert json.loads((out / "day.json").read_text()) == {"schema": 1}
    with tarfile.open(out / "logs.tgz") as archive:
        assert archive.getnames() == ["logs/first.log", "logs/short.log"]
        member = archive.extractfile("logs/first.log")
        assert member is not None and member.read() == b"speaks\n"


def test_what_a_part_finds_is_whole_in_its_file_at_any_moment(tmp_path: Path) -> None:
    file = tmp_path / "part.found.json"
    one = found.Found(file, cpu=False, within_s=10, device="NVIDIA H100 80GB HBM3")
    one.number(x=1)
    with file.open() as before:
        one.check("c", "g", 3, True)
        assert json.loads(before.read()) == {"numbers": {"x": 1}, "checks": []}, "a file that is replaced"
    with one.trying("d"):
        raise RuntimeError("out of luck\nand more")
    one.speed("e", "fast", "slow", False, of=("H200",))
    one.speed("f", "fast", "slow", False, of=("H100",))
    checks = [
        (check["name"], check["found"], check["ok"]) for check in json.loads(file.read_text())["checks"]
    ]
    assert checks == [
        ("c", "3", True),
        ("d", "RuntimeError: out of luck", False),
        ("e", "slow", None),
        ("f", "slow", False),
    ]
    cpu = found.Found(file, cpu=True, within_s=10)
    cpu.speed("g", "fast", "slow", False)
    assert [check.ok for check in cpu.checks] == [None]


def test_the_most_telling_parts_fit_into_one_command() -> None:
    assert sum(part.box_s for part in day.PARTS[:6]) <= day.BUDGET_S
    assert all(part.box_s <= day.BUDGET_S for part in day.PARTS)
    for part in day.PARTS:
        assert (day.HERE / "parts" / f"{part.name.replace('-', '_')}.py").is_file()


def test_parts_that_there_are_not_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert [part.name for part in day.arguments(["--parts", "soak,facts"]).parts] == ["facts", "soak"]
    with pytest.raises(SystemExit):
        day.arguments(["--parts", "facts,facsimile"])
    assert "unknown parts: facsimile" in capsys.readouterr().err


def test_parts_see_nothing_of_the_user_and_only_absolute_paths(tmp_path: Path) -> None:
    environ = {"HPCSCHED_DIR": "/somebody's", "PYTHONPATH": "wheels:/abs", "CUDA_VISIBLE_DEVICES": "3"}
    env = day.environment(tmp_path, cpu=False, environ=environ)
    assert "HPCSCHED_DIR" not in env
    paths = env["PYTHONPATH"].split(":")
    assert all(path.startswith("/") for path in paths)
    assert paths[-2:] == [str(Path("wheels").absolute()), "/abs"]
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert Path(env["HOME"]).is_dir() and env["PATH"]
    assert day.environment(tmp_path, cpu=True, environ={})["CUDA_VISIBLE_DEVICES"] == ""


# -- the GPU, by a stand-in for NVML -----------------------------------------------------------------------


class NVMLError(Exception):
    pass


def nvml(**more: Any) -> Any:
    """Two GPUs that nobody is on."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}abc",
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H100",
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
            total=80 << 30, free=79 << 30, used=600 << 20
        ),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0b101,
        "nvmlClocksThrottleReasonGpuIdle": 1,
        "nvmlClocksThrottleReasonSwPowerCap": 4,
        "nvmlDeviceGetComputeMode": lambda handle: 3,
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
    }
    return SimpleNamespace(**{**answers, **more})


@pytest.fixture(autouse=True)
def all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_facts_of_the_gpus_what_nvml_cannot_say_is_none() -> None:
    gpus = device.Gpus(nvml())
    first, second = gpus.facts()
    assert (gpus.name, gpus.driver, gpus.in_the_way()) == ("NVIDIA H100", "580.1", None)
    assert (first["uuid"], second["uuid"]) == ("GPU-0abc", "GPU-1abc")
    assert first["throttle_reasons"] == ["GpuIdle", "SwPowerCap"]
    assert (first["compute_mode"], first["mig"], first["memory_mib"]) == ("exclusive process", None, 81920)


@pytest.mark.parametrize(
    ("visible", "uuids"), [("1", ["GPU-1abc"]), ("GPU-1", ["GPU-1abc"]), ("1,0", ["GPU-1abc", "GPU-0abc"])]
)
def test_only_the_gpus_that_are_visible(
    visible: str, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [one["uuid"] for one in device.Gpus(nvml()).facts()] == uuids
    for none in ("", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        with pytest.raises(device.NoGpu, match="CUDA_VISIBLE_DEVICES"):
            device.Gpus(nvml())


def test_others_on_a_gpu_are_named_in_one_line() -> None:
    def on_second(handle: int) -> list[Any]:
        return [SimpleNamespace(pid=4711, usedGpuMemory=3 << 30)] * handle

    busy = device.Gpus(nvml(nvmlDeviceGetComputeRunningProcesses=on_second))
    assert busy.in_the_way() == "GPU 1 is in use by process 4711 (3072 MiB): a day needs it idle"
    full: Mapping[str, int] = {"total": 80 << 30, "free": 70 << 30, "used": 10 << 30}
    hidden = device.Gpus(nvml(nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(**full)))
    assert hidden.in_the_way() == "GPU 0: 10240 MiB are in use, by processes not seen from here"


def test_packages_that_are_not_there_are_named_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert device.missing() == []
    monkeypatch.setitem(device.NEEDED, "pyzmq", "zmq_that_is_not_there")
    assert day.main(["--state", str(tmp_path / "s")]) == 2
    assert capsys.readouterr().err == "gpu_day: not installed: pyzmq; see benchmarks/gpu-day.md\n"
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("option", ["--state", "--out"])
def test_a_folder_that_cannot_be_written_is_said_before_any_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(day, "ending_on_sigterm", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "file").touch()
    assert day.main(["--cpu", "--state", str(tmp_path / "s"), option, str(tmp_path / "file")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("gpu_day: [Errno 17] File exists") and said.err.count("\n") == 1
    assert said.out == ""


def test_two_days_in_one_state_folder_do_not_go_on_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(day, "ending_on_sigterm", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(day, "machine", lambda: {"date": "2026-12-01T10:00:00"})
    words = ["--cpu", "--state", str(tmp_path), "--parts", "facts", "--budget-s", "0"]
    with day._locked(tmp_path):
        assert day.main(words) == 2
        assert capsys.readouterr().err == f"gpu_day: another day goes on in {tmp_path}\n"
    assert day.main(words) == 0
    said = capsys.readouterr().out
    assert "facts: not begun" in said
    assert "to be sent" not in said and "nothing about a GPU" in said


def test_no_driver_is_one_line() -> None:
    def missing() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    with pytest.raises(device.NoGpu, match="NVML: NVML Shared Library Not Found"):
        device.Gpus(nvml(nvmlInit=missing))


def test_a_whole_day_on_a_stand_in_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    boxes: list[tuple[str, float]] = []

    def run_in_box(command: list[str], *, box_s: float, log: Path, env: Mapping[str, str]) -> Ended:
        words = dict(itertools.pairwise(command))
        boxes.append((words["--one"], box_s))
        assert words["--device"] == "NVIDIA H100" and "--cpu" not in command
        assert float(words["--budget-s"]) < box_s and Path(env["TMPDIR"]).is_dir()
        log.write_text("")
        Path(words["--found"]).write_text('{"numbers": {}, "checks": []}')
        return DONE

    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.setattr(day, "run_in_box", run_in_box)
    monkeypatch.setattr(day, "machine", lambda: {"date": "2026-12-01T10:00:00"})
    monkeypatch.setattr(day, "_torch_cannot", lambda env: None)
    monkeypatch.setattr(day, "torch_versions", lambda: {"torch": "2.11.0+cu130", "cuda": "13.0"})
    monkeypatch.setattr(day, "ending_on_sigterm", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    words = ["--state", str(tmp_path / "s"), "--out", str(tmp_path / "o"), "--parts", "facts,nccl"]
    assert day.main(words) == 0
    said = capsys.readouterr().out
    assert boxes == [("facts", 30), ("nccl", 30)]
    assert "driver 580.1, device NVIDIA H100, torch 2.11.0+cu130, cuda 13.0" in said
    assert "compute_mode exclusive process" in said and "free_mib 80896" in said
    assert "benchmarks/results/2026-12-01-gpu-day-nvidia-h100.json" in said
    page = json.loads((tmp_path / "o" / "day.json").read_text())
    assert [gpu["uuid"] for gpu in page["gpus"]] == ["GPU-0abc", "GPU-1abc"]
    assert page["parts"]["facts"]["left_mib"] == 0.0
    assert page["parts"]["facts"]["gpu_after"]["throttle_reasons"] == ["GpuIdle", "SwPowerCap"]

    monkeypatch.setattr(day, "_torch_cannot", lambda env: "torch 2.11.0: no CUDA")
    assert day.main(words) == 2
    assert capsys.readouterr().err == "gpu_day: torch 2.11.0: no CUDA\n"
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetCount=lambda: 0))
    assert day.main(words) == 2
    assert capsys.readouterr().err == "gpu_day: there is no GPU\n"
