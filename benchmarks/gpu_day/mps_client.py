"""`python -m gpu_day.mps_client DEVICE`: computes when asked to, by lines; answers each with a line of JSON.

`work SECONDS`: products per second; `take MIB`: whether so much memory was to be had.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from gpu_day.timing import settle


def main(kind: str) -> None:
    device = torch.device(kind)
    torch.set_num_threads(1)
    a = torch.randn(64 if device.type == "cpu" else 2048, 64 if device.type == "cpu" else 2048, device=device)
    kept: list[torch.Tensor] = []
    _answer(ready=True)
    for line in sys.stdin:
        word, number = line.split()
        try:
            if word == "take":
                kept.append(torch.empty(int(number) << 20, dtype=torch.uint8, device=device))
                _answer(took=int(number))
                continue
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < float(number):
                for _ in range(10):
                    b = a @ a
                settle(device)
                count += 10
            _answer(rate=count / (time.perf_counter() - began), finite=bool(torch.isfinite(b).all()))
        except RuntimeError as error:
            _answer(error=(str(error).splitlines() or ["?"])[0])


def _answer(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
