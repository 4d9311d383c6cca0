"""The keys of a [[job]] table, and what is right for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hpcsched import dialects
from hpcsched.contract import schema
from hpcsched.contract.schema import either, flag, many, number, one_of, option, text, whole
from hpcsched.core.model import MOST_JOBS, SIGNALS
from hpcsched.jobfile.needs import GPU_TYPE, MODULES, MOST_CPUS, SIZE

NAME = re.compile(r"[A-Za-z0-9._=-]{1,64}")

MOST_STEPS = schema.LARGEST

KINDS = ("trainer", "command", "replay")
ENVIRONMENTS = ("python", "venv", "conda")
"""Keys of which a job has one; and at most one."""

MOST_PROCESSES = 256
"""On a host, of one job."""

TIME = either('seconds, or a time such as "90s", "10m", "2h", "1-12:00:00"', number("", minimum=0), text(""))
_GPUS = whole("")
SHARE = "share"
"""What `gpus` says of a job that takes what others leave of a GPU."""
_FRACTION = number("", minimum=1 / MOST_JOBS, exclusiveMaximum=1)
_LIMITS = schema.table(
    "",
    properties={"min": _GPUS.schema, "max": _GPUS.schema, "multiple_of": _GPUS.schema},
    additionalProperties=False,
)

MATRIX = schema.table(
    'a table of values: lists of texts, numbers, true and false, such as [1e-3, 1e-2], or "1..5"'
)
AT_ONCE = whole("how many of a matrix may be under way at a time: 1 or more")
MOST_PRIORITY = 10_000
"""Of either sign."""

_ARRAY = schema.table(
    "{ name = NAME, index = NUMBER }, and at_once = NUMBER",
    properties={"name": text("").schema, "index": whole("", 0).schema, "at_once": whole("").schema},
    additionalProperties=False,
)
"""What a matrix makes of a job: its array, its number there, and how many of them may be under way."""

NONE = "none"
"""What `speaks` says of a program that is not to be recognised, and `suspend_signal` of one that saves only
as it goes."""

_SIGNAL = f"(?i:(SIG)?({'|'.join(name[3:] for name in SIGNALS)})|{NONE})"
_WORDS = many(text(""), "a list of texts that are not empty")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A [[job]] table as written, and what is right for each key."""

    name: str = option(text("1 to 64 of A-Z a-z 0-9 . _ = -", f"^{NAME.pattern}$"))
    model: str | None = option(text("text: the key of a profile", least=0), None)
    steps: int | None = option(whole("a positive number of steps"), None)
    epochs: float | None = option(
        number("a positive number of passes over the data", exclusiveMinimum=0), None
    )
    continues: str | None = option(text("the name of a job"), None)
    trainer: str | None = option(text('"package.module:Name"', r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"), None)
    command: Sequence[str] = option(
        many(text(""), "a list of a program and its arguments, each a text that is not empty"), ()
    )
    replay: bool = option(flag(), False)
    args: dict[str, Any] = option(
        schema.table("a table of texts, finite numbers, true, false, lists and tables"), {}
    )
    after: Sequence[str] = option(many(text("", least=0), "a list of job names"), ())
    gpus: Literal["auto", "share"] | float | dict[str, int] = option(
        replace(
            either(
                '"auto", "share", a whole number from 1, '
                f"a share of one GPU from {1 / MOST_JOBS:g} to below 1 (numbers without quotes), or "
                "{ min = 1, max = 4 } with min <= max, and multiple_of",
                one_of("auto", SHARE),
                _GPUS,
                _FRACTION,
                _LIMITS,
            ),
            also=lambda gpus: not isinstance(gpus, dict) or gpus.get("min", 1) <= gpus.get("max", MOST_STEPS),
        ),
        "auto",
    )
    nodes: int = option(whole("1 or more"), 1)
    strategy: str | dict[str, Any] = option(
        either("the name of a strategy, or a table with its kind and options", text(""), schema.table("")),
        "ddp",
    )
    background: bool = option(flag(), False)
    max_foreground_slowdown: float = option(
        number("a share of the job's speed, 0 to 1", minimum=0, maximum=1), 0.05
    )
    submit_at: float | str = option(TIME, 0)
    priority: int = option(
        whole(f"a whole number, {-MOST_PRIORITY} to {MOST_PRIORITY}", -MOST_PRIORITY, MOST_PRIORITY), 0
    )
    retries: int = option(whole("0 or more", 0), 2)
    env: dict[str, str] = option(
        schema.table("a table of texts by variable name", additionalProperties={"type": "string"}), {}
    )
    output: str = option(text("a file name"), "hpcsched-%j.out")
    checkpoint_every: float | str = option(TIME, "10m")
    keep_checkpoints: int = option(whole("1 or more"), 2)
    workdir: str | None = option(text("a folder", least=0), None)
    processes: Literal["auto", "per-gpu", "one"] | int = option(
        either(
            f'"auto", "per-gpu", "one" or a number, 1 to {MOST_PROCESSES}',
            one_of("auto", "per-gpu", "one"),
            whole("", most=MOST_PROCESSES),
        ),
        "auto",
    )
    python: str | None = option(text("a Python interpreter: its path, or its name in PATH"), None)
    venv: str | None = option(text("the folder of a virtual environment"), None)
    container: str | dict[str, Any] | None = option(
        either(
            "an image, or a table with image, runtime, mounts, options, python", text(""), schema.table("")
        ),
        None,
    )
    conda: str | None = option(text("the name or the folder of a conda environment"), None)
    restartable: bool | None = option(flag("told to end it goes on by itself when it is started again"), None)
    speaks: str | None = option(one_of(NONE, *dialects.NAMES), None)
    suspend_signal: str | None = option(text(f'{", ".join(SIGNALS)}, or "{NONE}"', f"^{_SIGNAL}$"), None)
    checkpoints: str | Sequence[str] = option(
        either('a pattern such as "out/checkpoint-*", or a list of them', text(""), many(text(""), "")), ()
    )
    resume_args: Sequence[str] = option(_WORDS, ())
    accumulation: int | None = option(whole("a positive number of batches before each step"), None)
    progress_pattern: str | None = option(
        text(r"a pattern with one (\d+) where the number of the step stands, such as 'step (\d+)'"), None
    )
    saved_exit_codes: Sequence[int] = option(many(whole("", 1, 255), "a list of numbers, 1 to 255"), ())
    batch: Literal["fixed", "scales"] | None = option(one_of("fixed", "scales"), None)
    suspend_command: Sequence[str] = option(_WORDS, ())
    resume_command: Sequence[str] = option(_WORDS, ())
    time: float | str | None = option(TIME, None)
    cpus_per_gpu: int | None = option(
        whole(f"a number of cores for each GPU, 1 to {MOST_CPUS}", most=MOST_CPUS), None
    )
    memory: str | None = option(SIZE, None)
    gpu_type: str | None = option(GPU_TYPE, None)
    gpu_memory: str | None = option(SIZE, None)
    modules: Sequence[str] = option(MODULES, ())
    matrix: dict[str, Any] | None = option(MATRIX, None)
    at_once: int | None = option(AT_ONCE, None)
    array: dict[str, Any] | None = option(_ARRAY, None)
