"""The digits training in float64: writes down the loss of each step, and signals itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from hpcsched.examples.digits import Digits
from hpcsched.worker.session.trainer import Parts


class ExactDigits(Digits):
    """An mlp without batch norm or dropout: sums over a batch depend on its split by rounding only.

    `stop_at` in args: rank 0 gets SIGTSTP in this step of the attempt, counted from 0.
    """

    def build(self, args: dict[str, Any]) -> Parts:
        stop_at = args.pop("stop_at", None)
        parts = super().build({"kind": "mlp", "width": 64, **args})
        parts.model.double()
        images, labels = parts.dataset  # type: ignore[misc]
        parts.dataset = (images.double(), labels)
        loss, rank = parts.loss, os.environ["HPCSCHED_RANK"]
        log = Path(os.environ["HPCSCHED_JOB_DIR"]) / f"losses.{os.environ['HPCSCHED_ATTEMPT']}.{rank}"
        seen = 0

        def noted(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            nonlocal seen
            losses = loss(model, batch)
            with log.open("a") as file:
                file.write(f"{losses.sum().item()!r}\n")
            if rank == "0" and seen == stop_at:
                os.kill(os.getpid(), signal.SIGTSTP)
            seen += 1
            return losses

        parts.loss = noted
        parts.evaluate = None
        return parts
