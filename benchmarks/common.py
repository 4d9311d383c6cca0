"""What the benchmarks share: the report they print, clean child processes, small statistics."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NoReturn

from machine import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for `profiles`, whose scripts hold models
JOB_SETS = tuple(ROOT / "jobscripts" / "marble" / f"set{n}.toml" for n in (1, 2, 3))
STOP_S = 10.0

__all__ = [
    "JOB_SETS",
    "ROOT",
    "Report",
    "Scratch",
    "Terminated",
    "ending_on_sigterm",
    "hpcsched",
    "main",
    "median",
    "ms",
    "partial_results",
    "percentile",
    "spread",
    "wait_for",
]


@dataclass(frozen=True)
class Row:
    """One line of the table; `ok` None: no goal, or nothing to judge by on this machine."""

    what: str
    goal: str
    measured: str
    ok: bool | None = None


@dataclass
class Report:
    """Raw samples by name (seconds where the name ends in `_s`) and the lines that sum them up.

    `output`: a file that holds all there is after each line, whatever ends the program then.
    """

    results: dict[str, list[float]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    output: Path | None = None
    quick: bool = False

    def row(self, what: str, measured: str, *, goal: str = "", ok: bool | None = None) -> None:
        self.rows.append(Row(what, goal, measured, ok))
        if self.output is not None:
            unfinished = self.output.with_name(f".{self.output.name}.new")
            unfinished.write_text(json.dumps(self.page()) + "\n")
            unfinished.replace(self.output)

    def page(self) -> dict[str, Any]:
        """All there is, for `--json`."""
        rows = [asdict(row) for row in self.rows]
        about = {"schema": 1, "quick": self.quick, "machine": machine()}
        return {**about, "results": self.results, "rows": rows}


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    words = {True: "yes", False: "**no**", None: ""}
    lines = ["| what | goal | measured | met |", "|---|---|---|---|"]
    lines += [f"| {r.what} | {r.goal} | {r.measured} | {words[r.ok]} |" for r in rows]
    return "\n".join(lines)


class Terminated(BaseException):
    """SIGTERM has come. No SystemExit: packs take one for the end of a member that has called `sys.exit`."""


def ending_on_sigterm() -> None:
    """From now on SIGTERM raises Terminated, once, so that children are ended on the way out."""

    def end(*_: int | FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    signal.signal(signal.SIGTERM, end)


def partial_results(parser: argparse.ArgumentParser, budget_s: float) -> None:
    """Options of a program that may be ended early: its time, and a file that has what there is so far."""
    about = f"combinations that would begin later are left out ({budget_s:g})"
    parser.add_argument("--budget-s", type=float, default=budget_s, metavar="S", help=about)
    parser.add_argument("--output", type=Path, metavar="FILE", help="holds all there is, line after line")


def main(
    description: str,
    measure: Callable[[argparse.Namespace], Report],
    *flags: str,
    options_of: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Run one benchmark program; `flags` are switches of its own, `options_of` adds its other options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print raw samples as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    if options_of is not None:
        options_of(parser)
    options = parser.parse_args()
    machine()  # as it is before that loads it
    ending_on_sigterm()
    try:
        report = measure(options)
    except Terminated:
        sys.exit(128 + signal.SIGTERM)
    report.quick = options.quick
    if options.json:
        print(json.dumps(report.page()))
    else:
        print(table(report.rows))


# --- child processes --------------------------------------------------------------------------------


def hpcsched(*arguments: object) -> list[str]:
    """The command line of the hpcsched that belongs to this Python."""
    script = Path(sys.executable).with_name("hpcsched")
    start = [str(script)] if script.exists() else [sys.executable, "-c", _START]
    return [*start, *map(str, arguments)]


_START = "from hpcsched.cli.main import main; main()"


class Scratch:
    """A temporary folder and an environment in which nothing of the user's settings or data is seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # An installed program has its byte code; without it each start would compile the sources anew.
        hidden = ("HPCSCHED_", "PYTHONDONTWRITEBYTECODE")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        self.env |= {
            "HPCSCHED_DATABASE": str(folder / "hpcsched.db"),
            "HPCSCHED_SITE_CONFIG": str(folder / "none.toml"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_DATA_HOME": str(folder / "data"),
        }

    @classmethod
    @contextlib.contextmanager
    def make(cls) -> Iterator[Scratch]:
        with tempfile.TemporaryDirectory(prefix="hpcsched-bench-") as folder:
            yield cls(Path(folder))

    @contextlib.contextmanager
    def start(self, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """A child that is interrupted, and if need be killed, when the block is left."""
        with (self.folder / "errors.log").open("ab") as errors:
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        with child:
            try:
                yield child
            finally:
                _stop(child)

    def run(self, command: Sequence[str], *, deadline_s: float) -> bytes:
        """Standard output of a child that must exit with 0 in time; RuntimeError if it does not."""
        with self.start(command) as child:
            try:
                output, _ = child.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{command}: not done after {deadline_s:g} s; {self.errors}") from None
        if child.returncode != 0:
            raise RuntimeError(f"{command}: exit code {child.returncode}; {self.errors}")
        return output

    def json(self, command: Sequence[str], *, deadline_s: float) -> Any:
        return json.loads(self.run(command, deadline_s=deadline_s))

    @property
    def errors(self) -> str:
        """The end of what the children said on stderr."""
        return (self.folder / "errors.log").read_text(errors="replace")[-2000:]


def _stop(child: subprocess.Popen[bytes]) -> None:
    # An agent saves its jobs at the first SIGINT and ends them at the second.
    for number, patience_s in ((signal.SIGINT, 0.5), (signal.SIGINT, STOP_S), (signal.SIGKILL, STOP_S)):
        if child.poll() is not None:
            return
        child.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)


def wait_for(condition: Callable[[], bool], what: str, *, deadline_s: float) -> None:
    """Poll until `condition()`; raises RuntimeError when it takes longer than that."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not after {deadline_s:g} s")
        time.sleep(0.02)


# --- numbers ----------------------------------------------------------------------------------------


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample that `share` (0..1) of all do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, -(-round(share * 1e6) * len(ordered) // 1_000_000) - 1)]


def spread(samples: Sequence[float], words: str) -> str:
    """The median, and the least and the most if there are several; each as `words` has it."""
    few = "" if len(samples) == 1 else f" ({words.format(min(samples))} to {words.format(max(samples))})"
    return f"{words.format(median(samples))}{few}"


def ms(seconds: float) -> str:
    """Milliseconds with three significant digits."""
    return f"{float(f'{seconds * 1000:.3g}'):g} ms"
