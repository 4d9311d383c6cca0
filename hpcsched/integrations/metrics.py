"""What adapters log of a training: what its framework logs, under the framework's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcsched.contract.metrics import MOST_METRICS, is_name
from hpcsched.worker.link import Link
from hpcsched.worker.process.metrics_log import MetricsLog, Pace


class Metrics:
    """The metrics of a training whose link this is; without hpcsched, and on other ranks than 0, none."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._logs = link.active and link.rank == 0
        self._pace = Pace()
        self._log = MetricsLog(link.env.job_dir if link.env is not None else None)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """The framework, or the program, logs after `step` steps: what of it are numbers. What else
        frameworks log, such as texts and images, ends no training."""
        if self._logs:
            self._link.log(_numbers(values), step=step)

    def at_pace(self, values: Mapping[str, Any], step: int) -> None:
        """What is known after each step, where nobody says when to log, but for what the program logs."""
        env = self._link.env
        if self._logs and env is not None and (left := self._log.left(values)) and self._pace.due():
            found = _numbers({name: values[name] for name in values if name in left})
            self._log.write_for_it(step, found, attempt=env.attempt)


def whole_work(*, begun: int, epochs: int, steps: int, batches: int, length: int) -> int:
    """At most so many steps has a training whose last `epochs` epochs are as the one under way: that began
    after `begun` steps, and `batches` of its `length` batches have made `steps`."""
    return begun + epochs * -(-steps * length // batches)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if len(found) < MOST_METRICS and isinstance(name, str) and is_name(name):
            number = _number(value)
            if number is not None:
                found[name] = number
    return found


def _number(value: Any) -> float | None:
    """Of a number, or of a tensor or array of one; None for all else."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
