"""Inputs that nobody meant, as many as fit into a time.

    python -m tests.fuzz --seconds 60 [--only TARGET[,TARGET]] [--first SEED] [--json FILE]
    python -m tests.fuzz --replay FILE
    python -m tests.fuzz --seed jobs-17.203

Exit code 1 when something is wrong: a traceback, a code that none of ours is, no end, or a refusal that is
not one line beside notes (`hpcsched: ...`; with exit code 1 also a line for each job that was named). It is
told with its name, which says how it is made again, and its input is written to a file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is imported: children of one with threads are none

from . import sandbox
from .campaign import Campaign, Found, fuzzed, write
from .mutate import Mutator
from .planted import PLANTED
from .sandbox import played
from .targets import TARGETS, Target


def _one(name: str, options: dict[str, object]) -> Campaign:
    options = dict(options)
    sandbox.CPU_S = float(str(options.pop("cpu_s")))
    if plant := options.pop("plant"):
        PLANTED[str(plant)].put()
    return fuzzed(TARGETS[name], **options, tell=lambda found: print(found.told(), flush=True))  # type: ignore[arg-type]


def _again(target: Target, data: bytes) -> int:
    (outcome,) = played(target.act, [data])
    right = f"not played: {outcome.skipped}" if outcome.skipped else f"right: {outcome.said}"
    print(f"{outcome.why}\n{outcome.trace}" if outcome.why else right)
    return bool(outcome.why)


def main(words: Sequence[str]) -> int:
    """Try inputs; the exit code."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of all targets together")
    parser.add_argument("--only", metavar="TARGET[,TARGET]", default=",".join(TARGETS))
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--most", type=int, default=10**9, metavar="N", help="inputs of a target")
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), metavar="N", help="targets")
    parser.add_argument("--guided", action="store_true", help="new lines guide")
    parser.add_argument("--plant", choices=PLANTED, help="with a bug that is put in on purpose")
    parser.add_argument("--cpu", type=float, default=sandbox.CPU_S, help="seconds of a core for an input")
    parser.add_argument("--busy", action="store_true", help="seconds are those of a core, not of a clock")
    parser.add_argument("--until-found", action="store_true", help="end a target with its first fault")
    parser.add_argument("--faults", type=Path, default=Path("fuzz-faults"), metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--seed", metavar="NAME", help="an input by its name, such as jobs-17.203")
    parser.add_argument("--list", action="store_true", help="the targets")
    args = parser.parse_args(words)
    if args.list:
        print("\n".join(f"{target.name:12} {target.about}" for target in TARGETS.values()))
        return 0
    if args.replay or args.seed:
        name, _, line = str(args.seed or args.replay.name.removesuffix(".input")).rpartition("-")
        target = TARGETS[name]
        seeds = [int(seed) for seed in line.split(".")] if args.seed else []
        data = Mutator(target.form, target.seeds()).made(seeds) if args.seed else args.replay.read_bytes()
        return _again(target, data)
    names = args.only.split(",")
    share_s = args.seconds * min(args.at_once, len(names)) / len(names)
    more = {"enough": 1} if args.until_found else {}
    plan = {
        "first": args.first,
        "seconds": share_s,
        "most": args.most,
        "plant": args.plant,
        "cpu_s": args.cpu,
        **more,
    }
    plan |= {"busy": True} if args.busy else {}
    plan |= {"guided": True} if args.guided else {}
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(min(args.at_once, len(names)), maxtasksperchild=1) as pool:
        ended = pool.starmap(_one, [(name, plan) for name in names], chunksize=1)
    faults: list[Found] = [found for each in ended for found in each.found.values()]
    for each in ended:
        lines = each.reached[-1][2]
        print(
            f"{each.target:12} {each.inputs:6} inputs in {each.seconds:5.1f} s, {len(each.found)} faults"
            + (f", {each.skipped} not played" if each.skipped else "")
            + (f", {lines} lines, {each.kept} kept" if lines else "")
        )
    print(
        f"{sum(each.inputs for each in ended)} inputs in {time.monotonic() - began:.0f} s, "
        f"{len(faults)} faults"
    )
    for found in faults:
        print(f"  {write(found, args.faults)}: {found.outcome.why[:160]}")
    if args.json:
        page = {
            each.target: {
                "inputs": each.inputs,
                "skipped": each.skipped,
                "seconds": round(each.seconds, 1),
                "lines": each.reached[-1][2],
                "reached": each.reached[:: max(1, len(each.reached) // 20)],
                "faults": {found.named: found.outcome.why for found in each.found.values()},
            }
            for each in ended
        }
        args.json.write_text(json.dumps(page, indent=1) + "\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
