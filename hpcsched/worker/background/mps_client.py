"""`python -m hpcsched.worker.background.mps_client PROGRAM ARGV...`: becomes a program that is not ours, as a
client of NVIDIA's multi-process service. No torch."""

from __future__ import annotations

import os
import signal
import sys

from hpcsched.errors import ConfigError
from hpcsched.worker.background import mps, settings
from hpcsched.worker.process.contract import say

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def main(program: str, argv: list[str]) -> int:
    """Become `program`; returns the exit code where that cannot be."""
    try:
        settings.mode(os.environ)  # refuses it without a GPU
        mps.use(os.environ, lane="shared")
    except ConfigError as error:
        say(str(error))
        return error.exit_code
    for number in _IGNORED_BY_PYTHON:  # it would ignore them too
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(program, argv)
    except OSError as error:
        say(f"{program}: {error.strerror}")
        return 126
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
