"""Schedules of faults, as many as fit into a time.

    python -m tests.chaos --seconds 60 [--first SEED] [--only SEED] [--json FILE]

Exit code 1 when one violates what must hold; it is shown at its shortest, with its seed.
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

from .virtual.campaign import played, told
from .virtual.schedule import drawn


def _violations(seed: int) -> tuple[int, list[str]]:
    return seed, played(drawn(seed))[0]


def main(words: Sequence[str]) -> int:
    """Play schedules; the exit code."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--most", type=int, default=10**9, metavar="N")
    parser.add_argument("--only", type=int, metavar="SEED")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    if args.only is not None:
        print(told(drawn(args.only)))
        return bool(_violations(args.only)[1])
    began, count, bad = time.monotonic(), 0, dict[int, list[str]]()
    seeds = range(args.first, args.first + args.most)
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for seed, found in pool.imap_unordered(_violations, seeds, chunksize=4):
            count += 1
            if found:
                bad[seed] = found
                print(f"seed {seed}: {'; '.join(found)}", flush=True)
            if time.monotonic() - began > args.seconds:
                pool.terminate()
                break
    took_s = time.monotonic() - began
    print(f"{count} schedules in {took_s:.0f} s, {len(bad)} with violations")
    if args.json:
        table = {"schedules": count, "first": args.first, "seconds": round(took_s, 1)}
        args.json.write_text(json.dumps({**table, "violations": bad}, indent=1) + "\n")
    if bad:
        print(told(drawn(min(bad))))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
