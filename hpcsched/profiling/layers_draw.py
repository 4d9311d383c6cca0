"""Layer profiles as text."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.planning.burst.graph import LayerProfile, ProfiledLayer
from hpcsched.profiling.draw import aligned

SPLIT_DEVICES = (2, 4, 8)
"""Devices over which a layer's samples are thought to be split, where the batch allows (chosen)."""


def layers_list(profiles: Sequence[LayerProfile]) -> str:
    """One line a layer profile, under a header."""
    header = ("MODEL", "DEVICE", "LAYERS", "BATCHES", "SOURCE", "NOTE")
    rows = []
    for profile in profiles:
        note = profile.note if len(profile.note) <= 60 else profile.note[:59] + "…"
        batches = ",".join(map(str, _batches(profile)))
        count = str(len(profile.layers))
        rows.append((profile.model, profile.device, count, batches, profile.source, note))
    return aligned([header, *rows], left=(0, 1, 3, 4, 5))


def layers_table(profile: LayerProfile) -> str:
    """One line a layer with its times at the largest batch, and how much faster it is for a part of it.

    A layer that is twice as fast for half the batch has 2.0 under x2: splitting it over 2 devices pays fully.
    """
    batch = _batches(profile)[-1]
    splits = [k for k in SPLIT_DEVICES if batch >= k]
    header = [
        "ID",
        "LAYER",
        "READS",
        "PARAMS",
        "OUT",
        "FORWARD_US",
        "BACKWARD_US",
        *(f"x{k}" for k in splits),
    ]
    rows = [
        [
            str(layer.id),
            layer.name,
            ",".join(map(str, layer.prev)) or "-",
            _size(layer.parameter_bytes),
            _size(layer.activation_bytes),
            f"{layer.forward_at(batch):.0f}",
            f"{layer.backward_at(batch):.0f}",
            *(f"{_time([layer], batch) / max(_time([layer], batch // k), 1e-9):.1f}" for k in splits),
        ]
        for layer in profile.layers
    ]
    whole = _time(profile.layers, batch)
    sums = [
        "",
        "all",
        "",
        _size(sum(layer.parameter_bytes for layer in profile.layers)),
        "",
        f"{sum(layer.forward_at(batch) for layer in profile.layers):.0f}",
        f"{sum(layer.backward_at(batch) for layer in profile.layers):.0f}",
        *(f"{whole / max(_time(profile.layers, batch // k), 1e-9):.1f}" for k in splits),
    ]
    title = (
        f"{profile.model} on one {profile.device}, batch {batch} of {','.join(map(str, _batches(profile)))}\n"
    )
    return title + aligned([header, *rows, sums], left=(1, 2)) + (f"{profile.note}\n" if profile.note else "")


def _batches(profile: LayerProfile) -> list[int]:
    """Those that all layers were measured with."""
    return sorted(set.intersection(*(set(layer.forward_us) for layer in profile.layers)))


def _time(layers: Sequence[ProfiledLayer], batch: int) -> float:
    """Microseconds of both passes."""
    return sum(layer.forward_at(batch) + layer.backward_at(batch) for layer in layers)


def _size(count: int) -> str:
    """Bytes, short."""
    size = float(count)
    for unit in ("B", "K", "M"):
        if size < 1000:
            return f"{size:.0f}{unit}" if unit == "B" or size >= 100 else f"{size:.1f}{unit}"
        size /= 1024
    return f"{size:.1f}G"
