"""Profiles as text: a table of many, the curve of one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

from hpcsched.core.profile import Cost, Profile
from hpcsched.store.profiles import describe

LEAST_BAR, MAX_BAR = 4, 40
"""Characters of the longest bar of a curve, on a narrow terminal and on a wide one (chosen)."""

_BEST = " <- optimal"


def table_of(profiles: Sequence[Profile]) -> str:
    """One line a profile, under a header."""
    header = ("MODEL", "DEVICE", "NODES", "BATCH", "GPUS", "OPTIMAL", "SOURCE", "SOFTWARE")
    rows = [
        (
            p.model,
            p.device,
            str(p.nodes),
            str(p.global_batch or "-"),
            ",".join(map(str, sorted(p.throughput))),
            str(p.optimal(max(p.throughput))),
            p.source,
            p.software or "-",
        )
        for p in profiles
    ]
    return aligned([header, *rows], left=(0, 1, 4, 6, 7))


def curve_of(profile: Profile, width: int = 80) -> str:
    """A bar for each count there is, the optimal one marked, with spread, costs and origin.

    Its lines are at most `width` characters long, unless the numbers alone are.
    """
    counts = sorted(profile.throughput)
    best, most = profile.optimal(counts[-1]), max(profile.throughput.values())
    rates = profile.throughput
    columns = [
        ["GPUS", *map(str, counts)],
        [f"{profile.unit}/s", *(f"{rates[g]:.4g}" for g in counts)],
        _column("SPREAD", profile.spread, counts, "{:.1%}".format),
        _column("START_S", profile.start_s, counts, "{:.1f}".format),
        _column("SUSPEND_S", profile.suspend_s, counts, "{:.1f}".format),
        _column("RESUME_S", profile.resume_s, counts, "{:.1f}".format),
        _column("GROW_S", profile.grow_s, counts, "{:.2f}".format),
        _column("SHRINK_S", profile.shrink_s, counts, "{:.2f}".format),
        _column("MIB", profile.memory_mib, counts, "{:.0f}".format),
    ]
    shown = [column for column in columns if column]
    numbers = sum(max(map(len, column)) + 2 for column in shown)
    bar = max(LEAST_BAR, min(MAX_BAR, width - numbers - len(_BEST)))
    shown.append(["", *("#" * max(1, round(bar * rates[g] / most)) + _BEST * (g == best) for g in counts)])
    drawn = aligned(list(zip(*shown, strict=True)), left=(len(shown) - 1,))
    title = f"{profile.model}: {describe(profile, note=False)}\n"
    told = (_packed(profile), profile.software, profile.note)
    lines = [line for text in told if text for line in textwrap.wrap(text, width)]
    return title + drawn + "".join(f"{line}\n" for line in lines)


def _packed(profile: Profile) -> str:
    """What a step of several of them as one takes; "" where that was never measured."""
    steps, memory = profile.packed_s or {}, profile.packed_mib or {}
    packs = [
        f"{n} in {1e3 * steps[n]:.4g} ms a step" + (f" ({memory[n]:.0f} MiB)" if n in memory else "")
        for n in sorted(steps)
    ]
    return f"packed on one device: {', '.join(packs)}" if packs else ""


def _column(name: str, found: Cost | None, counts: Sequence[int], form: Callable[[float], str]) -> list[str]:
    """A header and a cell for each count, "-" where nothing is known; nothing without any."""
    if found is None:
        return []
    values = found if isinstance(found, Mapping) else dict.fromkeys(counts, found)
    return [name, *(form(values[g]) if g in values else "-" for g in counts)]


def aligned(rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    """Lines of cells; the columns in `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)
