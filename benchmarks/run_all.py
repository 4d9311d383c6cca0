"""Runs every benchmark, prints one Markdown table, writes all samples to benchmarks/results/.

    python benchmarks/run_all.py [--json] [--quick] [--only NAME]... [--output FILE] [--hyperqueue PYTHON]
    python benchmarks/run_all.py --check [--only NAME]... [--hyperqueue PYTHON]
    python benchmarks/run_all.py --store-reference [--only NAME]... [--hyperqueue PYTHON]

Each runs in a process of its own, one after the other. Takes long; keep the machine quiet.

`--check` runs those that have ratios to a floor or a peer (`regressions.py`), and exits with 1 where one is
lost against its reference by more than its noise, 2 where there is no reference for this kind of machine;
what is not judged is in the table. `--store-reference` writes the reference, of a clean commit on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import regressions
from common import ROOT, Row, table
from machine import headline, machine, slug

HERE = Path(__file__).parent
DEADLINES_S = {
    "marble_tables": 120,
    "replay_vs_simulate": 400,
    "decisions": 300,
    "monitoring": 120,
    "idle_agent": 120,
    "growth": 1800,
    "soak": 7200,
    "throughput": 900,
    "dispatch": 3600,
    "latency": 300,
    "hosts": 300,
    "resume_equality": 600,
    "resize": 1200,
    "resize_seen": 1200,
    "suspend": 600,
    "marble_torch": 1200,
    "plans": 300,
    "burst_plans": 120,
    "burst_cluster": 900,
    "burst_executor": 900,
    "pack_plans": 600,
    "pack_steps": 1800,
    "packed_hyperband": 1800,
    "adapters": 1800,
    "vsw_plans": 300,
    "vsw_forecast": 1800,
    "vsw_cluster": 900,
    "vsw_steps": 900,
    "vsw_training": 900,
    "cpu_shares": 600,
    "sharing": 1800,
    "ps_live": 1800,
    "ps_simulated": 900,
    "simulator_scale": 900,
    "policies": 900,
    "strategies": 1800,
}
"""The benchmarks, in order, and the longest each may take."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run all benchmarks.")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of the table")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast")
    parser.add_argument("--only", action="append", choices=list(DEADLINES_S), metavar="NAME", default=[])
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the samples")
    parser.add_argument("--hyperqueue", metavar="PYTHON", help="has the package `hyperqueue`, for `dispatch`")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--check", action="store_true", help="exit with 1 where a ratio of the reference is lost"
    )
    only.add_argument("--store-reference", action="store_true", help="write the reference of this machine")
    options = parser.parse_args()
    judged = options.check or options.store_reference
    page: dict[str, Any] = {
        "schema": 1,
        "quick": options.quick,
        "machine": machine(),
        "results": {},
        "rows": [],
    }
    reference = regressions.reference_of(page["machine"], HERE / "results")
    if options.check and not reference.exists():
        print(f"no reference for this kind of machine: {reference} (--store-reference)", file=sys.stderr)
        return 2
    if options.store_reference and (why := regressions.why_no_reference(page["machine"])):
        print(f"no reference is stored: {why}", file=sys.stderr)
        return 2
    failed = []
    for name in options.only or (regressions.PROGRAMS if judged else DEADLINES_S):
        print(f"{name} ...", file=sys.stderr, flush=True)
        further = ["--hyperqueue", options.hyperqueue] if name == "dispatch" and options.hyperqueue else []
        try:
            found = _run(name, *further, quick=options.quick)
        except (RuntimeError, ValueError, KeyError) as error:
            failed.append(name)
            page["rows"].append({"what": f"`{name}.py`", "goal": "", "measured": "failed", "ok": False})
            print(f"{name}: {error}", file=sys.stderr)
            continue
        page["results"][name] = found["results"]
        page["rows"] += found["rows"]
    lost = False
    if options.check:
        known, now = regressions.stored(reference), regressions.ratios(page["results"])
        verdicts = regressions.verdicts(known, now)
        lost = any(verdict.lost for verdict in verdicts) or not verdicts
        page["rows"] += [verdict.row() for verdict in verdicts]
        for what, why in regressions.not_judged(known, page["results"]).items():
            page["rows"].append({"what": what, "goal": "", "measured": f"not judged: {why}", "ok": None})
    if options.store_reference and not failed:
        regressions.store(page["results"], page["machine"], reference)
        print(f"reference in {reference}", file=sys.stderr)
    output = options.output
    if output is None and not (options.quick or judged):
        output = HERE / "results" / f"{page['machine']['date'][:10]}-{slug(page['machine'])}.json"
    if output:
        keep(page, output)
    if options.json:
        print(json.dumps(page))
    else:
        print(headline(page["machine"]) + "\n\n" + table([Row(**row) for row in page["rows"]]))
    return int(bool(failed) or lost)


def keep(page: dict[str, Any], output: Path) -> None:
    """Write all samples to a file, and say where."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(page) + "\n")
    print(f"samples in {output}", file=sys.stderr)


def _run(name: str, *further: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *(["--quick"] if quick else []), *further]
    with tempfile.TemporaryFile() as output, subprocess.Popen(command, stdout=output, cwd=ROOT) as child:
        try:
            code = child.wait(DEADLINES_S[name])
        except subprocess.TimeoutExpired:
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
            raise RuntimeError(f"not done after {DEADLINES_S[name]} s") from None
        if code:
            raise RuntimeError(f"exit code {code}")
        output.seek(0)
        page: dict[str, Any] = json.loads(output.read())
        return page


if __name__ == "__main__":
    sys.exit(main())
