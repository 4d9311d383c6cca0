"""What the runs of a day train: the networks of hpcsched's examples, their processes on record."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpcsched.examples.models import Network
from hpcsched.worker import Parts


class Recorded(Network):
    """`args` besides those of `Network`: `record` (a file that gets a line in each process of the job),
    `pause_s` (of each step), `loaders` (processes that read the data), `megabytes` (of further parameters)
    and `breaks_at` (the step in which an index is out of range on the device)."""

    def build(self, args: dict[str, Any]) -> Parts:
        rest = dict(args)
        record, pause_s = Path(rest.pop("record")), rest.pop("pause_s", 0.0)
        loaders, breaks_at = rest.pop("loaders", 0), rest.pop("breaks_at", 0)
        megabytes = rest.pop("megabytes", 0)
        parts = super().build(rest)
        _note(record)
        if megabytes:
            size = megabytes * 2**20 // 12  # a parameter with two moments, 4 bytes each
            parts.model.register_parameter("ballast", torch.nn.Parameter(torch.ones(size)))
            parts.optimizer = torch.optim.AdamW(parts.model.parameters(), lr=1e-4)
        if loaders:
            tensors = parts.tensors
            assert tensors is not None
            parts.dataset, parts.loaders = list(zip(*tensors, strict=True)), loaders
        plain, steps = parts.loss, 0

        def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            nonlocal steps
            steps += 1
            time.sleep(pause_s)
            losses = plain(model, batch)
            if steps == breaks_at:
                losses = losses[torch.full((1,), 10**6, device=losses.device)]
            if megabytes:
                losses = losses + 0.0 * model.ballast[:1]  # type: ignore[index]
            return losses

        parts.loss = loss
        return parts


def _note(record: Path) -> None:
    """A line of what this process is."""
    visible: Mapping[str, str] = os.environ
    command = Path("/proc/self/cmdline").read_bytes()
    line = {
        "pid": os.getpid(),
        "forked": b"hpcsched.worker.zygote" in command,
        "visible": visible.get("CUDA_VISIBLE_DEVICES"),
        "uuid": str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None,
    }
    with record.open("a") as file:
        file.write(json.dumps(line) + "\n")
