"""What bounds all the rest: copies, products, pinned memory, launches, and a context's first use."""

from __future__ import annotations

import mmap
import os
import platform
import time
from typing import Any

import torch

from gpu_day.found import H100, H200, Found
from gpu_day.timing import device_of, seconds_of, settle

GIB = 2**30
WINDOW_S, CPU_WINDOW_S = 0.5, 0.02
HOPPER = (H100, H200)


def run(found: Found) -> None:
    """All of them, the most telling first."""
    device = device_of(found)
    began = time.perf_counter()
    if not found.cpu:
        torch.cuda.init()
        torch.empty(1, device=device)
        settle(device)
    cuda: Any = torch.cuda
    found.number(
        context_creation_s=None if found.cpu else time.perf_counter() - began,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        nccl=None if found.cpu else list(cuda.nccl.version()),
        arch=None if found.cpu else list(torch.cuda.get_device_capability(device)),
        multiprocessors=None if found.cpu else cuda.get_device_properties(device).multi_processor_count,
        cores=len(os.sched_getaffinity(0)),
        context_mib=None if found.cpu else _context_mib(),
    )
    for measure in (_copies, _products, _transfers, _pinning, _launches):
        with found.trying(measure.__name__.strip("_")):
            measure(found, device)


def _window_s(found: Found) -> float:
    return CPU_WINDOW_S if found.cpu else WINDOW_S


def _context_mib() -> float:
    """What is in use on the GPU with nothing on it but this process's context."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def _products(found: Found, device: torch.device) -> None:
    size = 128 if found.cpu else 8192
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        rate = 2 * size**3 / seconds_of(lambda a=a, b=b: a @ b, device, window_s=_window_s(found)) / 1e12  # type: ignore[misc]
        found.number(**{f"matmul_{name}_{size}_tflops": rate})
        if name == "bf16":
            found.speed("bf16 product", ">= 700 TFLOP/s", f"{rate:.0f} TFLOP/s", rate >= 700, of=HOPPER)


def _copies(found: Found, device: torch.device) -> None:
    size = 2**20 if found.cpu else 4 * GIB
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    rate = 2 * size / seconds_of(lambda: b.copy_(a), device, window_s=_window_s(found)) / 1e12
    found.number(copy_on_device_tb_per_s=rate)
    found.speed("copy on the device", ">= 2.7 TB/s", f"{rate:.2f} TB/s", rate >= 2.7, of=HOPPER)


def _transfers(found: Found, device: torch.device) -> None:
    size = 2**20 if found.cpu else GIB
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    for pinned in (False,) if found.cpu else (True, False):
        here = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
        name = "pinned" if pinned else "pageable"
        to_s, from_s = (
            seconds_of(
                lambda target=target, source=source: target.copy_(source, non_blocking=True),  # type: ignore[misc]
                device,
                window_s=_window_s(found),
            )
            for target, source in ((there, here), (here, there))
        )
        found.number(
            **{
                f"{name}_to_device_gb_per_s": size / to_s / 1e9,
                f"{name}_to_host_gb_per_s": size / from_s / 1e9,
            }
        )


def _pinning(found: Found, device: torch.device) -> None:
    """What a suspend does with the memory it saves into: a memfd's pages, touched, registered, summed up."""
    size = 2**20 if found.cpu else GIB
    descriptor = os.memfd_create("gpu-day")
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as memory:
        os.close(descriptor)
        data = torch.frombuffer(memory, dtype=torch.int64)
        began = time.perf_counter()
        data.fill_(1)
        numbers = {"memfd_touch_gb_per_s": size / (time.perf_counter() - began) / 1e9}
        began = time.perf_counter()
        data.view(-1, 64).sum(1)
        numbers["checksum_gb_per_s"] = size / (time.perf_counter() - began) / 1e9
        if not found.cpu:
            numbers |= _registered(found, data, device)
        found.number(**numbers)
        del data


def _registered(found: Found, data: torch.Tensor, device: torch.device) -> dict[str, float]:
    cudart: Any = torch.cuda.cudart()
    size, numbers = data.nbytes, {}
    began = time.perf_counter()
    code = int(cudart.cudaHostRegister(data.data_ptr(), size, 0))
    numbers["host_register_gb_per_s"] = size / (time.perf_counter() - began) / 1e9
    found.check("cudaHostRegister of 1 GiB of a memfd", "0", code, code == 0)
    if code == 0:
        there = torch.zeros(size // 8, dtype=torch.int64, device=device)
        took_s = seconds_of(lambda: data.copy_(there, non_blocking=True), device)
        numbers["registered_to_host_gb_per_s"] = size / took_s / 1e9
        settle(device)
        began = time.perf_counter()
        cudart.cudaHostUnregister(data.data_ptr())
        numbers["host_unregister_gb_per_s"] = size / (time.perf_counter() - began) / 1e9
    return numbers


def _launches(found: Found, device: torch.device) -> None:
    """Seconds to ask for a small kernel, and to have it done; the same by a graph of 100."""
    x = torch.zeros(8, device=device)
    count = 20 if found.cpu else 2000
    for _ in range(10):
        x.add_(1)
    settle(device)
    began = time.perf_counter()
    for _ in range(count):
        x.add_(1)
    asked_s = (time.perf_counter() - began) / count
    settle(device)
    done_s = (time.perf_counter() - began) / count
    began = time.perf_counter()
    for _ in range(count // 10):
        x.add_(1)
        settle(device)
    alone_s = (time.perf_counter() - began) / (count // 10)
    found.number(launch_us=asked_s * 1e6, launched_kernel_us=done_s * 1e6, launch_and_wait_us=alone_s * 1e6)
    if not found.cpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                x.add_(1)
        found.number(kernel_in_graph_us=seconds_of(graph.replay, device, window_s=0.2) * 1e4)
