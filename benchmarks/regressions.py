"""Ratios to a floor or to a peer, measured in pairs in one run: whether one is lost, against a reference.

A ratio counts as lost where its median is below the reference's by more than its noise: the larger of LEAST
of the reference, and three standard errors of the two medians, each from its own raw samples. So a ratio
that varies much by itself has to fall far, one that does not is held tightly. The machine is in both sides
of each ratio; a reference is that of one kind of machine all the same, as floors and programs gain
differently by a faster one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from machine import QUIET, slug

LEAST = 0.05
"""A smaller loss is none (chosen): a ratio varies so much from one start of the machine to the next."""

FEWEST = 3
"""Pairs without which there is no noise to tell."""

Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Ratio:
    """A ratio of one program; more is better. `of`: its samples, from the program's results;
    KeyError where the peer was not there."""

    program: str
    what: str
    of: Callable[[Samples], list[float]]


def _given(name: str) -> Callable[[Samples], list[float]]:
    return lambda found: list(found[name])


def _over(theirs: str, ours: str) -> Callable[[Samples], list[float]]:
    """Their seconds over ours, pair by pair."""
    return lambda found: [b / a for b, a in zip(found[theirs], found[ours], strict=True)]


RATIOS = (
    Ratio("dispatch", "no-op jobs, rate over that of xargs", _given("ratio_to_xargs")),
    Ratio("dispatch", "no-op jobs, rate over HyperQueue's", _given("ratio_to_hyperqueue")),
    Ratio("dispatch", "no-op jobs, rate over task-spooler's", _given("ratio_to_task_spooler")),
    Ratio("latency", "a bare Python's time over `status`'s, 10,000 jobs", _over("python_s", "status_s")),
    Ratio("latency", "... over `status --json`'s", _over("python_s", "status_json_s")),
    Ratio("latency", "... over `--help`'s", _over("python_s", "help_s")),
    Ratio("latency", "... over `explain`'s", _over("python_s", "explain_s")),
    *(
        Ratio(
            "burst_plans",
            f"our Algorithm 1's time over the planner's, {model}, {gpus:,} GPUs",
            _over(f"{model}_{gpus}_algorithm_1_s", f"{model}_{gpus}_s"),
        )
        for model in ("vgg16", "wrn101-2", "inception-v3")
        for gpus in (8, 1024)
    ),
)
PROGRAMS = tuple(dict.fromkeys(ratio.program for ratio in RATIOS))


@dataclass(frozen=True)
class Verdict:
    """What has become of one ratio: medians, and the noise of their difference."""

    what: str
    reference: float
    now: float
    noise: float

    @property
    def lost(self) -> bool:
        return self.now < self.reference - self.noise

    def row(self) -> dict[str, Any]:
        """The line of a table."""
        goal = f"at least {self.reference - self.noise:.3g} ({self.reference:.3g} less its noise)"
        return {"what": self.what, "goal": goal, "measured": f"{self.now:.3g}", "ok": not self.lost}


def ratios(results: Mapping[str, Samples]) -> dict[str, list[float]]:
    """The samples of all ratios that there are in results by program, by what they are."""
    found = {}
    for ratio in RATIOS:
        if ratio.program in results:
            try:
                found[ratio.what] = ratio.of(results[ratio.program])
            except KeyError:
                continue  # `not_judged` tells
    return found


def not_judged(reference: Samples, results: Mapping[str, Samples]) -> dict[str, str]:
    """Why some ratios of the programs that were run have no verdict, and those of the reference that no
    program has any more."""
    now, why = ratios(results), {}
    for ratio in RATIOS:
        if ratio.program not in results:
            continue
        if ratio.what not in now:
            why[ratio.what] = "no samples: its peer is not here, or they are called otherwise"
        elif ratio.what not in reference:
            why[ratio.what] = "no reference: --store-reference makes it"
        elif min(len(reference[ratio.what]), len(now[ratio.what])) < FEWEST:
            why[ratio.what] = f"fewer than {FEWEST} pairs"
    here = {ratio.what for ratio in RATIOS}
    return why | {what: "the reference has it, and no program" for what in reference if what not in here}


def verdicts(reference: Samples, now: Samples) -> list[Verdict]:
    """On each ratio that both have, with enough pairs."""
    both = [what for what in reference if min(len(reference[what]), len(now.get(what, ()))) >= FEWEST]
    return [_verdict(what, reference[what], now[what]) for what in both]


def _verdict(what: str, reference: Sequence[float], now: Sequence[float]) -> Verdict:
    before = median(reference)
    noise = max(LEAST * before, 3 * hypot(_error(reference), _error(now)))
    return Verdict(what, before, median(now), noise)


def _error(samples: Sequence[float]) -> float:
    """The standard error of a median, of samples that are normal but for outliers.

    1.4826 times the median absolute deviation is their standard deviation; a median's error is 1.2533 times a
    mean's.
    """
    middle = median(samples)
    deviation = median(abs(sample - middle) for sample in samples)
    return 1.2533 * 1.4826 * deviation / sqrt(len(samples))


def reference_of(about: Mapping[str, Any], folder: Path) -> Path:
    """The file of the reference of a kind of machine."""
    return folder / f"reference-{slug(dict(about))}.json"


def why_no_reference(about: Mapping[str, Any]) -> str:
    """Why what was measured on this machine, as it is, is no reference; "" if it is."""
    if about["dirty"] or not about["commit"]:
        return "the working tree is not that of a commit"
    if about["load_before"] > QUIET:
        return f"the machine is not quiet: load {about['load_before']:.2f}, at most {QUIET} is"
    return ""


def store(results: Mapping[str, Samples], about: Mapping[str, Any], file: Path) -> None:
    """Have these ratios be the reference; those of other programs stay."""
    known = json.loads(file.read_text())["ratios"] if file.exists() else {}
    found = {
        what: {"commit": about["commit"], "samples": samples} for what, samples in ratios(results).items()
    }
    page = {"schema": 1, "machine": dict(about), "ratios": {**known, **found}}
    file.write_text(json.dumps(page, indent=1) + "\n")


def stored(file: Path) -> dict[str, list[float]]:
    """The samples of a reference. Raises OSError."""
    return {what: one["samples"] for what, one in json.loads(file.read_text())["ratios"].items()}
