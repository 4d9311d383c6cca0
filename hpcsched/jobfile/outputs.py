"""Names of output files: sbatch's patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping

LETTERS = {
    "j": "the job's id",
    "A": "the id of its array's first job, or its own",
    "a": "its number in its array, or the attempt",
    "x": "its name",
    "N": "the (first) host",
    "u": "the user",
    "%": "a percent sign",
}
"""What can stand behind a percent sign."""

_NUMBERS = "jAa"

_NOT_HERE = re.compile(r"%\d*([bJnst])")
"""Of sbatch, and of what is not here: job steps, tasks and nodes with files of their own."""

_PATTERN = re.compile(rf"%(\d{{0,2}})([{''.join(LETTERS)}])")


def not_here(pattern: str) -> str:
    """The first of sbatch's words in a pattern that means nothing here, such as "%t"; else empty."""
    found = _NOT_HERE.search(pattern.replace("%%", ""))
    return found[0] if found else ""


def filled(pattern: str, values: Mapping[str, str]) -> str:
    """The name with these values by letter; "%4j" has zeros in front of a number, up to four digits. What is
    no word of ours stays as it is."""

    def value(found: re.Match[str]) -> str:
        width, text = int(found[1] or 0), "%" if found[2] == "%" else values[found[2]]
        return text.zfill(width) if found[2] in _NUMBERS else text

    return _PATTERN.sub(value, pattern)
