"""The code that the environment names, imported: a trainer, and the strategy that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any, Callable

from hpcsched import strategies
from hpcsched.contract.strategies import KINDS
from hpcsched.errors import ConfigError


def load_strategy(table: Mapping[str, Any]) -> Callable[[Any, Any], None]:
    """What trains by the strategy that a job file describes: called with a trainer and a JobEnv.

    It is the function `run` of the strategy's module, which gets its options besides. Raises ConfigError.
    """
    kind = table.get("kind")
    where = f"strategy {kind}" if isinstance(kind, str) and kind in KINDS else "strategy"
    strategy = strategies.read(table, where=where, trainer=True)
    name = strategy.module
    if name is None:
        accepted = "one whose class says which `module` runs it"
        raise ConfigError(
            where="strategy", key="kind", got=f"{table['kind']!r}, for no trainer", accepted=accepted
        )
    try:
        return partial(import_module(name).run, options=strategy)
    except Exception as error:
        if name.startswith("hpcsched."):
            raise
        why = (str(error) or type(error).__name__).splitlines()[0]
        got = f"the module {name!r} of the strategy {table['kind']!r} cannot be loaded: {why}"
        accepted = "a module with run(trainer, env, options)"
        raise ConfigError(where="strategy", key="kind", got=got, accepted=accepted) from error


def load_trainer(name: str | None) -> Any:
    """An instance of the Trainer class called `package.module:Name`. Raises ConfigError."""
    where = f"trainer {name!r}"
    home, colon, attribute = (name or "").partition(":")
    if not (home and colon and attribute):
        raise ConfigError(where=where, got="not a class", accepted="package.module:Name")
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        # Only if it is the trainer's own module that is missing, not one that it imports.
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            where=where,
            got=f"no module named {error.name!r}",
            accepted="a module that can be imported from the job's directory",
        ) from None
    found = getattr(module, attribute, None)
    from hpcsched.worker.session.trainer import Trainer

    if not (isinstance(found, type) and issubclass(found, Trainer)):
        got = f"{home} has no {attribute}" if found is None else f"{attribute} is not a Trainer class"
        raise ConfigError(where=where, got=got, accepted="a subclass of hpcsched.worker.Trainer")
    return found()
