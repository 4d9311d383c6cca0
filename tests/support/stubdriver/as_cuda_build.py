"""Copied as `sitecustomize.py` into a folder of PYTHONPATH: torch calls the driver as its CUDA build does.

For a CPU build of torch; one with CUDA is left as it is. As seen with torch 2.11 for CUDA 13: importing torch
loads the driver and does not initialise it; a backward pass does, also of a model on the CPU (autograd counts
the GPUs), as do an optimizer's step (it asks whether a graph is captured), and `torch.cuda`.

There are no kernels: where a GPU can be used, `is_available` calls the driver and says no, so that a training
goes on on the CPU, and `Tensor.cuda` leaves a tensor there.
"""

import importlib.abc
import importlib.machinery
import sys


def _adapt(torch):
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")

    def asking(call):
        def asks(*words, **options):
            driver.cuInit(0)
            return call(*words, **options)

        return asks

    def init():
        if error := driver.cuInit(0):
            text = ctypes.c_char_p()
            driver.cuGetErrorString(error, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver: {(text.value or b'').decode()}")

    def device_count():
        number = ctypes.c_int()
        return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)) else number.value

    def synchronize(device=None):
        init()
        if error := driver.cuDeviceGet(ctypes.byref(ctypes.c_int()), device or 0):
            raise RuntimeError(f"CUDA error: {error}")

    def cuda(tensor, *words, **options):
        init()
        return tensor

    def get_device_name(device=None):
        name = ctypes.create_string_buffer(64)
        driver.cuDeviceGetName(name, len(name), device or 0)
        return name.value.decode()

    torch.Tensor.cuda, torch.cuda.get_device_name = cuda, get_device_name
    torch.backends.cuda.is_built = lambda: True
    torch.cuda.init, torch.cuda.device_count, torch.cuda.synchronize = init, device_count, synchronize
    torch.cuda.is_available = asking(lambda: False)
    backward = asking(torch.autograd.graph._engine_run_backward)
    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = backward
    check = "_accelerator_graph_capture_health_check"
    if not hasattr(torch.optim.Optimizer, check):  # its name before torch 2.10
        check = "_cuda_graph_capture_health_check"
    setattr(torch.optim.Optimizer, check, asking(getattr(torch.optim.Optimizer, check)))


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as the others do, and adapts it when it has been imported; imports nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if module.version.cuda is None:
                    _adapt(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterTorch())
