"""Options of `submit` that are keys of a job file, by sbatch's names; the key's checks hold."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import click

from hpcsched.cli.jobs.directives import SAID
from hpcsched.cli.jobs.given_jobs import trainer_arguments
from hpcsched.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_PREFIX = "key_"
"""Of the parameters' names: a setting `cpus_per_gpu` of a file is about `run`."""

_OPTIONS = {
    "trainer": (("--trainer",), "PKG.MOD:CLASS", "A Python trainer, in the place of a command."),
    "workdir": (("--workdir", "--chdir", "-D"), "DIR", "Directory it runs in (default: this one)."),
    "time": (("--time", "-t"), "T", "Time that it may run: 90m, 2h, 1:30:00, 1-12."),
    "cpus_per_gpu": (("--cpus-per-gpu", "-c"), "N", "CPU cores for each of its GPUs."),
    "memory": (("--mem",), "SIZE", "Main memory on each host, such as 16G."),
    "gpu_type": (("--gpu-type", "-C"), "WORDS", "Words of its GPUs' name, such as A100."),
}

_ARGS = "What the trainer's build() gets: lr=0.1,width=64, or JSON; can be repeated."

_NUMBER = re.compile(r"\s*[+-]?[0-9.][0-9.e]*\s*")


def key_options(command: F) -> F:
    """Adds the options, and --args; the command is given their `keys`, as a [[job]] table has them."""

    @functools.wraps(command)
    def with_keys(*args: Any, trainer_args: tuple[str, ...], **options: Any) -> Any:
        given = {key: options.pop(_PREFIX + key) for key in _OPTIONS}
        return command(*args, keys=_keys(given, trainer_args), **options)

    found = with_keys
    for key, (names, metavar, words) in reversed(_OPTIONS.items()):
        if key == "trainer":
            found = click.option("--args", "trainer_args", metavar="K=V,...", multiple=True, help=_ARGS)(
                found
            )
        found = click.option(_PREFIX + key, *names, metavar=metavar, help=words)(found)
    return cast(F, found)


@contextlib.contextmanager
def naming_the_option(ctx: click.Context) -> Iterator[None]:
    """Says of a wrong key the option that has given it."""
    try:
        yield
    except ConfigError as error:
        key = error.key.rpartition(".")[2]
        name = key if key not in _OPTIONS else _PREFIX + key
        if not error.key.startswith("job ") or name not in {p.name for p in ctx.command.params}:
            raise
        raise ConfigError(where=_option(ctx, name), got=error.got, accepted=error.accepted) from None


def _option(ctx: click.Context, name: str) -> str:
    """The option that gives this parameter, as people call it, with the script where it stands."""
    (option,) = (parameter.opts[0] for parameter in ctx.command.params if parameter.name == name)
    return f"{ctx.params['words'][0]}: #HPCSCHED {option}" if name in ctx.meta.get(SAID, ()) else option


def _keys(given: dict[str, str | None], arguments: tuple[str, ...]) -> dict[str, Any]:
    keys: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if arguments:
        if "trainer" not in keys:
            raise click.UsageError("--args goes with --trainer; a command has its arguments behind it")
        keys["args"] = {key: value for text in arguments for key, value in trainer_arguments(text).items()}
    if _NUMBER.fullmatch(time := keys.get("time", "")):
        where = _option(click.get_current_context(), _PREFIX + "time")
        number = time.strip().lstrip("+-")
        accepted = f"{number}m, as sbatch means it, or {number}s, as a job file does; 2h, 1:30:00, 1-12"
        raise ConfigError(where=where, got=f"{time.strip()}: without a unit", accepted=accepted)
    if (cores := keys.get("cpus_per_gpu", "")).isdecimal() and len(cores) < 9:
        keys["cpus_per_gpu"] = int(cores)
    return keys
