"""What a job needs besides a number of GPUs: time, cores, memory, a kind of GPU, modules."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_WORD = re.compile(r"[a-z0-9.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a job file says of a job's resources; jobs of one file that say the same share the object.

    `time_s`: how long the job may run (None: without a limit). `cpus_per_gpu`: cores for each of its GPUs,
    its data loaders' included (None: an equal share of those that are kept for GPU jobs). `memory_mib`: main
    memory of the job on each host (None: not limited, and not counted). `gpu_type` and `gpu_memory_mib`:
    which GPUs it can use ("" and None: any). `modules` are loaded before its program starts. `share`: the
    job is content with this share of one GPU, above 0 and below 1 (0: with as little as others that do so
    leave it, as measured; None: it shares no GPU). Of such a job `gpu_memory_mib` is all that it uses there.
    """

    time_s: float | None = None
    cpus_per_gpu: int | None = None
    memory_mib: float | None = None
    gpu_type: str = ""
    gpu_memory_mib: float | None = None
    modules: tuple[str, ...] = ()
    share: float | None = None

    @property
    def picky(self) -> bool:
        """Whether it cannot use every GPU."""
        return bool(self.gpu_type) or self.gpu_memory_mib is not None

    @property
    def places(self) -> bool:
        """Whether it matters on which host and GPUs the job is."""
        return self.picky or self.cpus_per_gpu is not None or self.memory_mib is not None

    @property
    def placing(self) -> Needs | None:
        """What of it matters for where the job is; None: nothing."""
        return replace(self, time_s=None, modules=(), share=None) if self.places else None

    def suits(self, kind: str, memory_mib: float | None) -> bool:
        """Whether the job can use a GPU of this kind; one whose memory is not known has too little."""
        if self.gpu_memory_mib is not None and (memory_mib or 0.0) < self.gpu_memory_mib * ENOUGH:
            return False
        return not self.gpu_type or is_type(self.gpu_type, kind)

    def __str__(self) -> str:
        said = [self.gpu_type] if self.gpu_type else []
        if self.gpu_memory_mib is not None:
            said.append(f"with at least {said_mib(self.gpu_memory_mib)}")
        if self.cpus_per_gpu is not None:
            said.append(f"{self.cpus_per_gpu} cores each")
        if self.memory_mib is not None:
            said.append(f"{said_mib(self.memory_mib)} of the host's memory")
        return ", ".join(said)


ENOUGH = 0.95
"""The share of `gpu_memory` that a GPU must have (chosen): one that is sold with 40 GB shows
a little less, as ECC and the driver take some."""


def is_type(wanted: str, kind: str) -> bool:
    """Whether a GPU's name has these words, one after the other: "a100", "A100-SXM4", "h100 nvl".

    As Slurm's AutoDetect=nvml does it, but word by word: "a10" is not "NVIDIA A100-SXM4-40GB".
    """
    words, of_it = _WORD.findall(kind.lower()), _WORD.findall(wanted.lower())
    return any(words[i : i + len(of_it)] == of_it for i in range(len(words)))


def said_mib(mib: float) -> str:
    """MiB in words, as people write them: "16G"."""
    for unit, size in (("T", 2.0**20), ("G", 2.0**10)):
        if mib >= size:
            return f"{mib / size:.4g}{unit}"
    return f"{mib:.4g}M"


def said_time(seconds: float) -> str:
    """A time limit as people write it: "2h", "90m", "45s"."""
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.10g}s"
