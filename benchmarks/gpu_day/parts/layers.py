"""Layer profiles: their sum against whole steps, and against themselves."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from common import Scratch, hpcsched

from gpu_day.found import Found
from gpu_day.live import SMALL
from gpu_day.timing import device_of, seconds_of
from hpcsched.examples.models import make

NETWORKS = ("resnet50", "vgg16", "transformer", "inception-v3", "wrn101-2")
BATCHES, CPU_BATCHES = (1, 8, 32, 64), (2, 4)
SUM_WITHIN, AGAIN_WITHIN = 0.10, 0.05
LEAST_S, CPU_LEAST_S = 40.0, 10.0


def run(found: Found) -> None:
    """Each network measured twice by `profile layers`, and its whole step, as a graph and as it comes."""
    device = device_of(found)
    for network in ("vgg16",) if found.cpu else NETWORKS:
        if found.left_s < (CPU_LEAST_S if found.cpu else LEAST_S):
            found.check(network, "measured", "not reached in time", None)
            continue
        with found.trying(network):
            steps = _whole_steps(found, network, device)
            first, again = (_profile(found, network) for _ in range(2))
            _judge(found, network, first, again, steps)
        if not found.cpu:
            torch.cuda.empty_cache()


def _batches(found: Found) -> tuple[int, ...]:
    return CPU_BATCHES if found.cpu else BATCHES


def _arguments(found: Found, network: str) -> dict[str, Any]:
    return {**(SMALL[network] if found.cpu else {}), "classes": 1000}


def _profile(found: Found, network: str) -> dict[str, Any]:
    with Scratch.make() as scratch:
        words = ["--args", json.dumps(_arguments(found, network)), "--devices", found.devices, "--json"]
        words += [
            "--batches",
            ",".join(map(str, _batches(found))),
            "--seconds",
            "0.005" if found.cpu else "0.02",
        ]
        command = hpcsched("profile", "layers", network, *words)
        profile: dict[str, Any] = json.loads(scratch.run(command, deadline_s=max(5.0, found.left_s - 5)))
        print(scratch.errors, file=sys.stderr)
        return profile


def _whole_steps(found: Found, network: str, device: torch.device) -> dict[int, tuple[float, float | None]]:
    """By batch: the seconds of a forward and backward pass, launched from Python and as one graph."""
    model, example = make(network, _arguments(found, network))
    model.to(device).train()
    steps: dict[int, tuple[float, float | None]] = {}
    for batch in _batches(found):
        x = tuple(tensor.to(device) for tensor in example(batch))
        parameters = [p for p in model.parameters() if p.requires_grad]

        def work(x: Any = x, parameters: Any = parameters) -> Any:
            out = model(*x)
            return torch.autograd.grad(out, parameters, torch.ones_like(out), allow_unused=True)

        eager_s = seconds_of(work, device, window_s=0.05 if found.cpu else 0.4)
        steps[batch] = eager_s, None if found.cpu else _graphed(work, device)
    return steps


def _graphed(work: Any, device: torch.device) -> float:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    took = seconds_of(graph.replay, device, window_s=0.4)
    del kept
    return took


def _judge(
    found: Found,
    network: str,
    first: dict[str, Any],
    again: dict[str, Any],
    steps: dict[int, tuple[float, float | None]],
) -> None:
    sums = [_sums(profile) for profile in (first, again)]
    found.number(
        **{
            f"{network}_profile": first,
            f"{network}_sums_s": sums,
            f"{network}_steps_s": {batch: list(taken) for batch, taken in steps.items()},
        }
    )
    whole = {batch: (graph_s or eager_s) for batch, (eager_s, graph_s) in steps.items()}
    off = {batch: sums[0][batch] / whole[batch] - 1 for batch in whole if batch in sums[0]}
    worst = max(off.values(), key=abs)
    said = ", ".join(f"{batch}: {by:+.1%}" for batch, by in off.items())
    found.speed(
        f"{network}: sum of layers against a step, by batch", "within 10 %", said, abs(worst) <= SUM_WITHIN
    )
    moved = {batch: sums[1][batch] / sums[0][batch] - 1 for batch in sums[0] if batch in sums[1]}
    worst = max(moved.values(), key=abs)
    found.speed(f"{network}: measured again", "within 5 %", f"{worst:+.1%}", abs(worst) <= AGAIN_WITHIN)
    missing = sorted(set(_batches(found)) - set(sums[0]))
    found.check(
        f"{network}: batches measured", "all", f"without {missing}" if missing else "all", not missing
    )
    if not found.cpu:
        note = str(first.get("note", ""))
        found.check(
            f"{network}: layers as CUDA graphs",
            "all",
            note,
            "as CUDA graphs" in note and " not as" not in note,
        )


def _sums(profile: dict[str, Any]) -> dict[int, float]:
    """Seconds of all layers, forward and backward, by batch."""
    sums: dict[int, float] = {}
    for layer in profile["layers"]:
        for kind in ("forward_us", "backward_us"):
            for batch, us in layer[kind].items():
                sums[int(batch)] = sums.get(int(batch), 0.0) + us / 1e6
    return sums
