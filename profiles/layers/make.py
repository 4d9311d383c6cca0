"""Makes the A100 layer profiles in this folder out of deeppool-a100.csv: `python make.py`.

The table has times of single layers; here they are put together to the graphs of VGG-16, WideResNet-101-2
and Inception-v3. What must stay together is one layer: a convolution and its ReLU (the table books the
backward pass of the one on the other), a flatten with the pooling before it.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEVICE = "A100-SXM4-40GB"
SOURCE = (
    "github.com/DeepPoolML/DeepPool, commit 7f823f2 (MIT, Seo Jin Park 2021): measured by its authors on one "
    "A100 of a DGX A100, mixed precision"
)
COPY_BYTES_S = 1.3e12
"""For concatenations, which the table lacks: about what an A100 copies a second, reading and writing."""

Times = dict[int, list[float]]
Key = tuple[str, str, str, str]


def read(path: Path) -> dict[Key, Times]:
    """Forward and backward microseconds by batch, of each layer of each model."""
    found: dict[Key, Times] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["model"], row["layer"], row["params"], row["input_shape"]
            found[key][int(row["batch"])] = [float(row["forward_us"]), float(row["backward_us"])]
    return found


class Graph:
    """A layer profile in the making: each method adds a layer and returns its id."""

    def __init__(self, table: dict[Key, Times], model: str, batches: list[int]) -> None:
        self.table, self.model, self.batches = table, model, batches
        self.layers: list[dict[str, Any]] = []
        self.shapes: list[tuple[int, ...]] = []

    def times(self, layer: str, shape: tuple[int, ...], **params: Any) -> Times:
        text = str(shape[0]) if len(shape) == 1 else json.dumps(list(shape), separators=(",", ":"))
        key = self.model, layer, json.dumps(params, separators=(",", ":"), sort_keys=True), text
        return self.table[key]

    def add(self, name: str, prev: list[int], shape: tuple[int, ...], parameters: int, *parts: Times) -> int:
        size = 1
        for extent in shape:
            size *= extent
        sums = {n: [sum(part[n][i] for part in parts) for i in (0, 1)] for n in self.batches}
        self.layers.append(
            {
                "id": len(self.layers),
                "name": name,
                "prev": prev,
                "parameter_bytes": 4 * parameters,
                "activation_bytes": 4 * size,
                "forward_us": {str(n): us[0] for n, us in sums.items()},
                "backward_us": {str(n): us[1] for n, us in sums.items()},
            }
        )
        self.shapes.append(shape)
        return len(self.layers) - 1

    def shape(self, prev: list[int], first: tuple[int, ...]) -> tuple[int, ...]:
        return self.shapes[prev[0]] if prev else first

    def write(self, title: str, file: str, input_bytes: int, note: str) -> None:
        table = {
            "schema": 1,
            "model": title,
            "device": DEVICE,
            "source": "published",
            "note": f"{SOURCE}. {note}",
            "input_bytes": input_bytes,
            "layers": self.layers,
        }
        text = json.dumps(table, indent=1)
        (HERE / file).write_text(text + "\n", encoding="utf-8")


def vgg16(table: dict[Key, Times]) -> None:
    g = Graph(table, "vgg16", [1, 2, 3, 4, 6, 8, 16, 32, 64])
    relu = {"inplace": True, "kernel_size": 1, "padding": 0, "stride": 1}
    prev: list[int] = []
    channels, size = 3, 224
    for stage, (out, convs) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for number in range(1, convs + 1):
            conv = {"in_channels": channels, "kernel_size": 3, "out_channels": out, "padding": 1, "stride": 1}
            here = (channels, size, size)
            times = [g.times("conv2d", here, **conv), g.times("ReLU2d", (out, size, size), **relu)]
            prev = [g.add(f"conv{stage}_{number}", prev, (out, size, size), 9 * channels * out + out, *times)]
            channels = out
        pool = g.times("maxPool2d", (out, size, size), kernel_size=2, padding=0, stride=2)
        size //= 2
        times = [pool, g.times("flatten", (512, 7, 7), kernel_size=1)] if stage == 5 else [pool]
        prev = [g.add(f"pool{stage}", prev, (out, size, size), 0, *times)]
    for number, (width, out) in enumerate(((25088, 4096), (4096, 4096), (4096, 1000)), 6):
        times = [g.times("linear", (width,), bias=True, in_features=width, out_features=out)]
        if number < 8:
            times.append(g.times("ReLU1d", (4096,), **relu))
        prev = [g.add(f"fc{number}", prev, (out,), width * out + out, *times)]
    g.write("VGG-16", "vgg16-a100.json", 4 * 3 * 224 * 224, "Layers fused by make.py.")


def wrn101_2(table: dict[Key, Times]) -> None:
    g = Graph(table, "wrn101_2", [1, 2, 3, 4, 6, 8, 16, 32])
    relu = {"inplace": True, "kernel_size": 1, "padding": 0, "stride": 1}
    conv = {"in_channels": 3, "kernel_size": 7, "out_channels": 64, "padding": 3, "stride": 2}
    times = [g.times("conv2d", (3, 224, 224), **conv), g.times("ReLU2d", (64, 112, 112), **relu)]
    prev = [g.add("conv1", [], (64, 112, 112), 9408 + 128, *times)]
    pool = g.times("maxPool2d", (64, 112, 112), kernel_size=3, padding=1, stride=2)
    prev = [g.add("maxpool", prev, (64, 56, 56), 0, pool)]
    width, size = 64, 56
    for stage, (planes, blocks) in enumerate(((64, 3), (128, 4), (256, 23), (512, 3)), 1):
        for number in range(blocks):
            block: dict[str, Any] = {"base_width": 128, "dilation": 1, "groups": 1}
            inner, out = 2 * planes, 4 * planes
            parameters = width * inner + 9 * inner * inner + inner * out + 2 * (2 * inner + out)
            stride = 1
            if number == 0:
                stride = 1 if stage == 1 else 2
                block["downsampleParams"] = [[width, out, stride], out]
                parameters += width * out + 2 * out
            block |= {"inplanes": width, "planes": planes}
            if number == 0:
                block["stride"] = stride
            times = [g.times("ResnetBottleneck", (width, size, size), **block)]
            width, size = out, size // stride
            prev = [g.add(f"layer{stage}.{number}", prev, (width, size, size), parameters, *times)]
    pool = g.times("adAvgPool2d", (2048, 7, 7), output_height=1, output_width=1)
    prev = [g.add("avgpool", prev, (2048,), 0, pool, g.times("flatten", (2048, 1, 1), kernel_size=1))]
    last = g.times("linear", (2048,), bias=True, in_features=2048, out_features=1000)
    g.add("fc", prev, (1000,), 2048 * 1000 + 1000, last)
    note = "A bottleneck block was measured as one layer; bytes of parameters include its batch norms."
    g.write("WideResNet-101-2", "wrn101-2-a100.json", 4 * 3 * 224 * 224, note)


def inception_v3(table: dict[Key, Times]) -> None:
    g = Graph(table, "inception_v3", [*range(1, 17), 32, 64])

    def conv(
        name: str, prev: list[int], out: int, kernel: Any, padding: Any = 0, stride: int = 1
    ) -> list[int]:
        here = g.shape(prev, (3, 299, 299))
        params = {"in_channels": here[0], "kernel_size": kernel, "out_channels": out}
        times = g.times("conv2d", here, **params, padding=padding, stride=stride)
        high, wide = kernel if isinstance(kernel, list) else (kernel, kernel)
        pad = padding if isinstance(padding, list) else [padding, padding]
        size = ((here[1] + 2 * pad[0] - high) // stride + 1, (here[2] + 2 * pad[1] - wide) // stride + 1)
        parameters = here[0] * out * high * wide + 2 * out
        return [g.add(name, prev, (out, *size), parameters, times)]

    def pool(
        name: str, prev: list[int], kind: str = "maxPool2d", padding: int = 0, stride: int = 2
    ) -> list[int]:
        here = g.shapes[prev[0]]
        times = g.times(kind, here, kernel_size=3, padding=padding, stride=stride)
        size = (here[1] + 2 * padding - 3) // stride + 1
        return [g.add(name, prev, (here[0], size, size), 0, times)]

    def concat(name: str, *branches: list[int]) -> list[int]:
        prev = [layer for branch in branches for layer in branch]
        channels = sum(g.shapes[layer][0] for layer in prev)
        shape = (channels, *g.shapes[prev[0]][1:])
        once_us = 2 * 4 * channels * shape[1] * shape[2] / COPY_BYTES_S * 1e6
        times = {n: [max(2.0, round(n * once_us, 1))] * 2 for n in g.batches}
        return [g.add(name, prev, shape, 0, times)]

    x = conv("conv1a", [], 32, 3, stride=2)
    x = conv("conv2a", x, 32, 3)
    x = conv("conv2b", x, 64, 3, 1)
    x = pool("pool1", x)
    x = conv("conv3b", x, 80, 1)
    x = conv("conv4a", x, 192, 3)
    x = pool("pool2", x)
    for name in ("5b", "5c", "5d"):
        one = conv(f"{name}.1x1", x, 64, 1)
        five = conv(f"{name}.5x5_2", conv(f"{name}.5x5_1", x, 48, 1), 64, 5, 2)
        dbl = conv(f"{name}.3x3dbl_2", conv(f"{name}.3x3dbl_1", x, 64, 1), 96, 3, 1)
        dbl = conv(f"{name}.3x3dbl_3", dbl, 96, 3, 1)
        pooled = conv(
            f"{name}.pool", pool(f"{name}.avg", x, "avgPool2d", 1, 1), 32 if name == "5b" else 64, 1
        )
        x = concat(f"{name}.concat", one, five, dbl, pooled)
    three = conv("6a.3x3", x, 384, 3, stride=2)
    dbl = conv("6a.3x3dbl_2", conv("6a.3x3dbl_1", x, 64, 1), 96, 3, 1)
    dbl = conv("6a.3x3dbl_3", dbl, 96, 3, stride=2)
    x = concat("6a.concat", three, dbl, pool("6a.pool", x))
    for name, width in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        row, column = ([1, 7], [0, 3]), ([7, 1], [3, 0])
        one = conv(f"{name}.1x1", x, 192, 1)
        seven = conv(f"{name}.7x7_2", conv(f"{name}.7x7_1", x, width, 1), width, *row)
        seven = conv(f"{name}.7x7_3", seven, 192, *column)
        dbl = conv(f"{name}.7x7dbl_2", conv(f"{name}.7x7dbl_1", x, width, 1), width, *column)
        dbl = conv(f"{name}.7x7dbl_3", dbl, width, *row)
        dbl = conv(f"{name}.7x7dbl_5", conv(f"{name}.7x7dbl_4", dbl, width, *column), 192, *row)
        pooled = conv(f"{name}.pool", pool(f"{name}.avg", x, "avgPool2d", 1, 1), 192, 1)
        x = concat(f"{name}.concat", one, seven, dbl, pooled)
    three = conv("7a.3x3_2", conv("7a.3x3_1", x, 192, 1), 320, 3, stride=2)
    seven = conv("7a.7x7_2", conv("7a.7x7_1", x, 192, 1), 192, [1, 7], [0, 3])
    seven = conv("7a.7x7_4", conv("7a.7x7_3", seven, 192, [7, 1], [3, 0]), 192, 3, stride=2)
    x = concat("7a.concat", three, seven, pool("7a.pool", x))
    for name in ("7b", "7c"):
        one = conv(f"{name}.1x1", x, 320, 1)
        three = conv(f"{name}.3x3_1", x, 384, 1)
        three = concat(
            f"{name}.3x3_concat",
            conv(f"{name}.3x3_2a", three, 384, [1, 3], [0, 1]),
            conv(f"{name}.3x3_2b", three, 384, [3, 1], [1, 0]),
        )
        dbl = conv(f"{name}.3x3dbl_2", conv(f"{name}.3x3dbl_1", x, 448, 1), 384, 3, 1)
        dbl = concat(
            f"{name}.3x3dbl_concat",
            conv(f"{name}.3x3dbl_3a", dbl, 384, [1, 3], [0, 1]),
            conv(f"{name}.3x3dbl_3b", dbl, 384, [3, 1], [1, 0]),
        )
        pooled = conv(f"{name}.pool", pool(f"{name}.avg", x, "avgPool2d", 1, 1), 192, 1)
        x = concat(f"{name}.concat", one, three, dbl, pooled)
    note = (
        "Concatenations were not measured: computed from the bytes they copy at 1.3 TB/s, at least 2 us. "
        "The table has no final pooling and classifier either, so the graph ends before them."
    )
    g.write("Inception-v3", "inception-v3-a100.json", 4 * 3 * 299 * 299, note)


if __name__ == "__main__":
    measured = read(HERE / "deeppool-a100.csv")
    vgg16(measured)
    wrn101_2(measured)
    inception_v3(measured)
