"""`python -m hpcsched.worker`: run one rank of the trainer that the environment names."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcsched.contract import variables
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.worker.entry import before_torch, hosting
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.startup import fewer_collections, leave_torch_as_it_is, run_to_the_end

STRATEGIES = {
    "ddp": "hpcsched.worker.ddp.strategy",
    "burst": "hpcsched.worker.burst.strategy",
    "packed": "hpcsched.worker.packing.strategy",
    "ps": "hpcsched.worker.ps.strategy",
    "vsw": "hpcsched.worker.vsw.strategy",
}


def main() -> int:
    """Train; returns the exit code. Errors in the user's own code keep their traceback."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        env = JobEnv.from_environ()
        if env is None:
            raise ConfigError(
                where="environment",
                key=variables.JOB_ID,
                got="not set",
                accepted="a start by `hpcsched run`, which sets it",
            )
        code = before_torch()
        if code is not None:
            return code
        env = JobEnv.from_environ() or env  # a guest may have come back, to go on from where it was
        with hosting(_trainer, _strategy) as watched:
            with fewer_collections():
                strategy = _strategy(dict(env.strategy))
                leave_torch_as_it_is()
                gc.freeze()  # a collection that walks over all of torch stops the training for 0.2 s
                trainer = watched(_trainer(env.trainer))
            strategy.run(trainer, env)
    except HpcschedError as error:
        say(str(error))
        return error.exit_code
    return 0


def _strategy(table: dict[str, Any]) -> Any:
    """The module that runs this strategy, its options known to it."""
    kind = table.pop("kind", None)
    if kind not in STRATEGIES:
        raise ConfigError(where="strategy", key="kind", got=repr(kind), accepted=", ".join(STRATEGIES))
    module = import_module(STRATEGIES[kind])
    for key in table:
        if key not in module.OPTIONS:
            accepted = ", ".join(module.OPTIONS) or "no options"
            raise ConfigError(where=f"strategy {kind}", key=key, got="unknown option", accepted=accepted)
    return module


def _trainer(name: str | None) -> Any:
    """An instance of the Trainer class called `package.module:Name`."""
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


if __name__ == "__main__":
    run_to_the_end(main)
