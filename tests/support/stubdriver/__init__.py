"""A CUDA driver and an NVML for tests, in C: they drive nothing, and note who calls them, and when.

They obey rules of the real ones (see the head of each source), so that all of hpcsched can be run on them by
LD_LIBRARY_PATH, with `--devices cuda:8`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

AS_A_CUDA_BUILD = HERE / "as_cuda_build.py"
"""A `sitecustomize`: a CPU build of torch calls the driver where a CUDA build does."""


@dataclass(frozen=True)
class Call:
    """A line of the driver's log: `what` is "loaded", "cuInit", or "forked" for a cuInit after a fork."""

    pid: int
    what: str
    gpus: tuple[int, ...]
    """The GPUs that the process has from then on."""
    visible: str
    """CUDA_VISIBLE_DEVICES at that moment."""
    program: str


class StubDriver:
    """The libraries of one test session, and the log and broken GPUs of one test in `folder`."""

    def __init__(self, libraries: Path, folder: Path) -> None:
        self.libraries = libraries
        self.log, self.broken, self._hooks = folder / "driver.log", folder / "broken", folder / "hooks"

    def environ(
        self, inherited: Mapping[str, str], *, gpus: int, cores: Sequence[Sequence[int]] = ()
    ) -> dict[str, str]:
        """What a process needs to find these libraries, and `gpus` GPUs; `cores`: those near each of them."""
        self._hooks.mkdir(exist_ok=True)
        shutil.copy(AS_A_CUDA_BUILD, self._hooks / "sitecustomize.py")

        def first(value: object, name: str) -> str:
            return f"{value}:{inherited[name]}" if inherited.get(name) else str(value)

        environ = {
            **inherited,
            "LD_LIBRARY_PATH": first(self.libraries, "LD_LIBRARY_PATH"),
            "PYTHONPATH": first(self._hooks, "PYTHONPATH"),
            "STUB_DRIVER_LOG": str(self.log),
            "STUB_BROKEN_GPUS": str(self.broken),
            "STUB_GPUS": str(gpus),
        }
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            environ.pop(name, None)
        if cores:
            environ["STUB_GPU_CORES"] = " ".join(",".join(map(str, near)) for near in cores)
        return environ

    def calls(self, what: str = "cuInit") -> list[Call]:
        return [call for call in self._read() if call.what == what]

    def _read(self) -> Iterator[Call]:
        for line in self.log.read_text().splitlines() if self.log.exists() else []:
            pid, what, gpus, visible, program = line.split("\t")
            yield Call(int(pid), what, tuple(map(int, gpus.split(",") if gpus else ())), visible, program)


def build(folder: Path) -> Path:
    """Compile both libraries into a folder. Skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (`cc`) to build the stub driver with")
    for name in ("libcuda", "libnvidia-ml"):
        words = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}.so.1", "-o", folder / f"{name}.so.1"]
        subprocess.run([compiler, *words, HERE / f"{name}.c"], check=True, timeout=60)
    return folder
