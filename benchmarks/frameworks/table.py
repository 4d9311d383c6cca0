"""The table of docs/frameworks.md: each program as it is, suspended and resumed, promoted."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from frameworks.examples import EXAMPLES, ROOT, Example, python_of, versions
from frameworks.trial import Course, Failed, Printed, TooShort, Trial

BEGIN = "<!-- table: written by benchmarks/frameworks -->"
END = "<!-- end of table -->"
ENVIRONMENTS = ROOT / ".venv-frameworks"
"""Where packaging/framework_envs.sh puts them: the newest versions and the oldest that are supported."""

STEPS = 60
LONGER, MOST_TIMES_LONGER = 5, 125
"""How many times as long a training is that was done too soon, and is at most (chosen)."""
TEN_MINUTES_S = 600.0

T = TypeVar("T")


@dataclass
class Row:
    """What was seen of one example. A cell is text; `ok`: nothing in it went wrong."""

    name: str
    title: str
    versions: dict[str, str] = field(default_factory=dict)
    steps: int = STEPS
    as_it_is: str = ""
    unchanged: str = ""
    changed: int | None = None
    suspended: str = ""
    promoted: str = ""
    share: float | None = None
    ok: bool = True
    wrong: list[str] = field(default_factory=list)

    def fault(self, what: str) -> str:
        """Note that something went wrong; returns it, as a cell."""
        self.ok = False
        self.wrong.append(what)
        return f"**{what}**"


def try_example(example: Example, *, python: str, steps: int, place: Path) -> Row:
    """Run all there is of one example, anew with more steps if it is done before it can be suspended."""
    most = steps * MOST_TIMES_LONGER
    while True:
        row = Row(example.name, example.title, dict(versions(python, example.distributions)), steps)
        try:
            return _filled(row, example, python=python, place=place)
        except TooShort as error:
            if steps >= most:
                row.fault(str(error))
                return row
            steps *= LONGER


def _filled(row: Row, example: Example, *, python: str, place: Path) -> Row:
    """The row, with all its cells. Raises TooShort."""
    steps = row.steps

    def trial(program: str) -> Trial:
        return Trial(example, program, python=python, steps=steps, place=place / example.name)

    row.changed = example.changed
    alone = _tried(row, lambda: _undisturbed(row, trial("train.py"), steps))
    if alone:
        row.unchanged = _tried(row, lambda: _unchanged(trial("train.py"), alone)) or row.wrong[-1]
    if row.changed is None:
        return row
    if row.changed > example.most_changed:
        row.fault(f"{row.changed} lines changed, more than {example.most_changed}")
    whole = _tried(row, lambda: _course(trial("elastic.py").undisturbed(), steps))
    if whole:
        row.suspended = _tried(row, lambda: _suspended(row, trial("elastic.py"), whole)) or row.wrong[-1]
        if stays := example.stays(row.versions):
            row.promoted = f"not applicable: {stays}"
        else:
            row.promoted = _tried(row, lambda: _promoted(trial("elastic.py"), whole)) or row.wrong[-1]
    return row


def _tried(row: Row, call: Callable[[], T]) -> T | None:
    """What it gives; None, noted in the row, if it has failed."""
    try:
        return call()
    except Failed as error:
        row.fault(str(error))
        return None


def _course(course: Course, steps: int) -> Printed:
    printed = course.printed
    if not printed.done or printed.losses.keys() != set(range(1, steps + 1)):
        raise Failed(f"{len(printed.losses)} of {steps} steps, done: {printed.done}")
    return printed


def _undisturbed(row: Row, trial: Trial, steps: int) -> Printed:
    printed = _course(trial.undisturbed(), steps)
    row.as_it_is = "runs" if not printed.repeated else row.fault(f"{printed.repeated} steps twice")
    return printed


def _unchanged(trial: Trial, alone: Printed) -> str:
    """The cell of a program that nobody has changed: it may not be suspendable, but must say so."""
    try:
        course = trial.suspended()
    except Failed as error:
        if "cannot be suspended" in str(error) or "has not said" in str(error):
            return "refused, in a line: it is not known to save by itself"
        raise
    if course.printed.losses.keys() - alone.losses.keys() == {max(alone.losses) + 1}:
        return "goes on; resumed after its last step it makes one more"  # Transformers' `Trainer` does
    behind = alone.losses.keys() - course.printed.losses.keys()
    if (
        course.printed.done
        and len(behind) == len(course.suspend_s)
        and min(behind) > max(course.printed.losses)
    ):
        return f"goes on; its log falls behind by a step at each resume ({course.printed.repeated} repeated)"
    return _compared(course, alone)


def _suspended(row: Row, trial: Trial, whole: Printed) -> str:
    course = trial.suspended()
    if course.suspend_s:
        paid = (sum(course.suspend_s) + sum(course.resume_s)) / len(course.suspend_s)
        row.share = paid / TEN_MINUTES_S
    return _compared(course, whole)


def _promoted(trial: Trial, whole: Printed) -> str:
    course = trial.promoted()
    if max(course.widths, default=1) < 2:
        raise TooShort(f"it was never promoted: {course.widths} slots")
    return f"{' → '.join(map(str, course.widths))} slots, {_compared(course, whole)}"


def _compared(course: Course, whole: Printed) -> str:
    same, apart, missing = course.printed.compared(whole)
    if not course.printed.done:
        raise Failed("it did not come to its end")
    said = "losses equal to the last digit" if same else f"losses differ by {apart:.2g} at most"
    if missing:
        raise Failed(f"{missing} steps are not in both")
    if course.printed.repeated:
        said += f", {course.printed.repeated} steps repeated"
    return said


# --- the page ---------------------------------------------------------------------------------------


def page(rows: Sequence[Row]) -> str:
    """The table, as Markdown."""
    head = (
        *("program", "versions", "as it is", "unchanged, suspended and resumed twice", "lines changed"),
        *("suspended and resumed twice", "promoted", "one suspend in 10 minutes"),
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        named = ", ".join(f"{name} {version}" for name, version in row.versions.items())
        share = "" if row.share is None else f"{row.share:.1%}"
        changed = "" if row.changed is None else str(row.changed)
        title = f"[{row.title}](../examples/{row.name}/README.md)"
        cells = (title, named, row.as_it_is, row.unchanged, changed, row.suspended, row.promoted, share)
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def put(text: str, file: Path) -> None:
    """Put the table into a page, between its two marks."""
    before, _, rest = file.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> int:
    """Exit code 1: something went wrong in a row."""
    names = [example.name for example in EXAMPLES]
    parser = argparse.ArgumentParser(prog="benchmarks/frameworks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"of each training, more if it is too short; {STEPS}"
    )
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS / "newest", help="their folder")
    parser.add_argument("--scratch", type=Path, help="where to run; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="put the rows there, with versions and the machine")
    parser.add_argument("--page", type=Path, help="put the table into this page, between its marks")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(names)}")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        place = given.scratch or Path(temporary)
        for example in EXAMPLES:
            if given.names and example.name not in given.names:
                continue
            python = python_of(example, given.environments.absolute())
            if not python or not (example.folder / "jobs.toml").exists():
                print(f"{example.name}: not here: {', '.join(example.packages)}", file=sys.stderr)
                continue
            row = try_example(example, python=python, steps=given.steps, place=place.resolve())
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
    if given.page:
        put(page(rows), given.page)
    else:
        print(page(rows))
    if given.json:
        found = {"python": platform.python_version(), "machine": platform.machine()}
        given.json.write_text(json.dumps({**found, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return int(not rows or not all(row.ok for row in rows))
