"""The options of `run` that are handed on to an agent that takes the run over."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hpcsched.cli.common import variable

_OWN = frozenset(
    {
        *("dir_", "name", "each", "array", "at_once", "resume", "update", "retry", "lead"),
        *("requeue", "chain", "chain_script", "max_restarts", "gantt", "learning_curves", "compare"),
        *("batch", "hosts", "launcher", "pyslurm", "interface", "detach", "quiet", "as_json", "share"),
        *("policy", "policy_option", "devices", "python", "venv", "conda"),
    }
)
"""Those that are about one allocation or one call, and those that the run directory knows itself."""

_PATHS = frozenset({"checkpoints", "metrics_file", "database", "profiles"})
"""Those whose values are files, as seen from where `run` was called."""

_KEY = __name__


def remember(ctx: click.Context, args: Sequence[str]) -> None:
    """Note a command line before it is parsed: afterwards only its values are known."""
    ctx.meta[_KEY] = tuple(args)


def words_of(ctx: click.Context) -> tuple[str, ...]:
    """The options of this call that another agent of the run needs, each as it was given."""
    if _KEY not in ctx.meta:
        return ()
    parser = ctx.command.make_parser(ctx)
    given, _, _ = parser.parse_args(list(ctx.meta.get(_KEY, ())))
    words: list[str] = []
    for parameter in ctx.command.get_params(ctx):
        name = str(parameter.name)
        if not isinstance(parameter, click.Option) or name in _OWN:
            continue
        source, value = ctx.get_parameter_source(name), given.get(name)
        if source is ParameterSource.ENVIRONMENT:
            value = os.environ.get(variable(parameter))
            value = (value not in ("", "0", "false", "no")) if parameter.is_flag else value
        elif source is not ParameterSource.COMMANDLINE:
            continue
        words += _words(parameter, value)
    return tuple(words)


def _words(option: click.Option, value: Any) -> list[str]:
    long = next((one for one in option.opts if one.startswith("--")), option.opts[0])
    if option.is_flag:
        return [long] if value else []
    values = value if isinstance(value, (list, tuple)) else [value]
    return [f"{long}={_absolute(str(option.name), str(one))}" for one in values if one is not None]


def _absolute(name: str, value: str) -> str:
    """A file as it is found from anywhere; a profile may be one by its name alone."""
    by_name = name == "profiles" and not Path(value).exists()
    return str(Path(value).absolute()) if name in _PATHS and not by_name else value
