"""The code that the environment names, imported: a trainer, and the strategy that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

STRATEGIES: Mapping[str, str] = {
    "ddp": "hpcsched.worker.ddp.strategy",
    "burst": "hpcsched.worker.burst.strategy",
    "packed": "hpcsched.worker.packing.strategy",
    "ps": "hpcsched.worker.ps.strategy",
    "vsw": "hpcsched.worker.vsw.strategy",
}
"""The strategies of this package: the module of each kind. Such a module has `OPTIONS`, the names of its
options, and `run(trainer, env)`, which trains to the end; see `hpcsched.worker.session.strategy.Strategy`."""

GROUP = "hpcsched.worker_strategies"
"""The entry points by which an installed package adds a strategy: the name is its kind, the value its module.
What is in `STRATEGIES` cannot be replaced."""


def load_strategy(table: Mapping[str, Any], strategies: Mapping[str, str] = STRATEGIES) -> Any:
    """The module of a strategy whose options, all of `table` but `kind`, it knows.

    Args:
        table: as a job file has it.
        strategies: the module of each kind; besides, there are those of installed packages.

    Raises ConfigError.
    """
    kind = str(table.get("kind"))
    if kind in strategies:
        module = import_module(strategies[kind])
    else:
        installed = _installed()
        if kind not in installed:
            accepted = ", ".join((*strategies, *sorted(installed)))
            raise ConfigError(where="strategy", key="kind", got=repr(table.get("kind")), accepted=accepted)
        module = _imported(installed[kind])
    for key in table:
        if key != "kind" and key not in module.OPTIONS:
            accepted = ", ".join(module.OPTIONS) or "no options"
            raise ConfigError(where=f"strategy {kind}", key=key, got="unknown option", accepted=accepted)
    return module


def _installed() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # only for those who need it

    found: Any = entry_points()
    select = getattr(found, "select", None)  # came with Python 3.10
    points = select(group=GROUP) if select is not None else found.get(GROUP, ())
    return {point.name: point for point in points}


def _imported(point: EntryPoint) -> Any:
    accepted = "a module with OPTIONS and run(trainer, env)"
    try:
        module = point.load()
    except Exception as error:  # whatever somebody else's module does
        why = (str(error) or type(error).__name__).splitlines()[0]
        got = f"{point.value!r} of the entry point {point.name!r} cannot be loaded: {why}"
        raise ConfigError(where="strategy", key="kind", got=got, accepted=accepted) from error
    missing = [name for name in ("OPTIONS", "run") if not hasattr(module, name)]
    if missing:
        got = f"{point.value!r} of the entry point {point.name!r} has no {missing[0]}"
        raise ConfigError(where="strategy", key="kind", got=got, accepted=accepted)
    return module


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
