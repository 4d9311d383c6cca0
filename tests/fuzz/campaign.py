"""Inputs of one target, as many as fit into a time; each that is wrong is tried once more, alone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from .lines import Lines
from .mutate import Mutator
from .sandbox import Outcome, played, warm
from .targets import Target

AT_ONCE = 24
"""Inputs for one child (chosen): making a child costs some milliseconds, what one leaves behind is found."""
FROM_KEPT = 0.6
"""How often, where lines guide, the next input is made from one that reached new lines (chosen)."""

LONGEST_KEPT = 30_000
"""Bytes of an input that others are made from (chosen): long ones cost most of the time."""
MOST_SEEDS = 16
"""Documents of the corpus that are played first (chosen), to know what they reach."""

Line = tuple[int, ...]
"""The name of an input: the seeds that made it, see `mutate`."""


@dataclass(slots=True)
class Found:
    """An input that is wrong, and what came of it. `alone`: it is wrong in a process of its own too."""

    target: str
    line: Line
    data: bytes
    outcome: Outcome
    alone: bool = True

    @property
    def kind(self) -> str:
        """What inputs with the same fault have in common."""
        places = re.findall(r'File ".*?/(hpcsched/[^"]+)", line (\d+)', self.outcome.trace)
        why = re.sub(r"\d+|'[^']*'|\"[^\"]*\"|/\S+", "_", self.outcome.why)[:80]
        return f"{why} at {places[-1][0]}:{places[-1][1]}" if places else why

    @property
    def named(self) -> str:
        return f"{self.target}-{'.'.join(map(str, self.line))}"

    def told(self) -> str:
        """What people are shown of it."""
        last = "\n    ".join(self.outcome.trace.strip().splitlines()[-9:])
        lone = "" if self.alone else " (only after the inputs before it)"
        return f"{self.named}{lone}: {self.outcome.why}" + (f"\n    {last}" if last else "")


@dataclass(slots=True)
class Campaign:
    """What came of a target's inputs. `skipped`: those beside them that were not played. `reached`: lines of
    hpcsched, by the number of inputs until then."""

    target: str
    inputs: int = 0
    skipped: int = 0
    seconds: float = 0.0
    found: dict[str, Found] = field(default_factory=dict)
    reached: list[tuple[int, float, int]] = field(default_factory=list)
    kept: int = 0


def fuzzed(
    target: Target,
    *,
    first: int = 0,
    seconds: float = 60.0,
    most: int = 10**9,
    guided: bool | None = None,
    counted: bool = False,
    busy: bool = False,
    enough: int = 10**9,
    tell: Callable[[Found], None] = lambda found: None,
) -> Campaign:
    """Try inputs until the time is up, or `most` have been made, or `enough` kinds of faults are known.

    Args:
        first: the first seed; the inputs are the same for the same seed, and number of inputs.
        guided: whether new lines guide; None: as the target says.
        counted: lines are counted though they do not guide.
        busy: seconds are those of a core, for measuring on a machine that has more to do.
    """
    guided = target.guided if guided is None else guided
    mutator = Mutator(target.form, target.seeds())  # its order is that of the corpus: names of inputs hold
    lines = Lines() if guided or counted else None
    campaign, random = Campaign(target.name), Random(first)
    kept: list[Line] = []
    corpus = random.sample(target.seeds(), min(len(target.seeds()), MOST_SEEDS))
    warm(target.act, corpus)
    clock = _core_s if busy else time.monotonic
    began, seed = clock(), first

    def take(inputs: Sequence[tuple[bytes, Line]]) -> None:
        left = list(inputs)
        while left:
            outcomes = played(target.act, [data for data, _ in left], lines)
            for (data, line), outcome in zip(left, outcomes, strict=False):
                campaign.inputs += not outcome.skipped
                campaign.skipped += bool(outcome.skipped)
                if outcome.lines and lines:
                    lines.seen |= outcome.lines
                    if len(data) < LONGEST_KEPT:
                        kept.append(line)
                if outcome.why:
                    found = Found(target.name, line, data, outcome)
                    if found.kind not in campaign.found:
                        (again,) = played(target.act, [data])
                        found.alone, found.outcome = bool(again.why), again if again.why else outcome
                        campaign.found[found.kind] = found
                        tell(found)
            left = left[max(1, len(outcomes)) :]
        campaign.reached.append((campaign.inputs, clock() - began, len(lines.seen) if lines else 0))

    take([(data, ()) for data in corpus])
    kept.clear()  # what the corpus reaches is no news
    while (left := most - campaign.inputs - campaign.skipped) > 0:
        if clock() - began >= seconds or len(campaign.found) >= enough:
            break
        batch: list[tuple[bytes, Line]] = []
        for _ in range(min(AT_ONCE, left)):
            parent = random.choice(kept[-200:]) if guided and kept and random.random() < FROM_KEPT else ()
            line = (*parent, seed)
            seed += 1
            batch.append((mutator.made(line), line))
        take(batch)
    campaign.seconds, campaign.kept = clock() - began, len(kept)
    return campaign


def _core_s() -> float:
    """Seconds of a core that this process and its children have had."""
    return sum(os.times()[:4])


def write(found: Found, folder: Path) -> Path:
    """The input, for `python -m tests.fuzz --replay FILE`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found.named}.input"[:200]
    path.write_bytes(found.data)
    return path
