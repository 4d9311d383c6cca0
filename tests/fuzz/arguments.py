"""Command lines as a target: those of all helps, those that look and plan, and one for each option."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from hpcsched.cli.examples import EXAMPLES
from hpcsched.cli.main import cli

from . import corpus
from .sandbox import CODES, CTRL_C, NotPlayed, command

LOOKS = (
    *(
        "--dir run status --states all",
        "--dir run status --json",
        "status --all",
        "--dir run status -l -S -M,i",
    ),
    *("--dir run explain", "--dir run explain 1", "--dir run explain 4 --json", "--dir run history"),
    *(
        "--dir run efficiency",
        "--dir run efficiency --policy marble",
        "--dir run report",
        "--dir run journal check",
    ),
    *(
        "--dir run logs 1",
        "--dir run metrics 4",
        "--dir run top -n 1",
        "simulate --run run",
        "clean --all --json",
    ),
    *("--dir run wait --timeout 0.1", "--dir run cancel 1", "--dir run resume"),
    *("--dir run status -o %i|%j|%R|%Z", "--dir run efficiency --json", "--dir run journal repair --yes"),
)


_STARTS = {("run",), ("demo",), ("tune",), ("join",), ("pool", "start"), ("pool", "enter")}
"""Commands that are an agent, or start one: their options are read, and no more."""
SLEEPS = 20
"""Times that a command may sleep until somebody presses Ctrl-C (chosen)."""


def play(folder: Path, data: bytes) -> str:
    """Run one line, where a job file and a run are."""
    words = json.loads(data)
    if {"-v", "--verbose"} & {*words}:
        raise NotPlayed("tracebacks are asked for")
    corpus.with_jobs(folder)
    corpus.with_run(folder)
    path, called = called_by(words)
    does_nothing: dict[str, Any] = {"callback": lambda **_: 0}
    with contextlib.ExitStack() as patches:
        if called and (path in _STARTS or "--serve" in words):
            patches.enter_context(patch.multiple(called, **does_nothing))
        patches.enter_context(patch.object(time, "sleep", side_effect=_until_ctrl_c()))
        return command(folder, *words, codes=(*CODES, CTRL_C))


def called_by(words: Sequence[str]) -> tuple[tuple[str, ...], click.Command | None]:
    """The path of the command that a line calls, such as ("profile", "list"), and the command, as click finds
    them; of a line that calls none the beginning, and None."""
    path, rest = list[str](), [*words]
    command: click.Command = cli
    context: click.Context | None = None
    while isinstance(command, click.Group):
        context = click.Context(command, context, **command.context_settings)
        try:
            _, rest, _ = command.make_parser(context).parse_args(rest)
        except click.UsageError:
            return (*path,), None
        found = command.get_command(context, rest[0]) if rest else None
        if found is None:
            return (*path,), None
        path.append(rest.pop(0))
        command = found
    return (*path,), command


def _until_ctrl_c() -> Callable[[float], None]:
    left, sleep = iter(range(SLEEPS)), time.sleep

    def shortly(seconds: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        sleep(min(seconds, 0.01))

    return shortly


def lines_of_examples() -> list[bytes]:
    """The command lines of all helps, those that look and plan, and one for each option."""
    files = {"profiles.json": "marble-summit", "DIR": "run", "RUN": "run"}
    found = [shlex.split(line)[1:] for lines in EXAMPLES.values() for line in lines]
    found += [line.split() for line in (*LOOKS, *_PLANS)]
    found += _lines_of_options()
    return [json.dumps([files.get(word, word) for word in words]).encode() for words in found]


_PLANS = (
    "plan vsw resnet50-v100-p100 --global-batch 512 --gpus n1=2:V100 --local-batch 32,64 --accumulation 0 9",
    "plan vsw resnet50-v100-p100 --scale --samples 1000",
    "plan ps nearchus-a --model ResNet-50 --cpus 8 --link 1000 --rule optimus",
    "plan burst vgg16-a100 --gpus 8 --global-batch 32 --bandwidth 10 --latency 5 --amplification 2",
    "simulate jobs.toml --gpus-per-node 4 --nodes 2 --profiles marble-summit --policy planner,equal --jobs",
    "simulate jobs.toml --allocation 4@0+4h --allocation 2x8:V100@1h --profiles marble-summit",
    "script slurm jobs.toml --time 1:00:00 --gpus-per-node 4 --mem 64G --max-restarts 3 --margin 60",
    "submit --dir run --array 1-20:2%4 --time 2h --mem 16G --gpus 1-2 --processes 2 -- a {index}",
)


def _lines_of_options() -> list[list[str]]:
    """A line for each option of each command, before the arguments of its first example."""
    samples = {click.INT: "3", click.FLOAT: "1.5", click.BOOL: "true"}
    found, context = list[list[str]](), click.Context(cli)
    for name in cli.list_commands(context):
        todo = [([name], cli.get_command(context, name))]
        while todo:
            words, command = todo.pop()
            if isinstance(command, click.Group):
                todo += [([*words, below], each) for below, each in command.commands.items()]
                continue
            example = shlex.split(EXAMPLES[" ".join(words)][0])[1 + len(words) :]
            for option in command.params if command else ():
                if isinstance(option, click.Option):
                    kind = option.type
                    value = kind.choices[0] if isinstance(kind, click.Choice) else samples.get(kind, "2")
                    value = value if isinstance(value, str) else str(value)
                    given = [] if option.is_flag else [value] * option.nargs
                    found.append(["--dir", "run", *words, option.opts[-1], *given, *example])
    return found
