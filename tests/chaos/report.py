"""One file of results of what was played, from the files that the harnesses write.

    python -m tests.chaos.report --output F [--virtual F] [--real F...] [--planted F] [--planted-real F]

A part that is not given stays as it is in the file. Exit code 1 when something is violated, was not found, or
was played less often than it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from common import Row
from machine import machine

from .planted import FAULTS
from .real.planted import BUGS

Page = Mapping[str, Any]

VIRTUAL, REAL, TORCH, HOSTS, ENDS = 10_000, 1_000, 200, 50, 20

PARTS = ("virtual", "planted", "planted_real", "real")


def main(words: Sequence[str]) -> int:
    """Write the file; the exit code."""
    parser = argparse.ArgumentParser(prog="chaos.report", description=__doc__.partition("\n")[0])
    for part in PARTS:
        several = "+" if part == "real" else 1
        parser.add_argument(f"--{part.replace('_', '-')}", type=Path, metavar="FILE", nargs=several)
    parser.add_argument("--output", type=Path, metavar="FILE", required=True)
    args = parser.parse_args(words)
    known = json.loads(args.output.read_text()) if args.output.exists() else {}
    parts = {part: known[part] for part in PARTS if part in known}
    for part in PARTS:
        pages = [json.loads(path.read_text()) for path in getattr(args, part) or ()]
        if len(pages) > 1:
            rows = [row for page in pages for row in page["schedules"]]
            if len({row["seed"] for row in rows}) < len(rows):
                parser.error("a seed was played in two of these files")
            parts[part] = {"schedules": rows}
        elif pages:
            (parts[part],) = pages
    said = _rows(parts)
    tables = {}
    if "real" in parts:
        tables["kinds"] = _kinds(parts["real"]["schedules"])
    if planted := {part: parts[part] for part in ("planted", "planted_real") if part in parts}:
        tables["planted"] = _planted(planted)
    page = {"schema": 1, "machine": machine(), "rows": list(map(asdict, said)), "tables": tables, **parts}
    args.output.write_text(_text(page) + "\n")
    for row in said:
        print(f"{row.what}: {row.measured}" + ("" if row.ok else f" (goal: {row.goal})"))
    return not all(row.ok for row in said)


def _rows(parts: Mapping[str, Page]) -> list[Row]:
    """What is in each part, beside what should be."""
    rows = []
    if "virtual" in parts:
        rows.append(_of_virtual(parts["virtual"]))
    if "real" in parts:
        rows += _of_real(parts["real"]["schedules"])
    for part, where, bugs in (
        ("planted", "on the virtual clock", FAULTS),
        ("planted_real", "over real processes", BUGS),
    ):
        if part in parts:
            rows.append(_of_planted(where, parts[part], {bug.name for bug in bugs}))
    return rows


def _text(page: Page) -> str:
    """The page as JSON, a line for each schedule."""
    lines = [f"{json.dumps(key)}: {json.dumps(page[key])}" for key in page if key != "real"]
    if "real" in page:
        schedules = sorted(page["real"]["schedules"], key=lambda row: (row["seed"], row["flavour"]))
        each = ",\n".join(map(json.dumps, schedules))
        lines.append(f'"real": {{"schedules": [\n{each}\n]}}')
    return "{" + ",\n".join(lines) + "}"


def _of_virtual(page: Page) -> Row:
    count, bad = page["schedules"], len(page["violations"])
    said = f"{count:,} in {page['seconds'] / 60:.0f} minutes, {bad} violated"
    enough = count >= VIRTUAL and not bad
    return Row("schedules on the virtual clock", f"{VIRTUAL:,}, none violated", said, enough)


def _of_real(rows: Sequence[Page]) -> list[Row]:
    played = [row for row in rows if not row["skipped"]]
    bad = [row for row in played if row["violations"]]
    torch, hosts = sum(row["torch"] for row in played), sum(row["hosts"] > 1 for row in played)
    faults = sum(sum(row["faults"].values()) for row in played)
    ends, saved = (sum(row["walltimes"][n] for row in played) for n in (0, 1))
    commits = sorted({row["commit"] for row in played})
    where = ", ".join(commits) if len(commits) == 1 else f"{len(commits)} commits ({', '.join(commits)})"
    said = f"{len(played):,} at {where} with {faults:,} faults and doings of users, {len(bad)} violated"
    goal, enough = f"{REAL:,} at one commit, none violated", len(played) >= REAL and len(commits) == 1
    return [
        Row("schedules over real processes", goal, said, enough and not bad),
        Row("... with torch", f"at least {TORCH}", str(torch), torch >= TORCH),
        Row("... on several hosts", f"at least {HOSTS}", str(hosts), hosts >= HOSTS),
        Row(
            "... ends of allocations at which all was saved",
            f"all, of at least {ENDS}",
            f"{saved} of {ends}",
            saved == ends >= ENDS,
        ),
    ]


def _of_planted(where: str, page: Page, names: Set[str]) -> Row:
    """`names`: of all bugs, each of which has to be found."""
    times = {fault["fault"]: fault["found_s"] for fault in page["faults"] if fault["fault"] in names}
    found = [time_s for time_s in times.values() if time_s is not None]
    said = f"{len(found)} of {len(names)}" + (f", the last after {max(found):.0f} s" if found else "")
    within = f"all, each within {page['seconds_each']:.0f} s"
    return Row(f"bugs put in on purpose, found {where}", within, said, len(found) == len(names))


def _kinds(rows: Sequence[Page]) -> dict[str, list[Any]]:
    """Schedules by what they are about."""
    kinds = defaultdict[str, list[Page]](list)
    for row in rows:
        if not row["skipped"]:
            kinds[row["flavour"]].append(row)
    return {
        "head": ["kind", "schedules", "lives of agents", "faults and doings of users", "violated"],
        "rows": [
            [
                kind,
                str(len(of)),
                str(sum(row["lives"] for row in of)),
                str(sum(sum(row["faults"].values()) for row in of)),
                str(sum(bool(row["violations"]) for row in of)),
            ]
            for kind, of in sorted(kinds.items())
        ],
    }


def _planted(pages: Mapping[str, Page]) -> dict[str, list[Any]]:
    """Bugs that were put in, by where they were looked for."""
    rows = []
    for part, page in pages.items():
        where = "real" if part == "planted_real" else "virtual"
        for fault in page["faults"]:
            found = "**not found**" if fault["found_s"] is None else f"{fault['found_s']:.0f} s"
            rows.append([where, fault["fault"], f"`{fault['file']}`", found])
    return {"head": ["clock", "bug", "put into", "found after"], "rows": rows}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
