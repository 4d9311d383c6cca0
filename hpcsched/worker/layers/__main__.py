"""`python -m hpcsched.worker.layers`: measure the layers of the trainer that the environment names.

The environment has the request as JSON (see `LayerProbeRequest`). After each batch the file `result` is
replaced by {"profile": the layer profile so far, "left_out": {batch: reason}}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched.compat import dataclass
from hpcsched.contract import variables
from hpcsched.contract.environment import Reader
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.worker.load import load_trainer
from hpcsched.worker.process.contract import JobEnv, say, write_atomically
from hpcsched.worker.process.startup import fewer_collections, run_to_the_end

if TYPE_CHECKING:
    import torch

    from hpcsched.worker.layers.graph import Layer
    from hpcsched.worker.layers.measure import MeasuredLayers
    from hpcsched.worker.session.trainer import Parts


@dataclass(frozen=True, kw_only=True)
class LayerProbeRequest:
    """What to measure: `batches` (empty: 1, 2, 4, ... up to the global batch), for `seconds` each layer.

    `model`, `device` and `note` go into the profile.
    """

    model: str
    device: str
    result: str
    note: str = ""
    seconds: float = 0.05
    batches: list[int] = field(default_factory=list)


def main() -> int:
    """Measure; returns the exit code. Errors in the user's own code keep their traceback."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        env, asked = JobEnv.from_environ(), Reader(os.environ).table(variables.LAYERS)
        if env is None or not asked:
            raise ConfigError(
                where="environment",
                key=variables.LAYERS,
                got="not set",
                accepted="a start by `hpcsched profile layers`, which sets it",
            )
        _probe(env, LayerProbeRequest(**asked))
    except HpcschedError as error:
        say(str(error))
        return error.exit_code
    return 0


def _probe(env: JobEnv, request: LayerProbeRequest) -> None:
    with fewer_collections():
        import torch

        from hpcsched.worker.layers.conditions import conditions
        from hpcsched.worker.layers.graph import trace
        from hpcsched.worker.layers.measure import measure
        from hpcsched.worker.ranks.process_group import own_device
        from hpcsched.worker.session.trainer import build
    device = own_device(env)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parts = build(load_trainer(env.trainer), env.args)
    parts.model.to(device).train()
    batches = request.batches or _powers(parts.global_batch)
    inputs = _inputs(parts, device)
    layers = trace(parts.model, inputs(min(batches)))
    for found in measure(
        layers,
        inputs,
        batches,
        model=request.model,
        device=request.device,
        seconds=request.seconds,
        watch=_watch(env, len(layers.layers) * len(set(batches))),
    ):
        if found.times is not None:
            clock = {} if found.sm_clock_mhz is None else {"sm_clock_mhz": found.sm_clock_mhz}
            profile = found.times.profile(
                f"{request.note}; {_about(found, device)}", {**conditions(device), **clock}
            )
            answer = {"profile": profile.to_table(), "left_out": found.left_out}
            write_atomically(Path(request.result), json.dumps(answer).encode())
    for batch, why in found.left_out.items():
        say(f"batch {batch} is left out: {why}")


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *(2**i for i in range(most.bit_length()))} - {0})


def _inputs(parts: Parts, device: torch.device) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """What the trainer's loss calls its model with, for so many samples of the dataset."""
    from hpcsched.worker.layers.graph import capture_inputs
    from hpcsched.worker.session.trainer import to_device

    def inputs(samples: int) -> tuple[torch.Tensor, ...]:
        batch = to_device(parts.batch([i % parts.size for i in range(samples)]), device)
        found = capture_inputs(parts.loss, parts.model, batch)
        if any(len(tensor) != samples for tensor in found if tensor.dim()):
            raise ConfigError(
                where="loss",
                got=f"{samples} samples go into the model as {[len(t) for t in found if t.dim()]}",
                accepted="a loss that gives the model one row a sample",
            )
        return found

    return inputs


def _watch(env: JobEnv, total: int) -> Callable[[int, Layer], None]:
    """Reports progress to who started us, and leaves when that is gone."""
    done = 0

    def watch(batch: int, layer: Layer) -> None:
        nonlocal done
        done += 1
        if env.notify_pid is not None and os.getppid() != env.notify_pid:
            raise SystemExit("hpcsched: whoever wanted this profile is gone")
        if env.progress_fd is not None:
            line = {"step": done, "t": time.monotonic(), "of": total, "batch": batch}
            with contextlib.suppress(OSError):
                os.write(env.progress_fd, json.dumps(line).encode() + b"\n")

    return watch


def _about(found: MeasuredLayers, device: torch.device) -> str:
    """What the times depend on."""
    import torch

    facts: list[Any] = [f"torch {torch.__version__}"]
    if device.type == "cpu":
        facts.append(f"{torch.get_num_threads()} threads")
    else:
        facts.append(f"{found.eager} layers not as CUDA graphs" if found.eager else "as CUDA graphs")
        facts.append(f"at most {found.peak_mib:.0f} MiB")
    return ", ".join(facts)


if __name__ == "__main__":
    run_to_the_end(main)
