"""Numbers in what the commands of a batch system print."""

from __future__ import annotations

import re


def whole(text: str) -> int | None:
    """The number of a word of up to 18 ASCII digits; None of anything else.

    `str.isdigit` takes "²" too, and `int` raises for that, and for more than 4300 digits.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None
