"""Eight adapters (LoRA) on one frozen model: each alone in turn, as a pack's loop, on one pass of it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from gpu_day.found import MIB, Found, Refused
from gpu_day.timing import device_of

MEMBERS, CPU_MEMBERS, BATCH = 8, 3, 4
TINY: dict[str, Any] = {"width": 64, "layers": 2, "tokens": 16}
GPT2: dict[str, Any] = {"kind": "gpt2", "width": 768, "layers": 12, "tokens": 256, "words": 32_000}
LLAMA: dict[str, Any] = {"kind": "llama", "width": 1024, "layers": 16, "tokens": 256, "words": 32_000}
CASES: dict[str, dict[str, Any]] = {
    "gpt2 bfloat16": {**GPT2, "dtype": "bfloat16"},
    "gpt2 float32": {**GPT2, "dtype": "float32"},
    "llama bfloat16": {**LLAMA, "dtype": "bfloat16"},
    "llama float32": {**LLAMA, "dtype": "float32"},
}
"""Of about 110 and 260 million parameters; what is frozen is in this type, and the adapters in float32."""
SECONDS, CPU_SECONDS = 2.0, 0.05
"""So long each way is measured."""
CHECKED_STEPS, CLOSE = 8, 1e-6
CHECKED_LAYERS = 2
"""In double precision, which is slow on most GPUs."""
SLOWER = 0.02


def run(found: Found) -> None:
    """Speed, memory and equality. Refused where there is no PEFT, or no Transformers."""
    if missing := [name for name in ("peft", "transformers") if find_spec(name) is None]:
        raise Refused(f"there is no {' and no '.join(missing)} here")
    device = device_of(found)
    for kind in ("gpt2", "llama"):
        with found.trying(f"{kind}: equality"):
            _check(found, kind, device)
    for name, size in CASES.items():
        if found.left_s < 30:
            found.check(name, "measured", "not reached in time", None)
            continue
        with found.trying(name):
            _compare(found, name, {**size, **(TINY if found.cpu else {})}, device)


def _check(found: Found, kind: str, device: torch.device) -> None:
    """In double precision, and for information as people train: adapters of a pack, and of each alone."""
    from lora_packed import Comparison

    whole = CASES[f"{kind} float32"]
    size = {**whole, "layers": CHECKED_LAYERS, "words": 512, **(TINY if found.cpu else {})}
    comparison = Comparison(device, members=_members(found), batch=BATCH, **size)
    for dtype, judged in (("float64", True), ("float32", False), ("bfloat16", False)):
        far = comparison.differs(CHECKED_STEPS, dtype)
        found.number(**{f"{kind}_{dtype}_differs": far})
        what = f"{kind}, {dtype}: weights of adapters against those of each alone"
        found.check(what, f"<= {CLOSE:g}", f"{far:.0e}", far <= CLOSE if judged else None)


def _compare(found: Found, name: str, size: dict[str, Any], device: torch.device) -> None:
    from lora_packed import Comparison, clear, rates

    seconds = CPU_SECONDS if found.cpu else SECONDS
    comparison = Comparison(device, members=_members(found), batch=BATCH, seconds=seconds, **size)
    clear(device)
    one = comparison.one(0)
    next(one)
    times, peaks = {}, {"one alone": _peak_mib(device)}
    one.close()
    del one
    # Way after way: the memory of each is its own.
    ways = {"alone": comparison.alone, "loop": comparison.loop, "adapters": comparison.adapters}
    for way, make in ways.items():
        clear(device)
        times |= comparison.times({way: make()})
        if way != "alone":  # where all are there at once, though each is computed alone
            peaks[way] = _peak_mib(device)
    clear(device)
    per_s = rates(comparison.samples, times)
    key = name.replace(" ", "_")
    found.number(**{f"{key}_{way}_step_s": each for way, each in times.items()})
    found.number(**{f"{key}_samples_per_s": per_s, f"{key}_peak_mib": peaks})
    gain, over_loop = (per_s["adapters"] / per_s[way] for way in ("alone", "loop"))
    found.speed(
        f"{name}: {_members(found)} adapters on one pass, samples/s against one after the other",
        f">= {1 - SLOWER:g}x",
        f"{gain:.2f}x ({per_s['adapters']:.0f}/s), {over_loop:.2f}x the loop",
        gain >= 1 - SLOWER,
    )
    found.check(
        f"{name}: memory, MiB",
        "for information",
        ", ".join(f"{way} {mib:.0f}" for way, mib in peaks.items()),
        None,
    )


def _members(found: Found) -> int:
    return CPU_MEMBERS if found.cpu else MEMBERS


def _peak_mib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / MIB if device.type == "cuda" else 0.0
