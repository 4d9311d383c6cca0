"""The order of a day, its time, what is kept of it, and the table at its end."""

from __future__ import annotations

import argparse
import datetime
import fcntl
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from common import ROOT, Terminated, ending_on_sigterm
from machine import machine

from gpu_day.boxes import Ended, run_in_box
from gpu_day.device import Gpus, NoGpu, missing, torch_versions
from gpu_day.one import REFUSED, run_one
from hpcsched.store.files import write_atomically

HERE = Path(__file__).resolve().parent
BUDGET_S = 500.0
CPU_BOX_S = 120.0
"""A part takes 15 s at most on a CPU that is not busy with other things; CI is."""
MARGIN_S = 5.0
"""A part is told that its box ends so much earlier, so that it ends by itself."""
TAIL, MOST_LOG = 4000, 2 << 20
"""Characters of a log in a part's JSON; bytes of it, the last ones, in logs.tgz."""
IDLE_WITHIN_S = 10.0
"""What the driver may take to give back the memory of processes that have ended."""

PAGE = {"schema", "place", "status", "seconds", "exit_code", "checks", "log_tail"}
"""What a part's JSON has at least; another file is none."""

PASS, FAIL, OVER_TIME, IS_REFUSED, NOT_BEGUN = "pass", "fail", "over time", "refused", "not begun"


@dataclass(frozen=True)
class Part:
    """A part: it takes `box_s` at most, and its module is `gpu_day.parts.` and its name."""

    name: str
    box_s: float
    shows: str


PARTS = (
    Part("facts", 30, "copies, products, pinning, launches: what bounds all the rest"),
    Part("forks", 30, "processes that wait for a job stay off the driver"),
    Part("gpu-tests", 180, "tests/gpu"),
    Part("sticky", 60, "a step after an accident is as one without"),
    Part("suspend", 150, "suspending and resuming 1, 4, 10 GB"),
    Part("run", 50, "a whole run, with suspends, killed and stopped processes"),
    Part("lanes", 260, "two trainings on one GPU"),
    Part("layers", 150, "layer profiles against whole steps"),
    Part("mps", 90, "NVIDIA's multi-process service: devices, limits, a client that is killed"),
    Part("packs", 220, "packs against processes"),
    Part("adapters", 240, "adapters on one frozen model: one pass for all against each alone"),
    Part("shares", 440, "eight plain programs on one GPU, with shares and without"),
    Part("vsw", 140, "stream workers"),
    Part("two-ranks", 100, "two ranks on one GPU"),
    Part("nccl", 30, "groups of one rank, made anew again and again"),
    Part("soak", 240, "100 suspends in turn"),
)
"""In order of worth: the sum of the first six is one command's budget."""


@dataclass
class Day:
    """Runs parts one after the other until the time is over.

    Attributes:
        place: code, driver, device and versions: a part that was done with the same is not done again.
        run: does a part, in a file of what it finds and a log; returns how it ended.
        ready: why no part can begin now, in one line; None if one can.
    """

    parts: Sequence[Part]
    state: Path
    place: Mapping[str, Any]
    budget_s: float
    run: Callable[[Part, Path, Path], Ended]
    ready: Callable[[], str | None] = lambda: None
    after: Callable[[], Mapping[str, Any]] = dict
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    stopped: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._end = self.clock() + self.budget_s

    def go(self) -> None:
        """Do what is not done yet, as far as the time goes."""
        for part in self.parts:
            if (page := self.stored(part)) is not None and page["status"] != IS_REFUSED:
                self.say(f"{part.name}: {page['status']}, done before")
            elif part.box_s > (left_s := self._end - self.clock()):
                self.say(f"{part.name}: not begun: it takes up to {part.box_s:g} s, {left_s:.0f} s are left")
            elif (why := self.ready()) is not None:
                self.stopped = why
                return
            else:
                self.say(f"{part.name}: {part.shows} (at most {part.box_s:g} s) ...")
                page = self._do(part)
                self.say(f"{part.name}: {page['status']} after {page['seconds']:.1f} s")

    def _do(self, part: Part) -> dict[str, Any]:
        found, log = self._file(part, ".found.json"), self._file(part, ".log")
        found.unlink(missing_ok=True)
        began = datetime.datetime.now(datetime.UTC)
        ended = self.run(part, found, log)
        partly = _read(found) or {}
        checks = partly.get("checks", [])
        page = {
            "schema": 1,
            "part": part.name,
            "place": dict(self.place),
            "began": began.isoformat(timespec="seconds"),
            "status": status_of(ended, checks),
            "exit_code": ended.code,
            "seconds": round(ended.seconds, 3),
            "stray_processes": ended.stray,
            "numbers": partly.get("numbers", {}),
            "checks": checks,
            "log_tail": log.read_text(errors="replace")[-TAIL:],
            **({"why": partly["why"]} if "why" in partly else {}),
        }
        self._write(part, page)  # before anything else can go wrong
        page |= self.after()
        self._write(part, page)
        return page

    def stored(self, part: Part) -> dict[str, Any] | None:
        """What is known of a part from this place; None if it was not done here."""
        page = _read(self._file(part, ".json"))
        if page is None or not page.keys() >= PAGE:
            return None
        return page if page["schema"] == 1 and page["place"] == dict(self.place) else None

    def _write(self, part: Part, page: Mapping[str, Any]) -> None:
        write_atomically(self._file(part, ".json"), json.dumps(page, indent=1).encode(), durable=True)

    def _file(self, part: Part, suffix: str) -> Path:
        return self.state / f"{part.name}{suffix}"


def status_of(ended: Ended, checks: Iterable[Mapping[str, Any]]) -> str:
    """pass, fail, over time or refused."""
    if ended.over_time:
        return OVER_TIME
    if ended.code == REFUSED:
        return IS_REFUSED
    return PASS if ended.code == 0 and all(check["ok"] is not False for check in checks) else FAIL


def table(parts: Sequence[Part], pages: Mapping[str, Mapping[str, Any]]) -> str:
    """The parts, and every goal that was missed, as Markdown."""
    lines = ["| part | status | s | goals met | what is wrong |", "|---|---|---|---|---|"]
    for part in parts:
        page = pages.get(part.name)
        if page is None:
            lines.append(f"| {part.name} | {NOT_BEGUN} | | | |")
            continue
        judged = [check for check in page["checks"] if check["ok"] is not None]
        wrong = [f"{c['name']}: {c['found']} (goal: {c['goal']})" for c in judged if not c["ok"]]
        if not wrong and page["status"] != PASS:
            last = [line for line in page["log_tail"].splitlines() if line.strip()]
            wrong = [page.get("why") or (last[-1] if last else f"exit code {page['exit_code']}")]
        met = f"{sum(bool(check['ok']) for check in judged)} of {len(judged)}" if judged else ""
        words = "; ".join(wrong).replace("|", "/").replace("\n", " ")
        lines.append(f"| {part.name} | {page['status']} | {page['seconds']:.0f} | {met} | {words[:600]} |")
    return "\n".join(lines)


def pack(out: Path, page: Mapping[str, Any], logs: Iterable[Path]) -> None:
    """All of a day as two files."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "day.json", (json.dumps(page, indent=1) + "\n").encode())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for log in logs:
            data = log.read_bytes()[-MOST_LOG:]
            entry = tarfile.TarInfo(f"logs/{log.name}")
            entry.size, entry.mtime = len(data), int(log.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(data))
    write_atomically(out / "logs.tgz", packed.getvalue())


def code_digest(root: Path = ROOT) -> str:
    """Of the code that a day runs: whatever git says, the same code is the same."""
    digest = hashlib.sha256()
    for folder in ("hpcsched", "benchmarks", "tests/gpu", "tests/support", "pyproject.toml"):
        for file in sorted((root / folder).rglob("*.py")) or [root / folder]:
            if file.is_file():
                digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def environment(state: Path, *, cpu: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """What parts are started with: nothing of the user's settings, and every path absolute."""
    env = {name: value for name, value in environ.items() if not name.startswith("HPCSCHED_")}
    home = state / "home"
    home.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), str(HERE.parent)]
    paths += [str(Path(one).absolute()) for one in env.get("PYTHONPATH", "").split(os.pathsep) if one]
    env |= {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "HOME": env.get("HOME") or str(home),
        "PATH": env.get("PATH") or os.defpath,
    }
    if cpu:
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")}
    return env


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu_day",
        description="Measure and check what needs one idle GPU, part by part; goes on where it stopped.",
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", metavar="A,B", help=f"only these of: {', '.join(names)}")
    about = f"begin no part that would not end in this time ({BUDGET_S:g})"
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help=about)
    parser.add_argument("--out", type=Path, help="where day.json and logs.tgz go (the state folder)")
    about = "what is done already; goes along to continue elsewhere (.gpu_day)"
    parser.add_argument("--state", type=Path, default=Path(".gpu_day"), help=about)
    parser.add_argument("--cpu", action="store_true", help="without a GPU: shows that all of it works")
    for name in ("--one", "--found", "--device"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    chosen = options.parts.split(",") if options.parts else names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"unknown parts: {', '.join(unknown)}; there are: {', '.join(names)}")
    if not options.budget_s >= 0:
        parser.error(f"--budget-s: {options.budget_s:g}; it is a number of seconds")
    options.parts = [part for part in PARTS if part.name in chosen]
    return options


def main(words: Sequence[str] | None = None) -> int:
    """A day, or as much of it as there is time for; returns the exit code."""
    options = arguments(words)
    if options.one:
        file = Path(options.found)
        return run_one(
            options.one, file, cpu=options.cpu, within_s=options.budget_s, device=options.device or ""
        )
    began = time.monotonic()
    if packages := missing():
        print(f"gpu_day: not installed: {', '.join(packages)}; see benchmarks/gpu-day.md", file=sys.stderr)
        return 2
    ending_on_sigterm()
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    state = options.state.absolute()
    out = state if options.out is None else options.out.absolute()
    try:
        for folder in (state, out):  # now, and not after all parts
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        env = environment(state, cpu=options.cpu, environ=os.environ)
        gpus = None if options.cpu else Gpus()
        if gpus is not None and (why := gpus.in_the_way() or _torch_cannot(env)):
            raise NoGpu(why)
        lock = _locked(state)
    except (NoGpu, OSError) as error:
        print(f"gpu_day: {error}", file=sys.stderr)
        return 2
    place = {
        "code": code_digest(),
        "driver": None if gpus is None else gpus.driver,
        "device": "cpu" if gpus is None else gpus.name,
        **torch_versions(),
    }
    facts = [] if gpus is None else gpus.facts()
    print(", ".join(f"{name} {value}" for name, value in place.items()))
    for one in facts:
        print(", ".join(f"{name} {value}" for name, value in one.items() if value not in (None, [])))
    about = machine()
    before_mib = 0.0 if gpus is None else gpus.used_mib()

    def run(part: Part, found: Path, log: Path) -> Ended:
        box_s = CPU_BOX_S if options.cpu else part.box_s
        command = [sys.executable, str(HERE), "--one", part.name, "--found", str(found)]
        command += ["--budget-s", str(box_s - MARGIN_S), "--device", str(place["device"])]
        command += ["--cpu"] if options.cpu else []
        with tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as temporary:
            return run_in_box(command, box_s=box_s, log=log, env={**env, "TMPDIR": temporary})

    def ready() -> str | None:
        return None if gpus is None else _idle(gpus.in_the_way)

    def after() -> Mapping[str, Any]:
        if gpus is None:
            return {}
        _idle(lambda: "memory" if gpus.used_mib() > before_mib + 1 else None)
        return {"gpu_after": gpus.facts()[0], "left_mib": round(gpus.used_mib() - before_mib, 1)}

    parts = [Part(p.name, CPU_BOX_S if options.cpu else p.box_s, p.shows) for p in options.parts]
    budget_s = options.budget_s - (time.monotonic() - began)
    day = Day(parts, state, place, budget_s, run, ready, after, lambda text: print(text, flush=True))
    code = 0
    try:
        day.go()
    except (Terminated, KeyboardInterrupt):
        print("gpu_day: ended early; the same command goes on", file=sys.stderr)
        code = 128 + signal.SIGTERM
    finally:
        pages = {part.name: page for part in PARTS if (page := day.stored(part)) is not None}
        logs = [file for file in sorted(state.glob("*.log")) if file.stem in pages]
        whole = {"schema": 1, "place": place, "gpus": facts, "machine": about, "parts": pages}
        pack(out, whole, logs)
        lock.close()
    if day.stopped:
        print(f"gpu_day: {day.stopped}", file=sys.stderr)
        code = code or 2
    if options.cpu:
        print("No GPU, tiny sizes: this shows that the parts work, nothing about a GPU.")
    print(table(options.parts, pages))
    left = [part.name for part in options.parts if part.name not in pages]
    sent = "" if options.cpu else f" (to be sent as benchmarks/results/{file_name(whole)})"
    print(f"\n{out / 'day.json'}{sent}, {out / 'logs.tgz'}")
    if left:
        print(f"To be done, by the same command: {','.join(left)}")
    wrong = {FAIL, OVER_TIME} & {pages[p.name]["status"] for p in options.parts if p.name in pages}
    return code or int(bool(wrong))


def _locked(state: Path) -> IO[bytes]:
    """An open file in the state folder that no other day can have. Raises NoGpu while one goes on there."""
    file = (state / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise NoGpu(f"another day goes on in {state}") from error
    except OSError:
        pass  # a file system without locks
    return file


def _torch_cannot(env: Mapping[str, str]) -> str | None:
    """Why torch does not compute on the GPU; None if it does. Its process has ended then."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hpcsched.worker.gpu"],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        answer = json.loads((done.stdout.strip().splitlines() or [""])[-1])
        return None if answer["ok"] else str(answer["found"])
    except subprocess.TimeoutExpired:
        return "torch has not computed anything on the GPU within 120 s"
    except (ValueError, KeyError):
        return f"torch does not run here: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"


def _idle(why: Callable[[], str | None]) -> str | None:
    """The same, once it is None or IDLE_WITHIN_S are over."""
    end = time.monotonic() + IDLE_WITHIN_S
    while (said := why()) is not None and time.monotonic() < end:
        time.sleep(0.2)
    return said


def _read(file: Path) -> dict[str, Any] | None:
    try:
        page = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return page if isinstance(page, dict) else None


def file_name(page: Mapping[str, Any]) -> str:
    """What a day's JSON is called in benchmarks/results."""
    device = re.sub(r"[^a-z0-9]+", "-", str(page["place"]["device"]).lower()).strip("-")
    return f"{page['machine']['date'][:10]}-gpu-day-{device}.json"
