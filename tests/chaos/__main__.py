"""Schedules of faults on the virtual clock, as many as fit into a time.

    python -m tests.chaos --seconds 60 [--first SEED] [--json FILE]
    python -m tests.chaos --only SEED

Exit code 1 when one violates what must hold, or none was played: each is told with its seed, the first at its
shortest.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from machine import machine

from .virtual.campaign import played, told
from .virtual.schedule import drawn

LONGEST_S = 30.0
"""How long one schedule may take, in our own time (chosen): a hundred times what most do."""


def _play_for_ever(first: int, stride: int) -> None:
    """Play every stride-th schedule; a line of JSON to standard output before and after each."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    seed = first
    while True:
        print(json.dumps([seed, None]), file=out)
        print(json.dumps([seed, played(drawn(seed))[0]]), file=out)
        seed += stride


class Player:
    """A process of its own that plays schedules: it may hang, or end, by what it plays."""

    def __init__(self, first: int, stride: int) -> None:
        self._stride = stride
        self._begin(first)

    def _begin(self, seed: int) -> None:
        words = [sys.executable, "-m", "tests.chaos", "--play", f"{seed}+{self._stride}"]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
        self.seed, self._since = seed, time.monotonic()

    @property
    def lines(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def heard(self) -> tuple[int, list[str]] | None:
        """What is violated by a schedule that is over."""
        line = self.lines.readline()
        if not line:
            return self._again(f"the player ended with exit code {self._process.wait()}")
        self.seed, found = json.loads(line)
        self._since = time.monotonic()
        return None if found is None else (self.seed, found)

    def late(self) -> tuple[int, list[str]] | None:
        """The same of one that does not come to its end."""
        if time.monotonic() - self._since < LONGEST_S:
            return None
        return self._again(f"not over after {LONGEST_S:g} s of real time")

    def _again(self, why: str) -> tuple[int, list[str]]:
        seed = self.seed
        self.close()
        self._begin(seed + self._stride)
        return seed, [why]

    def close(self) -> None:
        """End it: its signal handlers may be an agent's."""
        self._process.kill()
        self._process.wait()
        self.lines.close()


def campaign(first: int, seconds: float, most: int, at_once: int) -> Iterator[tuple[int, list[str]]]:
    """What each schedule violates. Once the time is up, or so many are played, those under way are the last:
    one may hang."""
    until = time.monotonic() + seconds
    players = [Player(first + k, at_once) for k in range(at_once)]
    try:
        while players:
            with selectors.DefaultSelector() as selector:
                for player in players:
                    selector.register(player.lines, selectors.EVENT_READ, player)
                heard = {key.data for key, _ in selector.select(0.5)}
            for player in [*players]:
                if over := player.heard() if player in heard else player.late():
                    most -= 1
                    yield over
                    if most <= 0 or time.monotonic() >= until:
                        players.remove(player)
                        player.close()
    finally:
        for player in players:
            player.close()


def main(words: Sequence[str]) -> int:
    """Play schedules; the exit code."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--most", type=int, default=10**9, metavar="N", help="begin none after so many")
    parser.add_argument(
        "--most-bad", type=int, default=10, metavar="N", help="stop after so many that violate"
    )
    parser.add_argument("--at-once", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--only", type=int, metavar="SEED", help="this one, made as short as can be")
    parser.add_argument("--as-is", action="store_true", help="do not look for the shortest")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.play:
        first, _, stride = args.play.partition("+")
        _play_for_ever(int(first), int(stride))
    if args.only is not None:
        found, _ = played(drawn(args.only))
        print(told(drawn(args.only)) if found else f"seed {args.only} violates nothing")
        return bool(found)
    began, count, bad = time.monotonic(), 0, dict[int, list[str]]()
    for seed, found in campaign(args.first, args.seconds, args.most, args.at_once):
        count += 1
        if found:
            bad[seed] = found
            print(f"seed {seed}: {'; '.join(found)}", flush=True)
            if len(bad) >= args.most_bad:
                break
    took_s = time.monotonic() - began
    print(f"{count} schedules in {took_s:.0f} s, {len(bad)} with violations")
    if args.json:
        table = {"schedules": count, "first": args.first, "seconds": round(took_s, 1), "violations": bad}
        args.json.write_text(json.dumps({"machine": machine(), **table}, indent=1) + "\n")
    if bad and not args.as_is:
        print(told(drawn(min(bad))))
    return bool(bad) or not count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
