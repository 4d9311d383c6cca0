"""`python -m hpcsched.worker.keeper`: make durable what a quick suspend has left in shared memory.

Runs beside whatever comes next on those devices, with the environment of the rank 0 that has left. The
job's next attempt may train, and save, meanwhile: what is newer than ours stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcsched.contract import exits, files, variables
from hpcsched.contract.state import State
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import BadInput, ConfigError, HpcschedError, StoreError
from hpcsched.patience import patiently
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.startup import fewer_collections, run_to_the_end

if TYPE_CHECKING:
    from hpcsched.worker.checkpoint.files import CheckpointStore

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def main() -> int:
    """Save the newest state of the arena; returns the exit code.

    Once it is durable, `held.<attempt>` goes: nobody has to wait any more. Where it could not be saved that
    is for our launcher to say, who may try again.
    """
    os.environ.update(CUDA.hidden())  # the devices are someone else's by now
    for number in (signal.SIGTERM, signal.SIGTSTP, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):  # it leads a session of its own already
        os.setsid()
    try:
        env = JobEnv.from_environ()
        if env is None:
            raise ConfigError(where="environment", key=variables.JOB_ID, got="not set", accepted="a number")
        _keep(env)
        patiently(lambda: (env.job_dir / files.held(env.attempt)).unlink(missing_ok=True))
    except (HpcschedError, OSError) as error:
        with contextlib.suppress(OSError):  # whoever read our output may have gone
            say(f"what was left in shared memory could not be saved: {error}")
        return exits.CANNOT_SAVE
    return 0


def _keep(env: JobEnv) -> None:
    with fewer_collections():
        from hpcsched.worker.checkpoint.files import CheckpointStore
        from hpcsched.worker.checkpoint.shared_memory import Arena

    arena = Arena.open(env.arena_fd)
    if arena is None:
        raise StoreError("there is none")
    with arena.keeping() as state:
        step, samples = state["step"], state["samples"]
        path = _save(CheckpointStore(env.checkpoint_dir, env.keep), state)
    with arena.alone_with_state_file():
        if not _is_recorded(env.job_dir / files.STATE, step) and patiently(path.exists):
            env.write_state(step=step, samples=samples, checkpoint=path)


def _save(store: CheckpointStore, state: dict[str, Any]) -> Path:
    try:
        return store.save(state)
    except StoreError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_ROOM:
            say(f"{error}; trying again without the older checkpoints")
            store.prune(1, thorough=True)
        else:  # to delete checkpoints would not help
            say(f"{error}; trying again")
        return store.save(state)


def _is_recorded(path: Path, step: int) -> bool:
    """Whether STATE.json tells of a checkpoint of this step, or a later one, that is there."""
    try:
        record = State.decode(patiently(path.read_bytes))
        if record.step < step or record.checkpoint is None:
            return False
        return patiently(Path(record.checkpoint).exists)
    except (OSError, BadInput):
        return False


if __name__ == "__main__":
    run_to_the_end(main)
