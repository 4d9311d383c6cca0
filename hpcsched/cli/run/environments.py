"""--python, --venv and --conda: the environment of jobs that name none themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from hpcsched import jobfile
from hpcsched.cli.common import option
from hpcsched.cli.jobs.directives import SAID
from hpcsched.core.model import JobSpec, PythonEnvironment
from hpcsched.errors import BadEnvironment, ConfigError

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS = jobfile.ENVIRONMENTS
_HELP = {
    "python": "Python interpreter for jobs that name no environment.",
    "venv": "Virtual environment for jobs that name no environment.",
    "conda": "Conda environment for jobs that name no environment.",
}


def environment_options(command: F) -> F:
    """Adds the three options; the command is given an `environment`, None if they are not."""

    @functools.wraps(command)
    def with_environment(*args: Any, **options: Any) -> Any:
        words = {key: options.pop(key) for key in OPTIONS}
        return command(*args, environment=_environment(click.get_current_context(), words), **options)

    with_options = with_environment
    for key in reversed(OPTIONS):
        settings: dict[str, Any] = {"metavar": key[0].upper(), "help": _HELP[key]}
        # One setting is enough for files and variables: it can be any environment's interpreter.
        add = option(f"--{key}", **settings) if key == "python" else click.option(f"--{key}", **settings)
        with_options = add(with_options)
    return cast(F, with_options)


def was_said(ctx: click.Context) -> bool:
    """Whether the environment was given to this command, and not in a file of settings."""
    told = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    in_script: set[str] = ctx.meta.get(SAID, set())
    return any(key in in_script or ctx.get_parameter_source(key) in told for key in OPTIONS)


def filled_in(specs: Iterable[JobSpec], environment: PythonEnvironment | None) -> list[JobSpec]:
    """The jobs, with this environment where they name neither one nor a container."""
    return [
        spec if spec.environment or spec.container else replace(spec, environment=environment)
        for spec in specs
    ]


def _environment(ctx: click.Context, words: dict[str, str | None]) -> PythonEnvironment | None:
    said = {key: word for key, word in words.items() if word is not None}
    flags = {key for key in said if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE}
    said = {key: word for key, word in said.items() if not flags or key in flags}
    if len(said) > 1:
        raise click.UsageError(f"give one of {', '.join(f'--{key}' for key in OPTIONS)}")
    table = {"name": "job", "command": ["true"], **said}
    try:
        return jobfile.spec_of(table, where="", place="", workdir=Path.cwd(), user="").environment
    except ConfigError as error:
        (key,) = said
        raise ConfigError(where=f"--{key}", got=error.got, accepted=error.accepted) from None


def check_here(specs: Iterable[JobSpec], *, here: bool) -> Iterator[str]:
    """Problems of jobs' environments and images on this host; raises BadEnvironment where the jobs will have
    them too.

    That is where their agent is on this host (`here`), and the environment a path: an agent looks names up in
    its own PATH.
    """
    import os

    from hpcsched.launch.environment import inherited
    from hpcsched.launch.interpreters import Interpreters

    interpreters = Interpreters(inherited(os.environ))
    for spec in interpreters.unlike(spec for spec in specs if spec.environment or spec.container):
        try:
            interpreters.check(spec)
        except BadEnvironment as error:
            path = spec.container or (spec.environment and "/" in spec.environment.name)
            if here and path and not error.transient:
                raise
            yield str(error)
