"""Durations as people write them."""

from __future__ import annotations

import math
import re
from functools import lru_cache

_DAYS_HOURS = re.compile(r"(\d+)-(\d+)")
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d{1,2})(?::(\d{1,2}))?")
YEAR_S = 365 * 86400.0
"""The longest time that a what-if takes (chosen)."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: float | str) -> float:
    """The seconds of a number, of "90s", "10m", "2h", "1d", or of Slurm's "D-HH", "D-HH:MM:SS"
    and "MM:SS".

    Raises ValueError for anything else, and for negative and infinite numbers; OverflowError for numbers that
    are too large.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        if not text.isascii() or "_" in text:  # float() takes digits of all scripts, and "1_0"
            raise ValueError(value)
        if match := _DAYS_HOURS.fullmatch(text):
            return (int(match[1]) * 24 + int(match[2])) * 3600.0
        if match := _DURATION.fullmatch(text):
            days, first, second, third = match.groups()
            if int(second) > 59 or int(third or 0) > 59:
                raise ValueError(value)
            if third is None and days is None:
                return int(first) * 60.0 + int(second)
            hours = int(days or 0) * 24 + int(first)
            return hours * 3600.0 + int(second) * 60.0 + int(third or 0)
        factor = _UNITS.get(text[-1:], 0.0)
        value = float(text[:-1]) * factor if factor else float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(value)
    return float(value)


@lru_cache(maxsize=64)  # most jobs of a long queue have run for 0 s
def clock(seconds: float) -> str:
    """Slurm's way: MM:SS, H:MM:SS, D-HH:MM:SS."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}-{h:02}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def limit(seconds: float) -> str:
    """A time limit, always with hours, which batch systems do not take for something else: H:MM:SS,
    D-HH:MM:SS."""
    text = clock(seconds)
    return text if text.count(":") == 2 else f"0:{text:0>5}"
