"""Eight adapters (LoRA) on one small frozen model, on two CPU slots: in packs, and as people train them.

    python benchmarks/adapters.py [--json] [--quick] [--python PYTHON] [--output FILE] [--budget-s S]

Rank, alpha, learning rate and batch are each one's own. All eight

- with `hpcsched run`, each alone, one a slot; and in packs (`strategy = "packed"`);
- as plain programs that know nothing of hpcsched, one at a time with both cores, two at a time with one, and
  all at once.

Makespan; the same without the starts of processes, and samples a second then; the memory of all processes;
and how far the adapters of packs are from those trained alone. A process trains from its first step to its
last; without starts, each one begins to train when the one before it on its slot has ended.

Then, in one process and one thread, CPU time of a step of all: each alone, as a pack's loop, and on one pass
of the frozen model, by width of the model, batch, and number of adapters.

PYTHON has PEFT and Transformers; without the option it is this Python, or that which
`packaging/framework_envs.sh newest transformers` has made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, Report, Scratch, hpcsched, main, median, ms, partial_results
from lora import steps_in

HERE = Path(__file__).resolve().parent
MADE = ROOT / ".venv-frameworks/newest/transformers/bin/python"
MAKE = "packaging/framework_envs.sh newest transformers"
MODULES = ("peft", "transformers", "torch")

SLOTS, STEPS, QUICK_STEPS = 2, 2000, 40
SIZE = {"width": 64, "layers": 2, "tokens": 32}
JOBS = (
    {"rank": 4, "alpha": 8, "lr": 1e-2, "batch": 4},
    {"rank": 8, "alpha": 16, "lr": 3e-3, "batch": 4},
    {"rank": 16, "alpha": 16, "lr": 1e-3, "batch": 2},
    {"rank": 2, "alpha": 32, "lr": 1e-2, "batch": 3},
    {"rank": 8, "alpha": 8, "lr": 1e-3, "batch": 4},
    {"rank": 4, "alpha": 16, "lr": 3e-3, "batch": 2},
    {"rank": 16, "alpha": 32, "lr": 3e-3, "batch": 4},
    {"rank": 8, "alpha": 16, "lr": 1e-2, "batch": 3},
)
QUICK_JOBS = 3
GAIN, CLOSE = 2.0, 1e-6

WIDTHS, BATCHES, MEMBERS = (64, 128, 256), (1, 4), (4, 8)
LOOK_S = 0.5
WAY_S, RATIOS_S, BUDGET_S = 900.0, 900.0, 480.0

MODES_SAID = re.compile(r"steps of those that are alike: (.+)")


def options_of(parser: argparse.ArgumentParser) -> None:
    partial_results(parser, BUDGET_S)
    parser.add_argument("--python", metavar="PYTHON", help="that has PEFT, Transformers and torch")


@dataclass
class Way:
    """How the eight went: times in seconds, memory in MiB."""

    makespan_s: float
    trains_s: float
    peak_mib: float
    adapters: dict[str, Any] = field(repr=False)
    modes: str = ""


def measure(options: argparse.Namespace) -> Report:
    report = Report(output=options.output)
    python = options.python or next((p for p in (sys.executable, str(MADE)) if lacks(p) is None), None)
    if python is None:
        report.row("packs of adapters", f"not measured: no PEFT here; {MAKE} makes an environment")
        return report
    if why := lacks(python):
        print(f"adapters.py: --python {python}: {why}; {MAKE} makes one", file=sys.stderr)
        sys.exit(2)
    end = time.monotonic() + options.budget_s
    with Scratch.make() as scratch:
        scratch.env |= {"PYTHONPATH": f"{HERE}:{ROOT}", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        eight = Eight(scratch, python, quick=options.quick)
        ways = {
            "each alone, one a slot": lambda: eight.hpcsched("one a slot", packed=False),
            "packs": lambda: eight.hpcsched("packs", packed=True),
            "plain programs, one at a time": lambda: eight.plain("one at a time", 1, threads=SLOTS),
            "plain programs, two at a time": lambda: eight.plain("two at a time", SLOTS),
            "plain programs, all at once": lambda: eight.plain("all at once", len(eight.jobs)),
        }
        found = {}
        for words, go in ways.items():
            found[words] = go()
            _note(report, f"{len(eight.jobs)} adapters, {words}", found[words], eight.samples)
        packs = found.pop("packs")
        alone, *_ = found.values()
        for words, way in found.items():
            _compare(report, words, way, packs, judged=way is alone and not options.quick)
        _differ(report, alone.adapters, packs.adapters)
        _ratios(report, scratch, python, end, quick=options.quick)
    return report


def lacks(python: str) -> str | None:
    """What a Python lacks to train adapters; None: nothing."""
    code = f"import importlib.util as u; print('lacks', *[m for m in {MODULES} if u.find_spec(m) is None])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return str(error.strerror)
    said, *lacking = done.stdout.split() or [""]
    if done.returncode or said != "lacks":
        return "is no Python"
    return f"has no {', '.join(lacking)}" if lacking else None


class Eight:
    """The eight trainings (three of them, if `quick`), and ways to make them."""

    def __init__(self, scratch: Scratch, python: str, *, quick: bool) -> None:
        self._scratch, self._python = scratch, python
        self._steps = QUICK_STEPS if quick else STEPS
        self.jobs = JOBS[:QUICK_JOBS] if quick else JOBS
        self.samples = self._steps * sum(job["batch"] for job in self.jobs)

    def _args(self, number: int, record: Path) -> dict[str, Any]:
        about = {"name": f"lora-{number}", "record": str(record), "steps": self._steps, "seed": number}
        return {**about, **SIZE, **self.jobs[number]}

    def hpcsched(self, name: str, *, packed: bool) -> Way:
        """With `hpcsched run`."""
        record = self._folder(name)
        lines = ["schema = 1", "[defaults]", 'trainer = "lora_packed:Tuning"']
        lines += [f"python = {json.dumps(self._python)}", f"steps = {self._steps}", "gpus = 1"]
        lines += ['strategy = "packed"'] if packed else []
        for number in range(len(self.jobs)):
            args = ", ".join(f"{k} = {json.dumps(v)}" for k, v in self._args(number, record).items())
            name = f"lora-{number}"
            lines += ["[[job]]", f'name = "{name}"', f'model = "{name}"', f"args = {{ {args} }}"]
        file = self._scratch.folder / f"{record.name}.toml"
        file.write_text("\n".join([*lines, ""]))
        run = self._scratch.folder / f"run-{record.name}"
        command = hpcsched("run", file, "--dir", run, "--devices", f"cpu:{SLOTS}", "--quiet")
        began = time.time()
        with self._scratch.start(command) as agent, memory_of([agent]) as peak_mib:
            agent.communicate(timeout=WAY_S)
        took_s = time.time() - began
        if agent.returncode:
            raise RuntimeError(f"{name}: exit code {agent.returncode}; {self._scratch.errors}")
        said = [MODES_SAID.findall(log.read_text()) for log in sorted(run.glob("packs/*.log"))]
        modes = ", ".join(each[0] for each in said if each)
        return self._way(record, took_s, SLOTS, peak_mib[0], modes)

    def plain(self, name: str, at_once: int, threads: int = 1) -> Way:
        """As programs, so many at a time, each of them with so many threads."""
        record = self._folder(name)
        waiting = [
            [
                self._python,
                str(HERE / "lora.py"),
                json.dumps(self._args(number, record) | {"threads": threads}),
            ]
            for number in range(len(self.jobs))
        ]
        began, end = time.time(), time.monotonic() + WAY_S
        with contextlib.ExitStack() as stack:
            running: list[subprocess.Popen[bytes]] = []
            peak_mib = stack.enter_context(memory_of(running))
            while waiting or any(one.poll() is None for one in running):
                if time.monotonic() > end:
                    raise RuntimeError(f"{name}: not done after {WAY_S:g} s")
                if waiting and sum(one.poll() is None for one in running) < at_once:
                    running.append(stack.enter_context(self._scratch.start(waiting.pop(0))))
                else:
                    time.sleep(0.02)
            took_s = time.time() - began
        if any(one.returncode for one in running):
            raise RuntimeError(f"{name}: a program has failed; {self._scratch.errors}")
        return self._way(record, took_s, at_once, peak_mib[0])

    def _folder(self, name: str) -> Path:
        folder = self._scratch.folder / name.replace(" ", "-")
        folder.mkdir()
        return folder

    def _way(self, record: Path, took_s: float, at_once: int, peak_mib: float, modes: str = "") -> Way:
        import torch

        spans: dict[int, list[float]] = {}
        for number in range(len(self.jobs)):
            times = steps_in(record / f"lora-{number}.steps")
            if len(times) != self._steps:
                raise RuntimeError(f"{record.name}: {len(times)} steps of {self._steps}")
            pid = json.loads((record / f"lora-{number}.json").read_bytes())["pid"]
            spans.setdefault(pid, []).extend((times[0], times[-1]))
        adapters = {file.stem: torch.load(file) for file in record.glob("*.pt")}
        trains = [(min(span), max(span)) for span in spans.values()]
        return Way(took_s, without_starts(trains, at_once), peak_mib, adapters, modes)


def without_starts(trains: Sequence[tuple[float, float]], at_once: int) -> float:
    """The makespan of processes that train from one time to another, if starts took nothing: in their order,
    so many at a time."""
    free = [0.0] * at_once
    for began, ended in sorted(trains):
        slot = free.index(min(free))
        free[slot] += ended - began
    return max(free)


@contextlib.contextmanager
def memory_of(programs: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[float]]:
    """The largest memory of these and all that they start, within the block, in MiB: what is shared by some
    counts once (PSS). It is looked at some times a second."""
    import psutil

    peak, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            total = 0
            for program in list(programs):
                with contextlib.suppress(psutil.Error):
                    one = psutil.Process(program.pid)
                    for each in (one, *one.children(recursive=True)):
                        with contextlib.suppress(psutil.Error):
                            total += each.memory_full_info().pss
            peak[0] = max(peak[0], total / 2**20)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield peak
    finally:
        over.set()
        looking.join()


def _note(report: Report, words: str, way: Way, samples: int) -> None:
    report.results |= {
        f"{words}: makespan_s": [way.makespan_s],
        f"{words}: trains_s": [way.trains_s],
        f"{words}: samples_per_s": [samples / way.trains_s],
        f"{words}: peak_mib": [way.peak_mib],
    }
    modes = f"; modes: {way.modes}" if way.modes else ""
    report.row(
        words,
        f"makespan {way.makespan_s:.1f} s, without starts {way.trains_s:.1f} s "
        f"({samples / way.trains_s:.0f} samples/s), {way.peak_mib:.0f} MiB{modes}",
    )


def _compare(report: Report, words: str, way: Way, packs: Way, *, judged: bool) -> None:
    gain, whole = way.trains_s / packs.trains_s, way.makespan_s / packs.makespan_s
    memory = packs.peak_mib / way.peak_mib
    report.row(
        f"... packs against {words}",
        f"{gain:.2f}x the samples/s, {whole:.2f}x with starts, {memory:.0%} of its memory",
        goal=f"at least {GAIN:g}x the samples/s" if judged else "",
        ok=gain >= GAIN if judged else None,
    )


def _differ(report: Report, alone: dict[str, Any], packs: dict[str, Any]) -> None:
    far = max(
        float((tensor - packs[name][key]).abs().max())
        for name, adapter in alone.items()
        for key, tensor in adapter.items()
    )
    report.results["differs"] = [far]
    said = "the same bits" if far == 0 else f"{far:.1e}"
    report.row(
        "... weights of adapters, packs against alone, in float32",
        f"{said} after the last step",
        goal=f"at most {CLOSE:g}",
        ok=far <= CLOSE,
    )


def _ratios(report: Report, scratch: Scratch, python: str, end: float, *, quick: bool) -> None:
    cases = [
        {**SIZE, "width": width, "batch": batch, "members": members}
        for width in ((64,) if quick else WIDTHS)
        for batch in ((4,) if quick else BATCHES)
        for members in ((2,) if quick else MEMBERS)
    ]
    asked = json.dumps({"within_s": max(0.0, end - time.monotonic()), "cases": cases})
    pages = scratch.json([python, str(HERE / "lora_packed.py"), asked], deadline_s=RATIOS_S)
    farthest = 0.0
    for case, page in zip(cases, pages, strict=True):
        width, batch, members = case["width"], case["batch"], case["members"]
        what = f"{members} adapters, width {width}, batch {batch}: samples/s against each alone"
        if page is None:
            report.row(what, "not reached in time")
            continue
        name = f"w{width}_b{batch}_n{members}"
        report.results |= {f"{name}_{way}_step_s": times for way, times in page["step_s"].items()}
        report.results[f"{name}_differs"] = [page["differs"]]
        farthest = max(farthest, page["differs"])
        step_s = {way: median(times) for way, times in page["step_s"].items()}
        alone = step_s["alone"]
        report.row(
            what,
            f"loop {alone / step_s['loop']:.2f}x, adapters {alone / step_s['adapters']:.2f}x of {ms(alone)}",
        )
    report.row(
        "... weights against those of each alone, in float64, at most",
        "the same bits" if farthest == 0 else f"{farthest:.1e}",
        goal=f"at most {CLOSE:g}",
        ok=farthest <= CLOSE,
    )


if __name__ == "__main__":
    os.chdir(HERE)
    main(__doc__.splitlines()[0], measure, options_of=options_of)
