"""The keys of a [[job]] table, as keyword arguments of `Run.submit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from hpcsched.client.job import Job


class Keys(TypedDict, total=False):
    """What docs/job-files.md says of each; `after` takes jobs too. `at_once` is for `Run.map`."""

    name: str
    model: str
    steps: int
    epochs: float
    continues: str
    trainer: str
    replay: bool
    args: Mapping[str, Any]
    after: Sequence[str | Job] | str | Job
    gpus: Literal["auto", "share"] | float | Mapping[str, int]
    nodes: int
    strategy: str | Mapping[str, Any]
    background: bool
    max_foreground_slowdown: float
    submit_at: float | str
    priority: int
    retries: int
    env: Mapping[str, str]
    output: str
    checkpoint_every: float | str
    keep_checkpoints: int
    workdir: str
    processes: Literal["auto", "per-gpu", "one"] | int
    python: str
    venv: str
    container: str | Mapping[str, Any]
    conda: str
    restartable: bool
    speaks: str
    suspend_signal: str
    checkpoints: str | Sequence[str]
    resume_args: Sequence[str]
    accumulation: int
    progress_pattern: str
    saved_exit_codes: Sequence[int]
    batch: Literal["fixed", "scales"]
    suspend_command: Sequence[str]
    resume_command: Sequence[str]
    time: float | str
    cpus_per_gpu: int
    memory: str
    gpu_type: str
    gpu_memory: str
    modules: Sequence[str]
    at_once: int
