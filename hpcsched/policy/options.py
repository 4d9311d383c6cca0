"""What the options of policies accept: words, or numbers within bounds.

A policy declares them as `OPTIONS`, by name. Values come as text from the command line, and as text or
numbers from job files and journals; `read` gives the policy what it works with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberOption:
    """Finite numbers in [least, most]. `whole`: integers only; `or_inf`: infinity too."""

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    or_inf: bool = False

    def read(self, value: Any) -> float | int:
        """The number meant; ValueError if it is none of those accepted."""
        if self.or_inf and value in ("inf", math.inf, None):  # JSON, and so the journal, says null for it
            return math.inf
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError("not a number")
        if self.whole and isinstance(value, float) and not value.is_integer():
            raise ValueError("not a whole number")
        number = int(value) if self.whole else float(value)
        if not (math.isfinite(number) and self.least <= number <= self.most):
            raise ValueError("out of bounds")
        return number

    def __str__(self) -> str:
        text = "a whole number" if self.whole else "a number"
        if math.isfinite(self.least) and math.isfinite(self.most):
            text += f" from {self.least:.15g} to {self.most:.15g}"
        elif math.isfinite(self.least):
            text += f" of at least {self.least:.15g}"
        elif math.isfinite(self.most):
            text += f" of at most {self.most:.15g}"
        return text + ", or inf" * self.or_inf


Accepted = NumberOption | tuple[str, ...]
"""Numbers, or one of these words."""


def read(accepted: Accepted, value: Any) -> Any:
    """The value that is meant; ValueError if it is not accepted."""
    if isinstance(accepted, NumberOption):
        return accepted.read(value)
    if value not in accepted:
        raise ValueError("not one of the words")
    return value


def said(accepted: Accepted) -> str:
    """What is accepted, in words."""
    return str(accepted) if isinstance(accepted, NumberOption) else ", ".join(accepted)
