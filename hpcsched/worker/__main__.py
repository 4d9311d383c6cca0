"""`python -m hpcsched.worker`: run one rank of the trainer that the environment names."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from hpcsched.contract import variables
from hpcsched.errors import ConfigError, HpcschedError
from hpcsched.worker.entry import before_torch, hosting
from hpcsched.worker.load import load_strategy, load_trainer
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.startup import fewer_collections, leave_torch_as_it_is, run_to_the_end


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
        with hosting(load_trainer, load_strategy) as watched:
            with fewer_collections():
                run = load_strategy(env.strategy)
                leave_torch_as_it_is()
                gc.freeze()  # a collection that walks over all of torch stops the training for 0.2 s
                trainer = watched(load_trainer(env.trainer))
            run(trainer, env)
    except HpcschedError as error:
        say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    run_to_the_end(main)
